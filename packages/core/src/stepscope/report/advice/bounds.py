"""Upper bounds of the time that a step could lose.

A bound is of the same work in the same order: its cause takes no time, everything else as long as it did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import msgspec

from stepscope.report.accounting import union_ns
from stepscope.report.stage_names import MOVES_WEIGHTS, is_tool
from stepscope.timeline import Span, Timeline

_Pair = tuple[int, int]
"""(start, end)."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a step could lose, by cause. 0: the cause is not there."""

    tools_ns: int = 0
    """Tools of trajectories."""
    queue_ns: int = 0
    """Waiting of requests for a place in an engine."""
    weights_ns: int = 0
    """Stages that move weights."""


def step_bounds(timeline: Timeline) -> Bounds:
    """Return the bounds of the step."""
    rollout = _Rollout(timeline)
    return Bounds(
        tools_ns=rollout.without(lambda span: is_tool(span.role, span.stage)),
        queue_ns=rollout.without(lambda span: span.waits and span.role == "rollout"),
        weights_ns=union_ns(_of_weights(timeline)),
    )


def _of_weights(timeline: Timeline) -> list[_Pair]:
    moving = (
        (span.start_ns, timeline.until_ns(span))
        for span in timeline.spans
        if timeline.processes[span.process].aligned and not span.waits and MOVES_WEIGHTS.search(span.stage)
    )
    return _clip(moving, timeline.window.start_ns, timeline.window.end_ns)


def _clip(pairs: Iterable[_Pair], from_ns: int, until_ns: int) -> list[_Pair]:
    clipped = ((max(start_ns, from_ns), min(end_ns, until_ns)) for start_ns, end_ns in pairs)
    return [(start_ns, end_ns) for start_ns, end_ns in clipped if start_ns < end_ns]


class _Rollout:
    """The trajectories that the step waits for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._members: dict[str, list[Span]] = defaultdict(list)
        self._roots: list[Span] = []
        for span in timeline.spans:
            if span.trajectory is not None:
                self._members[span.trajectory].append(span)
                if span.stage == "trajectory" and span.step == timeline.step and span.end_ns is not None:
                    self._roots.append(span)
        self._roots = [span for span in self._roots if timeline.processes[span.process].aligned]

    def without(self, counts: Callable[[Span], bool]) -> int:
        """Return how much earlier the last trajectory could end if some of the spans took no time.

        Of each trajectory its own such spans would go, from its begin on, or from the end of its last wait:
        up to there it waited for others, and these for theirs. So all such spans before could go.
        """
        pairs = [self._pair(span) for span in self._timeline.spans if counts(span) and self._placed(span)]
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
        stops_ns = [self._pair(span)[1] if self._placed(span) else end_ns for span in waits]
        alone_ns = min(max([root.start_ns, *stops_ns]), end_ns)
        pairs = [self._pair(span) for span in own if self._placed(span)]
        elsewhere_ns = sum(span.dur_ns or 0 for span in own if not self._placed(span))
        return before.union_ns(alone_ns) + union_ns(_clip(pairs, alone_ns, end_ns)) + elsewhere_ns

    def _placed(self, span: Span) -> bool:
        return self._timeline.processes[span.process].aligned

    def _pair(self, span: Span) -> _Pair:
        return span.start_ns, self._timeline.until_ns(span)


class _Before:
    """The time that spans cover up to any moment."""

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        merged: list[_Pair] = []
        for start_ns, end_ns in sorted(pairs):
            if merged and start_ns <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end_ns)
            else:
                merged.append((start_ns, end_ns))
        self._merged = merged
        self._starts_ns = [start_ns for start_ns, _ in merged]
        self._sums_ns = [0, *accumulate(end_ns - start_ns for start_ns, end_ns in merged)]

    def union_ns(self, until_ns: int) -> int:
        """Return the time before `until_ns` that is covered."""
        place = bisect_left(self._starts_ns, until_ns)
        beyond_ns = max(0, self._merged[place - 1][1] - until_ns) if place else 0
        return self._sums_ns[place] - beyond_ns
