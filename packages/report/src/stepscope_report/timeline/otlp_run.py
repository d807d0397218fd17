"""Timeline of a run without stepscope, from OTLP JSON only.

All spans together are one step, from the first to the last. The process of the longest root span is the
owner, and clocks of other hosts are assumed to be right. The outermost span of each agent is a trajectory.
Without agents, each outermost span of the stage `trajectory` is one. Without such spans, each root span with
a call to a model is one, if there are at least two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files.storage import files_below
from stepscope.files.trace_context import TraceContext
from stepscope_report.timeline.clocks import NOT_NEAR, Hours, is_wall
from stepscope_report.timeline.foreign import GrowingTimeline, by_process, is_request, without_copies
from stepscope_report.timeline.model import FileProblem, ProcessClock, Span, Timeline, Window
from stepscope_report.timeline.readers.contract import FoundFile
from stepscope_report.timeline.readers.otlp import SUFFIXES, OtlpSpan, read_otlp

_HEAD = 1 << 16
_FIELD = b'"resourceSpans"'
_TRAJECTORY = "trajectory"
_ID = "trajectory_id"
_CALLS = frozenset({"generate", "request"})
"""Stages of a call to a model."""


def is_otlp(paths: Sequence[Path]) -> bool:
    """Return whether the paths contain OTLP JSON, and no other JSON."""
    files = [file for path in paths for file in _below(path)]
    return bool(files) and all(_FIELD in FoundFile(path=file, name=file.name).head(_HEAD) for file in files)


def load_otlp(paths: Sequence[Path]) -> Timeline:
    """Return the spans of all files as one step.

    Raises:
        RecordError: no file contains a span with a plausible time.
    """
    spans, problems = _read(paths)
    if not spans:
        reasons = "; ".join(f"{one.file}: {one.what}" for one in problems[:3])
        raise RecordError(f"no span in {', '.join(map(str, paths))} ({reasons or 'no such files'})")
    first = paths[0].absolute()
    name = first.name if first.is_dir() else first.parent.name
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    empty = Timeline(
        step=0,
        run_id=name,
        runs=(name,),
        tracer="OpenTelemetry",
        window=Window(start_ns=start_ns, end_ns=end_ns, opened=False, closed=False),
        processes=(),
        spans=[],
        manifest=None,
        problems=tuple(problems),
    )
    groups = list(by_process(without_copies(spans), empty))
    known = {span.span_id for span in spans}
    groups.sort(key=lambda group: -max(_root_ns(span, known) for span in group[1]))
    contexts: dict[TraceContext, int] = {}
    merged = GrowingTimeline(empty, contexts, engines=any(map(is_request, spans)))
    for info, own in groups:
        merged.add(info, own)
        if len(merged.processes) == 1:
            owner = msgspec.structs.replace(
                merged.processes[0], owner=True, clock=ProcessClock(alignment="owner", uncertainty_ns=0)
            )
            merged.processes[0] = owner
            merged.place_beside((owner,))
    merged.link()
    _name_trajectories(merged.spans, contexts)
    return msgspec.structs.replace(empty, processes=merged.named(), spans=merged.spans)


def _read(paths: Sequence[Path]) -> tuple[list[OtlpSpan], list[FileProblem]]:
    """Return each span once, if it began in the hours in which most spans began, and the problems of the
    files.
    """
    seen: set[tuple[str, str]] = set()

    def is_new(span: OtlpSpan) -> bool:
        key = span.trace_id, span.span_id
        new = key not in seen
        seen.add(key)
        return new

    found, problems, hours = list[tuple[str, OtlpSpan]](), list[FileProblem](), Hours()
    for path in (file for given in paths for file in _below(given)):
        file = read_otlp(path, is_new)
        found += ((path.name, span) for span in file.spans)
        problems += (
            FileProblem(file=path.name, what=what, lines=lines) for what, lines in file.problems.items()
        )
    hours.add(span.start_ns / 1000 for _, span in found if is_wall(span.start_ns))
    first_us, last_us = hours.near()
    far: dict[str, int] = {}
    spans = []
    for name, span in found:
        if is_wall(span.start_ns) and first_us * 1000 <= span.start_ns and span.end_ns <= last_us * 1000:
            spans.append(span)
        else:
            far[name] = far.get(name, 0) + 1
    what = NOT_NEAR.replace("events", "spans")
    return spans, [*problems, *(FileProblem(file=name, what=what, lines=n) for name, n in far.items())]


def _below(path: Path) -> Iterator[Path]:
    candidates = [path] if path.is_file() else sorted(files_below(path))
    yield from (file for file in candidates if file.suffix in SUFFIXES and not file.name.startswith("."))


def _root_ns(span: OtlpSpan, known: set[str]) -> int:
    """Return the length in ns of a span that has no known parent, or 0 for any other span."""
    return 0 if span.parent_id in known else span.end_ns - span.start_ns


def _name_trajectories(spans: Sequence[Span], contexts: dict[TraceContext, int]) -> None:
    """Find the trajectories in the order that the top of this file states, and name them. Spans below a
    trajectory belong to it.
    """
    traces = {index: context.trace_id for context, index in contexts.items()}
    roots = (
        _outermost(spans, lambda span: span.role == "agent_loop")
        or _outermost(spans, lambda span: span.stage == _TRAJECTORY)
        or _calling_roots(spans)
    )
    for number, root in enumerate(roots):
        said = (spans[root].attrs or {}).get(_ID)
        name = f"{spans[root].stage} {traces.get(root, '')[:8] or number}" if said is None else f"{said}"
        spans[root].trajectory = (
            name if all(spans[one].trajectory != name for one in roots) else f"{name}-{number}"
        )
        spans[root].role, spans[root].stage = "agent_loop", _TRAJECTORY
    for span in spans:
        at, above = span.parent, span
        while above.trajectory is None and at is not None:
            above = spans[at]
            at = above.parent
        span.trajectory = above.trajectory


def _outermost(spans: Sequence[Span], is_one: Callable[[Span], bool]) -> list[int]:
    return [
        index
        for index, span in enumerate(spans)
        if is_one(span) and not any(is_one(spans[above]) for above in _above(spans, span))
    ]


def _calling_roots(spans: Sequence[Span]) -> list[int]:
    """Return the root spans with a call to a model below them; empty if there is only one."""
    roots = {
        above
        for span in spans
        if span.stage in _CALLS
        for above in _above(spans, span)
        if spans[above].parent is None
    }
    return sorted(roots) if len(roots) > 1 else []


def _above(spans: Sequence[Span], span: Span) -> Iterator[int]:
    at = span.parent
    while at is not None:
        yield at
        at = spans[at].parent
