"""Kinds of steps, so that a step with a checkpoint, or with a generation for several updates, is not taken
for a slow step of the usual kind.

Steps are of one kind if they have the same large stages. If the stages are unknown, kinds are told apart by
lengths that repeat in a pattern, such as a longer step every 10 steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

Stages: TypeAlias = Mapping[str, float]
"""{`role/stage`: seconds} of the spans at the top of the process that bounds steps."""
LARGE = 0.05
"""A stage is large if it takes at least this part of its step."""
FACTOR = 1.5
"""Two lengths differ if their ratio is larger than this."""
GAP = 1.25
"""Least ratio between the lengths of two neighbouring groups of steps."""
_MEMBERS = 3
"""Least number of steps that make a pattern."""
_FITTING = 0.8
"""Least share of a group's steps that follow its pattern."""


def alike(one: Stages, other: Stages) -> bool:
    """Return whether two steps are of one kind: each has the large stages of the other."""
    return _large(one) <= other.keys() and _large(other) <= one.keys()


def same_length(one_ns: float, other_ns: float, factor: float = FACTOR) -> bool:
    return max(one_ns, other_ns) <= factor * min(one_ns, other_ns)


def like(step: int, took: Mapping[int, int], stages: Mapping[int, Stages] = {}) -> set[int]:
    """Return the steps in `took` that are of the same kind as `step`, which itself is not in `took`.

    Args:
        took: {number of a step: its duration in ns}.
        stages: The stages of those steps, and of `step`, as far as they are known.
    """
    own = stages.get(step)
    if own is None:
        by_stages = set(took)
    else:
        by_stages = {number for number in took if alike(own, stages.get(number, own))}
    apart = rhythms({number: took[number] for number in by_stages})
    for group, (period, place) in apart:
        if step % period == place:
            return group
    return by_stages.difference(*(group for group, _ in apart))


def _large(stages: Stages) -> set[str]:
    least = LARGE * sum(stages.values())
    return {stage for stage, seconds in stages.items() if seconds > least}


def rhythms(took: Mapping[int, int]) -> list[tuple[set[int], tuple[int, int]]]:
    """Return the groups of steps with unusual lengths that occur every n-th step.

    Each group comes with (n, remainder of its steps' numbers).
    """
    ordered = sorted(took, key=lambda step: took[step])
    breaks = [at for at, (a, b) in enumerate(pairwise(ordered), 1) if took[b] > GAP * took[a]]
    groups = [ordered[first:end] for first, end in pairwise([0, *breaks, len(ordered)])]
    usual = ordered[len(ordered) // 2] if ordered else None
    unusual = [(set(group), _rhythm(group, took)) for group in groups if usual not in group]
    return [(group, rhythm) for group, rhythm in unusual if rhythm is not None]


def _rhythm(group: Sequence[int], took: Collection[int]) -> tuple[int, int] | None:
    """Return (period, remainder) at which most steps are in the group, and most of the group's steps are;
    None if there is none.
    """
    for period in sorted({b - a for a, b in pairwise(sorted(group))} - {1}):
        ((place, hits),) = Counter(step % period for step in group).most_common(1)
        placed = sum(step % period == place for step in took)
        if hits >= _MEMBERS and hits >= _FITTING * max(len(group), placed):
            return period, place
    return None
