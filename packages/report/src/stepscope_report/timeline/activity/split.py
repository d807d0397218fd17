"""Split of traces of the whole step by the stage in which their operators and kernels began.

The stage at a moment is the phase of an engine's iteration, or else the stage of the process' latest open
span that does not only wait. A kernel belongs to the stage in which it began on the device, which may be
later than the stage of its launch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope_report.accounting import Label
from stepscope_report.timeline.activity.content import Iteration, TraceContent
from stepscope_report.timeline.activity.content_reader import Reading
from stepscope_report.timeline.activity.trace_events import Complete, Event
from stepscope_report.timeline.activity.traces import TraceActivity
from stepscope_report.timeline.model import Timeline
from stepscope_report.timeline.readers.chrome import SUFFIXES, ChromeTrace


class _Stretch(NamedTuple):
    """A time in which one stage ran, in us of the trace."""

    start_us: float
    end_us: float
    label: Label


class _Stage(NamedTuple):
    """One span or iteration, which other spans and iterations may overlap."""

    start_us: float
    end_us: float
    label: Label
    by_iteration: bool


def by_stage(folder: Path, timeline: Timeline, activities: Iterable[TraceActivity]) -> list[TraceActivity]:
    """Split the activities of the whole step by stage, and return them with the other activities.

    To split an activity, its trace is read again. Events that began in no stage get `stage=None`. Traces that
    are unaligned, or not of torch, are not split.

    Args:
        folder: The step's folder.
    """
    spans: dict[int, list[tuple[int, int, Label]]] = defaultdict(list)
    for span in timeline.spans:
        if not span.waits:
            spans[span.process].append((span.start_ns, timeline.until_ns(span), (span.role, span.stage)))
    split = []
    for activity in activities:
        own = [] if activity.process is None else spans[activity.process]
        stretches = list(_stretches(activity, own)) if _can_be_split(activity) else []
        parts = _read(folder / activity.file, stretches) if stretches else {}
        if sum(map(_calls, parts.values())) != _calls(activity.content):  # another reader has read the file
            parts = {}
        for label, content in parts.items():
            role, stage = (activity.info.role, None) if label is None else label
            info = msgspec.structs.replace(activity.info, role=role)
            split.append(msgspec.structs.replace(activity, info=info, stage=stage, content=content))
        if not parts:
            split.append(activity)
    return split


def _can_be_split(activity: TraceActivity) -> bool:
    json = activity.file.endswith(SUFFIXES)
    return json and activity.stage is None and activity.unaligned is None


def _calls(content: TraceContent) -> int:
    operators, kernels = content.operators, content.kernels
    return sum(row.count for row in operators) + sum(row.count for row in kernels)


def _stretches(activity: TraceActivity, spans: Iterable[tuple[int, int, Label]]) -> Iterator[_Stretch]:
    shift_ns, role = activity.shift_ns, activity.info.role
    stages = [
        _Stage((start - shift_ns) / 1000, (end - shift_ns) / 1000, (role, stage), by_iteration=False)
        for start, end, (role, stage) in spans
    ]
    stages += [
        _Stage(ran.start_us, ran.start_us + ran.dur_us, (role, _phase(ran)), by_iteration=True)
        for ran in activity.content.iterations
    ]
    return _innermost(sorted(stages))


def _phase(iteration: Iteration) -> str:
    if iteration.mixed or (iteration.prefills and iteration.decodes):
        return "mixed"
    return "prefill" if iteration.prefills else "decode"


def _innermost(stages: Sequence[_Stage]) -> Iterator[_Stretch]:
    """Yield disjoint stretches in order. An instant belongs to the open iteration, else to the open stage
    that began last.

    Iterations take precedence, because a request's span may begin in the middle of an iteration.

    Args:
        stages: Stages in order of their starts.
    """
    still: list[tuple[bool, float, float, Label]] = []
    begun = 0
    bounds = sorted({bound for stage in stages for bound in stage[:2]})
    for start_us, end_us in pairwise(bounds):
        while begun < len(stages) and stages[begun].start_us <= start_us:
            stage = stages[begun]
            heappush(still, (not stage.by_iteration, -stage.start_us, stage.end_us, stage.label))
            begun += 1
        while still and still[0][2] <= start_us:
            heappop(still)
        if still:
            yield _Stretch(start_us, end_us, still[0][3])


def _read(path: Path, stretches: Sequence[_Stretch]) -> dict[Label | None, TraceContent]:
    trace, starts = ChromeTrace(path), [stretch.start_us for stretch in stretches]
    parts = defaultdict[Label | None, Reading](lambda: Reading(trace.notes))

    def take(events: Sequence[Event]) -> None:
        own = defaultdict[Label | None, list[Event]](list)
        for event in events:
            if isinstance(event, Complete):
                at = bisect_right(starts, event.ts) - 1
                inside = at >= 0 and event.ts < stretches[at].end_us
                own[stretches[at].label if inside else None].append(event)
        for label, some in own.items():
            parts[label].take(some)

    fields = trace.read(Reading(trace.notes).parse, take)
    return {label: part.finish(fields) for label, part in parts.items()}
