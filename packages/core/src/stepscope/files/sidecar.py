"""Who wrote a file and what is in it: the process identity, the artifact, and its sidecar on disk."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one process in a run."""

    role: str
    rank: Int | None
    """Global rank; None when nothing says. Never guessed."""
    world_size: Int | None
    host: str
    pid: Int
    replica: Int | None = None
    """Index of the inference replica that this process belongs to, if any."""
    rank_source: str | None = None
    """Where `rank` came from: `argument`, `environment`, `torch.distributed`, `position` in the workers
    given.
    """
    actor_id: str | None = None
    """Ray actor id, if the process is one."""

    @property
    def key(self) -> str:
        """Unique within a step: `actor_rank0_host_pid123`; `actor_host_pid123` where the rank is unknown."""
        rank = "" if self.rank is None else f"_rank{self.rank}"
        return f"{self.role}{rank}_{self.host}_pid{self.pid}"


Ended: TypeAlias = Literal["capture", "count", "budget", "others"]
"""`capture`: ours, with the capture. `count`: the engine, after the iterations that were asked for. `budget`:
ours, before. `others`: somebody else stopped the engine's profiler."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch in which an engine served nothing, because its own profiler started or wrote its file."""

    start_ns: Int
    """Unix ns by the clock of the artifact's host, as `end_ns`."""
    end_ns: Int
    doing: Literal["starting", "writing"]
    source: Literal["stamps", "file"]
    """`stamps`: our code in the engine's process timed it. `file`: from the end of what is recorded until the
    last of its files was whole; what the engine did after that is not in it."""


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One complete file that a backend or an engine wrote. Its sidecar stands beside it as
    `<path>.meta.json`.
    """

    path: str
    """Relative to the step folder."""
    kind: str
    """`torch_trace`, `cuda_memory_snapshot`, `vllm_trace`...: what a reader is chosen by."""
    tool: str
    """The backend or engine that wrote it."""
    role: str
    stage: str | None = None
    """None for a whole capture (continuous mode)."""
    rank: Int | None = None
    world_size: Int | None = None
    replica: Int | None = None
    topology: dict[str, int] | None = None
    """Position in the parallel layout, e.g. {"tp": 1, "pp": 0, "dp": 0}. None when nothing says."""
    host: str
    pid: Int | None = None
    size_bytes: Int
    truncated: str | None = None
    """Why the artifact ends before its window did; None when it does not."""
    ignored: dict[str, str] = {}
    """Options that could not be honoured: {option: reason}."""
    iterations: Int | None = None
    """Engine iterations in it. None: it does not name them."""
    iterations_asked: Int | None = None
    """The number to record. None: all until the end of the capture."""
    ended: Ended | None = None
    """The cause of its end. None: not known."""
    note: str | None = None
    """A fact about it that is no trouble."""
    stalls: tuple[Stall, ...] = ()
    """When the engine served nothing for the sake of this file."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `<artifact>.meta.json`: the data model behind a file name."""

    format: Int = 1
    step: Int
    run_id: str
    artifact: Artifact
    process: str | None
    """`ProcessInfo.key` of the process that recorded it, if it was one of ours."""
    opened: ClockAnchor | None
    """Clock reading when recording began, in the recording process."""
    closed: ClockAnchor | None
    versions: dict[str, str] = {}
    options: dict[str, str | int | float | bool | None] = {}
