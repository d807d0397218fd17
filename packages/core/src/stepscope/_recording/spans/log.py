"""The span file of a capture. Spans are objects in memory, which a thread writes as lines.

A span appends itself to its log when it opens; the recorded code does nothing else. A thread checks the log
five times a second, and writes a `span` line for each span that has ended. A span that is still open gets an
`open` line at the first check after it has run for a second, so that a hang is visible. A crash loses the
spans that ended since the last check, and spans that opened in the last 1.2 seconds. After a burst of spans,
a crash also loses the spans that wait for the next check (`FLUSH_NS`).
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
from stepscope._recording.spans.span import Span, next_id
from stepscope.errors import ours
from stepscope.files import clock
from stepscope.files import spans as records
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import append_whole, private

if TYPE_CHECKING:
    from io import FileIO


FLUSH_S = 0.2
OPEN_NS = 1_000_000_000
"""A span that is open for this long gets an `open` line. If this were shorter, a burst of short turns would
need two lines for each span."""
FLUSH_NS = 10_000_000
"""Longest time of one flush, so that the writing thread has the GIL for at most 5 % of the time. Further
spans of a burst are written later."""
BATCH = 500
"""Number of spans that are encoded and written at once, about 100 KB, which fit into the CPU cache."""


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
        # deque.append is atomic and does not block.
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
        """{(role, stage): total duration of ended top-level spans that belong to the step}."""
        self._young: deque[Span] = deque()
        """Spans without a line that were open at the last check, the oldest first. Like `_running`, used only
        by the writing thread."""
        self._running: list[Span] = []
        """Open spans with an `open` line."""
        self._step = step
        self._before = next_id()
        """A number below the numbers of all spans of this log."""
        self._file: FileIO | None = None
        self._fd = -1
        """The descriptor of the file while it is open, else -1."""
        self._size = 0
        self._anchor: ClockAnchor | None = None
        """Clock reading at the beginning of the recording, or None before."""
        self._stop = threading.Event()
        self._writing = threading.Lock()

    def open(self) -> None:
        """Create the file and start the writing thread, which writes only after `start`.

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
        finally:  # also without a file, to count lost spans and free their memory
            threading.Thread(target=self._run, name="stepscope-spans", daemon=True).start()

    def take(self, running: Iterable[Span]) -> None:
        """Also record `running`, spans of another log. Call this before the log has spans."""
        self.taken.update(running)
        self._young.extend(sorted(self.taken, key=lambda span: span.id))

    def start(self, anchor: ClockAnchor) -> None:
        """Begin recording at `anchor`. The writing thread writes the header, so the call does not wait for
        the disk.
        """
        self._anchor = anchor

    def open_spans(self) -> list[Span]:
        known = (*self._running, *self._young, *list(self._pending))
        return [span for span in known if span.end_ns is None and span.log is self]

    @property
    def began(self) -> bool:
        """True if the header is written."""
        return self._size > 0

    def close(self, anchor: ClockAnchor, timeout_s: float = 5.0) -> None:
        """Write the remaining spans and the end line. A span that is still open gets an `open` line.

        If `start` was not called, the file is removed.
        """
        self._stop.set()  # the thread ends and does not write any more
        if not self._writing.acquire(timeout=timeout_s):
            self.failed = f"the disk did not take the last spans within {timeout_s:g} s"
            return
        try:
            self._write_pending()
            if self._fd >= 0 and self.began:
                end = records.End(anchor=anchor, spans=self.written, dropped=self.dropped)
                self._append(lines.encoded(end))
                if lost := self._lost():
                    self.failed, self._size, self.written = self.failed or lost, 0, 0
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
        """Return the reason if the file was removed or replaced while it was written, else None."""
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
        """Write spans until the time `until_ns`, except young open spans. None writes all spans."""
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
        """Write the next `number` spans, except open spans that began after `youngest_ns`."""
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
            if end_ns is None:
                if span.start_ns > youngest_ns:
                    self._young.append(span)
                    continue
                self._running.append(span)
            over = end_ns is not None
            if span.id - self._before > self.limit:
                self.dropped += over
                continue
            try:
                record = lines.record_of(span, end_ns, self._step, self)
                batch.append(record)
                is_top = record.parent is None and record.link is None and record.step is None
                if is_own and is_top and end_ns is not None:
                    self.top_ns[record.role, record.stage] += end_ns - span.start_ns
            except ours() as error:  # only this span is lost
                self.dropped += over
                failures.note("encoding a span", error)
                continue
            finished += over
        text, lost = lines.encoded_spans(batch)
        self.dropped += lost
        self._write(text, finished - lost)

    def _is_of_step(self, span: Span) -> bool:
        """Return whether a span of the flight recorder belongs to the step: it has ended in the step, or
        belongs to a trajectory. Other spans, such as the main loop of a service, do not concern the step.
        """
        if span.end_ns is None:
            return scopes.trajectory_at(span) is not None
        return self._anchor is not None and span.end_ns > self._anchor.mono_ns

    def _write(self, text: bytes, finished: int) -> None:
        """Write lines, of which `finished` are ended spans."""
        if self._fd < 0:  # the file could not be opened, which was logged
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
        """Queue the spans that have ended since the last check, and spans that now need an `open` line."""
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
"""CPU time of one span in this process in ns, or None until measured. One writer: `span_cost_ns`."""


def span_cost_ns(batches: int = 5, repeats: int = 50) -> int:
    """Return the CPU time of one span in ns, including the writing thread's work. It is measured once, as the
    lowest of a few batches.
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
