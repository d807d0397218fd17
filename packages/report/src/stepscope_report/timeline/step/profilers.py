"""Costs of profilers, from the parts of the manifest: slowed processes and stalled engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from stepscope.files import passes
from stepscope.files.manifest.records import ProcessPart
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope_report.timeline.model import EngineStall, Process
from stepscope_report.timeline.step.rows import clock_of, offset_at


def profiled_keys(parts: Sequence[ProcessPart]) -> frozenset[str]:
    """Return `ProcessInfo.key` of each process in which a profiler ran, an engine's own included.

    A part records this for its own process. The files of an engine show it for the process that wrote them.
    If that is a worker of the engine without a part, they show it for the replica's process.
    """
    artifacts = [
        artifact
        for part in parts
        for item in part.expected
        for artifact in item.artifacts
        if artifact.kind != passes.KIND  # notes of passes slow nothing
    ]
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
    """Return the replica of a process: as recorded, else its position among the given workers; None if
    neither is known.
    """
    if process.replica is not None or process.role != "rollout" or process.rank_source != "position":
        return process.replica
    return process.rank


def stalls_of(parts: Iterable[ProcessPart], processes: Sequence[Process]) -> tuple[EngineStall, ...]:
    """Return the stalls of each replica, disjoint and in order.

    A replica stalls while all of its data-parallel engines do, because each of these serves its own requests.
    Files of hosts whose clock was not measured are ignored.
    """
    engines: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for item in part.expected:
            for artifact in item.artifacts:
                if artifact.replica is not None:
                    dp = (artifact.topology or {}).get("dp", 0)
                    engines[artifact.replica][dp] += _placed(artifact, processes)
    return tuple(
        EngineStall(replica=replica, start_ns=start_ns, end_ns=end_ns)
        for replica, intervals in sorted(engines.items())
        for start_ns, end_ns in _common(intervals)
    )


def replicas_of(parts: Iterable[ProcessPart]) -> int:
    """Return the number of replicas that the capture was given, recorded or not."""
    return len({item.name for part in parts for item in part.expected if item.kind == "engine"})


def _placed(artifact: Artifact, processes: Sequence[Process]) -> list[tuple[int, int]]:
    process = clock_of(artifact.host, processes)
    if process is None:
        return []
    placed = (
        (stall.start_ns - offset_at(process, stall.start_ns), stall.end_ns - offset_at(process, stall.end_ns))
        for stall in artifact.stalls
    )
    return [(start_ns, end_ns) for start_ns, end_ns in placed if start_ns < end_ns]


def _common(engines: Mapping[int, Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the stretches in which every engine has at least one interval."""
    events = sorted(
        event
        for engine, intervals in engines.items()
        for start_ns, end_ns in intervals
        for event in ((start_ns, 1, engine), (end_ns, -1, engine))
    )
    depth, began_ns = dict.fromkeys(engines, 0), None
    common = []
    for at_ns, change, engine in events:
        depth[engine] += change
        stalled = all(depth.values())
        if stalled and began_ns is None:
            began_ns = at_ns
        elif not stalled and began_ns is not None:
            if began_ns < at_ns:
                common.append((began_ns, at_ns))
            began_ns = None
    return common
