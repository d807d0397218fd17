"""Marks of spans: blocks of time, united if a screen could not show them apart."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from stepscope_report.accounting import Label, Mask, bits_of, walk
from stepscope_report.division import work_of
from stepscope_report.table import grouped
from stepscope_report.timeline import Span, Timeline

_Row = TypeVar("_Row")
_Drawn = TypeVar("_Drawn")


class Mark(msgspec.Struct, frozen=True, gc=False):
    """One block. Times are ns after the capture opened."""

    label: Label
    """The stage with most of the time, if there are several."""
    start_ns: int
    end_ns: int
    spans: int = 1
    """Number of calls that the mark stands for (in `runs`, of stretches)."""
    at_once: int = 1
    """Largest number of these calls that ran at once."""
    open: bool = False
    """True if one of the calls never ended. The mark then extends to the process' last sign of life."""
    failed: int = 0
    """Number of the calls that ended with an exception."""
    gaps_ns: int = 0
    """Time inside the mark in which none of its calls ran."""


def blocks(timeline: Timeline, spans: Iterable[Span]) -> list[Mark]:
    """Return the calls of one stage in one process as blocks: calls that overlap or touch share a block."""
    zero_ns = timeline.window.start_ns
    marks: list[Mark] = []
    running: list[int] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        mark = Mark(
            (span.role, span.stage),
            span.start_ns - zero_ns,
            timeline.until_ns(span) - zero_ns,
            open=span.end_ns is None,
            failed=int(span.error is not None),
        )
        while running and running[0] <= mark.start_ns:
            heapq.heappop(running)
        heapq.heappush(running, mark.end_ns)
        if marks and mark.start_ns <= marks[-1].end_ns:
            marks[-1] = _unite((marks[-1], mark), at_once=len(running))
        else:
            marks.append(mark)
    return marks


def join_near(marks: Iterable[Mark], gap_ns: int) -> list[Mark]:
    """Unite neighbours of one stage that are less than `gap_ns` apart, if at least one of the two is shorter
    than that.
    """
    joined: list[Mark] = []
    for mark in marks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and mark.start_ns - last.end_ns < gap_ns
            and min(_wall_ns(mark), _wall_ns(last)) < gap_ns
        ):
            joined[-1] = _unite((last, mark))
        else:
            joined.append(mark)
    return joined


def runs(timeline: Timeline, indices: Sequence[int], start_ns: int, end_ns: int) -> list[Mark]:
    """Return the stage that ran at each instant from `start_ns` to `end_ns` (unix ns), as marks.

    Of the running leaves, work comes before waiting, then the first stage by name. If nothing ran, there is a
    gap.
    """
    zero_ns = timeline.window.start_ns
    work = work_of(timeline, indices)
    chosen: dict[Mask, Label] = {}
    marks: list[Mark] = []
    for from_ns, until_ns, mask in walk(work.intervals, start_ns, end_ns):
        if not mask:
            continue
        if mask not in chosen:
            chosen[mask] = min((work.tiers[bit], work.labels[bit]) for bit in bits_of(mask))[1]
        label = chosen[mask]
        if marks and marks[-1].label == label and marks[-1].end_ns == from_ns - zero_ns:
            marks[-1] = Mark(label, marks[-1].start_ns, until_ns - zero_ns)
        else:
            marks.append(Mark(label, from_ns - zero_ns, until_ns - zero_ns))
    return marks


def blend_short(marks: Iterable[Mark], shortest_ns: int) -> list[Mark]:
    """Unite neighbours shorter than `shortest_ns` to one mark, of the stage with most of their time.

    At most two marks remain in any stretch of `shortest_ns`.
    """
    blended: list[Mark] = []
    short: list[Mark] = []
    for mark in marks:
        long = _wall_ns(mark) >= shortest_ns
        if short and (
            long
            or mark.start_ns - short[0].start_ns >= shortest_ns
            or mark.start_ns - short[-1].end_ns >= shortest_ns
        ):
            blended.append(_unite(short))
            short = []
        if long:
            blended.append(mark)
        else:
            short.append(mark)
    return [*blended, _unite(short)] if short else blended


def _unite(marks: Sequence[Mark], at_once: int = 1) -> Mark:
    if len(marks) == 1:
        return marks[0]
    time_ns: Counter[Label] = Counter()
    for mark in marks:
        time_ns[mark.label] += _wall_ns(mark)
    start_ns, end_ns = min(mark.start_ns for mark in marks), max(mark.end_ns for mark in marks)
    return Mark(
        time_ns.most_common(1)[0][0],
        start_ns,
        end_ns,
        sum(mark.spans for mark in marks),
        max(at_once, *(mark.at_once for mark in marks)),
        any(mark.open for mark in marks),
        sum(mark.failed for mark in marks),
        # Either they overlap or touch, and there is no gap; or they are apart, and their times add up.
        max(0, end_ns - start_ns - sum(_wall_ns(mark) - mark.gaps_ns for mark in marks)),
    )


def fit(
    drawn: _Drawn,
    window_ns: int,
    budget: int,
    thin: Callable[[_Drawn, int], _Drawn],
    count: Callable[[_Drawn], int],
) -> tuple[_Drawn, int]:
    """Return a chart with as many marks as fit, and the ns below which neighbours are drawn as one.

    A mark may be as short as half a pixel of a laptop's screen, up to a tenth of it.
    """
    shortest_ns = 0
    for parts in (2048 >> halvings for halvings in range(9)):
        shortest_ns = window_ns // parts
        drawn = thin(drawn, shortest_ns)
        if count(drawn) <= budget:
            break
    return drawn, shortest_ns


def _wall_ns(mark: Mark) -> int:
    return mark.end_ns - mark.start_ns


def pick(count: int, limit: int, wanted: Iterable[int] = ()) -> list[int]:
    """Pick every k-th of `count` rows, so that at most `limit` are drawn, plus the wanted ones."""
    every = max(1, -(-count // limit))
    return sorted({*range(0, count, every), *(index for index in wanted if index < count)})


def pick_of_each(
    rows: Sequence[_Row], group: Callable[[_Row], str], size: Callable[[_Row], float], limit: int
) -> Iterator[int]:
    """Yield the indices of the rows to draw: up to `limit` in each group, and always the group's largest
    row.
    """
    for places in grouped(range(len(rows)), lambda at: group(rows[at])).values():
        largest = max(range(len(places)), key=lambda at: size(rows[places[at]]))
        yield from (places[at] for at in pick(len(places), limit, [largest]))
