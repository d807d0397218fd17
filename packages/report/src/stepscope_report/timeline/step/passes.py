"""Forward passes of a step's engines, on the clock of the capture's owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepscope.errors import RecordError
from stepscope.files.passes import PassFile, read_passes
from stepscope_report.timeline.model import EnginePasses, FileProblem, Process
from stepscope_report.timeline.step.rows import clock_of, never_measured, offset_at
from stepscope_report.timeline.step.trace_files import TraceFile


def passes_of(
    files: Iterable[TraceFile], processes: Sequence[Process]
) -> tuple[tuple[EnginePasses, ...], list[FileProblem]]:
    """Return the passes of each file by replica and engine, and the problems of files that cannot be used."""
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
