"""Culprits of a slow step: calls that took longer than similar calls, and the time that each costs the step.

A process is compared with others of its role, a call of a tool with other calls of the tool, and the last
trajectories with the others. Every saving comes from a replay of the critical path.

This file has more than 500 lines, because all kinds of culprits use the same times of calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from stepscope.files.spans import PROFILING
from stepscope_report.accounting import Label, Pair, clipped, joined, union_ns
from stepscope_report.formatting import count, duration, middle, the_last
from stepscope_report.spans import ToolNames, is_tool, replica_of, whole
from stepscope_report.stragglers import skipped_collectives
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.critical_path import Piece, Replay, critical_path
from stepscope_report.timeline.model import Span
from stepscope_report.timeline.step_graph import StepGraph, step_graph

CauseKind: TypeAlias = Literal[
    "late-rank",
    "skipped-collective",
    "slow-rank",
    "slow-replica",
    "slow-host",
    "uneven-batch",
    "slow-tool",
    "long-trajectory",
    "queue",
    "preemption",
    "weight-sync",
    "slow-stage",
    "slow-storage",
    "between-steps",
    "event-loop",
    "gc",
    "profiler",
    "unexplained",
]
LEAST = 50
"""A straggler counts as a suspect if it costs at least 1 / LEAST of the step."""
LEAST_OF_CALLS = 20
"""A tool, a trajectory or a stage, whose times vary by nature, counts as a suspect if it costs at least 1 /
LEAST_OF_CALLS of the step."""
ENOUGH = 3
"""Least number of trajectories for a comparison of the last trajectories with the others."""
_LONG = 3
"""A tool's call is long if it takes at least this many times the median of the tool's calls."""
NO_WORK = frozenset({"trajectory", "turn", PROFILING})
"""Stages whose own time is not work."""


class Suspect(NamedTuple):
    """Calls, a rank or a process that took longer than similar calls, ranks or processes."""

    kind: CauseKind
    ns: int | None
    """Time in ns by which the step would be shorter without the excess, or None if it is unknown whether the
    step waited."""
    longer_ns: int
    """Time by which the suspect took longer than usual."""
    label: Label | None = None
    """Role and stage (for a tool, with its name), or None if no span names the cause."""
    process: int | None = None
    """Index in `Timeline.processes`, or None if the suspect belongs to no single process."""
    took_ns: int | None = None
    usual_ns: int | None = None
    """The usual time of the same work, or None if unknown."""
    beside: str = ""
    """Words for the steps, processes or calls from which `usual_ns` comes."""
    trajectory: str | None = None
    turn: int | None = None
    evidence: tuple[str, ...] = ()
    awaited_in: Label | None = None
    """The stage in which other ranks waited for the suspect, or None if no rank waited."""
    nodes: tuple[int, ...] = ()
    """The suspect's calls."""
    peers: tuple[tuple[int, ...], ...] = ()
    """The calls of each process from which `usual_ns` comes. Empty if `usual_ns` comes from other steps,
    or from calls of the same process."""
    spells: tuple[Pair, ...] = ()
    """The stretches in which a rank that came late was in no call, or in which an event loop was blocked.
    Empty for other suspects."""
    within: tuple[Pair, ...] = ()
    """The stretches of a stage that took longer than in the flight recorder's other steps, if the suspect is
    the stage or a part of it. Else empty."""
    because: str = ""
    """Words for what held up the process, or "" if nothing is known."""
    apart_ns: int | None = None
    """Time by which a rank came after the others, if no call made it late. `longer_ns` is the part of this
    time in which the rank was in no call. None for other suspects."""
    on_path: bool = False
    """True if `took_ns` and `usual_ns` are times on the critical path: no call was longer than usual."""


class StepPath(NamedTuple):
    """The order of a step's calls, its critical path, and its replay."""

    graph: StepGraph
    pieces: Sequence[Piece]
    replay: Replay


def step_path(timeline: Timeline) -> StepPath:
    graph = step_graph(timeline)
    return StepPath(graph, critical_path(graph), Replay(graph))


class Work(NamedTuple):
    """The calls of one stage in one process."""

    nodes: list[int]
    own_ns: int
    """Sum of the calls' own times in the step, without calls below them and without waits for ranks that
    entered later."""
    whole_ns: int
    """`own_ns` plus work before the step: an owner's capture may open before the first owner's. The
    `own_ns` of a process is compared with the `whole_ns` of the other processes."""
    tokens: int | None
    """Sum of the calls' attributes `tokens`, or None if a call lacks that attribute."""


Works: TypeAlias = Mapping[Label, Mapping[int, Work]]


def suspects_of(path: StepPath, cut: Set[str] = frozenset(), *, tail: bool = True) -> list[Suspect]:
    """Return the calls, ranks and processes that took longer than similar ones in the same step, the largest
    saving first.

    Args:
        cut: Names of processes whose recording ended before their work did.
        tail: True if the last trajectories may be compared with the others, because no profiler slowed only
            them.
    """
    return _Lineup(path, cut).run(tail=tail)


class _Lineup:
    def __init__(self, path: StepPath, cut: Set[str]) -> None:
        self._graph, self._replay = path.graph, path.replay
        self._timeline = path.graph.timeline
        self._window_ns = max(1, self._timeline.window.wall_ns)
        self._names = ToolNames(self._timeline)
        self._labels = [self._names.label_of(span) for span in self._timeline.spans]
        self._began_ns = list(map(self._begin_ns, range(len(self._timeline.spans))))
        self._own_ns = list(map(self._own, range(len(self._timeline.spans)), path.graph.start_ns))
        self._works = self._all_works(cut)

    def run(self, *, tail: bool) -> list[Suspect]:
        skipped = list(self._skipped())
        behind = {one.process for one in skipped}
        late = [*skipped, *(one for one in self._late() if one.process not in behind)]
        named = {(one.process, one.label) for one in late}
        slow = (one for one in self._stragglers() if (one.process, one.label) not in named)
        tools = list(self._slow_tools())
        found = {one.label for one in tools}
        late_ones = self._late_trajectories() if tail else ()
        calls = [*tools, *(one for one in late_ones if one.label not in found)]
        return ranked([one for one in (*late, *slow, *calls) if self._counts(one)])

    def _counts(self, suspect: Suspect) -> bool:
        """Return whether the step would be shorter without the suspect, or whether that is unknown."""
        return suspect.ns is None or suspect.ns * LEAST >= self._window_ns

    def _begin_ns(self, node: int) -> int:
        """Return the unix time in ns at which a call began. The call of an owner may begin before the step,
        because the owner's capture may have opened before the first owner's.
        """
        span = self._timeline.spans[node]
        return span.start_ns if self._timeline.processes[span.process].owner else self._graph.start_ns[node]

    def _own(self, node: int, start_ns: int) -> int:
        """Return the own time of a call in ns, from `start_ns` on."""
        graph, span = self._graph, self._timeline.spans[node]
        if not self._timeline.processes[span.process].aligned:
            return span.dur_ns or 0
        end_ns = graph.end_ns[node]
        below = [*graph.kids.get(node, ())]
        below += (member for cluster in graph.clusters.get(node, ()) for member in cluster.members)
        pairs = [(self._began_ns[kid], graph.end_ns[kid]) for kid in below]
        if self._timeline.stalls and span.role == "rollout":
            replica = replica_of(self._timeline, span)
            pairs += (
                (stall.start_ns, stall.end_ns)
                for stall in self._timeline.stalls
                if replica is not None and stall.replica == replica.number and not replica.role
            )
        if node in graph.last_of:
            pairs.append((start_ns, graph.start_ns[graph.last_of[node]]))
        busy_ns = union_ns(clipped(pairs, start_ns, end_ns)) if pairs else 0
        return max(0, end_ns - start_ns - busy_ns)

    def _all_works(self, cut: Set[str]) -> Works:
        nodes: dict[Label, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        broken = set[Label]()
        for node, span in enumerate(self._timeline.spans):
            if span.waits or span.stage in NO_WORK or not self._counts_in_step(node):
                continue
            nodes[self._labels[node]][span.process].append(node)
            if span.end_ns is None and self._timeline.processes[span.process].name in cut:
                broken.add(self._labels[node])
        works = {
            label: {process: self._work(own) for process, own in by_process.items()}
            for label, by_process in nodes.items()
            if label not in broken and not _is_cut(self._timeline, by_process, cut)
        }
        return {label: self._without_dead(by_process) for label, by_process in works.items()}

    def _without_dead(self, by_process: dict[int, Work]) -> dict[int, Work]:
        """Return the calls of a stage without those of processes that never closed their capture.

        These processes worked for longer than was recorded, so that a comparison with them would be wrong.
        The process with the most time of all stays, closed or not.
        """
        most_ns = max(work.own_ns for work in by_process.values())
        return {
            process: work
            for process, work in by_process.items()
            if self._timeline.processes[process].closed_ns is not None or work.own_ns == most_ns
        }

    def _counts_in_step(self, node: int) -> bool:
        """Return whether a part of the call lies in the step, within the uncertainty of its clock."""
        process = self._timeline.processes[self._timeline.spans[node].process]
        has_time = self._graph.start_ns[node] < self._graph.end_ns[node]
        is_known = process.aligned and not process.owner
        return (has_time or not is_known) and not self._timeline.leaves(self._timeline.spans[node])

    def _work(self, nodes: list[int]) -> Work:
        tokens = [whole(self._timeline.spans[node], "tokens") for node in nodes]
        known = [number for number in tokens if number is not None]
        own_ns = self._sum(nodes)
        before_ns = sum(
            self._own(node, self._began_ns[node]) - self._own_ns[node]
            for node in nodes
            if self._began_ns[node] < self._graph.start_ns[node]
        )
        return Work(nodes, own_ns, own_ns + before_ns, sum(known) if len(known) == len(nodes) else None)

    # Ranks for which others waited.

    def _skipped(self) -> Iterator[Suspect]:
        """Yield the ranks that skipped a collective in which other ranks waited for long."""
        for skip in skipped_collectives(self._graph):
            if skip.late_ns * LEAST < self._window_ns:
                continue
            yield Suspect(
                "skipped-collective",
                skip.late_ns,
                skip.late_ns,
                self._labels[skip.others[0]],
                skip.process,
                beside=self._others(skip.process, (self._timeline.spans[n].process for n in skip.others)),
                evidence=("its later collectives met those before them of the others",),
                nodes=(skip.node,),
            )

    def _late(self) -> Iterator[Suspect]:
        """Yield the ranks that came late to meetings of ranks (collectives), with the stage that made them
        late.
        """
        graph, spans = self._graph, self._timeline.spans
        found: dict[tuple[int, Label | None, Label], list[_Lateness]] = defaultdict(list)
        met_ns: dict[int, int] = {}
        calls: dict[int, list[int]] = defaultdict(list)
        met_in = {member for members in graph.meetings for member in members}
        if graph.meetings:
            for node in sorted(range(len(spans)), key=lambda node: graph.end_ns[node]):
                counts = graph.start_ns[node] < graph.end_ns[node] or (
                    self._timeline.processes[spans[node].process].owner
                    and not self._timeline.leaves(spans[node])
                )
                # A rank's wait for its queue or its engine may make it late. Waits in meetings do not.
                if counts and node not in met_in:
                    calls[spans[node].process].append(node)
        at = Counter[int]()
        """{process: number of its calls that ended before the current meeting}."""
        for met in sorted(graph.meetings, key=lambda members: graph.end_ns[members[0]]):
            members, last = self._begun_late(met, graph.last_of[met[0]])
            stretches: dict[int, dict[Label, list[int]]] = {}
            for member in members:
                process = spans[member].process
                since_ns = met_ns.get(process, 0)
                own, stretch = calls[process], defaultdict[Label, list[int]](list)
                while at[process] < len(own) and graph.end_ns[own[at[process]]] <= graph.start_ns[member]:
                    node = own[at[process]]
                    if graph.start_ns[node] >= since_ns and spans[node].stage not in NO_WORK:
                        stretch[self._labels[node]].append(node)
                    at[process] += 1
                stretches[member] = stretch
            start_ns = self._timeline.window.start_ns
            since = {member: met_ns.get(spans[member].process, start_ns) for member in members}
            inner = dict(zip(members, met, strict=True))
            lateness = self._lateness(last, inner, stretches, since)
            found[spans[last].process, lateness.label, self._labels[last]].append(lateness)
            for member in met:
                met_ns[spans[member].process] = graph.end_ns[member]
        for (process, label, meeting), times in found.items():
            late_ns = sum(one.late_ns for one in times)
            took_ns, usual_ns = sum(one.took_ns for one in times), sum(one.usual_ns for one in times)
            least = LEAST_OF_CALLS if label is None else LEAST
            if late_ns * least < self._window_ns or (label is not None and took_ns * 4 < usual_ns * 5):
                continue
            cuts = {node: ns for one in times for node, ns in one.cuts_ns.items()}
            sooner = {node: ns for one in times for node, ns in one.sooner_ns.items()}
            ns = self._replay.saves_by_ns(cuts, sooner)
            first = max(times, key=lambda one: one.late_ns)
            uneven = label is not None and all(one.uneven for one in times)
            yield Suspect(
                "uneven-batch" if uneven else "late-rank",
                min(ns, late_ns),
                late_ns,
                label,
                process,
                None if label is None else took_ns,
                None if label is None else usual_ns,
                self._others(process, (spans[node].process for one in times for node in one.members)),
                evidence=(self._say_met(first, len(times), label),),
                awaited_in=meeting,
                nodes=tuple(cuts),
                apart_ns=took_ns if label is None else None,
                peers=_by_process(spans, (node for one in times for node in one.others)),
                spells=tuple(pair for one in times if label is None for pair in one.spells),
            )

    def _begun_late(self, members: Sequence[int], last: int) -> tuple[Sequence[int], int]:
        """Return (calls that meet, the call of the last rank): the outermost calls in which the last rank is
        late.

        A meeting may lie inside larger calls, such as a collective in a backward pass. If the last rank began
        its larger call after all other ranks had come to the meeting, the larger calls are returned, one in
        each rank. Otherwise `members` and `last` are returned.
        """
        spans, start_ns = self._timeline.spans, self._graph.start_ns
        others_ns = max(start_ns[member] for member in members if member != last)
        around = {member: spans[member].parent for member in members}
        known = {member: call for member, call in around.items() if call is not None}
        alike = {self._labels[call] for call in known.values()}
        own = all(spans[call].process == spans[member].process for member, call in known.items())
        if len(known) < len(members) or len(alike) > 1 or not own or start_ns[known[last]] <= others_ns:
            return members, last
        return self._begun_late(tuple(known.values()), known[last])

    def _lateness(
        self,
        last: int,
        members: Mapping[int, int],
        stretches: Mapping[int, Mapping[Label, Sequence[int]]],
        since_ns: Mapping[int, int],
    ) -> _Lateness:
        """Return how much later than the median of the other ranks a rank came to a meeting, and the stage
        that made the rank late. If no stage did, at most the time in which the rank ran no call is counted.

        Args:
            members: {call that meets: the call itself, or the call inside it in which the ranks met}. If
                calls of the same stage made the rank late, the time before the call inside counts too.
            since_ns: {call that meets: time of its rank's previous meeting, or of the step's beginning}.
        """
        graph, own = self._graph, stretches[last]
        others = [member for member in members if member != last]
        late_ns = graph.start_ns[last] - middle(graph.start_ns[member] for member in others)
        usual_ns = {
            label: middle(self._work([*stretches[other].get(label, ())]).whole_ns for other in others)
            for label in own
        }
        longer_ns = {label: self._sum(nodes) - usual_ns[label] for label, nodes in own.items()}
        heads_ns = {call: graph.start_ns[inner] - graph.start_ns[call] for call, inner in members.items()}
        usual_head_ns = middle(heads_ns[member] for member in others)
        head_ns, met = heads_ns[last] - usual_head_ns, self._labels[last]
        if longer_ns.get(met, 0) > 0 and head_ns > 0:
            longer_ns[met] += head_ns
        label = max(longer_ns, key=lambda label: longer_ns[label], default=None)
        if label is None or longer_ns[label] <= 0 or longer_ns[label] * 2 < late_ns:
            around = self._late_around(last, others, stretches, since_ns, late_ns)
            if around is not None:
                return around
            spells = self._outside(own, since_ns[last], graph.start_ns[last])
            out_ns = min(late_ns, union_ns(spells))
            return _Lateness(
                last, tuple(members), out_ns, None, late_ns, 0, {}, {last: out_ns}, spells=spells
            )
        sooner_ns = dict[int, int]()
        own_ns = self._sum(own[label])
        took_ns, share = own_ns, min(longer_ns[label], late_ns) / own_ns
        if label == met and head_ns > 0:
            took_ns, share = own_ns + heads_ns[last], min(longer_ns[met] - head_ns, late_ns) / own_ns
            late_ns, usual_ns[met] = late_ns + head_ns, usual_ns[met] + usual_head_ns
            sooner_ns[members[last]] = head_ns
        return _Lateness(
            last,
            tuple(members),
            late_ns,
            label,
            took_ns,
            usual_ns[label],
            {
                node: min(int(self._own_ns[node] * share), graph.end_ns[node] - graph.start_ns[node])
                for node in own[label]
            },
            sooner_ns,
            self._is_uneven(own[label], [stretches[other].get(label, ()) for other in others]),
            tuple(node for other in others for node in stretches[other].get(label, ())),
        )

    def _late_around(
        self,
        last: int,
        others: Sequence[int],
        stretches: Mapping[int, Mapping[Label, Sequence[int]]],
        since_ns: Mapping[int, int],
        late_ns: int,
    ) -> _Lateness | None:
        """Return the lateness of a rank that worked longer than the others in the call around the meeting
        itself, such as a forward pass that gathers weights. None if that does not explain half of `late_ns`.
        """
        spans, start_ns, members = self._timeline.spans, self._graph.start_ns, (last, *others)
        around = [spans[member].parent for member in members]
        known = [call for call in around if call is not None]
        if len(known) < len(members) or len({self._labels[call] for call in known}) > 1:
            return None
        if any(spans[call].process != spans[m].process for call, m in zip(known, members, strict=True)):
            return None
        took_ns, *often_ns = (
            sum(
                end_ns - begin_ns
                for begin_ns, end_ns in self._outside(
                    stretches[member], max(since_ns[member], start_ns[call]), start_ns[member]
                )
            )
            for call, member in zip(known, members, strict=True)
        )
        usual_ns = middle(often_ns)
        if (took_ns - usual_ns) * 2 < late_ns:
            return None
        sooner_ns = {last: min(late_ns, took_ns - usual_ns)}
        label = self._labels[known[0]]
        return _Lateness(
            last,
            members,
            late_ns,
            label,
            took_ns,
            usual_ns,
            {known[0]: 0},
            sooner_ns,
            others=tuple(known[1:]),
        )

    def _outside(self, own: Mapping[Label, Sequence[int]], since_ns: int, until_ns: int) -> tuple[Pair, ...]:
        """Return the parts of a stretch in which no call of `own` ran, in order."""
        pairs = (
            (self._graph.start_ns[node], self._graph.end_ns[node]) for nodes in own.values() for node in nodes
        )
        ran = [(since_ns, since_ns), *joined(clipped(pairs, since_ns, until_ns)), (until_ns, until_ns)]
        return tuple((end_ns, start_ns) for (_, end_ns), (start_ns, _) in pairwise(ran) if end_ns < start_ns)

    def _is_uneven(self, nodes: Sequence[int], others: Sequence[Sequence[int]]) -> bool:
        """Return whether the calls `nodes` have a quarter more tokens than the calls of the other ranks, at
        about the same time per token.
        """
        one, rest = self._work(list(nodes)), [self._work(list(other)) for other in others if other]
        usual = middle(work.tokens or 0 for work in rest) if rest else 0
        if not one.tokens or not usual or one.tokens * 4 < usual * 5:
            return False
        return one.own_ns * usual * 4 < middle(work.own_ns for work in rest) * one.tokens * 5

    def _sum(self, nodes: Sequence[int]) -> int:
        return sum(self._own_ns[node] for node in nodes)

    def _say_met(self, first: _Lateness, times: int, label: Label | None) -> str:
        spans, graph = self._timeline.spans, self._graph
        others = [member for member in first.members if member != first.last]
        earlier = min(others, key=lambda member: graph.start_ns[member])
        apart_ns = graph.start_ns[first.last] - graph.start_ns[earlier]
        name = self._timeline.processes[spans[earlier].process].name
        stage = " ".join(self._labels[first.last])
        often = f", the latest of {times:,} times" if times > 1 else ""
        if label is None:  # the cause's own sentence has the other facts
            return f"all of them ended together{often}"
        return f"it began {stage} {duration(apart_ns)} after {name}{often}, and all of them ended together"

    # Processes that are slower than others of their role.

    def _stragglers(self) -> Iterator[Suspect]:
        for label, by_process in self._works.items():
            if is_tool(*label):
                continue
            alike = _alike(self._timeline, by_process)
            if len(by_process) == 1:
                beside = self._works_of_later_steps(label, by_process)
                alike = [(by_process, {**beside, **by_process})] if beside else []
            for candidates, compared in alike:
                suspect = self._straggler(label, candidates, compared)
                if suspect is not None:
                    yield suspect

    def _works_of_later_steps(self, label: Label, by_process: Mapping[int, Work]) -> dict[int, Work]:
        """Return the calls of other processes in the same stage that ran wholly during this step, for later
        steps.

        Only the time per token of such calls can be compared. So nothing is returned if any calls, those of
        `by_process` included, do not state their tokens.
        """
        window, nodes = self._timeline.window, defaultdict[int, list[int]](list)
        for node, span in enumerate(self._timeline.spans):
            if (
                self._labels[node] == label
                and span.process not in by_process
                and self._timeline.leaves(span)
                and self._timeline.processes[span.process].aligned
                and window.start_ns <= span.start_ns
                and span.end_ns is not None
                and span.end_ns <= window.end_ns
            ):
                nodes[span.process].append(node)
        works = dict[int, Work]()
        for process, own in nodes.items():
            own_ns = sum(map(self._recorded_own, own))
            works[process] = self._work(own)._replace(own_ns=own_ns, whole_ns=own_ns)
        return works if all(work.tokens for work in (*works.values(), *by_process.values())) else {}

    def _recorded_own(self, node: int) -> int:
        """Return the own time of a call as recorded, whether or not the graph has times for the call."""
        spans, until_ns = self._timeline.spans, self._timeline.until_ns
        start_ns, end_ns = spans[node].start_ns, until_ns(spans[node])
        below = ((spans[kid].start_ns, until_ns(spans[kid])) for kid in self._graph.kids.get(node, ()))
        return end_ns - start_ns - union_ns(clipped(below, start_ns, end_ns))

    def _straggler(
        self, label: Label, candidates: Mapping[int, Work], compared: Mapping[int, Work]
    ) -> Suspect | None:
        """Return the slowest process of a stage if it is slower by a quarter than the median of the other
        processes.

        If all calls state their tokens, processes are compared by the time for each token. If none is slow by
        that, the process with the longest own time is returned if it had a quarter more tokens.
        """
        kind: CauseKind
        usual_ns: Callable[[Work], int]
        slowest, each_ns = _slowest(candidates, compared)
        if each_ns is not None and self._is_slow(compared[slowest], _at(each_ns)):
            usual_ns = _at(each_ns)
            kind = "slow-replica" if self._is_replica(slowest) else "slow-rank"
        else:
            slowest = max(candidates, key=lambda process: compared[process].own_ns)
            others_ns = middle(work.whole_ns for process, work in compared.items() if process != slowest)
            usual_ns = lambda _: others_ns  # noqa: E731
            if not self._is_slow(compared[slowest], usual_ns):
                return None
            kind = "slow-replica" if self._is_replica(slowest) else "slow-rank"
            if each_ns is not None:
                tokens = middle(work.tokens or 0 for p, work in compared.items() if p != slowest)
                if (compared[slowest].tokens or 0) * 4 < tokens * 5:
                    return None
                kind = "uneven-batch"
        work = compared[slowest]
        longer_ns = work.own_ns - usual_ns(work)
        others = {process: one for process, one in compared.items() if process != slowest}
        if self._busy_ns(work) < middle(map(self._busy_ns, others.values())):
            return None
        slow, beside = [slowest], self._others(slowest, compared)
        if kind != "uneven-batch":
            slow += (
                process
                for process, one in others.items()
                if one.own_ns > usual_ns(one) and one.own_ns * 4 >= usual_ns(one) * 5
            )
            host = self._timeline.processes[slowest].info.host
            of_host = {p for p in compared if self._timeline.processes[p].info.host == host}
            if len(slow) > 1 and of_host == set(slow) and len(of_host) < len(compared):
                kind = "slow-host"
                hosts = {self._timeline.processes[p].info.host for p in compared} - {host}
                beside = f"on host {hosts.pop()}" if len(hosts) == 1 else f"on {len(hosts)} other hosts"
        cuts = {
            node: self._own_ns[node] * (one.own_ns - usual_ns(one)) // one.own_ns
            for one in map(compared.__getitem__, slow)
            for node in one.nodes
        }
        return Suspect(
            kind,
            self._saves(cuts),
            longer_ns,
            label,
            slowest,
            work.own_ns,
            work.own_ns - longer_ns,
            beside,
            evidence=tuple(self._say_work(slowest, slow, compared)),
            nodes=tuple(cuts),
            peers=tuple(tuple(one.nodes) for process, one in compared.items() if process not in slow),
        )

    def _is_slow(self, work: Work, usual_ns: Callable[[Work], int]) -> bool:
        usual = usual_ns(work)
        return (work.own_ns - usual) * LEAST >= self._window_ns and work.own_ns * 4 >= usual * 5

    def _say_work(self, slowest: int, slow: Sequence[int], compared: Mapping[int, Work]) -> Iterator[str]:
        """Yield the numbers of calls and tokens of the slowest process and of the others, to show whether the
        slowest had more to do.
        """
        others = [work for process, work in compared.items() if process != slowest]
        work = compared[slowest]
        if work.tokens and all(other.tokens for other in others):
            yield f"{work.tokens:,} tokens, the others {middle(other.tokens or 0 for other in others):,}"
        calls = middle(len(other.nodes) for other in others)
        each_ns = sum(other.own_ns for other in others) // max(1, sum(len(other.nodes) for other in others))
        own = f"{count(len(work.nodes), 'call')} of {duration(work.own_ns // len(work.nodes))}"
        yield f"{own} on average, the others {calls:,} of {duration(each_ns)}"
        names = [self._timeline.processes[process].name for process in slow if process != slowest]
        if names:
            yield f"the same holds for {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"

    def _busy_ns(self, work: Work) -> int:
        return union_ns((self._graph.start_ns[node], self._graph.end_ns[node]) for node in work.nodes)

    def _is_replica(self, process: int) -> bool:
        return self._timeline.processes[process].is_replica

    # Tools.

    def _slow_tools(self) -> Iterator[Suspect]:
        """Yield tools that have calls much longer than their other calls, or a process slower than the other
        processes.
        """
        for label, by_process in self._works.items():
            if is_tool(*label) and not self._only_calls_tools(by_process):
                suspect = self._slow_server(label, by_process) or self._long_calls(label, by_process)
                if suspect is not None:
                    yield suspect

    def _only_calls_tools(self, by_process: Mapping[int, Work]) -> bool:
        """Return whether the calls of a tool spent half of their time in tool calls below them, such as calls
        recorded by the tool's server.
        """
        nodes = [node for work in by_process.values() for node in work.nodes]
        below = (kid for node in nodes for kid in self._graph.kids.get(node, ()))
        tools_ns = sum(self._took_ns(kid) for kid in below if is_tool(*self._labels[kid]))
        return tools_ns * 2 >= max(1, sum(map(self._took_ns, nodes)))

    def _took_ns(self, node: int) -> int:
        return self._timeline.spans[node].dur_ns or 0

    def _slow_server(self, label: Label, by_process: Mapping[int, Work]) -> Suspect | None:
        """Return the process whose median call is a quarter longer than in the other processes, or None if no
        process is so slow.
        """
        if len(by_process) < 2:
            return None
        each = {process: middle(map(self._took_ns, work.nodes)) for process, work in by_process.items()}
        slowest = max(each, key=lambda process: each[process])
        usual_ns = middle(ns for process, ns in each.items() if process != slowest)
        if len(by_process[slowest].nodes) < 2 or each[slowest] * 4 < usual_ns * 5:
            return None
        return self._calls(label, by_process[slowest].nodes, usual_ns, slowest, self._others(slowest, each))

    def _long_calls(self, label: Label, by_process: Mapping[int, Work]) -> Suspect | None:
        nodes = [node for work in by_process.values() for node in work.nodes]
        usual_ns = middle(map(self._took_ns, nodes))
        long = [node for node in nodes if self._took_ns(node) >= _LONG * max(1, usual_ns)]
        if not long or len(long) * 3 > len(nodes):
            return None
        places = {self._timeline.spans[node].process for node in long}
        process = places.pop() if len(places) == 1 else None
        return self._calls(label, long, usual_ns, process, "in its other calls")

    def _calls(
        self, label: Label, nodes: Sequence[int], usual_ns: int, process: int | None, beside: str
    ) -> Suspect | None:
        cuts = {node: self._took_ns(node) - usual_ns for node in nodes if self._took_ns(node) > usual_ns}
        ns = self._saves(cuts)
        if ns is None or ns * LEAST_OF_CALLS < self._window_ns:
            return None
        longest = max(cuts, key=lambda node: cuts[node])
        span = self._timeline.spans[longest]
        evidence = (f"{len(cuts):,} of its calls were longer",) if len(cuts) > 1 else ()
        return Suspect(
            "slow-tool", ns, sum(cuts.values()), label, process, self._took_ns(longest), usual_ns, beside,
            span.trajectory, span.turn, evidence, nodes=tuple(cuts),
        )  # fmt: skip

    # Trajectories.

    def _late_trajectories(self) -> Iterator[Suspect]:
        """Yield the last tenth of the trajectories if it ended later than the others by 15 % of the rollout.
        The suspect names the stage that took longer in the last trajectory.
        """
        timeline, graph = self._timeline, self._graph
        roots = [
            node
            for node, span in enumerate(timeline.spans)
            if span.stage == "trajectory"
            and span.end_ns is not None
            and timeline.consumes(span)
            and not span.cancelled
            and timeline.processes[span.process].aligned
        ]
        if len(roots) < ENOUGH:
            return
        roots.sort(key=lambda node: timeline.spans[node].end_ns or 0)
        *_, last = roots
        first = len(roots) - -(-len(roots) // 10)
        others, latest = roots[:first], roots[first:]
        ends = [timeline.spans[node].end_ns or 0 for node in roots]
        begun_ns = min(timeline.spans[node].start_ns for node in roots)
        held_ns = ends[-1] - ends[first - 1]
        if held_ns * 100 < 15 * (ends[-1] - begun_ns) or held_ns * LEAST < self._window_ns:
            return
        usual_ns = middle(self._took_ns(node) for node in others)
        cuts = {node: self._took_ns(node) - usual_ns for node in latest if self._took_ns(node) > usual_ns}
        usual_begin_ns = middle(graph.start_ns[node] for node in others)
        sooner = {
            node: later_ns for node in latest if (later_ns := graph.start_ns[node] - usual_begin_ns) > 0
        }
        known = any(self._replay.has(node) for node in latest)
        ns = self._replay.saves_by_ns(cuts, sooner) if known else None
        if ns is not None and ns * LEAST < self._window_ns:
            return
        span = timeline.spans[last]
        usual = [timeline.spans[node].trajectory for node in others]
        label, took_ns, often_ns = self._longest_part(span.trajectory, usual)
        waits = any(
            other.waits for other, own in zip(timeline.spans, self._labels, strict=True) if own == label
        )
        kind: CauseKind = "long-trajectory"
        if label is not None and took_ns - often_ns > sooner.get(last, 0):
            kind = "slow-tool" if is_tool(*label) else "queue" if waits else kind
        ended = f"ended {duration(held_ns)} after the others"
        evidence, because = [f"{the_last(len(latest), len(roots))} trajectories {ended}"], ""
        if sooner.get(last, 0) > took_ns - often_ns:
            because = f"it began {duration(sooner[last])} later than they did"
            label = None
        elif label is not None:
            often = f"{duration(often_ns)} in the others"
            evidence.append(f"{' '.join(label)} took {duration(took_ns)} of it, {often}")
        of_part = kind != "long-trajectory"
        yield Suspect(
            kind,
            ns,
            held_ns,
            label,
            None,
            took_ns if of_part else self._took_ns(last),
            often_ns if of_part else usual_ns,
            "in the other trajectories" if of_part else "the others",
            span.trajectory,
            evidence=tuple(evidence),
            nodes=tuple(latest),
            because=because,
        )

    def _longest_part(
        self, trajectory: str | None, others: Sequence[str | None]
    ) -> tuple[Label | None, int, int]:
        """Return the stage in which a trajectory exceeds the other trajectories most, the time in that stage,
        and the usual time. The stage is None if no stage has an excess.
        """
        times: dict[str | None, Counter[Label]] = {name: Counter() for name in (trajectory, *others)}
        for node, span in enumerate(self._timeline.spans):
            if span.trajectory in times and span.stage != PROFILING:
                times[span.trajectory][self._labels[node]] += self._own_ns[node]
        usual = {label: middle(times[other][label] for other in others) for label in times[trajectory]}
        label = max(usual, key=lambda label: times[trajectory][label] - usual[label], default=None)
        if label is None or times[trajectory][label] <= usual[label]:
            return None, 0, 0
        return label, times[trajectory][label], usual[label]

    def _saves(self, cuts: Mapping[int, int]) -> int | None:
        """Return how many ns shorter the step would be if each call in `cuts` were shorter by its ns. None if
        the replay contains none of the calls.
        """
        if not any(self._replay.has(node) for node in cuts):
            return None
        return self._replay.saves_by_ns(cuts)

    def _others(self, process: int, among: Iterator[int] | Mapping[int, object]) -> str:
        """Return the name of the only other process, or `the others` if there are several."""
        others = set(among) - {process}
        return self._timeline.processes[others.pop()].name if len(others) == 1 else "the others"


def _slowest(candidates: Mapping[int, Work], compared: Mapping[int, Work]) -> tuple[int, float | None]:
    """Return (slowest process, median time per token of the other processes).

    The slowest process exceeds the usual time for its tokens most. If a process states no tokens, the process
    with the longest own time is the slowest, and the time per token is None.
    """
    if not all(work.tokens for work in compared.values()):
        return max(candidates, key=lambda process: compared[process].own_ns), None
    each = {process: work.whole_ns / (work.tokens or 1) for process, work in compared.items()}
    usual = median(each.values())
    slowest = max(candidates, key=lambda p: compared[p].own_ns - usual * (compared[p].tokens or 0))
    return slowest, median(ns for process, ns in each.items() if process != slowest)


def _at(each_ns: float) -> Callable[[Work], int]:
    """Return a function that returns the time for a process' tokens at `each_ns` per token."""
    return lambda work: round(each_ns * (work.tokens or 0))


class _Lateness(NamedTuple):
    """A rank that came late to one meeting."""

    last: int
    members: tuple[int, ...]
    late_ns: int
    label: Label | None
    """The stage in which the rank took longer than the other ranks, or None if it was late outside of
    calls."""
    took_ns: int
    """Time of the rank in stage `label`. If `label` is None, the whole time by which the rank came late."""
    usual_ns: int
    cuts_ns: Mapping[int, int]
    sooner_ns: Mapping[int, int]
    """{call: ns by which it would begin sooner if the rank had come in time, in addition to `cuts_ns`}."""
    uneven: bool = False
    others: tuple[int, ...] = ()
    """The calls of the same stage in the other ranks."""
    spells: tuple[Pair, ...] = ()
    """The stretches before the meeting in which the rank was in no call, if they made the rank late. Else
    empty."""


def _by_process(spans: Sequence[Span], nodes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return one tuple for each process that has calls: the nodes of its calls."""
    calls: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        calls[spans[node].process].append(node)
    return tuple(map(tuple, calls.values()))


def ranked(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Return the suspects, the largest saving first."""
    return sorted(suspects, key=lambda one: (-(one.ns or 0), -one.longer_ns, one.kind, one.label or ("", "")))


def _is_cut(timeline: Timeline, by_process: Mapping[int, Sequence[int]], cut: Set[str]) -> bool:
    """Return whether a recording that ended early may lack calls of a stage."""
    return any(timeline.processes[process].name in cut for process in by_process) and (
        len({len(nodes) for nodes in by_process.values()}) > 1
    )


def _alike(
    timeline: Timeline, by_process: Mapping[int, Work]
) -> list[tuple[Mapping[int, Work], Mapping[int, Work]]]:
    """Return pairs of (processes of a stage that may be stragglers, processes that they are compared with).

    Profiled processes are compared with each other, and processes without a profiler with each other. A
    single process without a profiler is compared with all.
    """
    profiled = {p: work for p, work in by_process.items() if timeline.processes[p].profiled}
    others = {p: work for p, work in by_process.items() if p not in profiled}
    if not (profiled and others):
        return [(by_process, by_process)]
    groups: list[tuple[Mapping[int, Work], Mapping[int, Work]]] = [
        (others, others if len(others) > 1 else by_process)
    ]
    return [*groups, (profiled, profiled)] if len(profiled) > 1 else groups
