"""Spans of the last steps: a ring in memory, written later to folders like those of captured steps."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope._recording.counters.sampler import TICKS, Sampler
from stepscope._recording.output import ManifestPart
from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import read_hardware
from stepscope._recording.recorder import nccl_ras
from stepscope._recording.recorder.engine_queues import EngineQueues
from stepscope._recording.recorder.state import communicators_in_time
from stepscope._recording.recorder.steps import RecordedStep
from stepscope._recording.spans import lines, scopes
from stepscope._recording.spans.maker import SpanMaker, not_kept
from stepscope._recording.spans.span import Span
from stepscope.config import ProfileConfig
from stepscope.engines import EngineCapture, passes, settings
from stepscope.errors import ours
from stepscope.files import counters
from stepscope.files import spans as records
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.records import (
    Ending,
    Expectation,
    ProcessPart,
    Recorded,
    awaited,
    of_engine,
)
from stepscope.files.passes import PassFile
from stepscope.files.recorder import VISIT, Order
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import ProcessState
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.trace_context import SpanIds

SPAN_BYTES = 400
"""Memory of a span without attributes, including its numbers and its place in the ring, rounded up."""
_TRIES = 10
"""Number of attempts to copy a busy ring: an attempt fails if a span opens meanwhile."""


class Copied(NamedTuple):
    """The spans of a ring, copied at one moment."""

    spans: list[Span]
    """The spans in the order of opening, which is nearly the order of their starts."""
    since_ns: int
    """Every span that began after this time, up to the moment of the copy, is in `spans`."""


class Ring(SpanMaker):
    """The latest spans of this process, as live objects. The oldest are dropped when there are too many."""

    def __init__(
        self, *, process: ProcessInfo, run_id: str, memory_mb: int, redact: tuple[str, ...] = ()
    ) -> None:
        limit = max(1, (memory_mb << 20) // SPAN_BYTES)
        self._spans: deque[Span] = deque(maxlen=limit)
        self._long: list[Span] = []
        """Spans that were still running when the spans of their step were dropped. Only the recorder's thread
        uses this list."""
        self._dropped_ns = 0
        """Time before which spans were dropped with their steps. One writer: the recorder's thread."""
        super().__init__(process=process, run_id=run_id, step=None, opened=self._spans.append, redact=redact)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def last_id(self) -> int:
        """The number of the span that opened last; 0 before the first."""
        try:
            return self.number(self._spans[-1])
        except IndexError:
            return 0

    def number(self, span: Span) -> int:
        """Return the number of a span in this log's files."""
        return span.id if span.log is self else self.taken.get(span, 0)

    def take(self, running: Iterable[Span]) -> None:
        """Also keep the spans of a capture that run when it ends."""
        for span in running:
            self.taken[span] = next(self.ids)
            self._spans.append(span)
        try:
            self._forget_taken(self._spans[0].start_ns)
        except IndexError:  # the recorder's thread has dropped them all meanwhile
            pass

    def _forget_taken(self, before_ns: int) -> None:
        for span in [span for span in list(self.taken) if _ended_before(span, before_ns)]:
            self.taken.pop(span, None)

    def begin_step(self, step: int) -> None:
        """Make carriers and trace contexts name this step from now on."""
        self.step = step
        self.trace = SpanIds(self.run_id, step, self.process.key)

    def copy(self) -> Copied:
        """Return the spans in the ring at this moment.

        Raises:
            RuntimeError: spans opened during every attempt.
        """
        for _ in range(_TRIES):
            dropped_ns = self._dropped_ns
            try:
                spans = list(self._spans)
            except ours(RuntimeError):  # the collector ran, and a span opened meanwhile
                continue
            first_ns = spans[0].start_ns if len(spans) == self._spans.maxlen else 0
            return Copied([*self._long, *spans], max(dropped_ns, first_ns))
        raise RuntimeError("spans opened faster than the flight recorder could copy them")

    def since(self, span_id: int) -> list[Span]:
        """Return the spans that opened after the one with this number, the last first."""
        for _ in range(_TRIES):
            try:
                return list(islice(reversed(self._spans), max(0, self.last_id - span_id)))
            except ours(RuntimeError):
                continue
        return []

    def open_spans(self) -> list[Span]:
        return [span for span in self.copy().spans if span.end_ns is None]

    def drop_before(self, start_ns: int) -> None:
        """Drop the spans that ended before `start_ns`. Spans that began later, or still run, stay."""
        self._long = [span for span in self._long if not _ended_before(span, start_ns)]
        self._dropped_ns = max(self._dropped_ns, start_ns)
        try:
            while self._spans[0].start_ns < start_ns:
                span = self._spans.popleft()
                if not _ended_before(span, start_ns):
                    self._long.append(span)
        except IndexError:
            pass
        self._forget_taken(start_ns)

    def close(self) -> None:
        """Release all spans."""
        self.opened = not_kept
        self._spans.clear()
        self._long.clear()
        self.taken.clear()


COUNTERS_HZ = 1.0
"""Samples of counters per second, between captures."""
WHY = "the flight recorder keeps spans, and starts no profiler"
VISITS = "the process is no worker of the capture: it took part by attach(), and starts no profiler"
STANDS_STILL = ("hang", "signal")
"""Triggers upon which the written step also gets the state of each process."""
_KEPT = "the passes that the engine kept"
_OLDER = "earlier passes were not kept: the engine did not keep any yet, or recorder.memory_mb was too small"
_BATCH = 500
"""Number of spans that are encoded without a pause, in about 2 ms; then other threads get the GIL for as
long."""


class Window(NamedTuple):
    """A step on the clocks of this process."""

    step: int
    opened: ClockAnchor
    closed: ClockAnchor
    ending: Ending | None = None
    """The cause of the step's early end, or None."""
    running: bool = False
    """True if the step still runs."""


class Written(NamedTuple):
    """A step that this process has written."""

    layout: StepLayout
    part: ManifestPart


def window_of(step: RecordedStep, now: ClockAnchor) -> Window:
    """Return the window of a step of this process. If the step still runs, the window ends now.

    Its wall-clock times follow the present wall clock, as the workers' do, even if the clock has jumped
    since.
    """
    running, opened, closed = step.closed is None, _by_now(step.opened, now), _by_now(step.closed or now, now)
    return Window(step.number, opened, closed, step.ending, running)


def _by_now(anchor: ClockAnchor, now: ClockAnchor) -> ClockAnchor:
    return msgspec.structs.replace(anchor, wall_ns=now.wall_ns - now.mono_ns + anchor.mono_ns)


def windows_by_time(order: Order, process: ProcessInfo, now: ClockAnchor) -> list[Window]:
    """Return the windows of an order in a process that knows no steps, by its wall clock."""
    ahead_ns = order.offsets_ns.get(process.key, 0)

    def at(orderer_ns: int) -> ClockAnchor:
        wall_ns = orderer_ns + ahead_ns
        return ClockAnchor(
            wall_ns=wall_ns,
            mono_ns=wall_ns - now.wall_ns + now.mono_ns,
            uncertainty_ns=now.uncertainty_ns,
        )

    return [Window(step.step, at(step.start_ns), at(step.end_ns)) for step in order.steps]


class StepWriter:
    """Writes the recorded spans and counters of this process for the steps of one order."""

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler | None,
        config: ProfileConfig,
        order: Order,
        state: Callable[[], ProcessState],
        engines: EngineQueues | None,
    ) -> None:
        """Args:
        state: Returns the present state of this process.
        engines: The engines whose passes are kept, or None.
        """
        self._engines = engines
        self._ring = ring
        self._state = state
        self._sampler = sampler
        self._config = config
        self._order = order

    def write(
        self,
        windows: Sequence[Window],
        *,
        owner: bool,
        began: dict[str, str] | None = None,
        clocks: Sequence[ClockOffset] = (),
    ) -> list[Written]:
        """Write the steps, one after the other. Disk errors are recorded in the parts of the manifest.

        Args:
            windows: The windows of the steps, in order of time.
            owner: Whether this process bounds the steps.
            began: {`ProcessInfo.key`: name} of the workers that record too.
            clocks: Measured clocks of workers on other hosts.
        """
        if windows and self._order.trigger in STANDS_STILL:
            self._write_state(windows[-1])
        copied, lost = self._copy()
        spans = _by_window(copied.spans, windows)
        written = [
            self._write(
                window,
                inside,
                self._outcome(window, copied.since_ns, lost),
                owner=owner,
                began=began or {},
                clocks=tuple(clocks),
            )
            for window, inside in zip(windows, spans, strict=True)
        ]
        if windows and self._engines is not None and self._order.trigger != "signal":
            self._write_passes(self._engines, windows, written)
        return written

    def write_visit(self, window: Window, chosen: Callable[[Sequence[Span]], Sequence[Span]]) -> None:
        """Write this process' part of a step that another process captures, or write it again.

        Args:
            chosen: Returns the spans of the part, of all spans in the ring.
        """
        copied, lost = self._copy()
        outcome = self._outcome(window, copied.since_ns, lost)
        self._write(window, chosen(copied.spans), outcome, owner=False, began={}, clocks=())

    def _write_passes(
        self, engines: EngineQueues, windows: Sequence[Window], written: Sequence[Written]
    ) -> None:
        """Write the passes of this process' engines. A process that a signal ends has no time for it."""
        for replica, files in engines.passes(windows[0].opened.wall_ns):
            for window, step in zip(windows, written, strict=True):
                outcome = self._outcome_of_passes(replica, files, window, step.layout)
                if outcome is not None:
                    step.part.expect(outcome)
                    step.part.write()

    def _outcome_of_passes(
        self, replica: int, files: Sequence[PassFile] | str, window: Window, layout: StepLayout
    ) -> Expectation | None:
        """Write the passes of a replica in a step, and return the outcome; None if there were none."""
        name = f"replica {replica}"
        if isinstance(files, str):
            return Expectation(name=name, kind="engine", state="failed", reason=f"{_KEPT}: {files}")
        start_ns, end_ns = window.opened.wall_ns, window.closed.wall_ns
        parts = [passes.between(file, start_ns, end_ns) for file in files]
        capture = EngineCapture(
            step=window.step,
            run_id=self._order.run_id,
            out_dir=str(layout.engine_dir(replica).absolute()),
            step_dir=str(layout.root.absolute()),
            name=f"step_{window.step:06d}_{self._order.run_id}",
            replica=replica,
            passes=sum(len(part.passes.number) for part in parts),
        )
        try:
            artifacts = tuple(one for part in parts for one in passes.publish_passes(part, capture))
        except ours() as error:
            reason = f"{_KEPT}: {describe(error)}"
            return Expectation(name=name, kind="engine", state="failed", reason=reason)
        is_cut = any(file.anchor.wall_ns > start_ns for file in files)
        return of_engine(name, artifacts, {}, _OLDER if is_cut else None) if artifacts else None

    def _write_state(self, window: Window) -> None:
        """Write the present state of this process into the last step, which a hang or a signal ends."""
        layout = RunLayout(self._config.save_path).step(window.step)
        path = layout.state_of(self._ring.process, self._order.run_id)
        try:
            state = self._state()
            if self._order.trigger == "hang" and nccl_ras.may_know():
                state = msgspec.structs.replace(state, communicators=communicators_in_time())
            write_atomic(path, msgspec.json.encode(state))
        except ours() as error:
            failures.note("writing what the process does, into a step of the flight recorder", error)

    def _copy(self) -> tuple[Copied, str | None]:
        """Return a copy of the spans, and the reason if they could not be copied."""
        try:
            return self._ring.copy(), None
        except ours(RuntimeError) as error:
            return Copied([], 0), str(error)

    def _write(
        self,
        window: Window,
        spans: Sequence[Span],
        outcome: Expectation,
        *,
        owner: bool,
        began: dict[str, str],
        clocks: tuple[ClockOffset, ...],
    ) -> Written:
        process, run_id = self._ring.process, self._order.run_id
        layout = RunLayout(self._config.save_path).step(window.step)
        number, visits, ending = 1, self._order.trigger == VISIT, window.ending
        while not visits and layout.part_of(process, run_id, number).exists():
            number += 1
        part = ProcessPart(
            run_id=run_id,
            step=window.step,
            process=process,
            owner=owner,
            capture=number,
            opened=window.opened,
            closed=window.closed,
            recorded=False,
            why=VISITS if visits else WHY,
            roles=(process.role,),
            began=began,
            clocks=clocks,
            hardware=read_hardware(self._config.throughput),
            settings=settings.kept(),
            ended_by=None if ending is None else ending.by,
            error=None if ending is None else ending.error,
            recorder=None if visits else self._recorded(window),
        )
        manifest_part = ManifestPart(layout.part_of(process, run_id, number), part)
        if not visits:
            manifest_part.expect(awaited("spans", "spans", "exporting"))
            manifest_part.write()
        try:
            write_atomic(layout.spans_of(process, run_id, number), self._file(window, spans))
        except ours(OSError) as error:
            manifest_part.fail("spans", describe(error), kind="spans")
            failures.warn("stepscope: step %d of the flight recorder is lost: %s", window.step, error)
        else:
            manifest_part.update(
                spans=sum(span.end_ns is not None for span in spans),
                roles=tuple(dict.fromkeys((process.role, *sorted(self._ring.roles)))),
            )
            manifest_part.expect(outcome)
        if self._sampler is not None:
            if not window.running:
                self._sampler.catch_up(window.closed.mono_ns)
            self._write_counters(
                layout.counters_of(process, run_id, number), self._sampler, window, manifest_part
            )
        manifest_part.write()
        return Written(layout, manifest_part)

    def _recorded(self, window: Window) -> Recorded:
        return Recorded(trigger=self._order.trigger, reason=self._order.reason, running=window.running)

    def _write_counters(
        self, path: Path, sampler: Sampler, window: Window, manifest_part: ManifestPart
    ) -> None:
        content, outcome = self._counters(sampler, window), _outcome_of_counters(sampler, window)
        try:
            write_atomic(path, content)
        except ours(OSError) as error:
            manifest_part.fail("counters", describe(error), kind="counters")
        else:
            manifest_part.expect(outcome)

    def _counters(self, sampler: Sampler, window: Window) -> bytes:
        """Return the content of the counter file. It also has the last sample before the step and the first
        one after it.
        """
        ticks = sampler.around(window.opened.mono_ns, window.closed.mono_ns)
        head = counters.Header(
            step=window.step,
            run_id=self._order.run_id,
            process=self._ring.process,
            anchor=window.opened,
            hz=COUNTERS_HZ,
        )
        samples = [counters.Sample(at_ns=tick.at_ns, values=tick.values) for tick in ticks]
        end = counters.End(anchor=window.closed, samples=len(samples), absent=sampler.absent)
        return b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *sampler.series, *samples, end))

    def _file(self, window: Window, spans: Sequence[Span]) -> bytes:
        """Return the content of the span file. Half of the time is left to other threads."""
        header = records.Header(
            step=window.step, run_id=self._order.run_id, process=self._ring.process, anchor=window.opened
        )
        text, finished, dropped = [lines.encoded(header)], 0, 0
        for first in range(0, len(spans), _BATCH):
            began = time.monotonic()
            chosen = spans[first : first + _BATCH]
            batch = [self._record_of(span, window.step) for span in chosen]
            encoded, lost = lines.encoded_spans(batch)
            text.append(encoded)
            finished += sum(type(record) is records.Span for record in batch) - lost
            dropped += lost
            time.sleep(time.monotonic() - began)
        text.append(lines.encoded(records.End(anchor=window.closed, spans=finished, dropped=dropped)))
        return b"".join(text)

    def _record_of(self, span: Span, step: int) -> lines.Record:
        return lines.record_of(span, span.end_ns, step, self._ring, self._ring.number(span))

    def _outcome(self, window: Window, since_ns: int, lost: str | None) -> Expectation:
        """Return the outcome of a step's spans. The copy holds all spans that began after `since_ns`."""
        if lost is not None:
            return Expectation(name="spans", kind="spans", state="failed", reason=lost)
        if since_ns <= window.opened.mono_ns:
            return Expectation(name="spans", kind="spans", state="ok")
        reason = f"older spans had gone: recorder.memory_mb is {self._config.recorder.memory_mb}"
        return Expectation(name="spans", kind="spans", state="partial", reason=reason)


def _ended_before(span: Span, start_ns: int) -> bool:
    return span.end_ns is not None and span.end_ns < start_ns


def _outcome_of_counters(sampler: Sampler, window: Window) -> Expectation:
    if sampler.since_ns <= window.opened.mono_ns:
        return Expectation(name="counters", kind="counters", state="ok")
    reason = f"older samples had gone: {TICKS:,} are kept"
    return Expectation(name="counters", kind="counters", state="partial", reason=reason)


def _by_window(spans: Sequence[Span], windows: Sequence[Window]) -> list[list[Span]]:
    """Return the spans of each window: those that began in it, and those that ran when it began, if they
    ended in it or are of a trajectory.
    """
    starts = [window.opened.mono_ns for window in windows]
    inside: list[list[Span]] = [[] for _ in windows]
    for span in spans:
        began, ended = span.start_ns, span.end_ns
        at = bisect_right(starts, began) - 1
        if at >= 0 and began <= windows[at].closed.mono_ns:
            inside[at].append(span)
        last = len(windows) if ended is None else bisect_right(starts, ended)
        for later in range(at + 1, last):
            if _is_of_window(span, windows[later]):
                inside[later].append(span)
    return inside


def _is_of_window(span: Span, window: Window) -> bool:
    """Return whether a span that ran when the window began ended in it, or is of a trajectory."""
    ended = span.end_ns
    return (ended is not None and ended <= window.closed.mono_ns) or scopes.trajectory_at(span) is not None
