"""The critical path of a step: the call that the step waited for at each moment, and savings along the path.

`docs/decisions/0041-the-critical-path.md` has the rules. Times are integers, and the pieces of a path add up
to the step exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Literal, NamedTuple, TypeAlias

from stepscope_report.accounting import Label
from stepscope_report.timeline.step_graph import NOBODY, Cluster, StepGraph, depths, is_close

PieceKind: TypeAlias = Literal["work", "wait", "not known"]


class Piece(NamedTuple):
    """A stretch of the critical path."""

    start_ns: int
    end_ns: int
    node: int
    """The node whose own time the piece is: a span, or the root of a process."""
    kind: PieceKind

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(graph: StepGraph) -> list[Piece]:
    """Return the pieces of the path, from the step's begin to its end. O(n) in spans."""
    return _Walk(graph).run()


class _Walk:
    """A walk back from the step's end.

    It enters a call on the path at the call's end, and leaves the call at its begin.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._pieces: list[Piece] = []
        self._kids_left = {node: len(kids) for node, kids in graph.kids.items()}
        self._clusters_left = {node: len(clusters) for node, clusters in graph.clusters.items()}
        self._turns: dict[int, dict[str | None, list[int]]] = {}
        """{first member of a cluster: its members by trajectory}."""

    def run(self) -> list[Piece]:
        graph = self._graph
        node: int = len(graph.spans)
        at_ns = graph.end_ns[node]
        while node != NOBODY:
            kid, cluster = self._last_kid(node, at_ns), self._last_cluster(node, at_ns)
            if kid is not None and (cluster is None or graph.end_ns[kid] >= cluster.end_ns):
                at_ns = self._own(node, graph.end_ns[kid], at_ns)
                node = graph.last_of.get(kid, kid)
            elif cluster is not None and cluster.joined:
                at_ns = self._own(node, cluster.end_ns, at_ns)
                node = graph.last_of.get(cluster.last, cluster.last)
            elif cluster is not None:
                at_ns = self._own(node, cluster.end_ns, at_ns)
                at_ns = self._add(node, cluster.start_ns, at_ns, "not known")
            else:
                at_ns = self._own(node, graph.start_ns[node], at_ns)
                node, at_ns = self._leave(node, at_ns)
        self._pieces.reverse()
        return self._pieces

    def _leave(self, node: int, at_ns: int) -> tuple[int, int]:
        """Return (node that a call waited for before it began, time at which this wait ended).

        The node is the caller if the call waited for no other call, and `NOBODY` for a root.
        """
        graph = self._graph
        caller, cluster = graph.caller[node], graph.cluster_of.get(node)
        if caller == NOBODY:
            return NOBODY, at_ns
        before = graph.before.get(node)
        if before is not None:
            at_ns = self._own(caller, graph.end_ns[before], at_ns)
            return graph.last_of.get(before, before), at_ns
        took_ns = graph.end_ns[node] - graph.start_ns[node]
        if cluster is None or at_ns <= cluster.start_ns:
            return caller, at_ns
        turn = self._turn_before(node, cluster)
        if turn is not None:
            return turn, self._add(caller, graph.end_ns[turn], at_ns, "not known")
        if is_close(at_ns - cluster.start_ns, took_ns):
            return caller, self._own(caller, cluster.start_ns, at_ns)
        return caller, self._add(caller, cluster.start_ns, at_ns, "not known")

    def _turn_before(self, node: int, cluster: Cluster) -> int | None:
        """Return the call of the cluster that ended last before `node` began, in the same trajectory. None if
        there is no such call.
        """
        graph, trajectory = self._graph, self._graph.spans[node].trajectory
        if trajectory is None:
            return None
        key = cluster.members[0]
        if key not in self._turns:
            self._turns[key] = defaultdict(list)
            for other in cluster.members:
                self._turns[key][graph.spans[other].trajectory].append(other)
        begun_ns = graph.start_ns[node]
        turns = (other for other in self._turns[key][trajectory] if graph.end_ns[other] <= begun_ns)
        return max(turns, key=lambda other: (graph.end_ns[other], other), default=None)

    def _last_kid(self, node: int, at_ns: int) -> int | None:
        """Return the last call below a node that ended by `at_ns`, or None if there is none. Calls that ended
        later are not considered again.
        """
        left = self._kids_left.get(node, 0)
        kids = self._graph.kids[node] if left else []
        while left and (
            self._graph.end_ns[kids[left - 1]] > at_ns or self._graph.start_ns[kids[left - 1]] >= at_ns
        ):
            left -= 1
        self._kids_left[node] = left
        return kids[left - 1] if left else None

    def _last_cluster(self, node: int, at_ns: int) -> Cluster | None:
        left = self._clusters_left.get(node, 0)
        clusters = self._graph.clusters[node] if left else []
        while left and (clusters[left - 1].end_ns > at_ns or clusters[left - 1].start_ns >= at_ns):
            left -= 1
        self._clusters_left[node] = left
        return clusters[left - 1] if left else None

    def _own(self, node: int, from_ns: int, until_ns: int) -> int:
        """Add a stretch of a node's own time to the path, and return the begin of the stretch."""
        span = self._graph.span_of(node)
        if span is None or node in self._graph.unknown:
            return self._add(node, from_ns, until_ns, "not known")
        return self._add(node, from_ns, until_ns, "wait" if span.waits else "work")

    def _add(self, node: int, from_ns: int, until_ns: int, kind: PieceKind) -> int:
        if from_ns >= until_ns:
            return until_ns
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (last.node, last.kind) == (node, kind):
            self._pieces[-1] = last._replace(start_ns=from_ns)
        else:
            self._pieces.append(Piece(from_ns, until_ns, node, kind))
        return from_ns


class Replay:
    """A replay of the step in the same order, with some own times shortened.

    A call begins after the calls of its caller that ended before its begin, and after the call that its
    thread ran before (`StepGraph.before`). It ends after the calls below it. Own times stay the same unless
    they are shortened.

    A call takes no part if nothing is known to have waited for its end. Of the overlapping calls at the top
    of a process, only calls of the stage that ended last take part.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        loose = {
            node
            for owner, clusters in graph.clusters.items()
            for cluster in clusters
            for node in cluster.members
            if not cluster.joined or (owner >= len(graph.spans) and not _is_alike(graph, node, cluster.last))
        }
        depth = depths(graph.caller)
        nodes = [n for n, caller in enumerate(graph.caller) if caller != NOBODY and n not in loose]
        nodes.sort(key=depth.__getitem__)
        self._nodes, self._members = nodes, frozenset(nodes)
        """The nodes that take part, each after its caller."""
        self._line = self._lines()
        """{node in a line: the line's head}. A line is a call (its head) and all calls below the head, if the
        calls of each caller run one after the other."""
        self._points = [node for node in nodes if self._line.get(node, node) == node]
        """Nodes that are in no line, and the heads of lines."""
        self._starts = sorted(self._points, key=graph.start_ns.__getitem__)
        self._ends = list(reversed(self._points))
        self._ends.sort(key=graph.end_ns.__getitem__)
        self._meeting_of = {node: members for members in graph.meetings for node in members}
        self._owners = frozenset(graph.owners)
        self._meets = {graph.spans[node].process for node in graph.last_of}
        self._of_label: dict[Label, list[int]] = defaultdict(list)
        for node in nodes:
            self._of_label[graph.spans[node].role, graph.spans[node].stage].append(node)

    def _lines(self) -> dict[int, int]:
        graph, start, end = self._graph, self._graph.start_ns, self._graph.end_ns
        crossed = {*graph.before, *graph.before.values(), *graph.last_of, *graph.clusters}
        alone: set[int] = set()
        for node in reversed(self._nodes):
            at_ns = start[node]
            for kid in graph.kids.get(node, ()):
                if kid not in alone or start[kid] < at_ns:
                    break
                at_ns = end[kid]
            else:
                if at_ns <= end[node] and node not in crossed:
                    alone.add(node)
        heads: dict[int, int] = {}
        for node in self._nodes:
            if node in alone:
                heads[node] = heads.get(graph.caller[node], node)
        return heads

    def has(self, node: int) -> bool:
        """Return whether a call takes part, below an owner or in a process that met other ranks. Only then
        is it known whether the step waited for the call.
        """
        graph, root = self._graph, node
        while graph.caller[root] != NOBODY:
            root = graph.caller[root]
        return node in self._members and (root in self._owners or graph.process_of(root) in self._meets)

    def saves_ns(self, labels: Collection[Label], left: float = 0.0) -> int:
        """Return the ns by which the step becomes shorter if the calls of some stages are shortened, with all
        calls below them.

        Args:
            left: The fraction of the calls' times that is left: 0.0 if the calls take no time.
        """
        graph = self._graph
        chosen = {node for label in labels for node in self._of_label.get(label, ())}
        shorter = bytearray(len(graph.caller))
        cut_ns: dict[int, int] = {}
        """{head of a line: total duration of the chosen calls in the line}."""
        for node in chosen:
            head = self._line.get(node, node)
            if head == node:
                shorter[node] = 1
            elif not self._is_below(node, chosen):
                cut_ns[head] = cut_ns.get(head, 0) + graph.end_ns[node] - graph.start_ns[node]
        for node in self._points:
            if shorter[graph.caller[node]]:
                shorter[node] = 1
        return self._usual_ns - self._ends_ns(shorter, cut_ns, left)

    def saves_by_ns(self, cuts_ns: Mapping[int, int], sooner_ns: Mapping[int, int] = {}) -> int:
        """Return the ns by which the step becomes shorter if some calls are shorter, or begin sooner.

        Args:
            cuts_ns: {call: ns by which the call is shorter}.
            sooner_ns: {call: ns by which the call begins sooner}.
        """
        cut_ns: dict[int, int] = {}
        sooner = dict[int, int]()
        for node, ns in cuts_ns.items():
            head = self._line.get(node, node)
            cut_ns[head] = cut_ns.get(head, 0) + ns
        for node, ns in sooner_ns.items():
            head = self._line.get(node, node)
            to = sooner if head == node else cut_ns
            to[head] = to.get(head, 0) + ns
        nothing = bytearray(len(self._graph.caller))
        return self._usual_ns - self._ends_ns(nothing, cut_ns, 0.0, sooner)

    def _is_below(self, node: int, chosen: Set[int]) -> bool:
        above = self._graph.caller[node]
        while above != NOBODY and above not in chosen:
            above = self._graph.caller[above]
        return above != NOBODY

    @property
    def _usual_ns(self) -> int:
        graph = self._graph
        return max(graph.end_ns[root] - graph.start_ns[root] for root in self._owners)

    def _ends_ns(
        self,
        shorter: Sequence[int],
        cut_ns: Mapping[int, int],
        left: float,
        sooner_ns: Mapping[int, int] = {},
    ) -> int:
        """Return the ns from the step's begin to the end of its last owner in the replay."""
        graph = self._graph
        start, end, callers = graph.start_ns, graph.end_ns, graph.caller
        before, meeting_of, last_of = graph.before, self._meeting_of, graph.last_of
        done = list(start)
        """Time in the original step (ns) up to which each node has been replayed: its start, or the end of a
        call below it."""
        now = list(start)
        """The corresponding time in the replay."""
        begun, ended = list(start), list(end)
        met = dict[int, int]()
        """{the last call of a meeting: time in the replay at which all members have begun}."""
        ends = iter(self._ends)
        ending = next(ends, None)
        for starting in (*self._starts, None):
            while ending is not None and (starting is None or end[ending] <= start[starting]):
                was_ns, becomes_ns = done[ending], now[ending]
                if ending in meeting_of:
                    last, members = last_of[ending], meeting_of[ending]
                    was_ns = max(was_ns, start[last])
                    met_ns = met.get(last)
                    if met_ns is None:
                        met_ns = max(begun[member] for member in members)
                        if start[last] < end[ending]:  # so all members have begun
                            met[last] = met_ns
                    becomes_ns = max(becomes_ns, met_ns)
                own_ns = end[ending] - was_ns
                if shorter[ending]:
                    own_ns = int(own_ns * left)
                elif ending in cut_ns:
                    own_ns -= cut_ns[ending] - int(cut_ns[ending] * left)
                becomes_ns += own_ns
                ended[ending] = becomes_ns
                caller = callers[ending]
                if becomes_ns > now[caller]:
                    now[caller] = becomes_ns
                done[caller] = end[ending]
                ending = next(ends, None)
            if starting is not None:
                caller = callers[starting]
                was_ns, becomes_ns = done[caller], now[caller]
                if starting in before:
                    was_ns = max(was_ns, end[before[starting]])
                    becomes_ns = max(becomes_ns, ended[before[starting]])
                own_ns = start[starting] - was_ns
                becomes_ns += int(own_ns * left) if shorter[caller] else own_ns
                becomes_ns -= sooner_ns.get(starting, 0)
                begun[starting] = now[starting] = becomes_ns
        lasts_ns = (now[root] + end[root] - done[root] - start[root] for root in self._owners)
        return max(0, *lasts_ns)  # a call may end after the step


def _is_alike(graph: StepGraph, node: int, other: int) -> bool:
    one, two = graph.spans[node], graph.spans[other]
    return (one.role, one.stage) == (two.role, two.stage)
