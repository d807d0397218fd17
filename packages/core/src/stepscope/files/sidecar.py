"""Records of a process, of a file that it wrote, and of the sidecar that describes both on disk."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int

NSYS_RANGES = "ranges"
"""Key in `Sidecar.options` of an nsys report: True if spans of stepscope made NVTX ranges in the report's
window."""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one process in a run."""

    role: str
    rank: Int | None
    """Global rank, or None if unknown. It is never guessed."""
    world_size: Int | None
    host: str
    pid: Int
    replica: Int | None = None
    """Number of the inference replica that this process belongs to, or None."""
    rank_source: str | None = None
    """The source of `rank`: `argument`, `environment`, `torch.distributed`, or `position` in the list of
    workers."""
    actor_id: str | None = None
    """Id of the Ray actor in this process, or None."""

    @property
    def key(self) -> str:
        """The name of the process, unique within a step: `actor_rank0_host_pid123`, or without a rank
        `actor_host_pid123`.
        """
        rank = "" if self.rank is None else f"_rank{self.rank}"
        return f"{self.role}{rank}_{self.host}_pid{self.pid}"


Ended: TypeAlias = Literal["capture", "count", "budget", "others"]
"""Cause of a recording's end. `capture`: the capture closed. `count`: the engine recorded the requested
number of iterations. `budget`: a budget ran out. `others`: other code stopped the engine's profiler."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which an engine served no requests, because its profiler was starting or writing its file."""

    start_ns: Int
    """Start of the stall in unix ns, on the clock of the artifact's host."""
    end_ns: Int
    doing: Literal["starting", "writing"]
    """Work of the profiler during the stall: it started, or it wrote its file."""
    source: Literal["stamps", "file"]
    """Source of the times. `stamps`: stepscope measured the stall in the engine's process. `file`: the stall
    is the time from the end of the recording until the last file was complete."""


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One complete file of a backend or an engine. Its sidecar is `<path>.meta.json`."""

    path: str
    """Path of the file, relative to the step's folder."""
    kind: str
    """Kind of the file, which determines its reader: `torch_trace`, `cuda_memory_snapshot`,
    `vllm_trace`..."""
    tool: str
    """The backend or engine that wrote the file."""
    role: str
    stage: str | None = None
    """Stage that the file covers, or None for a whole capture (continuous mode)."""
    rank: Int | None = None
    world_size: Int | None = None
    replica: Int | None = None
    topology: dict[str, int] | None = None
    """Ranks in the parallel layout, such as {"tp": 1, "pp": 0, "dp": 0}, or None if unknown."""
    host: str
    pid: Int | None = None
    size_bytes: Int
    truncated: str | None = None
    """Reason why the recording ended early, or None if it is complete."""
    ignored: dict[str, str] = {}
    """{option that had no effect: reason}."""
    iterations: Int | None = None
    """Number of recorded engine iterations that served a request, or None if the file does not mark
    iterations."""
    iterations_asked: Int | None = None
    """Requested number of iterations, or None for all until the end of the capture."""
    ended: Ended | None = None
    """Cause of the recording's end, or None if unknown."""
    note: str | None = None
    """A remark about the file that is not a problem, or None."""
    stalls: tuple[Stall, ...] = ()
    """Times in which the engine served no requests because of this file."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<artifact>.meta.json`."""

    format: Int = 1
    step: Int
    run_id: str
    artifact: Artifact
    process: str | None
    """`ProcessInfo.key` of the process that recorded the file, or None if stepscope did not run in it."""
    opened: ClockAnchor | None
    """Clock reading of the recording process when the recording began, or None if unknown."""
    closed: ClockAnchor | None
    """Clock reading of the recording process when the recording ended, or None if unknown."""
    versions: dict[str, str] = {}
    """{library: version} of the libraries that a reader needs to know."""
    options: dict[str, str | int | float | bool | None] = {}
    """{option that the profiler ran with: value}."""
