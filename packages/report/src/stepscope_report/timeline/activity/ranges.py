"""Ranges that a program names in its trace: steps, and a tree of labels, with the work that ran in each.

Steps are the ranges that the user chose by name; else `ProfilerStep#N`, which torch's profiler writes; else
the times between the ends of the optimizer's steps. Labels are ranges of `record_function` and NVTX, torch's
own steps, and modules. A kernel belongs to the label in which it was launched. If the launching thread has no
label, as in torch's backward pass, the label that was open on the thread with the most labels counts.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from heapq import merge
from itertools import chain, pairwise
from operator import itemgetter

from stepscope_report.timeline.activity.content import LabelTime, ProfilerStep, Work
from stepscope_report.timeline.activity.device_idle import EDGES, GAP_KINDS, GapKind, Gaps, Host
from stepscope_report.timeline.activity.doubts import NEVER
from stepscope_report.timeline.activity.intervals import (
    Cover,
    Covered,
    Names,
    Pair,
    Slices,
    Stretches,
    length,
)

_KEPT = 256
"""Largest number of labels of a trace in the result. The labels with the most time are kept."""
_MOST_LABELS = 4096
"""Largest number of labels with different paths. A further label counts as part of the label around it."""
MODULE = "nn.Module: "
"""Prefix of the names that torch gives modules if it records stacks."""
_ROOT = 0
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_FORWARD = re.compile(r"(?!.*backward).*forward", re.IGNORECASE)
_BACKWARD = re.compile(r"(?!.*forward).*backward", re.IGNORECASE)
BACKWARD = "autograd::engine::evaluate_function"
"""Prefix of the names of the operators of torch's backward pass."""
_LOADING, _OPTIMIZER = "enumerate(DataLoader)#", "Optimizer.step#"
_MOST_RANGES = 1 << 16
"""Largest number of ranges of each kind that are kept of a trace."""


class _Node:
    """One label in the tree."""

    __slots__ = ("busy", "count", "cpu_us", "idle", "idle_us", "kernels", "name", "parent", "steps", "talked")

    def __init__(self, parent: int, name: str) -> None:
        self.parent, self.name = parent, name
        self.count, self.cpu_us, self.idle_us, self.kernels = 0, 0.0, 0.0, 0
        self.busy: Cover | None = None
        self.talked: Cover | None = None
        self.idle: dict[GapKind, float] = {}
        self.steps: dict[int, float] = defaultdict(float)


class Labels:
    """The ranges of one trace by thread."""

    def __init__(self) -> None:
        self._names = Names()
        self._ranges: dict[int, Slices] = defaultdict(Slices)

    def add(self, name: str, start: float, dur: float, thread: int) -> None:
        self._ranges[thread].add(start, dur, self._names.number(name))

    def finish(self, host: Host, gaps: Gaps, steps: Sequence[ProfilerStep]) -> list[LabelTime]:
        """Return the labels as a tree in depth-first order: each label, then the labels inside it, the
        longest first.

        Args:
            steps: The steps in their order.
        """
        if not self._ranges:
            return []
        busy = Covered(merge(*(zip(d.starts, d.ends, strict=True) for d in host.devices.values())))
        nodes = [_Node(_ROOT, "")]
        nested = self._nest(nodes, busy, steps)
        main = max(nested, key=lambda thread: len(nested[thread]))
        for node, start, end, talks in self._kernels(host, nested, main):
            own = nodes[node]
            own.busy = own.busy or Cover()
            own.busy.add(start, end)
            own.kernels += 1
            if talks:
                own.talked = own.talked or Cover()
                own.talked.add(start, end)
        ordered = sorted(
            (number for number, kind in enumerate(gaps.kinds) if kind != EDGES), key=gaps.at.__getitem__
        )
        for number, stack in zip(
            ordered, nested[main].open_at(map(gaps.at.__getitem__, ordered)), strict=True
        ):
            idle, kind = nodes[stack[-1][1] if stack else _ROOT].idle, GAP_KINDS[gaps.kinds[number]]
            idle[kind] = idle.get(kind, 0.0) + gaps.ends[number] - gaps.starts[number]
        return _rows(nodes, has_device=bool(host.devices), launched=host.knows_launches)

    def _nest(self, nodes: list[_Node], busy: Covered, steps: Sequence[ProfilerStep]) -> dict[int, Slices]:
        """Add the ranges to the tree `nodes`. Return {thread: ranges, with the index of the node as name}."""
        numbers: dict[tuple[int, int], int] = {}
        nested: dict[int, Slices] = {}
        begun = [step.start_us for step in steps]
        for thread, ranges in self._ranges.items():
            nested[thread] = of_nodes = Slices()
            still: list[tuple[float, int]] = []
            ran = busy.within(map(itemgetter(0), ranges), map(itemgetter(1), ranges))
            for (start, end, name), busy_us in zip(ranges, ran, strict=True):
                while still and still[-1][0] <= start:
                    still.pop()
                above = still[-1][1] if still else _ROOT
                node = numbers.get((above, name))
                if node is None and len(nodes) < _MOST_LABELS:
                    node = numbers[above, name] = len(nodes)
                    nodes.append(_Node(above, self._names[name]))
                if node is None:
                    continue
                own = nodes[node]
                own.count += 1
                own.cpu_us += end - start
                own.idle_us += end - start - busy_us
                at = bisect_right(begun, start) - 1
                if at >= 0 and start < begun[at] + steps[at].dur_us:
                    own.steps[steps[at].number] += end - start
                still.append((end, node))
                of_nodes.add(start, end - start, node)
        return nested

    @staticmethod
    def _kernels(
        host: Host, nested: dict[int, Slices], main: int
    ) -> Iterator[tuple[int, float, float, bool]]:
        """Yield (node, start, end, True if it communicates) for each kernel whose launch is known."""
        by_thread: dict[int, list[tuple[float, float, float, bool]]] = defaultdict(list)
        for device in host.devices.values():
            launched, threads = host.launches_of(device.correlations)
            for start, end, called, by, talks in zip(
                device.starts, device.ends, launched, threads, device.talks(), strict=True
            ):
                if called != NEVER:
                    thread = by if by in nested else main
                    by_thread[thread].append((called, start, end, talks))
        of_main = by_thread.pop(main, [])
        for thread, launches in by_thread.items():
            launches.sort()
            points = (launch[0] for launch in launches)
            for launch, stack in zip(launches, nested[thread].open_at(points), strict=True):
                if stack:
                    yield stack[-1][1], *launch[1:]
                else:
                    of_main.append(launch)
        of_main.sort()
        points = (launch[0] for launch in of_main)
        for launch, stack in zip(of_main, nested[main].open_at(points), strict=True):
            if stack:
                yield stack[-1][1], *launch[1:]


def _rows(nodes: list[_Node], *, has_device: bool, launched: bool) -> list[LabelTime]:
    busy, talked = (_with_below(nodes, which) for which in ("busy", "talked"))
    children = defaultdict[int, list[int]](list)
    for number in range(len(nodes) - 1, 0, -1):
        node = nodes[number]
        children[node.parent].append(number)
        nodes[node.parent].kernels += node.kernels
    kept = {_ROOT, *sorted(range(1, len(nodes)), key=lambda at: -nodes[at].cpu_us)[:_KEPT]}
    rows: list[LabelTime] = []
    todo: list[tuple[int, tuple[str, ...]]] = [(_ROOT, ())]
    while todo:
        number, path = todo.pop()
        node = nodes[number]
        if number != _ROOT:
            rows.append(
                LabelTime(
                    path=path,
                    count=node.count,
                    cpu_us=node.cpu_us,
                    busy_us=busy[number] if launched else None,
                    communication_us=talked[number] if launched else None,
                    kernels=node.kernels,
                    idle_us=node.idle_us if has_device else None,
                    idle=node.idle,
                    steps=dict(node.steps),
                )
            )
        below = sorted(children[number], key=lambda at: (nodes[at].cpu_us, nodes[at].name))
        todo += ((at, (*path, nodes[at].name)) for at in below if at in kept)
    return rows


def _with_below(nodes: list[_Node], which: str) -> array[float]:
    """Return for each node the time in us that kernels of its label, and of all labels inside, cover.

    Args:
        which: Attribute of `_Node`: `busy` for all kernels, `talked` for kernels that communicate.
    """
    lengths = array("d", bytes(8 * len(nodes)))
    below: dict[int, list[Stretches]] = defaultdict(list)
    for number in range(len(nodes) - 1, 0, -1):
        own: Cover | None = getattr(nodes[number], which)
        parts = [*below.pop(number, ()), *(() if own is None else (own.stretches(),))]
        if parts:
            stretches = parts[0] if len(parts) == 1 else Stretches(merge(*parts))
            lengths[number] = stretches.length
            below[nodes[number].parent].append(stretches)
    return lengths


class ProfilerSteps:
    """The steps of one trace, and the times of known ranges, such as the optimizer's, within the steps."""

    def __init__(self, mark: str | None = None) -> None:
        """
        Args:
            mark: Name of the ranges that are steps, with `*` and `?` for any characters, or None.
        """
        self._mark = mark
        self._ends: dict[str, list[Pair]] = defaultdict(list)
        """{name of the range of an optimizer's step: times of its calls}."""
        self._forward, self._backward, self._h2d = Cover(), Cover(), Cover()
        self._steps: list[tuple[int, Pair]] = []
        self._loading: list[Pair] = []
        self._optimizer: list[Pair] = []

    def add(self, name: str, start_us: float, dur_us: float) -> None:
        """Add a range of the user. Ranges whose names are not known here are ignored."""
        step, pair = _STEP.fullmatch(name), (start_us, start_us + dur_us)
        if self._mark is not None and fnmatchcase(name, self._mark) and len(self._steps) < _MOST_RANGES:
            self._steps.append((-1, pair))
        elif step is not None and self._mark is None and len(self._steps) < _MOST_RANGES:
            self._steps.append((int(step[1]), pair))
        elif name.startswith(_LOADING) and len(self._loading) < _MOST_RANGES:
            self._loading.append(pair)
        elif name.startswith(_OPTIMIZER) and len(self._optimizer) < _MOST_RANGES:
            self._optimizer.append(pair)
            self._ends[name].append(pair)
        elif _FORWARD.match(name):
            self._forward.add(*pair)
        elif _BACKWARD.match(name):
            self._backward.add(*pair)

    def add_copy(self, start_us: float, dur_us: float) -> None:
        """Add a copy from the host to a device."""
        self._h2d.add(start_us, start_us + dur_us)

    def _numbered(self) -> list[tuple[int, Pair]]:
        """Return (number, times) of the steps. Steps that the user chose are numbered from 0, steps between
        an optimizer's calls from 1.
        """
        if self._steps:
            ordered = sorted(self._steps, key=lambda step: step[1])
            return [(at if number < 0 else number, pair) for at, (number, pair) in enumerate(ordered)]
        if self._mark is not None or not self._ends:
            return []
        calls: list[Pair] = max(self._ends.values(), key=len)
        return list(enumerate(pairwise(end for _, end in sorted(calls)), 1))

    def finish(
        self, devices: Iterable[Mapping[Work, Stretches]], backward: Iterable[Pair] = ()
    ) -> list[ProfilerStep]:
        """Return the steps in their order.

        Args:
            devices: The times in which each device worked, by kind of work.
            backward: The times of operators of torch's backward.
        """
        steps = self._numbered()
        if not steps:
            return []
        known = list(devices)
        self._backward.extend(backward)
        busy = Stretches(sorted(chain.from_iterable(chain.from_iterable(of.values()) for of in known)))
        computed = Stretches(sorted(chain.from_iterable(of.get("compute", ()) for of in known)))
        talked = Stretches(sorted(chain.from_iterable(of.get("communication", ()) for of in known)))
        exposed = Stretches(computed.leave(talked))
        forward, backward, h2d = (some.stretches() for some in (self._forward, self._backward, self._h2d))
        loading, optimizer = Stretches(sorted(self._loading)), Stretches(sorted(self._optimizer))
        return [
            ProfilerStep(
                number=number,
                start_us=pair[0],
                dur_us=pair[1] - pair[0],
                busy_us=_within(busy, pair) if known else None,
                exposed_us=_within(exposed, pair) if known else None,
                loading_us=_within(loading, pair),
                optimizer_us=_within(optimizer, pair),
                forward_us=_within(forward, pair) if forward else None,
                backward_us=_within(backward, pair) if backward else None,
                h2d_us=_within(h2d, pair) if h2d else None,
            )
            for number, pair in steps
        ]


def _within(stretches: Stretches, pair: Pair) -> float:
    return pair[1] - pair[0] - length(stretches.leave([pair]))
