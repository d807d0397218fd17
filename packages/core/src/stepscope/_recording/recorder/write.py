"""Writer of the flight recorder's spans, counters and passes. The step folders have the same form as
those of captured steps.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope._recording.counters.sampler import TICKS, Sampler
from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import IMPORTED_NS, read_hardware
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.recorder import nccl_ras
from stepscope._recording.recorder.engine_queues import EngineQueues
from stepscope._recording.recorder.ring import Copied, Ring
from stepscope._recording.recorder.state import communicators_in_time, in_time
from stepscope._recording.recorder.steps import RecordedStep
from stepscope._recording.spans import collective_calls, lines, scopes
from stepscope._recording.spans.span import Span
from stepscope.config import ProfileConfig
from stepscope.engines import EngineCapture, passes, settings
from stepscope.errors import ours
from stepscope.files import counters
from stepscope.files import spans as records
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import (
    Ending,
    Expectation,
    ProcessPart,
    Recorded,
    awaited,
    of_engine,
)
from stepscope.files.passes import PassFile
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import ProcessState
from stepscope.files.steps import Order
from stepscope.files.storage import write_atomic

COUNTERS_HZ = 1.0
"""Samples of counters per second between captures."""
WHY = "the flight recorder keeps spans, and starts no profiler"
VISITS = "the process is no worker of the capture: it took part by attach(), and starts no profiler"
STANDS_STILL = ("hang", "signal")
"""Triggers for which the state of each process is written too."""
_KEPT = "the passes that the engine kept"
_OLDER = "earlier passes were not kept: the engine did not keep any yet, or recorder.memory_mb was too small"
_ASK_S = 2.0
"""Longest wait for torch's flight recorder, which may block."""
_JUST_NS = 50_000_000
"""Longest time from a call by Python code until the call is noted in `collective_calls.seen`."""
_BATCH = 500
"""Number of spans that are encoded without a pause, in about 2 ms. The pause is as long, and lets other
threads take the GIL."""


class Window(NamedTuple):
    """A step, with its times on the clocks of this process."""

    step: int
    opened: ClockAnchor
    closed: ClockAnchor
    ending: Ending | None = None
    """Cause of an early end, or None."""
    running: bool = False
    """True if the step is still running."""


class Written(NamedTuple):
    """A step that this process has written."""

    layout: StepLayout
    part: ManifestPart


def _within(calls: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return the calls, which have no duration, that lie in at least one of the spans."""
    ordered = sorted(spans, key=lambda span: span.start_ns)
    starts_ns = [span.start_ns for span in ordered]
    ends_ns = list(accumulate((math.inf if (end := span.end_ns) is None else end for span in ordered), max))
    before = (bisect_right(starts_ns, call.start_ns) for call in calls)
    return [call for call, at in zip(calls, before, strict=True) if at and call.start_ns <= ends_ns[at - 1]]


def window_of(step: RecordedStep, now: ClockAnchor) -> Window:
    """Return the window of a step of this process. If the step is still running, the window ends now.

    Wall-clock times are computed with the current wall clock, as in workers, even if the clock has jumped
    since the step.
    """
    running, opened, closed = step.closed is None, _by_now(step.opened, now), _by_now(step.closed or now, now)
    return Window(step.number, opened, closed, step.ending, running)


def _by_now(anchor: ClockAnchor, now: ClockAnchor) -> ClockAnchor:
    return msgspec.structs.replace(anchor, wall_ns=now.wall_ns - now.mono_ns + anchor.mono_ns)


def windows_by_time(order: Order, process: ProcessInfo, now: ClockAnchor) -> list[Window]:
    """Return the windows of an order in a worker. A worker knows steps only by their times in the order."""
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
    """Writer of this process' recorded data for the steps of one order, or for a step that another process
    captures.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler | None,
        config: ProfileConfig,
        run_id: str,
        order: Order | None,
        state: Callable[[], ProcessState],
        engines: EngineQueues | None,
    ) -> None:
        """
        Args:
            order: The order, or None for `write_visit`.
            state: Returns the current state of this process.
            engines: The engines whose passes are written, or None.
        """
        self._engines = engines
        self._ring = ring
        self._state = state
        self._sampler = sampler
        self._config = config
        self._run_id = run_id
        self._order = order

    def write(
        self,
        windows: Sequence[Window],
        *,
        owner: bool,
        began: dict[str, str] | None = None,
        clocks: Sequence[ClockOffset] = (),
    ) -> list[Written]:
        """Write the steps one after the other. Disk errors are recorded in the manifest.

        Args:
            windows: The windows of the steps, ordered by time.
            owner: True for the process that runs the training loop.
            began: {`ProcessInfo.key`: name} of the workers whose flight recorder is on.
            clocks: Clock offsets of workers on other hosts.
        """
        trigger = None if self._order is None else self._order.trigger
        if windows and trigger in STANDS_STILL:
            self._write_state(windows[-1])
        issued = self._issued(windows)
        if any(span.start_ns > time.monotonic_ns() - _JUST_NS for span in issued):
            time.sleep(_JUST_NS / 1e9)
            issued = self._issued(windows)
        copied, lost = self._copy()
        spans = _by_window([*copied.spans, *issued], windows)
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
        if windows and self._engines is not None and trigger != "signal":
            self._write_passes(self._engines, windows, written)
        return written

    def write_visit(self, window: Window, chosen: Callable[[Sequence[Span]], Sequence[Span]]) -> None:
        """Write this process' part of a step that another process captures. May be called again for the same
        step.

        Args:
            chosen: Returns the spans to write, from all spans in the ring.
        """
        copied, lost = self._copy()
        outcome = self._outcome(window, copied.since_ns, lost)
        spans = chosen(copied.spans)
        issued = _within(self._issued([window]), spans)
        self._write(window, [*spans, *issued], outcome, owner=False, began={}, clocks=())

    def _write_passes(
        self, engines: EngineQueues, windows: Sequence[Window], written: Sequence[Written]
    ) -> None:
        """Write the passes of this process' engines. This may take long, so it is not done after SIGTERM."""
        for replica, files in engines.passes(windows[0].opened.wall_ns):
            for window, step in zip(windows, written, strict=True):
                outcome = self._outcome_of_passes(replica, files, window, step.layout)
                if outcome is not None:
                    step.part.expect(outcome)
                    step.part.write()

    def _outcome_of_passes(
        self, replica: int, files: Sequence[PassFile] | str, window: Window, layout: StepLayout
    ) -> Expectation | None:
        """Write the passes of a replica in a step, and return the outcome, or None if there were no
        passes.
        """
        name = f"replica {replica}"
        if isinstance(files, str):
            return Expectation(name=name, kind="engine", state="failed", reason=f"{_KEPT}: {files}")
        start_ns, end_ns = window.opened.wall_ns, window.closed.wall_ns
        parts = [passes.between(file, start_ns, end_ns) for file in files]
        capture = EngineCapture(
            step=window.step,
            run_id=self._run_id,
            out_dir=str(layout.engine_dir(replica).absolute()),
            step_dir=str(layout.root.absolute()),
            name=f"step_{window.step:06d}_{self._run_id}",
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
        """Write the current state of this process into the step of a hang or a signal."""
        layout = RunLayout(self._config.save_path).step(window.step)
        path = layout.state_of(self._ring.process, self._run_id)
        try:
            state = self._state()
            if self._order is not None and self._order.trigger == "hang" and nccl_ras.may_know():
                state = msgspec.structs.replace(state, communicators=communicators_in_time())
            write_atomic(path, msgspec.json.encode(state))
        except ours() as error:
            failures.note("writing what the process does, into a step of the flight recorder", error)

    def _issued(self, windows: Sequence[Window]) -> list[Span]:
        """Return the collectives that C++ issued in the steps; empty if torch does not return them in
        time.
        """
        if not windows:
            return []
        read = partial(collective_calls.issued, self._ring, windows[0].opened.mono_ns)
        return in_time("reading the collectives that C++ issued", read, _ASK_S) or []

    def _copy(self) -> tuple[Copied, str | None]:
        """Return (a copy of the spans, None), or (an empty copy, the reason why the copy failed)."""
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
        process, run_id = self._ring.process, self._run_id
        layout = RunLayout(self._config.save_path).step(window.step)
        number, visits, ending = 1, self._order is None, window.ending
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
            imported_ns=IMPORTED_NS,
            recorded=False,
            why=VISITS if visits else WHY,
            roles=(process.role,),
            began=began,
            clocks=clocks,
            hardware=read_hardware(self._config.throughput),
            settings=settings.kept(),
            ended_by=None if ending is None else ending.by,
            error=None if ending is None else ending.error,
            recorder=self._recorded(window),
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

    def _recorded(self, window: Window) -> Recorded | None:
        if self._order is None:
            return None
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
        """Return the content of the counter file, with the last sample before the step and the first sample
        after it.
        """
        ticks = sampler.around(window.opened.mono_ns, window.closed.mono_ns)
        head = counters.Header(
            step=window.step,
            run_id=self._run_id,
            process=self._ring.process,
            anchor=window.opened,
            hz=COUNTERS_HZ,
        )
        samples = [counters.Sample(at_ns=tick.at_ns, values=tick.values) for tick in ticks]
        end = counters.End(anchor=window.closed, samples=len(samples), absent=sampler.absent)
        return b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *sampler.series, *samples, end))

    def _file(self, window: Window, spans: Sequence[Span]) -> bytes:
        """Return the content of the span file. Pauses leave half of the time to other threads."""
        header = records.Header(
            step=window.step, run_id=self._run_id, process=self._ring.process, anchor=window.opened
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
        return lines.record_of(span, span.end_ns, step, self._ring)

    def _outcome(self, window: Window, since_ns: int, lost: str | None) -> Expectation:
        """Return the manifest item for the spans of a step. All spans that began after `since_ns` were
        copied, or none for the reason `lost`.
        """
        if lost is not None:
            return Expectation(name="spans", kind="spans", state="failed", reason=lost)
        if since_ns <= window.opened.mono_ns:
            return Expectation(name="spans", kind="spans", state="ok")
        reason = f"older spans had gone: recorder.memory_mb is {self._config.recorder.memory_mb}"
        return Expectation(name="spans", kind="spans", state="partial", reason=reason)


def _outcome_of_counters(sampler: Sampler, window: Window) -> Expectation:
    if sampler.since_ns <= window.opened.mono_ns:
        return Expectation(name="counters", kind="counters", state="ok")
    reason = f"older samples had gone: {TICKS:,} are kept"
    return Expectation(name="counters", kind="counters", state="partial", reason=reason)


def _by_window(spans: Sequence[Span], windows: Sequence[Window]) -> list[list[Span]]:
    """Return the spans of each window: spans that began in the window, and spans that began earlier if they
    ended in the window or belong to a trajectory.
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
    """Return whether a span that was running when the window began belongs to the window. This is so if the
    span ended in the window or belongs to a trajectory.
    """
    ended = span.end_ns
    return (ended is not None and ended <= window.closed.mono_ns) or scopes.trajectory_at(span) is not None
