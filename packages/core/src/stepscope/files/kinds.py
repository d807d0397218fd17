"""Kinds of steps: a step with a checkpoint, or with a generation for several updates, is no slow usual one.

Steps are of one kind if they have the same large stages. Where nothing says the stages, lengths that repeat
with a pattern tell kinds apart: every 10th step is longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

Stages: TypeAlias = Mapping[str, float]
"""{`role/stage`: seconds} of the spans at the top of the process that bounds steps."""
LARGE = 0.05
"""Share of its step from which on a stage is large."""
FACTOR = 1.5
"""Lengths whose ratio is larger differ."""
GAP = 1.25
"""Between the lengths of kinds lies a gap of this ratio."""
_MEMBERS = 3
"""Least number of steps that show a pattern."""
_FITTING = 0.8
"""Least share of a group's steps that follow its pattern."""


def alike(one: Stages, other: Stages) -> bool:
    """Return whether two steps are of one kind: each has the large stages of the other."""
    return _large(one) <= other.keys() and _large(other) <= one.keys()


def same_length(one_ns: float, other_ns: float, factor: float = FACTOR) -> bool:
    return max(one_ns, other_ns) <= factor * min(one_ns, other_ns)


def like(step: int, took: Mapping[int, int], stages: Mapping[int, Stages] = {}) -> set[int]:
    """Return those of the steps that are of one kind with `step`, which is not among them.

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
    """Return the groups of steps whose lengths lie apart from the usual ones, and that come every n-th step.

    Each has its n, and the remainder of its steps' numbers.
    """
    ordered = sorted(took, key=lambda step: took[step])
    breaks = [at for at, (a, b) in enumerate(pairwise(ordered), 1) if took[b] > GAP * took[a]]
    groups = [ordered[first:end] for first, end in pairwise([0, *breaks, len(ordered)])]
    usual = ordered[len(ordered) // 2] if ordered else None
    unusual = [(set(group), _rhythm(group, took)) for group in groups if usual not in group]
    return [(group, rhythm) for group, rhythm in unusual if rhythm is not None]


def _rhythm(group: Sequence[int], took: Collection[int]) -> tuple[int, int] | None:
    """Return the period and the remainder at which most steps are of the group, and most of the group are."""
    for period in sorted({b - a for a, b in pairwise(sorted(group))} - {1}):
        ((place, hits),) = Counter(step % period for step in group).most_common(1)
        placed = sum(step % period == place for step in took)
        if hits >= _MEMBERS and hits >= _FITTING * max(len(group), placed):
            return period, place
    return None
