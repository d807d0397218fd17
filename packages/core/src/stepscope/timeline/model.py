"""One captured step as it was: processes and spans, all on the wall clock of the capture's owner.

Every time is an integer in unix ns on that clock, unless the process is unaligned: then its spans stand on
its own clock and only their durations mean anything.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.manifest.records import Manifest, OwnCost
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.uncaptured import UncapturedStep
from stepscope.files.values import AttrValue

Alignment: TypeAlias = Literal["owner", "same host", "measured", "collectives", "unaligned"]


class ProcessClock(msgspec.Struct, frozen=True, kw_only=True):
    """Alignment of one process' times with the owner's clock."""

    alignment: Alignment
    """`owner`: it is the owner's. `same host`: the two share a wall clock. `measured`: by the owner's
    exchanges with it. `collectives`: by those and by what its host's collectives with others allow.
    `unaligned`: on another host, and nothing was measured."""
    offset_ns: int = 0
    """Lead of its wall clock over the owner's at its opening, already subtracted."""
    closing_offset_ns: int = 0
    """The same at its closing; in between it is interpolated."""
    uncertainty_ns: int | None = None
    """The true position lies within +- this. None where it is not known: unaligned."""
    drift_ns: int = 0
    """Gain of its wall clock on its monotonic clock while the capture was open."""
    jumped: bool = False
    """The wall clock was set meanwhile: positions follow the monotonic clock from the opening on."""
    drift_ppm: float | None = None
    """Rate of its gain on the owner's, already subtracted. None: not known, or the same clock."""
    matched: int = 0
    """Number of collectives that the offset rests on."""
    note: str | None = None
    """Why collectives say nothing of it, or not all that they could."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process that took part."""

    name: str
    """For people, unique in the step: `actor 0`, `rollout pid 812`."""
    info: ProcessInfo
    owner: bool
    opened_ns: int
    closed_ns: int | None
    """None: it never closed its capture (killed, or still running)."""
    last_ns: int
    """The last sign of life: when it closed, or else its latest record."""
    clock: ProcessClock
    spans: int
    """Finished spans that were read."""
    dropped: int | None
    """Spans that it did not write. None: it did not live to say."""
    cost: OwnCost | None
    """None: its part of the manifest is not there."""
    profiled: bool = False
    """A profiler recorded it, an engine's own among them: it is slower than its like that none recorded."""

    @property
    def aligned(self) -> bool:
        return self.clock.alignment != "unaligned"

    @property
    def is_replica(self) -> bool:
        """Whether it is, or belongs to, an inference replica. The role of its spans does not decide that: an
        agent loop calls its wait for a replica `rollout` too.
        """
        return not self.owner and (self.info.replica is not None or self.info.role == "rollout")


class Span(msgspec.Struct, kw_only=True, gc=False):
    """One stretch of code, placed in time."""

    process: int
    """Index in `Timeline.processes`."""
    parent: int | None
    """Index in `Timeline.spans` of the span it ran below: of this process or, by a carrier, of another."""
    role: str
    stage: str
    start_ns: int
    end_ns: int | None
    """None: never seen to end (a hang, or a killed process)."""
    dur_ns: int | None
    """By the process' own monotonic clock; `end_ns - start_ns` differs from it by the clock's drift."""
    step: int
    """The step that owns the work."""
    begun_step: int | None = None
    """The captured step in which the span stands that it ran below, where that is another one."""
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None
    thread: int = 0
    attrs: dict[str, AttrValue] | None = None
    error: str | None = None
    waits: bool = False
    """It waits and does no work: its attribute `wait` is true, or its stage is `queue` or `wait`."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The step's time: from the capture's opening to its closing in the owner."""

    start_ns: int
    end_ns: int
    opened: bool
    """False: the owner left nothing, and the window is the extent of what others left."""
    closed: bool
    """False: the owner never closed the capture; the window ends with the last sign of life of anyone."""

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


class EngineStall(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch in which a replica served nothing, because its own profiler started or wrote."""

    replica: int
    start_ns: int
    end_ns: int


class FileProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a file that could not be used. The rest of the file was."""

    file: str
    """Relative to the step's folder."""
    what: str
    lines: int | None = None
    """Number of lines that it concerns. None: the file."""
    events: int | None = None
    """Of a trace: how many events it concerns."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one run."""

    step: int
    run_id: str
    runs: tuple[str, ...]
    """All runs that left something in the step's folder, the latest last. This is `run_id`'s timeline."""
    window: Window
    processes: tuple[Process, ...]
    """The owner first, then by role and rank."""
    spans: list[Span]
    """By process, and there in the order of opening."""
    consumed: tuple[Span, ...] = ()
    """Calls of `consume`, without length: the trajectories that the step trains on."""
    manifest: Manifest | None
    """None: no process left its part."""
    problems: tuple[FileProblem, ...] = ()
    captures: int = 1
    """Number of captures of the step in one process (a retry). This is the last of them."""
    earlier_files: tuple[str, ...] = ()
    """Recordings of the captures before it, relative to the step's folder."""
    stalls: tuple[EngineStall, ...] = ()
    """Of engines, for their own profilers: by replica, disjoint and in order."""
    replicas: int = 0
    """Number of inference engines that the capture was given, recorded or not."""
    uncaptured: tuple[UncapturedStep, ...] = ()
    """Steps of the same loop that were not captured, in the order of their starts: the nearest ones that were
    kept."""

    def since_opening_ns(self, span: Span) -> int | None:
        """When the span began, after the capture opened. None where its process is unaligned."""
        return span.start_ns - self.window.start_ns if self.processes[span.process].aligned else None

    def until_ns(self, span: Span) -> int:
        """When the span ended; where that is not known, its process' last sign of life."""
        return self.processes[span.process].last_ns if span.end_ns is None else span.end_ns
