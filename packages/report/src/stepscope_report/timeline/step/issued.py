"""Ends of collectives of which only the begins are known: those that C++ issued, such as the buckets of DDP.

No rank leaves a collective before the last one has begun it. If a rank's thread began and ended nothing from
its own begin to the last rank's, it waited: DDP issues its last bucket when it has all gradients, and waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from stepscope.files.spans import BEGIN_ONLY, GROUP, SEQUENCE
from stepscope_report.timeline.model import Process, Span

_LEAST_NS = 1_000_000
"""Shortest wait that is told. Clocks of processes differ, and a begin is noted a moment before the call."""
_Thread: TypeAlias = tuple[int, int]
"""(process, thread)."""


def end_issued(spans: Sequence[Span], processes: Sequence[Process]) -> None:
    """Set ends, parents and roles of collectives without an end, in place, if ranks waited for the last one.
    The other collectives keep zero length.
    """
    calls: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, span in enumerate(spans):
        if span.attrs is not None and BEGIN_ONLY in span.attrs and processes[span.process].aligned:
            calls[span.role, span.stage, span.attrs.get(GROUP), span.attrs.get(SEQUENCE)].append(at)
    threads = _Threads(spans) if calls else None
    for members in calls.values():
        last_ns = max(spans[at].start_ns for at in members)
        ranks = {processes[spans[at].process].info.rank for at in members}
        if threads is None or len(ranks) < len(members):
            continue  # of several jobs, whose groups have the same names
        waiting = [at for at in members if threads.waits(at, last_ns)]
        for at in (*waiting, *(at for at in members if waiting and spans[at].start_ns == last_ns)):
            _end(spans, at, last_ns + 1, threads.around(at, last_ns))


def _end(spans: Sequence[Span], at: int, end_ns: int, parent: int | None) -> None:
    span = spans[at]
    span.end_ns, span.dur_ns, span.waits, span.parent = end_ns, end_ns - span.start_ns, True, parent
    if parent is not None:
        span.role = spans[parent].role


class _Threads:
    """The spans of each thread, and the moments at which something began or ended in it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._of: Mapping[_Thread, list[int]] = defaultdict(list)
        moments: dict[_Thread, set[int]] = defaultdict(set)
        for at, span in enumerate(spans):
            thread = span.process, span.thread
            self._of[thread].append(at)
            moments[thread] |= {span.start_ns} if span.end_ns is None else {span.start_ns, span.end_ns}
        self._moments = {thread: sorted(times) for thread, times in moments.items()}

    def waits(self, at: int, until_ns: int) -> bool:
        """Return whether a span's thread was in a call, and began and ended nothing, from the span's begin to
        `until_ns`.
        """
        span = self._spans[at]
        moments = self._moments[span.process, span.thread]
        is_still = bisect_right(moments, span.start_ns) == bisect_left(moments, until_ns)
        return until_ns - span.start_ns >= _LEAST_NS and is_still and self.around(at, until_ns) is not None

    def around(self, at: int, until_ns: int) -> int | None:
        """Return the innermost call of the span's thread that runs from the span's begin to `until_ns`."""
        span = self._spans[at]
        around = (
            other
            for other in self._of[span.process, span.thread]
            if _runs(self._spans[other], span.start_ns, until_ns)
        )
        return max(around, key=lambda other: self._spans[other].start_ns, default=None)


def _runs(span: Span, start_ns: int, until_ns: int) -> bool:
    is_issued = span.attrs is not None and BEGIN_ONLY in span.attrs
    return not is_issued and span.start_ns <= start_ns and (span.end_ns is None or span.end_ns >= until_ns)
