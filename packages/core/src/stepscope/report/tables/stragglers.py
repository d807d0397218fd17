"""Ranks for which others wait in collectives: a rank leaves one only after all have entered it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.report.table import Table
from stepscope.timeline import TraceActivity

_ALL_WAIT = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|barrier", re.IGNORECASE)
"""Collectives of traces that name no process groups."""
_Call: TypeAlias = tuple[int, tuple[float, float]]
"""Number, and start and end in us of the trace."""
_Key: TypeAlias = tuple[str, int | None, str | None, int, str, str]
"""(role, replica, stage, how many traces of the stage the process has before, collective, group)."""


class _Entry(NamedTuple):
    number: int
    start_ns: int
    end_ns: int
    process: str


class StragglerRow(msgspec.Struct, kw_only=True):
    """One process in the calls of one collective that other processes recorded too."""

    role: str
    collective: str
    process: str
    rank: int | None
    calls: int = 0
    last: int = 0
    """Calls that it entered last, and others had to wait for it."""
    others_waited_ns: int = 0
    """Time, summed over the others, in which they were in these calls and it was not."""
    waited_ns: int = 0
    """Time for which it was in calls before the last process was."""


def stragglers(activities: Iterable[TraceActivity]) -> Table[StragglerRow]:
    """Return a row for each process and collective, the process that others waited for longest first.

    Calls are matched by process group and by torch's number. Traces without groups are matched by name and
    order, if several processes made equally many. Traces that are unaligned are left out.
    """
    rows: dict[tuple[str, str, str], StragglerRow] = {}
    for (role, *_, collective, _), members in _matched(activities):
        own = {
            process: rows.setdefault(
                (role, collective, process),
                StragglerRow(role=role, collective=collective, process=process, rank=rank),
            )
            for (process, rank) in members
        }
        for _, entries in groupby(merge(*members.values()), key=lambda entry: entry.number):
            _count(own, list(entries))
    called = (row for row in rows.values() if row.calls)
    return Table(
        sorted(called, key=lambda row: (-row.others_waited_ns, row.role, row.collective, row.process))
    )


def _count(rows: Mapping[str, StragglerRow], entries: Sequence[_Entry]) -> None:
    """Add one call, with the times of each process in it."""
    if len(entries) < 2:
        return
    last_ns, latest = max((entry.start_ns, entry.process) for entry in entries)
    waited_ns = 0
    for _, start_ns, end_ns, process in entries:
        ns = max(0, min(last_ns, end_ns) - start_ns)
        rows[process].calls += 1
        rows[process].waited_ns += ns
        waited_ns += ns
    if waited_ns:
        rows[latest].last += 1
        rows[latest].others_waited_ns += waited_ns


def _matched(
    activities: Iterable[TraceActivity],
) -> Iterator[tuple[_Key, dict[tuple[str, int | None], Iterator[_Entry]]]]:
    """Yield the calls of each process in each group, by their numbers, for groups of several processes."""
    matched: dict[_Key, dict[tuple[str, int | None], Iterator[_Entry]]] = defaultdict(dict)
    before = Counter[tuple[str, str | None]]()
    for activity in activities:
        if activity.unaligned is not None:
            continue
        info, process = activity.info, (activity.name, activity.info.rank)
        place = before[activity.name, activity.stage]
        before[activity.name, activity.stage] += 1
        for collective, group, calls in _calls(activity):
            key = info.role, info.replica, activity.stage, place, collective, group
            matched[key][process] = _entries(activity, calls)
    for key, members in matched.items():
        if len(members) > 1:
            yield key, members


def _calls(activity: TraceActivity) -> Iterator[tuple[str, str, Iterable[_Call]]]:
    """Yield (collective, group, calls). Without groups, the number of calls stands for the group."""
    content = activity.content
    for grouped in content.grouped:
        group = grouped.group.partition(" ")[0]
        yield f"{grouped.op}, group {group}" if group else grouped.op, grouped.group, grouped.calls()
    for collective in () if content.grouped else content.collectives:
        if _ALL_WAIT.search(collective.name):
            name = re.split(r"__|\(", collective.name)[0]
            group = f"{collective.name} {len(collective.times)}"
            yield name, group, enumerate(collective.calls())


def _entries(activity: TraceActivity, calls: Iterable[_Call]) -> Iterator[_Entry]:
    for number, (start_us, end_us) in calls:
        yield _Entry(number, activity.unix_ns(start_us), activity.unix_ns(end_us), activity.name)
