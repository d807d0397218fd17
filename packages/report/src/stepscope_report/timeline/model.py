"""One captured step: its processes, spans and counters, and the reasons why it is not complete.

Every time is an integer in unix ns on the wall clock of the capture's owner. Times of an unaligned process
are on its own clock instead: only durations of its spans are meaningful.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import CounterKind, CounterScope
from stepscope.files.manifest import Manifest, OwnCost
from stepscope.files.passes import PassFile
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import ProcessState
from stepscope.files.steps import UncapturedStep
from stepscope.files.values import AttrValue

Alignment: TypeAlias = Literal["owner", "same host", "measured", "collectives", "assumed", "unaligned"]

GENERATES = frozenset({"rollout", "agent_loop"})
"""Roles whose work is generation, or contains generation."""
ROLLOUT = GENERATES | {"env", "reward"}
"""Roles whose work is the rollout."""


class ProcessClock(msgspec.Struct, frozen=True, kw_only=True):
    """Alignment of one process' times with the owner's clock."""

    alignment: Alignment
    """`owner`: the process is the owner. `same host`: it has the owner's wall clock. `measured`: exchanges of
    the owner with the process give the offset. `collectives`: collectives between hosts narrow the measured
    offset. `assumed`: the process' traces or spans name no host of this step, and its clock counts as the
    owner's. `unaligned`: the process runs on another host, and nothing was measured."""
    offset_ns: int = 0
    """Lead of the process' wall clock over the owner's when the capture opened. Times are corrected by this
    lead."""
    closing_offset_ns: int = 0
    """The lead when the capture closed. Between opening and closing, the lead is interpolated."""
    uncertainty_ns: int | None = None
    """Largest error (+-) of the process' times, or None if unknown, as for assumed and unaligned clocks."""
    drift_ns: int = 0
    """Gain of the process' wall clock over its monotonic clock while the capture was open."""
    jumped: bool = False
    """True if the wall clock was set during the capture. Positions then follow the monotonic clock."""
    drift_ppm: float | None = None
    """Drift against the owner's clock, already subtracted; None if unknown, or if both use the same clock."""
    matched: int = 0
    """Number of collectives that the offset is based on."""
    note: str | None = None
    """Reason why collectives improved the clock only in part or not at all, or an assumption about the clock.
    None if there is neither."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process that took part."""

    name: str
    """Display name, unique in the step: `actor 0`, `rollout pid 812`."""
    info: ProcessInfo
    owner: bool
    opened_ns: int
    closed_ns: int | None
    """The end of the capture, or None if the process never closed it (killed, or still running)."""
    last_ns: int
    """Time of the closing or of the latest record, whichever is later."""
    clock: ProcessClock
    spans: int
    """Number of finished spans that were read."""
    dropped: int | None
    """Number of spans that the process did not write, or None if it ended without recording that number."""
    cost: OwnCost | None
    """The cost of being captured, or None if the process' part of the manifest is missing."""
    profiled: bool = False
    """True if a profiler (an engine's own included) recorded the process, which makes it slower than its
    peers."""

    @property
    def aligned(self) -> bool:
        return self.clock.alignment != "unaligned"

    @property
    def is_replica(self) -> bool:
        """True if the process is, or belongs to, an inference replica.

        The role of its spans does not decide this: an agent loop also records its wait for a replica as
        `rollout`.
        """
        return not self.owner and (self.info.replica is not None or self.info.role == "rollout")


class Span(msgspec.Struct, kw_only=True, gc=False):
    """One timed section of code, placed on the timeline."""

    process: int
    """Index in `Timeline.processes`."""
    parent: int | None
    """Index of the parent in `Timeline.spans`, or None. With a carrier, the parent can be a span of another
    process."""
    role: str
    stage: str
    start_ns: int
    end_ns: int | None
    """The end; None if no end was recorded (a hang, or a killed process)."""
    dur_ns: int | None
    """Duration by the process' monotonic clock, or None without an end. `end_ns - start_ns` differs from this
    duration by the clock's drift."""
    step: int
    """The step that owns the work."""
    begun_step: int | None = None
    """Captured step of the parent span, if that is another step; else None."""
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None
    thread: int = 0
    attrs: dict[str, AttrValue] | None = None
    error: str | None = None
    cancelled: bool = False
    """True if the span's work was cancelled, which is no error."""
    number: int = 0
    """Number of the span in its process' file. The process' key and this number make the span's
    id in OpenTelemetry."""
    traceparent: str | None = None
    """W3C trace context of the parent if another tracer named the parent, else None."""
    waits: bool = False
    """True if the span only waits: its attribute `wait` is true, or its stage is `queue` or `wait`."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the step: from the opening to the closing of the capture in the owner."""

    start_ns: int
    end_ns: int
    opened: bool
    """False if the owner left no files, so that the window covers the records of the other processes."""
    closed: bool
    """False if the owner never closed the capture, so that the window ends with the latest record of any
    process."""

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one counter of one object, taken by one process."""

    process: int
    """Index in `Timeline.processes` of the process that sampled it."""
    name: str
    of: str
    """The sampled object, such as `GPU 3`; empty for the process or the host itself."""
    unit: str
    kind: CounterKind
    scope: CounterScope
    times_ns: tuple[int, ...]
    """Time at which each value was sampled, ascending."""
    values: tuple[float, ...]


class HeldValue(NamedTuple):
    """A value, and the time for which the value holds: from the previous sample to the value's own sample."""

    start_ns: int
    end_ns: int
    value: float


class EngineStall(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which a replica served nothing because its own profiler was starting or writing."""

    replica: int
    start_ns: int
    end_ns: int


class EnginePasses(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of one engine of a replica, on the owner's clock."""

    file: str
    """Path of the file, relative to the step's folder."""
    replica: int
    begins_ns: list[int]
    ends_ns: list[int]
    noted: PassFile
    """The file's content. Its times are on the engine's own clock."""

    @property
    def rows(self) -> list[int]:
        """Index in `noted.served` of the first row of each pass, then the number of all rows."""
        return list(accumulate(self.noted.passes.requests, initial=0))


class FileProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file that could not be used. The rest of the file was used."""

    file: str
    """Path of the file, relative to the step's folder."""
    what: str
    lines: int | None = None
    """Number of affected lines, or None for the whole file."""
    events: int | None = None
    """Number of affected events of a trace, or None if the problem concerns no single events."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one run."""

    step: int
    run_id: str
    runs: tuple[str, ...]
    """All runs with files in the step's folder, the latest last. This timeline is of `run_id`."""
    window: Window
    processes: tuple[Process, ...]
    """The processes: the owner first, then by role and rank."""
    spans: list[Span]
    """The spans, ordered by process, then by opening."""
    counters: tuple[Counter, ...] = ()
    """The counters by process, in the order in which the process first sampled them."""
    consumed: tuple[Span, ...] = ()
    """Calls of `consume`, which have no duration: the trajectories that the step trains on."""
    taken: frozenset[str] | None = None
    """Names of all trajectories that this step consumes. None if unknown: there are no calls of `consume`,
    some calls are lost, or no span here has a trajectory that the calls name."""
    tokens: tuple[Span, ...] = ()
    """Calls of `step_tokens`, which have no duration."""
    manifest: Manifest | None
    """The manifest, or None if no process left a part of the manifest."""
    tracer: str = ""
    """Name of the other tracer that recorded all spans of the step; empty if stepscope recorded the step."""
    problems: tuple[FileProblem, ...] = ()
    captures: int = 1
    """Number of captures of the step in one process, more than 1 after a retry. This is the last capture."""
    earlier_files: tuple[str, ...] = ()
    """Recordings of earlier captures of the step, relative to its folder."""
    stalls: tuple[EngineStall, ...] = ()
    """Times in which replicas stalled because of their own profilers, by replica. Stalls of a replica are
    disjoint and in order."""
    shared_numbers: frozenset[tuple[str, int]] = frozenset()
    """(role, number) of replicas that share their number with a replica of another role. Of the replicas with
    the same number, one is not in this set: the replica of the role `rollout`, or else of the first role by
    name."""
    passes: tuple[EnginePasses, ...] = ()
    """Noted forward passes, by replica and data-parallel engine."""
    replicas: int = 0
    """Number of inference engines that the capture was given, recorded or not."""
    uncaptured: tuple[UncapturedStep, ...] = ()
    """Nearest recorded steps of the same loop that were not captured, in the order of their starts."""
    previous_end_ns: int | None = None
    """End of the step before, captured or not, or None if unknown."""
    owner_went_on: bool = False
    """True if the flight recorder's lines show that the owner closed its capture. A full disk may have kept
    the closing out of the owner's own files."""
    regular: frozenset[str] = frozenset()
    """Large stages that come in every n-th step, an evaluation for example: `role/stage` of top spans."""
    warms_up: bool = False
    """True if the step is the first of its run, which includes compilation, allocation and connections."""
    metrics: dict[str, float] = {}
    """{name: number} that the trainer logged for the step, under the trainer's names."""
    states: tuple[ProcessState, ...] = ()
    """States of processes when the flight recorder wrote the step because of a hang or a signal. Empty
    otherwise."""

    def since_opening_ns(self, span: Span) -> int | None:
        """Return the time from the opening to the span's start, or None if the process is unaligned."""
        return span.start_ns - self.window.start_ns if self.processes[span.process].aligned else None

    def consumes(self, span: Span) -> bool:
        """Return whether the span is work for this step: of a consumed trajectory, or of no trajectory."""
        if self.taken is None or span.trajectory is None:
            return span.step == self.step
        return span.trajectory in self.taken

    def leaves(self, span: Span) -> bool:
        """Return whether the span is work that this step does not consume, so that nothing in the step waits
        for it.
        """
        if self.taken is None or span.trajectory is None:
            return span.step > self.step
        return span.trajectory not in self.taken

    def until_ns(self, span: Span) -> int:
        """Return the end of the span, or the latest time of its process if the end is unknown."""
        return self.processes[span.process].last_ns if span.end_ns is None else span.end_ns


def doubts(timeline: Timeline, traces: Iterable[FileProblem] = ()) -> tuple[str, ...]:
    """Return a line for each reason why a step is not complete.

    Args:
        traces: Problems inside the step's traces, if the traces were read.
    """
    return (*why_incomplete(timeline), *map(_say_problem, (*timeline.problems, *traces)))


def why_incomplete(timeline: Timeline) -> tuple[str, ...]:
    """Return the reasons why a step is not complete, without the problems of files in `Timeline.problems`."""
    lines = tuple(_reasons(timeline))
    if lines or timeline.problems or timeline.window.opened or timeline.tracer:
        return lines
    return ("the process that opened the capture left nothing",)


def is_running(manifest: Manifest | None) -> bool:
    """Return whether the step still ran when the flight recorder wrote it."""
    parts = () if manifest is None else manifest.processes
    return any(part.recorder is not None and part.recorder.running for part in parts)


def _reasons(timeline: Timeline) -> Iterator[str]:
    manifest = timeline.manifest
    if manifest is None and not timeline.tracer:
        yield "no process left its part of the manifest"
    elif manifest is not None:
        yield from (*manifest.problems(), *manifest.awaited())
    if is_running(manifest):
        yield "the step still ran when the flight recorder wrote it: it is cut off at that moment"
    for process in timeline.processes:
        if process.closed_ns is None and process is timeline.processes[0] and timeline.owner_went_on:
            yield f"{process.name} closed its capture, and could not write that: its disk may have been full"
        elif process.closed_ns is None:
            yield f"{process.name} never closed its capture: killed, or still running"
        if process.dropped:
            spans = f"{process.dropped:,} span{'s' * (process.dropped != 1)}"
            yield f"{process.name} dropped {spans}; its times are too short"
        if not process.aligned:
            yield f"{process.name} is on another host without a measured clock: its spans are left out"


def _say_problem(problem: FileProblem) -> str:
    lines = "" if problem.lines is None else f" ({problem.lines:,} line{'s' * (problem.lines != 1)})"
    return f"{problem.file}: {problem.what}{lines}"


def held_values(counter: Counter, timeline: Timeline) -> list[HeldValue]:
    """Return a counter's values within the step, in order of time. The counter's first value has no duration.

    If the clock of the process is unaligned, all values are returned, because their place in the step is
    unknown.
    """
    times = counter.times_ns
    pieces = map(HeldValue, (*times[:1], *times), times, counter.values)
    if not timeline.processes[counter.process].aligned:
        return list(pieces)
    start_ns, end_ns = timeline.window.start_ns, timeline.window.end_ns
    if counter.kind == "interval" and times and times[0] > end_ns:  # a late sample that covers the step
        return [HeldValue(start_ns, end_ns, counter.values[0])]
    return [
        HeldValue(max(piece.start_ns, start_ns), min(piece.end_ns, end_ns), piece.value)
        for piece in pieces
        if piece.end_ns >= start_ns and piece.start_ns <= end_ns
    ]
