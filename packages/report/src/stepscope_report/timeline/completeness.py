"""Reasons why a step is not complete: `ls`, `report`, `merge` and their `--json` all take them from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stepscope.files.manifest.records import Manifest
from stepscope_report.timeline.model import FileProblem, Timeline


def doubts(timeline: Timeline, traces: Iterable[FileProblem] = ()) -> tuple[str, ...]:
    """Return a line for each reason why a step is not complete; none if it is.

    Args:
        traces: Problems inside its traces, if these were read.
    """
    return (*why_incomplete(timeline), *map(_say_problem, (*timeline.problems, *traces)))


def why_incomplete(timeline: Timeline) -> tuple[str, ...]:
    """Return the reasons why a step is not complete, without the problems of files in `Timeline.problems`."""
    lines = tuple(_reasons(timeline))
    if lines or timeline.problems or timeline.window.opened or timeline.tracer:
        return lines
    return ("the process that opened the capture left nothing",)


def is_running(manifest: Manifest | None) -> bool:
    """Return whether the step still ran when the flight recorder wrote it."""
    parts = () if manifest is None else manifest.processes
    return any(part.recorder is not None and part.recorder.running for part in parts)


def _reasons(timeline: Timeline) -> Iterator[str]:
    manifest = timeline.manifest
    if manifest is None and not timeline.tracer:
        yield "no process left its part of the manifest"
    elif manifest is not None:
        yield from (*manifest.problems(), *manifest.awaited())
    if is_running(manifest):
        yield "the step still ran when the flight recorder wrote it: it is cut off at that moment"
    for process in timeline.processes:
        if process.closed_ns is None:
            yield f"{process.name} never closed its capture: killed, or still running"
        if process.dropped:
            spans = f"{process.dropped:,} span{'s' * (process.dropped != 1)}"
            yield f"{process.name} dropped {spans}; its times are too short"
        if not process.aligned:
            yield f"{process.name} is on another host without a measured clock: no wall time has its spans"


def _say_problem(problem: FileProblem) -> str:
    lines = "" if problem.lines is None else f" ({problem.lines:,} line{'s' * (problem.lines != 1)})"
    return f"{problem.file}: {problem.what}{lines}"
