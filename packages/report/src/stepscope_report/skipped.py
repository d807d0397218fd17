"""Ranks that skipped a collective: from there on, their collectives have lower numbers than the others'."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.files.spans import GROUP, SEQUENCE
from stepscope_report.accounting import Label
from stepscope_report.formatting import middle
from stepscope_report.spans import whole
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.step_graph import StepGraph

Place: TypeAlias = tuple[Label, Label | None]
"""A collective, and the call in or after which it was made."""


class Skip(NamedTuple):
    """A collective that a rank did not call."""

    process: int
    node: int
    """The collective that the rank called instead."""
    others: tuple[int, ...]
    """The skipped collective, in the other ranks."""
    late_ns: int
    """Time for which the others waited in it."""


def unseen_collectives(timeline: Timeline) -> int:
    """Return the most collectives of one process that C++ issued between those that Python called, by the
    numbers that a group lacks.
    """
    numbers: dict[tuple[int, object], set[int]] = defaultdict(set)
    for span in timeline.spans:
        number = whole(span, SEQUENCE)
        if number is not None:
            numbers[span.process, (span.attrs or {}).get(GROUP)].add(number)
    unseen = Counter[int]()
    for (process, _), own in numbers.items():
        unseen[process] += max(own) - min(own) + 1 - len(own)
    return max(unseen.values(), default=0)


def skipped_collectives(graph: StepGraph) -> Iterator[Skip]:
    """Yield the first skipped collective of each group, as far as the collectives on record tell.

    A rank skipped one if it agrees with the others up to some number of the group's collectives, and from
    there on calls what the others call later. Ranks that merely do other work between collectives do not.
    """
    groups: dict[object, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for node, span in enumerate(graph.spans):
        number = whole(span, SEQUENCE)
        if number is not None and graph.timeline.processes[span.process].aligned:
            groups[span.role, (span.attrs or {}).get(GROUP)][span.process][number] = node
    places = _places(graph) if groups else {}
    for ranks in groups.values():
        if len(ranks) > 1:
            skip = _skip(graph, ranks, places)
            if skip is not None:
                yield skip


def _skip(
    graph: StepGraph, ranks: Mapping[int, Mapping[int, int]], places: Mapping[int, Place]
) -> Skip | None:
    for process, own in ranks.items():
        others = [calls for other, calls in ranks.items() if other != process]
        expected = {
            number: Counter(places[calls[number]] for calls in others if number in calls).most_common(1)[0][0]
            for number in sorted({number for calls in others for number in calls})
        }
        first = next((n for n in sorted(own) if n in expected and places[own[n]] != expected[n]), None)
        if first is None or not _is_behind(
            [places[own[n]] for n in sorted(own) if n >= first], first, expected
        ):
            continue
        met = tuple(calls[first] for calls in others if first in calls)
        waited_ns = graph.start_ns[own[first]] - middle(graph.start_ns[node] for node in met)
        if waited_ns > 0:
            return Skip(process, own[first], met, waited_ns)
    return None


def _is_behind(own: Sequence[Place], first: int, expected: Mapping[int, Place]) -> bool:
    """Return whether these calls, which met those of the others from `first` on, are later ones of theirs."""
    for shift in range(1, len(expected)):
        pairs = [(place, expected.get(first + shift + at)) for at, place in enumerate(own)]
        known = [(place, other) for place, other in pairs if other is not None]
        if known and all(place == other for place, other in known):
            return True
    return False


def _places(graph: StepGraph) -> dict[int, Place]:
    """Return {collective: its place in the program}."""
    places: dict[int, Place] = {}
    before: dict[tuple[int, int], Label] = {}
    for node in sorted(range(len(graph.spans)), key=lambda node: graph.spans[node].start_ns):
        span = graph.spans[node]
        label, thread = (span.role, span.stage), (span.process, span.thread)
        if whole(span, SEQUENCE) is None:
            before[thread] = label
        else:
            places[node] = (label, before.get(thread))
    return places
