"""Times of each stage, call by call, and their balance over the processes that ran it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stepscope.files.spans import PROFILING
from stepscope_report.accounting import Pair, outside, rank_of, union_ns
from stepscope_report.formatting import middle
from stepscope_report.spans import ReplicaKey, ToolNames, above, replica_of, title
from stepscope_report.table import Table, grouped
from stepscope_report.timeline import Span, Timeline


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One process' part in a stage."""

    process: str
    rank: int | None
    calls: int
    busy_ns: int
    """The time in which at least one call ran. Calls that run at once in one process count once."""
    total_ns: int
    """The sum over its calls: more than `busy_ns` if some ran at once."""
    stalled_ns: int = 0
    """Of `busy_ns`, while its engine served nothing because its own profiler started or wrote."""
    profiled: bool = False
    """A profiler recorded it and slowed it."""

    @property
    def worked_ns(self) -> int:
        return self.busy_ns - self.stalled_ns


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one stage in one role. Times of calls are None when none has ended.

    A call inside another of the same stage, in its thread and of its trajectory, is a part of that call.
    """

    role: str
    stage: str
    calls: int
    """Spans that ended."""
    open: int
    """Spans never seen to end: in no time here but that of `processes`, up to the last sign of life."""
    errors: int
    cancelled: int = 0
    """Calls that were cancelled, which is no error. They are among those that ended."""
    total_ns: int
    mean_ns: int | None
    p50_ns: int | None
    max_ns: int | None
    processes: tuple[Share, ...]
    imbalance: float | None
    """The busiest process over the median one. None for one process, and where the median is 0."""
    slowest: str | None
    """The busiest process. None for one process."""
    waits: bool = False
    """Its calls wait and do no work."""
    name: str | None = None
    """Of a tool: the attribute `name` of its spans."""

    @property
    def title(self) -> str:
        """`tool search`, or the stage alone."""
        return title(self.stage, self.name)

    @property
    def uneven(self) -> bool:
        """Return whether a profiler recorded some of the processes and not the others."""
        return len({share.profiled for share in self.processes}) > 1


def stage_times(timeline: Timeline) -> Table[Stage]:
    """Return the stages of every role, the longest total first. Tools with a name are apart."""
    names = ToolNames(timeline)
    counted = (
        span for span in timeline.spans if span.stage != PROFILING and not _is_part(timeline, span, names)
    )
    spans = grouped(counted, names.label_of)
    stages = [_stage(timeline, (label[0], *names.parts(label)), own) for label, own in spans.items()]
    return Table(sorted(stages, key=lambda stage: (-stage.total_ns, stage.role, stage.title)))


def _is_part(timeline: Timeline, span: Span, names: ToolNames) -> bool:
    """Return whether a span lies in another call of its stage, as functions that call each other do."""
    place = _place(span)
    return any(
        _place(outer) == place and names.label_of(outer) == names.label_of(span)
        for outer in above(timeline, span)
    )


def _place(span: Span) -> tuple[object, ...]:
    return span.process, span.thread, span.role, span.stage, span.trajectory, span.turn


def _stage(timeline: Timeline, label: tuple[str, str, str | None], spans: Sequence[Span]) -> Stage:
    times = sorted(span.dur_ns for span in spans if span.dur_ns is not None)
    shares = _shares(timeline, spans)
    busiest = max(shares, key=lambda share: share.busy_ns)
    median = middle(share.busy_ns for share in shares)
    several = len(shares) > 1
    return Stage(
        role=label[0],
        stage=label[1],
        name=label[2],
        calls=len(times),
        open=len(spans) - len(times),
        errors=sum(span.error is not None for span in spans),
        cancelled=sum(span.cancelled for span in spans),
        total_ns=sum(times),
        mean_ns=sum(times) // len(times) if times else None,
        p50_ns=times[rank_of(50, len(times))] if times else None,
        max_ns=times[-1] if times else None,
        processes=shares,
        imbalance=round(busiest.busy_ns / median, 3) if several and median else None,
        slowest=busiest.process if several else None,
        waits=all(span.waits for span in spans),
    )


def _shares(timeline: Timeline, spans: Iterable[Span]) -> tuple[Share, ...]:
    """Return the shares by process, in the timeline's order."""
    by_process = sorted(grouped(spans, lambda span: span.process).items())
    return tuple(_share(timeline, index, own) for index, own in by_process)


def _share(timeline: Timeline, index: int, spans: Sequence[Span]) -> Share:
    process = timeline.processes[index]
    busy_ns = union_ns(_running(timeline, spans))
    return Share(
        process=process.name,
        rank=process.info.rank,
        calls=sum(span.dur_ns is not None for span in spans),
        busy_ns=busy_ns,
        total_ns=sum(end_ns - start_ns for start_ns, end_ns in _running(timeline, spans)),
        stalled_ns=busy_ns - _served_ns(timeline, spans) if timeline.stalls else 0,
        profiled=process.profiled,
    )


def _served_ns(timeline: Timeline, spans: Sequence[Span]) -> int:
    """Return the time in which at least one call ran whose engine did not stall."""
    served: list[Pair] = []
    for replica, own in grouped(spans, lambda span: replica_of(timeline, span)).items():
        stalls = [
            (stall.start_ns, stall.end_ns)
            for stall in timeline.stalls
            if ReplicaKey(stall.replica) == replica and spans[0].role == "rollout"
        ]
        served += outside(_running(timeline, own), stalls)
    return union_ns(served)


def _running(timeline: Timeline, spans: Iterable[Span]) -> list[Pair]:
    return [(span.start_ns, timeline.until_ns(span)) for span in spans]
