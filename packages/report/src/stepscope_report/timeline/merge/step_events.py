"""Spans, counters and forward passes of a step as events of its merged timeline, with arrows between them.

Spans are on tracks above the profilers'. Each counter is a track in its process' row.

This file has more than 500 lines, because an arrow needs the tracks of the spans and passes at its two ends.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope_report.timeline.activity.event_names import iteration_of
from stepscope_report.timeline.critical_path import critical_path
from stepscope_report.timeline.merge import Selection
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, JsonEvent, Tracks, microseconds
from stepscope_report.timeline.merge.rewrite import Text
from stepscope_report.timeline.model import Counter, EnginePasses, Span, Timeline
from stepscope_report.timeline.passes import linked_requests, pass_of_rows, passes_of_requests
from stepscope_report.timeline.rows import Axis, Row, Rows
from stepscope_report.timeline.step_graph import step_graph
from stepscope_report.timeline.tree import requests

_TOP = -1_000_000
"""Sort index of a row's first track of spans: above threads, whose index is their tid."""
_TRAJECTORIES = "trajectories"
_SLOWEST = 10
"""Number of trajectories whose turns have arrows to their passes, unless all are selected."""
STALL = "profiler: engine writes its trace"
_FLOW = re.compile(rb'\{[^{}]*"ac2g"[^{}]*\}')
_ANNOTATION = re.compile(rb'\{[^{}]*"user_annotation"(?:[^{}]|\{[^{}]*\})*\}')
_Thread: TypeAlias = tuple[int, int]
"""(pid, tid)."""


class Interval(NamedTuple):
    start_ns: int
    end_ns: int
    parent: int | None
    """Index of the parent interval, or None if there is none."""


def pack(intervals: Sequence[Interval]) -> list[int]:
    """Return the lane of each interval, counted from 0.

    Two intervals in a lane are nested or disjoint. An interval gets its parent's lane if it fits there:
    within the parent and beside its siblings. All other intervals get the lowest lane in which nothing runs
    at their start: intervals without a parent, children that outlive their parent, and concurrent siblings.
    If all children fit, the number of lanes is the largest number of intervals without a parent that overlap.
    """
    lanes = [-1] * len(intervals)
    stacks: list[list[int]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for index in sorted(range(len(intervals)), key=lambda at: (intervals[at].start_ns, at)):
        interval = intervals[index]
        while busy and busy[0][0] <= interval.start_ns:
            heappush(free, heappop(busy)[1])
        lane = -1 if interval.parent is None else lanes[interval.parent]
        if lane < 0 or not _fits(index, intervals, stacks[lane]):
            lane = heappop(free) if free else len(stacks)
            stacks[lane : lane + 1] = [[]]
            heappush(busy, (interval.end_ns, lane))
        stacks[lane].append(index)
        lanes[index] = lane
    return lanes


def _fits(index: int, intervals: Sequence[Interval], stack: list[int]) -> bool:
    """Return whether an interval fits in its parent's lane: the parent is innermost and ends no earlier."""
    start_ns, end_ns, parent = intervals[index]
    while stack and intervals[stack[-1]].end_ns <= start_ns:
        stack.pop()
    return bool(stack) and stack[-1] == parent and end_ns <= intervals[parent].end_ns


class Drawn:
    """The spans and counters of one timeline that are selected."""

    def __init__(self, timeline: Timeline, rows: Rows, axis: Axis, selection: Selection, cut: Cut) -> None:
        self._timeline = timeline
        self._rows = rows
        self._axis = axis
        self._selection = selection
        self._cut = cut
        self._tids: dict[int, int] = {}
        self._spans_of = defaultdict[int | None, list[int]](list)
        for index, span in enumerate(timeline.spans):
            self._spans_of[span.process].append(index)
        self._counters_of = defaultdict[int | None, list[Counter]](list)
        for counter in timeline.counters:
            self._counters_of[counter.process].append(counter)
        self._passes_at: dict[int, JsonEvent] = {}
        """{index of an engine in `Timeline.passes`: pid and tid of the track with its passes}."""
        self._launches: dict[int, EngineLaunches] = {}
        """{index of an engine: the launches in its traces}."""
        self._pointed: dict[int, set[int]] = defaultdict(set)
        """{index of an engine: its passes with an arrow from a turn}."""
        self._stalled: set[int] = set()
        """Replicas whose stalls have been drawn. Stalls are drawn in a replica's first row."""
        self.outside = 0
        """Spans left out because they are not between `from` and `to`."""

    def of(self, row: Row, tracks: Tracks) -> Iterator[JsonEvent]:
        """Yield the spans of a row. Call this for the rows in order, from top to bottom."""
        chosen = [index for index in self._spans_of[row.process] if self._chosen(index, row)]
        for group, members in self._groups(chosen).items():
            lanes = pack(self._intervals(members))
            tids = _tracks(row, group, lanes, tracks)
            for index, lane in zip(members, lanes, strict=True):
                self._tids[index] = tids[lane]
                yield self._slice(index, row)

    def path(self, row: Row, tracks: Tracks) -> Iterator[JsonEvent]:
        """Yield the critical path, as far as it is known, in the row of the capture's owner."""
        if row.process != 0 or not self._is_wanted(row):
            return
        graph = step_graph(self._timeline)
        for piece in critical_path(graph):
            span = graph.span_of(piece.node)
            start, end = piece.start_ns - self._axis.base_ns, piece.end_ns - self._axis.base_ns
            if span is None or piece.kind == "not known" or not self._cut.holds(start, end):
                continue
            if self._is_wanted(self._row(piece.node), span.role):
                args: JsonEvent = {"process": self._timeline.processes[span.process].name, "kind": piece.kind}
                if span.trajectory is not None:
                    args |= {"trajectory": span.trajectory, "turn": span.turn}
                yield {
                    "ph": "X", "cat": "critical path", "name": f"{span.role} {span.stage}", "pid": row.pid,
                    "tid": tracks.own(row, "critical path", _TOP - 1), "ts": microseconds(start),
                    "dur": microseconds(end - start), "args": args,
                }  # fmt: skip

    def consumed(self, row: Row, tracks: Tracks) -> Iterator[JsonEvent]:
        """Yield a mark for each trajectory that the row's process trains on. All these marks are on one
        track.
        """
        marks = [span for span in self._timeline.consumed if span.process == row.process]
        if not marks or not self._selection.rank(row.info.rank):
            return
        tid = tracks.own(row, "consumed trajectories", _TOP // 2 - 1)
        for span in marks:
            if not self._selection.role(row.info.role, span.role):
                continue
            at = span.start_ns + (row.shift_ns or 0) - self._axis.base_ns
            yield {
                "ph": "i", "s": "t", "cat": "stepscope", "name": f"consume {span.trajectory}", "pid": row.pid,
                "tid": tid, "ts": microseconds(at), "args": _args(span, self._timeline.step),
            }  # fmt: skip

    def stalls(self, row: Row, tracks: Tracks) -> Iterator[JsonEvent]:
        """Yield a span for each time in which the row's engine served nothing because of its own profiler."""
        replica = row.info.replica
        if replica is None or replica in self._stalled or row.unaligned is not None:
            return
        if not self._is_wanted(row) or (row.info.role, replica) in self._timeline.shared_numbers:
            return
        self._stalled.add(replica)
        for stall in self._timeline.stalls:
            start, end = stall.start_ns - self._axis.base_ns, stall.end_ns - self._axis.base_ns
            if stall.replica == replica and self._is_inside(start, end):
                yield {
                    "ph": "X", "cat": "stepscope", "name": STALL, "pid": row.pid,
                    "tid": tracks.own(row, "engine's profiler", _TOP // 2 - 2), "ts": microseconds(start),
                    "dur": microseconds(end - start), "args": {"role": row.info.role, "replica": replica},
                }  # fmt: skip

    def passes(self, row: Row, tracks: Tracks) -> Iterator[JsonEvent]:
        """Yield the forward passes of the row's engines, each engine on a track of its own."""
        if row.unaligned is not None or not self._is_wanted(row):
            return
        if (row.info.role, row.info.replica) in self._timeline.shared_numbers:
            return
        for at, engine in enumerate(self._timeline.passes):
            if engine.replica != row.info.replica or at in self._passes_at:
                continue
            name = f"passes, dp {engine.noted.dp}" if engine.noted.dp else "passes"
            tid = tracks.own(row, name, _TOP // 2 - 3)
            self._passes_at[at] = {"pid": row.pid, "tid": tid}
            yield from self._slices(engine, self._passes_at[at])

    def _slices(self, engine: EnginePasses, track: JsonEvent) -> Iterator[JsonEvent]:
        noted, rows = engine.noted, engine.rows
        facts = noted.passes
        for at, (begin_ns, end_ns) in enumerate(zip(engine.begins_ns, engine.ends_ns, strict=True)):
            start, end = begin_ns - self._axis.base_ns, end_ns - self._axis.base_ns
            if self._cut.holds(start, end):
                own = slice(rows[at], rows[at + 1])
                yield {
                    "ph": "X", "cat": "pass", "name": f"{facts.kind[at]} {facts.requests[at]}", **track,
                    "ts": microseconds(start), "dur": microseconds(end - start),
                    "args": {
                        "number": facts.number[at], "requests": facts.requests[at],
                        "tokens": sum(noted.served.tokens[own]), "output": sum(noted.served.output[own]),
                        "running": facts.running[at], "waiting": facts.waiting[at],
                        "kv_use": facts.kv_use[at],
                    },
                }  # fmt: skip

    def _served(self, ids: FlowIds) -> Iterator[JsonEvent]:
        """Yield arrows from turns to the first and the last pass of their requests."""
        links = linked_requests(self._timeline) if self._passes_at else {}
        slowest = None if self._selection.requests == "all" else self._slowest()
        places = {at: pass_of_rows(self._timeline.passes[at]) for at in self._passes_at}
        rows = {at: passes_of_requests(self._timeline.passes[at]) for at in self._passes_at}
        for (at, request), index in links.items():
            trajectory = self._timeline.spans[index].trajectory
            if at not in rows or index not in self._tids or self._row(index).unaligned is not None:
                continue
            if not rows[at][request] or (slowest is not None and trajectory not in slowest):
                continue
            served = [places[at][row] for row in rows[at][request]]
            for edge in dict.fromkeys((served[0], served[-1])):
                self._pointed[at].add(edge)
                begin = self._timeline.passes[at].begins_ns[edge] - self._axis.base_ns
                number = ids.number(b"%d-%d-%d" % (at, request, edge), "pass")
                common: JsonEvent = {"cat": "stepscope", "name": "pass", "id": number}
                yield {"ph": "s", **common, **self._at(index)}
                yield {"ph": "f", "bp": "e", **common, **self._passes_at[at], "ts": microseconds(begin)}

    def launches(self, row: Row) -> EngineLaunches | None:
        """Return the launches that the events of a row's traces are added to. Return None if the row is
        unaligned, or if none or several engines of its replica have drawn passes.
        """
        engines = [at for at in self._passes_at if self._timeline.passes[at].replica == row.info.replica]
        if len(engines) != 1 or row.unaligned is not None:
            return None
        return self._launches.setdefault(engines[0], EngineLaunches())

    def kernels(self, ids: FlowIds) -> Iterator[JsonEvent]:
        """Yield arrows from passes to their first work on a device. Call this after all traces are
        written.
        """
        for at, launches in self._launches.items():
            engine = self._timeline.passes[at]
            every = self._selection.requests == "all"
            wanted = set(range(len(engine.begins_ns))) if every else self._pointed[at]
            yield from launches.arrows(engine, wanted, self._passes_at[at], self._axis.base_ns, ids)

    def _slowest(self) -> frozenset[str | None]:
        """Return the names of the longest trajectories."""
        spans = self._timeline.spans
        roots = [span for span in spans if span.stage == "trajectory" and span.trajectory is not None]
        roots.sort(key=lambda span: span.start_ns - self._timeline.until_ns(span))
        return frozenset(span.trajectory for span in roots[:_SLOWEST])

    def counters(self, row: Row) -> Iterator[JsonEvent]:
        """Yield the values of a row's counters. A value that stays the same is one event."""
        for counter in self._counters_of[row.process] if self._is_wanted(row) else ():
            name, last = _name(counter), None
            for at_ns, value in _points(counter):
                position = at_ns + (row.shift_ns or 0) - self._axis.base_ns
                # Viewers drop a time below 0, which comes from a clock that is far off.
                if value != last and position >= 0 and self._cut.holds(position, position):
                    last = value
                    yield {
                        "ph": "C", "cat": "stepscope", "name": name, "pid": row.pid, "tid": 0,
                        "ts": microseconds(position), "args": {"value": value},
                    }  # fmt: skip

    def arrows(self, ids: FlowIds) -> Iterator[JsonEvent]:
        """Yield arrows from spans to the spans that they caused in other processes. Call this after all rows
        are drawn.
        """
        below = (
            (parent, index)
            for index in self._tids
            if (parent := self._timeline.spans[index].parent) is not None
        )
        for name, pairs in (("call", below), ("request", requests(self._timeline))):
            for cause, index in pairs:
                if not {cause, index} <= self._tids.keys() or not self._both_aligned(index, cause):
                    continue
                common = {"cat": "stepscope", "name": name, "id": ids.number(b"%d" % index)}
                yield {"ph": "s", **common, **self._at(cause)}
                yield {"ph": "f", "bp": "e", **common, **self._at(index)}
        yield from self._served(ids)

    def _both_aligned(self, index: int, parent: int) -> bool:
        """Return whether the two spans are in two different rows that are both aligned."""
        one, other = (self._row(at) for at in (index, parent))
        return one is not other and one.unaligned is None and other.unaligned is None

    def _chosen(self, index: int, row: Row) -> bool:
        wanted = self._is_wanted(row, self._timeline.spans[index].role)
        return wanted and self._is_inside(*self._positions(index))

    def _is_wanted(self, row: Row, *roles: str) -> bool:
        return self._selection.rank(row.info.rank) and self._selection.role(row.info.role, *roles)

    def _is_inside(self, start: int, end: int) -> bool:
        """Return whether a span is in the selected time; if not, count it as left out."""
        inside = self._cut.holds(start, end)
        self.outside += not inside
        return inside

    def _groups(self, chosen: Sequence[int]) -> dict[str, list[int]]:
        """Return {name: spans that share tracks}: one group for each thread of a process, and one group for
        all trajectories.
        """
        spans = self._timeline.spans
        threads = {spans[index].thread for index in chosen if spans[index].trajectory is None}
        groups: dict[str, list[int]] = {
            "spans" if len(threads) < 2 else f"spans, thread {n}": [] for n in threads
        }
        for index in chosen:
            thread = "spans" if len(threads) < 2 else f"spans, thread {spans[index].thread}"
            group = thread if spans[index].trajectory is None else _TRAJECTORIES
            groups.setdefault(group, []).append(index)
        return groups

    def _intervals(self, members: Sequence[int]) -> list[Interval]:
        at = {index: number for number, index in enumerate(members)}
        parents = (self._timeline.spans[index].parent for index in members)
        return [
            Interval(*self._positions(index), None if parent is None else at.get(parent))
            for index, parent in zip(members, parents, strict=True)
        ]

    def _positions(self, index: int) -> tuple[int, int]:
        span = self._timeline.spans[index]
        shift_ns = (self._row(index).shift_ns or 0) - self._axis.base_ns
        return span.start_ns + shift_ns, max(self._timeline.until_ns(span), span.start_ns) + shift_ns

    def _row(self, index: int) -> Row:
        return self._rows.of_process[self._timeline.spans[index].process]

    def _at(self, index: int) -> JsonEvent:
        start, _ = self._positions(index)
        return {"pid": self._row(index).pid, "tid": self._tids[index], "ts": microseconds(start)}

    def _slice(self, index: int, row: Row) -> JsonEvent:
        span = self._timeline.spans[index]
        start, end = self._positions(index)
        return {
            "ph": "X",
            "cat": "stepscope",
            "name": span.stage,
            "pid": row.pid,
            "tid": self._tids[index],
            "ts": microseconds(start),
            "dur": microseconds(end - start),
            "args": _args(span, self._timeline.step),
        }


def _tracks(row: Row, group: str, lanes: Sequence[int], tracks: Tracks) -> list[int]:
    count = max(lanes, default=-1) + 1
    top = _TOP if group != _TRAJECTORIES else _TOP // 2
    names = [group if count == 1 else f"{group} {lane + 1} of {count}" for lane in range(count)]
    return [tracks.own(row, name, top + lane) for lane, name in enumerate(names)]


def _args(span: Span, step: int) -> JsonEvent:
    args: JsonEvent = {"role": span.role}
    for name in ("trajectory", "turn", "policy_version", "begun_step", "error"):
        if (value := getattr(span, name)) is not None:
            args[name] = value
    if span.step != step:
        args["step"] = span.step
    if span.cancelled:
        args["cancelled"] = True
    if span.end_ns is None:
        args["open"] = "it was never seen to end"
    return {**{name: _plain(value) for name, value in (span.attrs or {}).items()}, **args}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not msgspec.json.encode(value)[:1].isdigit() else value


def _name(counter: Counter) -> str:
    """Return `GPU 3: GPU power [W]`, `process memory [B]`."""
    unit = f" [{counter.unit}]" if counter.unit else ""
    return f"{counter.of}: {counter.name}{unit}" if counter.of else f"{counter.name}{unit}"


def _points(counter: Counter) -> Iterator[tuple[int, float]]:
    """Yield (time from which a value holds, value).

    A value over an interval holds from the previous sample on, so the first such value is not drawn. A total
    is drawn as its growth from the first value.
    """
    times, values = counter.times_ns, counter.values
    if counter.kind == "interval":
        yield from zip(times[:-1], values[1:], strict=True)
        return
    first = values[0] if counter.kind == "total" else 0
    yield from zip(times, (value - first for value in values), strict=True)


class _Seen(msgspec.Struct):
    """The fields of an event that are used."""

    ph: str
    pid: int
    tid: int
    ts: float
    dur: float = 0.0
    id: int = 0
    cat: str = ""
    name: str = ""


_decode = msgspec.json.Decoder(_Seen).decode


class EngineLaunches:
    """Annotations and launches of one engine's workers, collected while the workers' traces are written.

    A worker annotates each pass with the numbers of its requests. A launch on the thread and in the time of
    the annotation has the same correlation as the launched work, also if the work is a replayed CUDA graph.
    Passes and annotations are matched by order and numbers and not by time, because a worker may launch a
    pass before the previous pass has ended. If several workers annotate a pass, the first annotation counts,
    because all workers run the same passes.
    """

    def __init__(self) -> None:
        self._annotations: list[tuple[float, float, int, int, _Thread]] = []
        """(start, end, requests, prefilling requests, thread) of each pass."""
        self._launches: defaultdict[_Thread, list[tuple[float, int]]] = defaultdict(list)
        """(time, correlation) by thread."""
        self._work: dict[int, _Seen] = {}
        """{correlation: the first event on a device}."""

    def see(self, text: Text) -> None:
        """Note the annotations and launches in written events."""
        content = bytes(text)
        for found in _FLOW.finditer(content) if b'"ac2g"' in content else ():
            flow = _event(found[0])
            if flow is not None and flow.cat == "ac2g" and flow.ph == "s":
                self._launches[flow.pid, flow.tid].append((flow.ts, flow.id))
            elif flow is not None and flow.cat == "ac2g" and flow.ph == "f":
                known = self._work.get(flow.id)
                self._work[flow.id] = flow if known is None or flow.ts < known.ts else known
        for found in _ANNOTATION.finditer(content) if b'"user_annotation"' in content else ():
            event = _event(found[0])
            named = None if event is None or event.ph != "X" else iteration_of(event.name)
            if event is None or named is None or event.cat != "user_annotation":
                continue
            thread = event.pid, event.tid
            if not self._annotations or self._annotations[0][4] == thread:
                end = event.ts + event.dur
                number = named.prefills + named.decodes
                self._annotations.append((event.ts, end, number, named.prefills, thread))

    def arrows(
        self, engine: EnginePasses, wanted: Set[int], track: JsonEvent, base_ns: int, ids: FlowIds
    ) -> Iterator[JsonEvent]:
        """Yield arrows from passes to their first work on a device.

        Args:
            wanted: The passes, by position.
            track: The pid and tid of the drawn passes.
        """
        for at, work in self._first_work(engine, base_ns).items():
            if at in wanted:
                number = ids.number(b"%d-%d-%d" % (engine.replica, engine.noted.dp, at), "kernel")
                common: JsonEvent = {"cat": "stepscope", "name": "first kernel", "id": number}
                start = float(microseconds(engine.begins_ns[at] - base_ns))
                yield {"ph": "s", **common, **track, "ts": min(start, work.ts)}
                yield {"ph": "f", "bp": "e", **common, "pid": work.pid, "tid": work.tid, "ts": work.ts}

    def _first_work(self, engine: EnginePasses, base_ns: int) -> Mapping[int, _Seen]:
        for launches in self._launches.values():
            launches.sort()
        first: dict[int, _Seen] = {}
        place, until = 0, 0.0
        for start, end, number, prefills, thread in sorted(self._annotations):
            if start < until:
                continue  # SGLang marks a pass twice, one annotation in the other
            until = end
            at = self._pass_of(engine, place, base_ns, start, end, number, prefills)
            if at is None:
                continue
            place = at + 1
            launches = self._launches[thread]
            for ts, correlation in launches[bisect_left(launches, (start, 0)) :]:
                if ts > end:
                    break
                if correlation in self._work:
                    first[at] = self._work[correlation]
                    break
        return first

    def _pass_of(
        self,
        engine: EnginePasses,
        place: int,
        base_ns: int,
        start: float,
        end: float,
        number: int,
        prefills: int,
    ) -> int | None:
        """Return the first pass from `place` on that fits an annotation. None if no pass fits.

        Such a pass has `number` requests, and ended after `start`. If `prefills` is 0, the pass is a decode
        pass, otherwise not. The previous pass began before `end`.
        """
        facts = engine.noted.passes
        for at in range(place, len(engine.begins_ns)):
            if at and (engine.begins_ns[at - 1] - base_ns) / 1000 > end:
                return None
            if (engine.ends_ns[at] - base_ns) / 1000 < start or facts.requests[at] != number:
                continue
            if (facts.kind[at] in ("decode", "speculative")) == (prefills == 0):
                return at
        return None


def _event(content: bytes) -> _Seen | None:
    try:
        return _decode(content)
    except msgspec.DecodeError:
        return None
