"""Who wrote a file and what is in it: the process identity, the artifact, and its sidecar on disk."""

from __future__ import annotations

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
