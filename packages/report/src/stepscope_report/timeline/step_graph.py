"""Order of a step's spans over all processes: which call waited for which, as far as the recording shows.

Each span is a node, and has one caller, which waits for the node. The caller is the parent span, the span
that made the request, or the owner's call that was running. Other nodes belong to the root of their process.

This file has more than 500 lines, because nodes, callers and waits are parts of one graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from stepscope.files.spans import GROUP, ISSUED_NS, SEQUENCE
from stepscope_report.accounting import Label, Pair, joined, union_ns
from stepscope_report.timeline.model import ROLLOUT, Process, Span, Timeline
from stepscope_report.timeline.tree import cut_cycles, requests

NOBODY = -1
"""The caller of roots, and of spans that nothing in this step waits for."""
CLOSE_NS = 10_000_000
"""Longest gap in ns between a call and its effect, or a twentieth of the call's time if that is longer."""
_TOGETHER_NS = 2_000_000
"""Longest time in ns between the ends of calls that end together, or a fiftieth of the time from the first
begin to the last end if that is longer."""


def is_close(gap_ns: int, call_ns: int) -> bool:
    """Return whether a gap beside a call is so short that the events on both sides are cause and effect."""
    return gap_ns <= max(CLOSE_NS, call_ns // 20)


class Cluster(NamedTuple):
    """Calls without a recorded caller in a node's time. Calls of different clusters do not overlap."""

    start_ns: int
    end_ns: int
    last: int
    """The node that ended last."""
    joined: bool
    """True if something waited for the end of the cluster. This is assumed if the next call begins, or the
    node around the cluster ends, shortly after this end. If all calls of the cluster have one stage, the same
    is assumed in two more cases: calls without a recorded caller fill half of the node's time outside of its
    recorded calls, or the last call is of the node's process."""
    members: tuple[int, ...]


class StepGraph(NamedTuple):
    """The calls of a step and their order. Nodes are indices of `Timeline.spans`, then a root for each
    process.
    """

    timeline: Timeline
    start_ns: list[int]
    end_ns: list[int]
    """End of each node. Starts are moved into the caller's time. Ends are too if the clocks' uncertainty
    explains the difference."""
    caller: list[int]
    kids: dict[int, list[int]]
    """{caller: calls that have this recorded caller, in the order of their ends}."""
    clusters: dict[int, list[Cluster]]
    """{node: clusters of calls without a recorded caller in the node's time, in order}."""
    cluster_of: dict[int, Cluster]
    before: dict[int, int]
    """{call: the call before it in its thread that it waited for}. The thread runs one call after the other:
    the later call was requested while the earlier one ran, and began when it ended."""
    last_of: dict[int, int]
    """{call: the call that began last}, for calls that end together in several processes and begin apart."""
    meetings: list[tuple[int, ...]]
    """Groups of calls that end together in several processes and begin apart."""
    unknown: set[int]
    """Nodes in whose own time unaligned work may have run."""

    @property
    def spans(self) -> Sequence[Span]:
        return self.timeline.spans

    def span_of(self, node: int) -> Span | None:
        """Return the span of a node, or None for a root."""
        return self.spans[node] if node < len(self.spans) else None

    @property
    def owners(self) -> list[int]:
        """Return the root of the first process, and the roots of aligned processes that opened a capture of
        the step.
        """
        return [
            len(self.spans) + number
            for number, process in enumerate(self.timeline.processes)
            if number == 0 or (process.owner and process.aligned)
        ]

    def process_of(self, node: int) -> int:
        span = self.span_of(node)
        return node - len(self.spans) if span is None else span.process


def step_graph(timeline: Timeline) -> StepGraph:
    """Return the order of a step's spans. O(n log n)."""
    return _Builder(timeline).build()


class _Builder:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._spans = timeline.spans
        count, window = len(timeline.spans), timeline.window
        processes = len(timeline.processes)
        self._start = [span.start_ns for span in timeline.spans] + [window.start_ns] * processes
        self._end = [timeline.until_ns(span) for span in timeline.spans]
        self._end += [_end_ns(process, window.end_ns) for process in timeline.processes]
        self._caller = [NOBODY] * (count + processes)
        self._kids: dict[int, list[int]] = defaultdict(list)
        self._clusters: dict[int, list[Cluster]] = defaultdict(list)
        self._unknown: set[int] = set()
        self._awaited: dict[int, list[int]] = defaultdict(list)
        """{wait of the main thread of a process: calls that end during the wait}. The calls are of the same
        process, or the waiting process is the owner."""
        self._within = [process.clock.uncertainty_ns or 0 for process in timeline.processes]

    def build(self) -> StepGraph:
        tops = self._recorded()
        self._inferred(tops)
        for kids in self._kids.values():
            kids.sort(key=lambda node: (self._end[node], node))
        meetings = list(self._meetings())
        last_of = {
            node: last
            for members in meetings
            for last in [max(members, key=lambda member: (self._start[member], member))]
            for node in members
        }
        return StepGraph(
            timeline=self._timeline,
            start_ns=self._start,
            end_ns=self._end,
            caller=self._caller,
            kids=self._kids,
            clusters=self._clusters,
            cluster_of={
                node: cluster
                for clusters in self._clusters.values()
                for cluster in clusters
                for node in cluster.members
            },
            before=self._threads(),
            last_of=last_of,
            meetings=meetings,
            unknown=self._unknown,
        )

    def _root(self, process: int) -> int:
        return len(self._spans) + process

    def _recorded(self) -> list[int]:
        """Give each span its recorded caller, and return the spans that have none."""
        timeline, tops = self._timeline, []
        parents = [span.parent for span in self._spans]
        for cause, served in requests(timeline):
            if parents[served] is None:
                parents[served] = cause
        cut_cycles(parents)
        above: list[int | None] = list(parents)
        """For each span, the nearest node above it for which `_counts` is True, or None."""
        depth = depths([NOBODY if parent is None else parent for parent in parents])
        for node in sorted(range(len(parents)), key=depth.__getitem__):
            span, parent = self._spans[node], parents[node]
            if parent is not None and not self._counts(parent):
                above[node] = parent = above[parent]
            aligned = timeline.processes[span.process].aligned
            if not aligned and parent is not None:
                self._unknown.add(parent)
            if not aligned or timeline.leaves(span) or not self._clip(node, parent):
                self._start[node] = self._end[node]  # gets no time
            elif parent is None:
                tops.append(node)
            else:
                self._caller[node] = parent
                self._kids[parent].append(node)
        return tops

    def _counts(self, node: int) -> bool:
        return self._start[node] < self._end[node]

    def _clip(self, node: int, caller: int | None) -> bool:
        """Move a span into the time of its caller, and return whether any of its time is left."""
        process = self._spans[node].process
        outer = self._root(0) if caller is None else caller
        within_ns = self._within[process]
        if caller is not None and self._spans[caller].process != process:
            within_ns += self._within[self._spans[caller].process]
        self._start[node] = max(self._start[node], self._start[outer])
        if self._end[outer] < self._end[node] <= self._end[outer] + within_ns:
            self._end[node] = self._end[outer]
        return self._counts(node)

    def _inferred(self, tops: Sequence[int]) -> None:
        """Give each span without a recorded caller an inferred one: a call of the owner, the owner's root, or
        the root of the span's own process.
        """
        timeline = self._timeline
        own: dict[int, list[int]] = defaultdict(list)
        workers = []
        for node in tops:
            process = timeline.processes[self._spans[node].process]
            if process.owner or self._spans[node].waits or not timeline.processes[0].owner:
                own[self._spans[node].process].append(node)
            else:
                workers.append(node)
        inside: dict[int, list[int]] = defaultdict(list)
        root = self._root(0)
        tops_here = own.pop(0, [])
        waits, beside = self._waits(tops_here), self._main(tops_here)
        for node, owner in self._owners(workers, tops_here):
            inside[owner].append(node)
        inside[root] = self._not_awaited(inside[root], waits)
        for wait in waits:
            inside[wait] += self._awaited.pop(wait, ())
        for owner, nodes in inside.items():
            calls = beside if owner == root else self._kids.get(owner, [])
            busy = self._joined(calls)
            apart = []
            for node in nodes:
                if _overlaps(busy, self._start[node], self._end[node]):
                    own[self._spans[node].process].append(node)
                else:
                    apart.append(node)
            if owner == root:
                beside = beside + apart
            else:
                self._add(owner, apart)
        self._add(root, beside)
        for index, nodes in own.items():
            self._add(self._root(index), self._main(nodes))
        for wait, nodes in self._awaited.items():
            self._add(wait, nodes)
        self._doubt()

    def _add(self, owner: int, nodes: Sequence[int]) -> None:
        """Add calls without a recorded caller, in clusters, to the node in whose time the calls lie. A call
        above `owner` is left out: it waits for `owner`.
        """
        above, at = set[int](), owner
        while at != NOBODY:
            above.add(at)
            at = self._caller[at]
        nodes = [node for node in nodes if node not in above]
        groups = list(self._overlapping(nodes))
        kids = self._kids.get(owner, [])
        starts = sorted(self._start[node] for node in (*nodes, *kids))
        covered_ns, busy_ns = union_ns(self._joined(nodes)), union_ns(self._joined(kids))
        filled = covered_ns * 2 >= self._end[owner] - self._start[owner] - busy_ns
        whose = owner - len(self._spans) if owner >= len(self._spans) else self._spans[owner].process
        for members in groups:
            last = max(members, key=lambda node: (self._end[node], node))
            end_ns = self._end[last]
            place = bisect_left(starts, end_ns)
            gap_ns = (starts[place] if place < len(starts) else self._end[owner]) - end_ns
            uniform = len({_label(self._spans[node]) for node in members}) == 1
            alone = uniform and (filled or self._spans[last].process == whose)
            joined = alone or is_close(gap_ns, end_ns - self._start[last])
            cluster = Cluster(self._start[members[0]], end_ns, last, joined, tuple(members))
            self._clusters[owner].append(cluster)
            for node in members:
                self._caller[node] = owner

    def _doubt(self) -> None:
        """Mark the own time of the owner's calls as unknown if an unaligned process may have worked for
        them.
        """
        timeline = self._timeline
        lost = any(
            span.parent is None and not timeline.processes[span.process].aligned and not timeline.leaves(span)
            for span in self._spans
        )
        if lost:
            self._unknown.update(
                node
                for node, span in enumerate(self._spans)
                if span.process == 0 and span.trajectory is None and not span.waits
            )

    def _owners(self, workers: Sequence[int], tops: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (span of a worker, innermost call of the owner around the span, else the owner's root).

        If several calls of the owner run at once, the call around all of them is used.
        """
        root = self._root(0)
        running = {root: _Running(self._start, self._end, tops)}
        for node in workers:
            callers = [root]
            while (at := running[callers[-1]].only(self._start[node])) is not None:
                callers.append(at)
                if at not in running:
                    own = [kid for kid in self._kids.get(at, ()) if self._spans[kid].process == 0]
                    running[at] = _Running(self._start, self._end, own)
            ends_ns = self._end[node] - self._within[self._spans[node].process]
            owner = next((call for call in reversed(callers) if self._end[call] >= ends_ns), root)
            if ends_ns <= self._end[owner]:
                self._end[node] = min(self._end[node], self._end[owner])
            yield node, owner

    def _main(self, nodes: Sequence[int]) -> list[int]:
        """Return the calls of a process' main thread, and the other threads' calls that do not overlap these.

        Calls of other threads that end while the main thread waits are placed in that wait.
        """
        main = self._main_thread(nodes)
        calls = [node for node in nodes if self._spans[node].thread == main]
        others = [node for node in nodes if self._spans[node].thread != main]
        waits = self._waits(nodes)
        calls = self._not_awaited_tasks(calls, waits)
        busy = self._joined(calls)
        others = self._not_awaited(others, waits) if others else others
        return calls + [n for n in others if not _overlaps(busy, self._start[n], self._end[n])]

    def _not_awaited_tasks(self, calls: Iterable[int], waits: Iterable[int]) -> list[int]:
        """Place each trajectory that ends in a wait of its thread in that wait. Return the other calls.

        Only waits outside of trajectories count. Such a wait and the trajectories are tasks of one event
        loop.
        """
        outside = [wait for wait in waits if self._spans[wait].trajectory is None]
        tasks = [node for node in calls if self._spans[node].trajectory is not None]
        left = set(self._not_awaited(tasks, outside))
        return [node for node in calls if self._spans[node].trajectory is None or node in left]

    def _main_thread(self, nodes: Sequence[int]) -> int | None:
        """Return a process' first thread, or another thread that was busy for more than twice as long.

        Return None without calls.
        """
        by_thread: dict[int, list[int]] = defaultdict(list)
        for node in nodes:
            by_thread[self._spans[node].thread].append(node)
        times = {thread: union_ns(self._joined(own)) for thread, own in by_thread.items()}
        main = max(times, key=lambda thread: (times[thread], -thread), default=None)
        if main is None:
            return None
        first = self._timeline.processes[self._spans[nodes[0]].process].info.pid
        return first if times.get(first, 0) * 2 >= times[main] else main

    def _not_awaited(self, nodes: Iterable[int], waits: Sequence[int]) -> list[int]:
        """Place each call that ends in one of these waits in that wait. Return the calls that end in no
        wait.
        """
        left, ends = [], [self._end[wait] for wait in waits]
        for node in nodes:
            place = bisect_left(ends, self._end[node])
            if place < len(waits) and self._start[waits[place]] < self._end[node]:
                self._awaited[waits[place]].append(node)
                self._begin_at(node, self._start[waits[place]])
            else:
                left.append(node)
        return left

    def _waits(self, nodes: Sequence[int]) -> list[int]:
        """Return the main thread's waits among these calls and the calls below them, sorted by end.

        Waits with a call below them are left out.
        """
        thread = self._main_thread(nodes)
        process = self._spans[nodes[0]].process if nodes else None
        left = [node for node in nodes if self._spans[node].thread == thread]
        waits = []
        while left:
            node = left.pop()
            kids = self._kids.get(node, ())
            left += kids
            span = self._spans[node]
            if span.waits and (span.process, span.thread) == (process, thread) and not kids:
                waits.append(node)
        return sorted(waits, key=self._end.__getitem__)

    def _begin_at(self, top: int, start_ns: int) -> None:
        """Let a call, and the calls below it, begin at `start_ns` at the earliest."""
        left = [top]
        while left:
            node = left.pop()
            self._start[node] = max(self._start[node], start_ns)
            below, kids = list(self._kids.get(node, ())), []
            while below:
                kid = below.pop()
                if self._end[kid] > start_ns:
                    kids.append(kid)
                    continue
                self._start[kid], self._caller[kid] = self._end[kid], NOBODY  # gets no time
                for lower in self._kids.pop(kid, ()):
                    self._caller[lower] = node
                    below.append(lower)
            if node in self._kids:
                self._kids[node] = kids
            left += kids

    def _joined(self, nodes: Iterable[int]) -> list[Pair]:
        return joined((self._start[node], self._end[node]) for node in nodes)

    def _overlapping(self, nodes: Iterable[int]) -> Iterator[list[int]]:
        """Yield the nodes in groups, in order. Nodes of different groups never overlap."""
        members: list[int] = []
        end_ns = 0
        for node in sorted(nodes, key=lambda node: (self._start[node], node)):
            if members and self._start[node] >= end_ns:
                yield members
                members = []
            end_ns = max(end_ns, self._end[node]) if members else self._end[node]
            members.append(node)
        if members:
            yield members

    def _threads(self) -> dict[int, int]:
        """Return {call: the call before it in its thread that it waited for}."""
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, span in enumerate(self._spans):
            caller = self._caller[node]
            if span.process and caller != NOBODY and not self._is_inside(node):
                calls[span.process, span.thread].append(node)
        before: dict[int, int] = {}
        for nodes in calls.values():
            nodes.sort(key=lambda node: self._start[node])
            pairs = list(pairwise(nodes))
            if all(self._end[one] <= self._start[other] for one, other in pairs):
                before.update((other, one) for one, other in pairs if self._waited(other, one))
        return before

    def _is_inside(self, node: int) -> bool:
        """Return whether a call has a caller in its own process."""
        caller = self._caller[node]
        return caller < len(self._spans) and self._spans[caller].process == self._spans[node].process

    def _waited(self, node: int, before: int) -> bool:
        called_ns = self._start[self._caller[node]]
        gap_ns = self._start[node] - self._end[before]
        return self._end[before] > called_ns and is_close(gap_ns, self._end[node] - self._start[node])

    def _meetings(self) -> Iterator[tuple[int, ...]]:
        """Yield the calls that end together in all processes that run their stage, and begin apart.

        Such calls end in a collective, and have no calls below them. Recorded collectives are identified by
        group and number. Other calls count only if all calls of their stage have an end and end together.
        Requests of a rollout do not count, because aborted requests end together.
        """
        calls: dict[Label, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        collectives: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
        for node, span in enumerate(self._spans):
            leaf = node not in self._kids and node not in self._clusters
            if self._caller[node] == NOBODY or not leaf:
                continue
            key = _collective_of(span)
            if key is not None and span.end_ns is not None:
                collectives[key][span.process] = node
            elif key is None and span.role not in ROLLOUT:
                calls[_label(span)][span.process].append(node)
        for ranks in self._across_roles(collectives):
            longest_ns = self._turn(tuple(ranks.values())).whole_ns // 50
            members = [node for node in ranks.values() if self._is_at_once(node, longest_ns)]
            for node in ranks.values():
                if node not in members:
                    calls[_label(self._spans[node])][self._spans[node].process].append(node)
            if members and (turn := self._turn(members)).overlaps and turn.is_apart:
                yield tuple(members)
        for by_process in calls.values():
            numbers = {len(nodes) for nodes in by_process.values()}
            if len(by_process) < 2 or len(numbers) > 1:
                continue
            if any(self._spans[node].end_ns is None for nodes in by_process.values() for node in nodes):
                continue
            for nodes in by_process.values():
                nodes.sort(key=lambda node: self._start[node])
            turns = list(zip(*by_process.values(), strict=True))
            if self._meet([self._turn(nodes) for nodes in turns]):
                yield from (nodes for nodes in turns if self._turn(nodes).begins_apart)

    def _across_roles(
        self, collectives: Mapping[tuple[object, ...], Mapping[int, int]]
    ) -> Iterator[Mapping[int, int]]:
        """Yield {process: call} of each collective. Calls of several roles are one collective if they have
        the same group and number, overlap, and end together, such as a broadcast of weights.
        """
        of_roles: dict[tuple[object, ...], list[Mapping[int, int]]] = defaultdict(list)
        for (_, *rest), ranks in collectives.items():
            of_roles[tuple(rest)].append(ranks)
        for roles in of_roles.values():
            turn = self._turn([node for ranks in roles for node in ranks.values()])
            if len(roles) > 1 and turn.overlaps and turn.ends_together:
                yield {process: node for ranks in roles for process, node in ranks.items()}
            else:
                yield from roles

    def _is_at_once(self, node: int, longest_ns: int) -> bool:
        """Return whether the span of a collective begins soon after its call: within `longest_ns`, or within
        `_TOGETHER_NS` if that is longer.
        """
        issued_ns = (self._spans[node].attrs or {}).get(ISSUED_NS, 0)
        return isinstance(issued_ns, int) and issued_ns <= max(_TOGETHER_NS, longest_ns)

    def _turn(self, nodes: Sequence[int]) -> _Turn:
        starts, ends = [self._begin_ns(node) for node in nodes], [self._end[node] for node in nodes]
        return _Turn(
            max(starts) - min(starts),
            max(ends) - min(ends),
            max(ends) - min(starts),
            max(starts) < min(ends),
        )

    def _begin_ns(self, node: int) -> int:
        """Return the time at which a call began, which for an owner may be before the step."""
        span = self._spans[node]
        return span.start_ns if self._timeline.processes[span.process].owner else self._start[node]

    def _meet(self, turns: Sequence[_Turn]) -> bool:
        """Return whether the calls of a stage wait for each other: none ends before the last has begun, and
        they end together.

        On a busy host, or with work after the collective, calls end at slightly different times. Then it is
        enough if the ends spread over at most a tenth of the time over which the begins spread, in the sum of
        all turns whose begins are far enough apart to judge.
        """
        usual_ns = median_low(turn.spread_ns for turn in turns)
        telling = [turn for turn in turns if turn.is_apart and turn.apart_ns >= 4 * usual_ns]
        apart_ns, spread_ns = sum(turn.apart_ns for turn in telling), sum(turn.spread_ns for turn in telling)
        together = spread_ns * 10 <= apart_ns or all(turn.ends_together for turn in turns)
        return together and all(turn.overlaps for turn in turns)


class _Turn(NamedTuple):
    """A call of one stage in each process."""

    apart_ns: int
    """Time in ns from the first begin to the last begin."""
    spread_ns: int
    """Time in ns from the first end to the last end."""
    whole_ns: int
    """Time in ns from the first begin to the last end."""
    overlaps: bool
    """True if no call ends before the last call has begun."""

    @property
    def ends_together(self) -> bool:
        return self.spread_ns <= max(_TOGETHER_NS, self.whole_ns // 50)

    @property
    def is_apart(self) -> bool:
        return self.apart_ns >= max(_TOGETHER_NS, self.whole_ns // 50)

    @property
    def begins_apart(self) -> bool:
        return self.is_apart and self.apart_ns >= 4 * self.spread_ns


class _Running:
    """Calls ordered by time, to look up the call that runs at a moment."""

    def __init__(self, start_ns: Sequence[int], end_ns: Sequence[int], nodes: Iterable[int]) -> None:
        ordered = sorted(nodes, key=start_ns.__getitem__)
        self._starts = [start_ns[node] for node in ordered]
        self._ends = sorted(end_ns[node] for node in ordered)
        self._latest: list[int] = []
        """The call that ends last among all calls up to each index."""
        for node in ordered:
            longer = self._latest and end_ns[self._latest[-1]] > end_ns[node]
            self._latest.append(self._latest[-1] if longer else node)

    def only(self, at_ns: int) -> int | None:
        """Return the call that runs at a time, or None if no call or several calls run."""
        begun = bisect_right(self._starts, at_ns)
        running = begun - bisect_right(self._ends, at_ns)
        return self._latest[begun - 1] if running == 1 else None


def _end_ns(process: Process, window_ns: int) -> int:
    """Return the end of a process' root: the owner's own closing, or else the end of the step."""
    closed_ns = process.closed_ns if process.owner and process.aligned else None
    return window_ns if closed_ns is None else closed_ns


def _collective_of(span: Span) -> tuple[object, ...] | None:
    """Return (role, name, group, number) if the span is a collective, else None."""
    attrs = span.attrs or {}
    return (span.role, span.stage, attrs.get(GROUP), attrs[SEQUENCE]) if SEQUENCE in attrs else None


def _label(span: Span) -> Label:
    return span.role, span.stage


def _overlaps(busy: Sequence[Pair], start_ns: int, end_ns: int) -> bool:
    """Return whether a stretch of time overlaps any of these pairs, which are disjoint and in order."""
    place = bisect_left(busy, (start_ns, start_ns))
    before = busy[place - 1][1] if place else start_ns
    return before > start_ns or (place < len(busy) and busy[place][0] < end_ns)


def depths(callers: Sequence[int]) -> list[int]:
    """Return how many nodes are above each node: 0 if its caller is `NOBODY`. There must be no cycles."""
    known = [-1] * len(callers)
    for node in range(len(callers)):
        path = []
        at = node
        while at != NOBODY and known[at] < 0:
            path.append(at)
            at = callers[at]
        depth = -1 if at == NOBODY else known[at]
        for below in reversed(path):
            depth += 1
            known[below] = depth
    return known
