"""The processes that a profiler slowed, by what the manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepscope.files.manifest.records import ProcessPart
from stepscope.files.sidecar import Artifact, ProcessInfo


def profiled_keys(parts: Sequence[ProcessPart]) -> frozenset[str]:
    """`ProcessInfo.key` of each process in which a profiler ran, or whose engine's own did.

    A part says it of its own process. The files of an engine say it of the process that wrote them, or of the
    replica's process if one of the engine's own wrote them.
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
    """The replica that recorded it in a process of which there is no part."""
    known = any((artifact.host, artifact.pid) == (part.process.host, part.process.pid) for part in parts)
    return None if known else artifact.replica


def _number(process: ProcessInfo) -> int | None:
    """The replica that a process is of: as it says, else by its place among the workers given."""
    if process.replica is not None or process.role != "rollout" or process.rank_source != "position":
        return process.replica
    return process.rank
