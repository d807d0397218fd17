"""Identity of a process, description of a file that it wrote, and the sidecar that holds both on disk."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int

NSYS_RANGES = "ranges"
"""Key in `Sidecar.options` of an nsys report: True if spans of stepscope made NVTX ranges in its window."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one process in a run."""

    role: str
    rank: Int | None
    """Global rank; None if unknown. Never guessed."""
    world_size: Int | None
    host: str
    pid: Int
    replica: Int | None = None
    """Index of the inference replica that this process belongs to, if any."""
    rank_source: str | None = None
    """The source of `rank`: `argument`, `environment`, `torch.distributed`, `position` among the workers."""
    actor_id: str | None = None
    """Ray actor id, if the process is one."""

    @property
    def key(self) -> str:
        """The name of the process, unique within a step: `actor_rank0_host_pid123`, or without a rank
        `actor_host_pid123`.
        """
        rank = "" if self.rank is None else f"_rank{self.rank}"
        return f"{self.role}{rank}_{self.host}_pid{self.pid}"


Ended: TypeAlias = Literal["capture", "count", "budget", "others"]
"""Cause of a recording's end. `capture`: the capture closed. `count`: the engine had recorded the requested
iterations. `budget`: a budget ran out. `others`: other code stopped the engine's profiler."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch in which an engine served nothing, because its own profiler started or wrote its file."""

    start_ns: Int
    """Start of the stall in unix ns, on the clock of the artifact's host; `end_ns` likewise."""
    end_ns: Int
    doing: Literal["starting", "writing"]
    source: Literal["stamps", "file"]
    """Source of the times. `stamps`: code of stepscope timed the stall in the engine's process. `file`: the
    stall lasts from the end of the recording until the last of its files was complete, without later work of
    the engine."""


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One complete file of a backend or an engine, with its sidecar beside it as `<path>.meta.json`."""

    path: str
    """Path of the file, relative to the step's folder."""
    kind: str
    """Kind of the file, which decides on its reader: `torch_trace`, `cuda_memory_snapshot`,
    `vllm_trace`..."""
    tool: str
    """The backend or engine that wrote it."""
    role: str
    stage: str | None = None
    """Stage that the file covers, or None for a whole capture (continuous mode)."""
    rank: Int | None = None
    world_size: Int | None = None
    replica: Int | None = None
    topology: dict[str, int] | None = None
    """Position in the parallel layout, for example {"tp": 1, "pp": 0, "dp": 0}. None if unknown."""
    host: str
    pid: Int | None = None
    size_bytes: Int
    truncated: str | None = None
    """Reason why the recording ended before its window, or None if it is complete."""
    ignored: dict[str, str] = {}
    """Options without effect: {option: reason}."""
    iterations: Int | None = None
    """Number of engine iterations with a request in the file, or None if the file does not name them."""
    iterations_asked: Int | None = None
    """Number of iterations to record, or None for all until the end of the capture."""
    ended: Ended | None = None
    """Cause of the recording's end, or None if unknown."""
    note: str | None = None
    """A fact about the file that is no problem, or None."""
    stalls: tuple[Stall, ...] = ()
    """Stretches in which the engine served nothing because of this file."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<artifact>.meta.json`: the data model behind a file name."""

    format: Int = 1
    step: Int
    run_id: str
    artifact: Artifact
    process: str | None
    """`ProcessInfo.key` of the process that recorded the file, or None if stepscope did not run there."""
    opened: ClockAnchor | None
    """Clock reading when recording began, in the recording process."""
    closed: ClockAnchor | None
    versions: dict[str, str] = {}
    options: dict[str, str | int | float | bool | None] = {}
