"""Ranks that enter collectives late (stragglers) or skip a collective, so that other ranks wait.

A rank leaves a collective only after all ranks have entered it. After a rank has skipped a collective, its
collectives have lower numbers than the same collectives in other ranks.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.files.spans import GROUP, SEQUENCE
from stepscope_report.accounting import Label
from stepscope_report.formatting import middle
from stepscope_report.spans import whole
from stepscope_report.table import Table
from stepscope_report.timeline import Timeline, TraceActivity
from stepscope_report.timeline.step_graph import StepGraph

_ALL_WAIT = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|barrier", re.IGNORECASE)
"""Names of collectives that no rank leaves before all have entered, for traces without process groups."""
_Call: TypeAlias = tuple[int, tuple[float, float]]
"""(number of the call, (start, end) in us of the trace)."""
_Key: TypeAlias = tuple[int, str, int | None, str | None, int, str, str]
"""(run, role, replica, stage, number of earlier traces of the process for this stage, collective, group)."""
_NUMBER = attrgetter("number")


class Member(NamedTuple):
    """A process in a call of a collective."""

    number: int
    start_ns: int
    end_ns: int
    activity: TraceActivity


class StragglerRow(msgspec.Struct, kw_only=True):
    """One process in the calls of one collective. Calls count only if another process recorded them, too."""

    role: str
    collective: str
    process: str
    rank: int | None
    calls: int = 0
    last: int = 0
    """Number of calls in which this process was the last to enter."""
    others_waited_ns: int = 0
    """Sum over the other processes of the time that they waited in these calls for this process to enter.
    Calls that overlap in a process count once."""
    waited_ns: int = 0
    """Time that this process waited in calls for the last process to enter. Calls that overlap count once."""


def stragglers(activities: Iterable[TraceActivity]) -> Table[StragglerRow]:
    """Return a row for each process and collective. The row for which others waited longest comes first."""
    rows: dict[tuple[str, str, str], StragglerRow] = {}
    for role, collective, calls in matched_calls(activities):
        waited = Waited()
        for members in calls:
            _count(rows, role, collective, members, waited)
    return Table(
        sorted(rows.values(), key=lambda row: (-row.others_waited_ns, row.role, row.collective, row.process))
    )


class Waited:
    """Sums of the time that processes wait in calls that may overlap. Calls of a process are added
    in order.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[str, str | None], int] = {}
        """{(process, process that it waits for; None for any process): end in ns of the waits so far}."""

    def add(self, process: str, last: str | None, start_ns: int, end_ns: int) -> int:
        """Add a wait, and return how many ns of the wait lie after the end of earlier waits of `process` for
        `last`.
        """
        until_ns = self._until.get((process, last), start_ns)
        self._until[process, last] = max(until_ns, end_ns)
        return max(0, end_ns - max(start_ns, until_ns))


def _count(
    rows: dict[tuple[str, str, str], StragglerRow],
    role: str,
    collective: str,
    members: Sequence[Member],
    waited: Waited,
) -> None:
    """Add the waiting times of one call to the rows of the processes in it."""
    last_ns, latest = max((member.start_ns, member.activity.name) for member in members)
    waited_ns = 0
    for _, start_ns, end_ns, activity in members:
        key = role, collective, activity.name
        row = rows.get(key)
        if row is None:
            row = rows[key] = StragglerRow(
                role=role, collective=collective, process=activity.name, rank=activity.info.rank
            )
        until_ns = min(last_ns, end_ns)
        row.calls += 1
        row.waited_ns += waited.add(activity.name, None, start_ns, until_ns)
        waited_ns += waited.add(activity.name, latest, start_ns, until_ns)
    if waited_ns:
        rows[role, collective, latest].last += 1
        rows[role, collective, latest].others_waited_ns += waited_ns


def matched_calls(
    activities: Iterable[TraceActivity],
) -> Iterator[tuple[str, str, Iterator[list[Member]]]]:
    """Yield (role, collective, calls) for each process group of several processes. A call is a list of two or
    more `Member`s, one for each process in the call.

    Calls are matched by run, process group and torch's number. Calls in traces without groups are matched by
    name and order, if several processes made the same number of calls. Traces that are unaligned are left
    out.
    """
    groups: dict[_Key, dict[str, tuple[TraceActivity, Iterable[_Call]]]] = defaultdict(dict)
    before = Counter[tuple[int, str, str | None]]()
    for run, activity in _by_run(activity for activity in activities if activity.unaligned is None):
        info = activity.info
        place = before[run, activity.name, activity.stage]
        before[run, activity.name, activity.stage] += 1
        for collective, group, calls in _calls(activity):
            key = run, info.role, info.replica, activity.stage, place, collective, group
            groups[key][activity.name] = activity, calls
    for (_, role, *_, collective, _), recorded in groups.items():
        for members in _instances(list(recorded.values())):
            entered = groupby(merge(*members, key=_NUMBER), key=_NUMBER)
            calls_of = (list(call) for _, call in entered)
            yield role, collective, (call for call in calls_of if len(call) > 1)


def _by_run(activities: Iterable[TraceActivity]) -> Iterator[tuple[int, TraceActivity]]:
    """Yield (number of the trace's run, trace) in the order of `activities`. Traces of one run overlap in
    time, each with the next trace.
    """
    known = list(activities)
    extents = [
        (
            activity.unix_ns(activity.content.first_us or 0.0),
            activity.unix_ns(activity.content.last_us or 0.0),
        )
        for activity in known
    ]
    numbers = [0] * len(known)
    run, until_ns = -1, None
    for at in sorted(range(len(known)), key=extents.__getitem__):
        first_ns, last_ns = extents[at]
        if until_ns is None or first_ns > until_ns:
            run, until_ns = run + 1, last_ns
        until_ns = max(until_ns, last_ns)
        numbers[at] = run
    return zip(numbers, known, strict=True)


def _instances(recorded: Sequence[tuple[TraceActivity, Iterable[_Call]]]) -> Iterator[list[Iterable[Member]]]:
    """Yield a list for each process group: the `Member`s of each of its processes.

    If a rank occurs twice, several jobs have groups with the same name at the same time. The times of the
    calls then show which processes belong together.
    """
    ranks = [activity.info.rank for activity, _ in recorded]
    if len(set(ranks)) == len(ranks) or set(ranks) == {None}:
        if len(recorded) > 1:
            yield [_members(*one) for one in recorded]
        return
    instances: list[list[tuple[TraceActivity, list[_Call]]]] = []
    for activity, calls in recorded:
        one = activity, list(calls)
        fits = (
            instance
            for instance in instances
            if all(activity.info.rank != other.info.rank for other, _ in instance) and _met(instance[0], one)
        )
        instance = next(fits, None)
        if instance is None:
            instances.append(instance := [])
        instance.append(one)
    for instance in instances:
        if len(instance) > 1:
            yield [_members(*one) for one in instance]


def _met(one: tuple[TraceActivity, list[_Call]], other: tuple[TraceActivity, list[_Call]]) -> bool:
    """Return whether two processes were in most of their common calls at the same time."""
    theirs = {member.number: member for member in _members(*other)}
    common = [(member, theirs[member.number]) for member in _members(*one) if member.number in theirs]
    met = sum(max(a.start_ns, b.start_ns) <= min(a.end_ns, b.end_ns) for a, b in common)
    return 0 < len(common) < 2 * met


def _calls(activity: TraceActivity) -> Iterator[tuple[str, str, Iterable[_Call]]]:
    """Yield (collective, group, calls). If the trace names no groups, the number of calls is used as the
    group.
    """
    content = activity.content
    for grouped in content.grouped:
        group = grouped.group.partition(" ")[0]
        yield f"{grouped.op}, group {group}" if group else grouped.op, grouped.group, grouped.calls()
    for collective in () if content.grouped else content.collectives:
        if _ALL_WAIT.search(collective.name):
            name = re.split(r"__|\(", collective.name)[0]
            group = f"{collective.name} {len(collective.times)}"
            yield name, group, enumerate(collective.calls())


def _members(activity: TraceActivity, calls: Iterable[_Call]) -> Iterator[Member]:
    for number, (start_us, end_us) in calls:
        yield Member(number, activity.unix_ns(start_us), activity.unix_ns(end_us), activity)


Place: TypeAlias = tuple[Label, Label | None]
"""(Label of a collective, label of the last other call that its thread began before it, or None)."""


class Skip(NamedTuple):
    """A collective that a rank did not call."""

    process: int
    node: int
    """Index of the call of another collective that the rank made instead."""
    others: tuple[int, ...]
    """Indices of the calls of the skipped collective in the other ranks."""
    late_ns: int
    """Time in ns for which the other ranks waited in the skipped collective."""


def unseen_collectives(timeline: Timeline) -> int:
    """Return the largest number of collectives in one process that C++ issued and Python did not see.

    Their numbers are missing between the numbers of the recorded collectives.
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
    """Yield the first skipped collective of each group, as far as the recorded collectives show one.

    A rank skipped a collective if two things hold. Before the collective, the rank called the same
    collectives as the other ranks. After it, the rank calls collectives that the other ranks call only later.
    Other work between collectives does not matter.
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
    every: dict[int, Counter[Place]] = {
        number: Counter(places[calls[number]] for calls in ranks.values() if number in calls)
        for number in sorted({number for calls in ranks.values() for number in calls})
    }
    for process, own in ranks.items():
        rest = {
            number: counts - Counter([places[own[number]]]) if number in own else counts
            for number, counts in every.items()
        }
        expected = {number: counts.most_common(1)[0][0] for number, counts in rest.items() if counts}
        first = next((n for n in sorted(own) if n in expected and places[own[n]] != expected[n]), None)
        if first is None or not _is_behind(
            [places[own[n]] for n in sorted(own) if n >= first], first, expected
        ):
            continue
        met = tuple(calls[first] for other, calls in ranks.items() if other != process and first in calls)
        waited_ns = graph.start_ns[own[first]] - middle(graph.start_ns[node] for node in met)
        if waited_ns > 0:
            return Skip(process, own[first], met, waited_ns)
    return None


def _is_behind(own: Sequence[Place], first: int, expected: Mapping[int, Place]) -> bool:
    """Return whether a rank's calls, numbered from `first` on, are calls that the other ranks make later."""
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
