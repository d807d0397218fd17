"""The processes that a profiler slowed, by what the manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepscope.files.manifest.records import ProcessPart
from stepscope.files.sidecar import Artifact, ProcessInfo


def profiled_keys(parts: Sequence[ProcessPart]) -> frozenset[str]:
    """Return `ProcessInfo.key` of each process in which a profiler ran, an engine's own included.

    A part records this for its own process. The files of an engine show it for the process that wrote them.
    If that is a worker of the engine without a part, they show it for the replica's process.
    """
    artifacts = [artifact for part in parts for item in part.expected for artifact in item.artifacts]
    wrote = {(artifact.host, artifact.pid) for artifact in artifacts if artifact.pid is not None}
    replicas = {number for artifact in artifacts if (number := _replica(artifact, parts)) is not None}
    return frozenset(
        part.process.key
        for part in parts
        if part.profiled
        or (part.process.host, part.process.pid) in wrote
        or _number(part.process) in replicas
    )


def _replica(artifact: Artifact, parts: Iterable[ProcessPart]) -> int | None:
    """Return the replica of an artifact, or None if the process that wrote it left a part of its own."""
    known = any((artifact.host, artifact.pid) == (part.process.host, part.process.pid) for part in parts)
    return None if known else artifact.replica


def _number(process: ProcessInfo) -> int | None:
    """Return the replica of a process: as recorded, or else its position among the given workers."""
    if process.replica is not None or process.role != "rollout" or process.rank_source != "position":
        return process.replica
    return process.rank
