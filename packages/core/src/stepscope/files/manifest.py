"""What a captured step should hold and what it does hold.

Every process of a capture writes its own part (`processes/<key>.json`, rewritten as things become known,
atomically), so no two processes ever write one file. `manifest.json` is the fold of all parts; readers fold
the parts again and do not need it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, ClockOffset, Int
from stepscope.files.sidecar import Artifact, ProcessInfo

State: TypeAlias = Literal["ok", "partial", "missing", "failed", "skipped"]
_TROUBLE = ("missing", "partial", "failed")

NOT_CLOSED = "the process has not closed its capture"
NOT_EXPORTED = "not exported yet"
NOT_RUN = "it has not run yet"
NOT_FETCHED = "on its own host, which shares no folder with this one; not fetched yet"
STILL_AWAITED = "its files may still come"
"""How the reason ends of an engine whose stop took longer than its deadline, or failed and may yet write."""
TERMINATED = "the process was terminated (SIGTERM)"
EXITED = "the process exited"
"""What stands for an exception (`ProcessPart.error`) where the end of its process ended a capture."""
LATE = "late"
"""Among what an engine ignored: why files may come after its stop. Who brings them writes their sidecars."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a process or engine was to produce, and what became of it."""

    name: str
    """`torch trace`, `torch trace of update_policy`, `spans`, `replica 1`..."""
    state: State
    reason: str | None = None
    """Always set unless `state` is ok."""
    artifacts: tuple[Artifact, ...] = ()
    truncated: str | None = None
    ignored: dict[str, str] = {}


class OwnCost(msgspec.Struct, frozen=True, kw_only=True):
    """What profiling itself cost this process, measured, in ns."""

    start_ns: Int = 0
    """Opening the capture here: backends started."""
    stop_ns: Int = 0
    """Closing it: backends stopped."""
    inside_ns: Int = 0
    """The part of the two above between `opened` and `closed`: the windows of stages (discrete mode)."""
    export_ns: Int = 0
    """Writing traces (in the background unless said otherwise)."""
    spans_ns: Int = 0
    """Number of spans times the cost of one, calibrated in this process."""


class ProcessPart(msgspec.Struct, frozen=True, kw_only=True):
    """One process' part of the manifest."""

    format: Int = 1
    run_id: str
    step: Int
    process: ProcessInfo
    owner: bool
    """True for the process that opened the capture; it also speaks for workers and engines that did not
    answer.
    """
    opened: ClockAnchor
    closed: ClockAnchor | None = None
    """None until the process has closed its capture."""
    recorded: bool
    """Whether a backend records this process (rank and role selection)."""
    why: str
    """The reason of that decision."""
    roles: tuple[str, ...] = ()
    """All roles whose work this process does: its own, its decorated methods', its spans'."""
    expected: tuple[Expectation, ...] = ()
    spans: Int = 0
    dropped: Int = 0
    cost: OwnCost = OwnCost()
    clocks: tuple[ClockOffset, ...] = ()
    """Owner only: the other processes' clocks against this one's."""
    absent: tuple[Absent, ...] = ()
    """Owner only: who was to take part and wrote no part of their own."""
    began: dict[str, str] = {}
    """Owner only: {`ProcessInfo.key`: name} of the workers that began, each of which writes a part."""
    error: str | None = None
    """`ExceptionType: message` of the user's exception that ended the capture."""
    instrumented: dict[str, tuple[str, ...]] = {}
    """{`module:name`: `role/stage`s} of the functions that `instrument` replaced in this process."""


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or replica that should have taken part and did not (all the way)."""

    name: str
    state: State
    reason: str
    process: str | None = None
    """Its `ProcessInfo.key`, if it answered before it went."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: the fold of all parts of one step."""

    format: Int = 1
    run_id: str
    step: Int
    state: State
    """The worst of all states; `skipped` does not count against a step."""
    processes: tuple[ProcessPart, ...]

    def problems(self) -> list[str]:
        """One line for each expectation that is missing, partial or failed, with its reason."""
        lines: list[str] = []
        for part in self.processes:
            key = part.process.key
            lines += [f"{key}: {i.name}: {i.state}: {i.reason}" for i in part.expected if i.state in _TROUBLE]
            lines += [f"{a.name}: {a.state}: {a.reason}" for a in part.absent if a.state in _TROUBLE]
        return lines
