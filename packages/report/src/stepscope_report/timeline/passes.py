"""Forward passes of a step's engines on the clock of the capture's owner, and the spans of their requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stepscope.errors import RecordError
from stepscope.files.passes import PassFile, read_passes
from stepscope_report.timeline.model import EnginePasses, FileProblem, Process, Timeline
from stepscope_report.timeline.rows import clock_of, never_measured, offset_at
from stepscope_report.timeline.trace_files import TraceFile
from stepscope_report.timeline.tree import REQUEST, replica_and_role


def passes_of(
    files: Iterable[TraceFile], processes: Sequence[Process]
) -> tuple[tuple[EnginePasses, ...], list[FileProblem]]:
    """Return the passes of each file, ordered by replica and engine, and the problems of unusable files."""
    engines, problems = [], []
    for file in files:
        try:
            engines.append(_placed(file, read_passes(file.path), processes))
        except (OSError, RecordError) as error:
            problems.append(FileProblem(file=file.name, what=f"no passes: {error}"))
    engines.sort(key=lambda engine: (engine.replica, engine.noted.dp, engine.file))
    return tuple(engines), problems


def _placed(file: TraceFile, noted: PassFile, processes: Sequence[Process]) -> EnginePasses:
    clock = clock_of(noted.host, processes)
    if clock is None:
        raise RecordError(never_measured(noted.host))
    anchor, times = noted.anchor, noted.passes
    wall_ns = anchor.wall_ns - anchor.mono_ns
    middle_ns = wall_ns + (anchor.mono_ns + noted.closed.mono_ns) // 2
    shift_ns = wall_ns - offset_at(clock, middle_ns)
    return EnginePasses(
        file=file.name,
        replica=noted.replica,
        begins_ns=[begin_ns + shift_ns for begin_ns in times.begin_ns],
        ends_ns=[end_ns + shift_ns for end_ns in times.end_ns],
        noted=noted,
    )


class RequestKey(NamedTuple):
    engine: int
    """Index in `Timeline.passes`."""
    request: int
    """Position in the file's `requests`."""


def linked_requests(timeline: Timeline) -> dict[RequestKey, int]:
    """Return {request: index in `timeline.spans` of the span that names the request}.

    If several spans name a request, the last one in a trajectory counts (the innermost). If none is in a
    trajectory, the first one counts.

    Several engines may use one request id. Then a span counts only if its replica is known. Spans of replicas
    in `Timeline.shared_numbers` do not count.
    """
    by_name: dict[object, list[RequestKey]] = defaultdict(list)
    for at, engine in enumerate(timeline.passes):
        requests = engine.noted.requests
        for position, names in enumerate(zip(requests.id, requests.caller_id, strict=True)):
            for name in set(names):
                by_name[name].append(RequestKey(at, position))
    links: dict[RequestKey, int] = {}
    for index, span in enumerate(timeline.spans if by_name else ()):
        named = None if span.attrs is None else span.attrs.get(REQUEST)
        if named is None or named not in by_name:
            continue
        keys, (replica, role) = by_name[named], replica_and_role(timeline, span)
        if replica is not None and (role, replica) in timeline.shared_numbers:
            continue
        if replica is not None:
            keys = [key for key in keys if timeline.passes[key.engine].replica == replica]
        if len({key.engine for key in keys}) != 1:
            continue
        for key in keys:
            if key not in links or span.trajectory is not None:
                links[key] = index
    return links


def passes_of_requests(engine: EnginePasses) -> list[list[int]]:
    """Return, for each request of the file, its rows in `noted.served`, in the order of the passes."""
    rows: list[list[int]] = [[] for _ in engine.noted.requests.id]
    for row, request in enumerate(engine.noted.served.request):
        rows[request].append(row)
    return rows


def pass_of_rows(engine: EnginePasses) -> list[int]:
    """Return the index of the pass of each row in `noted.served`."""
    return [at for at, requests in enumerate(engine.noted.passes.requests) for _ in range(requests)]
