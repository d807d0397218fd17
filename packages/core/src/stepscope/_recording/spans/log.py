"""Log of a capture's spans: live objects in memory, lines on disk a moment later.

A span appends itself to its log when it opens. The recorded code waits for nothing else. A thread looks five
times a second. A span that has closed by then becomes a `span` line. One that is still open is looked at
again until it closes, and gets an `open` line once it has run for a second. So a hang is visible. A crash
loses at most the spans that closed in the last fifth of a second, and those that opened in the last second.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING

from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope._recording.spans import lines, scopes
from stepscope._recording.spans.maker import SpanMaker, not_kept
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files import clock
from stepscope.files import spans as records
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.atomic import append_whole, private

if TYPE_CHECKING:
    from io import FileIO


FLUSH_S = 0.2
OPEN_NS = 1_000_000_000
"""A span that is open for this long gets an `open` line. Sooner, a burst of short turns would cost two lines
for each span."""
FLUSH_NS = 10_000_000
"""A flush stops after this time, so that writing takes at most 5 % of the GIL. The rest of a burst is written
later."""
BATCH = 500
"""Number of spans that are encoded and written at once: about 100 KB, which stay in the processor's cache."""


class SpanLog(SpanMaker):
    """The span file of one process for one capture, and the thread that writes it."""

    def __init__(
        self,
        path: Path,
        *,
        process: ProcessInfo,
        step: int,
        run_id: str,
        limit: int,
        redact: tuple[str, ...] = (),
    ) -> None:
        self._pending: deque[Span] = deque()
        # deque.append is atomic and never blocks.
        super().__init__(
            process=process, run_id=run_id, step=step, opened=self._pending.append, redact=redact
        )
        self.path = path
        self.limit = limit
        self.written = 0
        self.dropped = 0
        self.failed: str | None = None
        """Reason why the file is incomplete, or None."""
        self.top_ns: dict[tuple[str, str], int] = defaultdict(int)
        """Sum of the times of finished top spans, by role and stage."""
        self._young: deque[Span] = deque()
        """Spans that were open at the last look, the oldest first. Only the writing thread uses this list and
        `_running`."""
        self._running: list[Span] = []
        """Spans whose `open` line is written and that have not ended."""
        self._step = step
        self._file: FileIO | None = None
        self._fd = -1
        """The descriptor of the file while it is open, else -1."""
        self._size = 0
        self._anchor: ClockAnchor | None = None
        """Clock reading at the beginning of recording, or None before it."""
        self._stop = threading.Event()
        self._writing = threading.Lock()

    def open(self) -> None:
        """Create the file and start the thread, which writes nothing before `start`.

        Raises:
            OSError: The file cannot be created.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = open(self.path, "xb", buffering=0, opener=private)  # noqa: SIM115  # until close()
            self._fd = self._file.fileno()
        except ours(OSError) as error:
            self.failed = describe(error)
            raise
        finally:  # without a file too: the thread counts what is lost, and it does not pile up in memory
            threading.Thread(target=self._run, name="stepscope-spans", daemon=True).start()

    def take(self, running: Iterable[Span]) -> None:
        """Also record these spans of another log, which run now. To be called before this log has spans."""
        self.taken = {span: next(self.ids) for span in running}
        self._young.extend(self.taken)

    def start(self, anchor: ClockAnchor) -> None:
        """Begin recording at `anchor`, without waiting for the disk: the thread writes the header."""
        self._anchor = anchor

    def open_spans(self) -> list[Span]:
        known = (*self._running, *self._young, *list(self._pending))
        return [span for span in known if span.end_ns is None and span.log is self]

    @property
    def began(self) -> bool:
        """True if the header is written."""
        return self._size > 0

    def close(self, anchor: ClockAnchor, timeout_s: float = 5.0) -> None:
        """Write the pending spans and the end line. Spans that are still open keep their `open` lines.

        A log that was never started leaves no file.
        """
        self._stop.set()  # the thread ends by itself, and writes no more
        if not self._writing.acquire(timeout=timeout_s):
            self.failed = f"the disk did not take the last spans within {timeout_s:g} s"
            return
        try:
            self._write_pending()
            if self._fd >= 0 and self.began:
                end = records.End(anchor=anchor, spans=self.written, dropped=self.dropped)
                self._append(lines.encoded(end))
                self.failed = self.failed or self._lost()
            elif self._file is not None and self._anchor is None:
                self.path.unlink()
        except ours(OSError) as error:
            self.failed = describe(error)
            failures.note("writing the end of the spans", error)
        finally:
            self._writing.release()
        self._fd = -1
        if self._file is not None:
            self._file.close()
        self.opened = not_kept
        self._pending.clear()
        self._young.clear()
        self._running.clear()
        self.taken.clear()

    def _lost(self) -> str | None:
        """Return the reason why the written file cannot be found, or None if it is in its place."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return None
        except ours(OSError):
            pass
        return "the file was removed or replaced while it was written"

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            with self._writing:
                if not self._stop.is_set():
                    self._write_pending(monotonic_ns() + FLUSH_NS)

    def _write_pending(self, until_ns: int | None = None) -> None:
        """Write spans until `until_ns`, except the youngest open ones; if `until_ns` is None, write all."""
        if self._anchor is None:
            return
        youngest_ns = monotonic_ns() - OPEN_NS if until_ns is not None else sys.maxsize
        self._look_again(youngest_ns)
        if not self.began:
            self._write(self._header(self._anchor), 0)
        left = len(self._pending)
        while left > 0 and (until_ns is None or monotonic_ns() < until_ns):
            self._write_batch(min(left, BATCH), youngest_ns)
            left -= BATCH

    def _write_batch(self, number: int, youngest_ns: int) -> None:
        """Write the next `number` spans, except those that are open and began after `youngest_ns`."""
        batch: list[lines.Record] = []
        finished = 0
        for _ in range(number):
            span = self._pending.popleft()
            end_ns = span.end_ns
            is_own = span.log is self
            if not is_own and not self._is_of_step(span):
                if end_ns is None:
                    self._young.append(span)
                continue
            number = span.id if is_own else self.taken[span]
            if end_ns is None:
                if span.start_ns > youngest_ns:
                    self._young.append(span)
                    continue
                self._running.append(span)
            over = end_ns is not None
            if number > self.limit:
                self.dropped += over
                continue
            try:
                record = lines.record_of(span, end_ns, self._step, self, number)
                batch.append(record)
                if is_own and record.parent is None and record.link is None and end_ns is not None:
                    self.top_ns[record.role, record.stage] += end_ns - span.start_ns
            except ours() as error:  # one span is lost, and not all that come after it
                self.dropped += over
                failures.note("encoding a span", error)
                continue
            finished += over
        text, lost = lines.encoded_spans(batch)
        self.dropped += lost
        self._write(text, finished - lost)

    def _is_of_step(self, span: Span) -> bool:
        """Return True if a span taken from the flight recorder has ended in the step, or is of a trajectory.
        Other spans, such as a service's main loop, say nothing about the step.
        """
        if span.end_ns is None:
            return scopes.trajectory_at(span) is not None
        return self._anchor is not None and span.end_ns > self._anchor.mono_ns

    def _write(self, text: bytes, finished: int) -> None:
        """Write lines that contain `finished` ends of spans."""
        if self._fd < 0:  # it could not be opened, which is logged
            self.dropped += finished
            return
        try:
            self._append(text)
            self.written += finished
        except ours(OSError) as error:
            self.dropped += finished
            self.failed = self.failed or describe(error)
            failures.note("writing spans", error)

    def _look_again(self, youngest_ns: int) -> None:
        """Queue for writing the spans that have ended since the last look, or that now need an `open`
        line.
        """
        running, self._running = self._running, []
        for span in running:
            (self._running if span.end_ns is None else self._pending).append(span)
        young, self._young = self._young, deque()
        for span in young:
            is_young = span.end_ns is None and span.start_ns > youngest_ns
            (self._young if is_young else self._pending).append(span)

    def _header(self, anchor: ClockAnchor) -> bytes:
        header = records.Header(step=self._step, run_id=self.run_id, process=self.process, anchor=anchor)
        return lines.encoded(header)

    def _append(self, data: bytes) -> None:
        self._size = append_whole(self._fd, self._size, data)


_cost_ns: int | None = None
"""CPU cost of one span in this process in ns, measured once. One writer: `span_cost_ns`."""


def span_cost_ns(batches: int = 5, repeats: int = 50) -> int:
    """Return the CPU ns of one span, including the writing thread's work: the lowest cost of a few
    batches.
    """
    global _cost_ns
    if _cost_ns is None:
        process = ProcessInfo(role="calibration", rank=None, world_size=None, host="", pid=0)
        log = SpanLog(Path(os.devnull), process=process, step=0, run_id="", limit=batches * repeats)
        log._fd = os.open(os.devnull, os.O_WRONLY)
        log.start(clock.read_anchor())
        _cost_ns = min(_batch_ns(log, repeats) for _ in range(batches)) // repeats
        os.close(log._fd)
    return _cost_ns


def _batch_ns(log: SpanLog, repeats: int) -> int:
    began = thread_time_ns()
    for _ in range(repeats):
        with log.new("calibration"):
            pass
    log._write_pending()
    return thread_time_ns() - began
