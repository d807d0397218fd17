"""Upper bounds of the time that a step could lose.

A bound is of the same work in the same order: its cause takes no time, everything else as long as it did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from stepscope_report.accounting import Pair, clipped, joined, union_ns
from stepscope_report.spans import is_tool, placed
from stepscope_report.table import grouped
from stepscope_report.timeline import Span, Timeline


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a step could lose, by cause. 0: the cause is not there."""

    tools_ns: int = 0
    """Tools of trajectories."""
    queue_ns: int = 0
    """Waiting of requests for a place in an engine."""


def step_bounds(timeline: Timeline) -> Bounds:
    rollout = _Rollout(timeline)
    return Bounds(
        tools_ns=rollout.without(lambda span: is_tool(span.role, span.stage)),
        queue_ns=rollout.without(lambda span: span.waits and span.role == "rollout"),
    )


class _Rollout:
    """The trajectories that the step waits for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        inside = [span for span in timeline.spans if span.trajectory is not None]
        self._members = grouped(inside, lambda span: span.trajectory or "")
        roots = (span for span in inside if span.stage == "trajectory" and span.step == timeline.step)
        self._roots = [span for span in roots if span.end_ns is not None and self._aligned(span)]

    def without(self, counts: Callable[[Span], bool]) -> int:
        """Return how much earlier the last trajectory could end if some of the spans took no time.

        Of each trajectory its own such spans would go, from its begin on, or from the end of its last wait:
        up to there it waited for others, and these for theirs. So all such spans before could go.
        """
        pairs = placed(self._timeline, filter(counts, self._timeline.spans))
        if not (pairs and self._roots):
            return 0
        before = _Before(pairs)
        ends_ns = [root.end_ns or 0 for root in self._roots]
        earlier_ns = (
            end_ns - self._lost_ns(root, end_ns, counts, before)
            for root, end_ns in zip(self._roots, ends_ns, strict=True)
        )
        return max(ends_ns) - max(earlier_ns)

    def _lost_ns(self, root: Span, end_ns: int, counts: Callable[[Span], bool], before: _Before) -> int:
        """Return the time by which one trajectory could end earlier, at most."""
        members = self._members[root.trajectory or ""]
        own = [span for span in members if counts(span)]
        waits = [span for span in members if span.waits and not counts(span)]
        stops_ns = [self._timeline.until_ns(span) if self._aligned(span) else end_ns for span in waits]
        alone_ns = min(max([root.start_ns, *stops_ns]), end_ns)
        elsewhere_ns = sum(span.dur_ns or 0 for span in own if not self._aligned(span))
        own_ns = union_ns(clipped(placed(self._timeline, own), alone_ns, end_ns))
        return before.union_ns(alone_ns) + own_ns + elsewhere_ns

    def _aligned(self, span: Span) -> bool:
        return self._timeline.processes[span.process].aligned


class _Before:
    """The time that spans cover up to any moment."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._joined = joined(pairs)
        self._starts_ns = [start_ns for start_ns, _ in self._joined]
        self._sums_ns = [0, *accumulate(end_ns - start_ns for start_ns, end_ns in self._joined)]

    def union_ns(self, until_ns: int) -> int:
        """Return the time before `until_ns` that is covered."""
        place = bisect_left(self._starts_ns, until_ns)
        beyond_ns = max(0, self._joined[place - 1][1] - until_ns) if place else 0
        return self._sums_ns[place] - beyond_ns
