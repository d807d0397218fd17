"""Time by label: ranges of `record_function` and NVTX, of torch's own steps, and of modules, as a tree.

A kernel belongs to the label in which it was launched. A launch on a thread without labels, as that of
torch's backward, belongs to the label that was open on the thread with most of them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain

import msgspec

from stepscope_report.timeline.activity.device_idle import DeviceGap, GapKind, Host
from stepscope_report.timeline.activity.intervals import Cover, Stretches
from stepscope_report.timeline.activity.slices import Covered, Names, Slices

KEPT = 256
"""Number of labels of a trace that are kept, those with the most time."""
_MOST = 4096
"""Number of labels by path that are told apart; a deeper one counts to the label around it."""
MODULE = "nn.Module: "
"""Beginning of the names that torch gives modules where it records stacks."""
_ROOT = 0


class LabelTime(msgspec.Struct):
    """All ranges of one label within the same labels."""

    path: tuple[str, ...]
    """Names of the labels around it, and its own, the outermost first."""
    count: int
    cpu_us: float
    busy_us: float | None
    """Time in which a device ran kernels that were launched within the label, or None if the trace has
    no launches."""
    communication_us: float | None
    kernels: int
    """Number of kernels that were launched within the label."""
    idle_us: float | None
    """Time within the label in which no device was busy."""
    idle: dict[GapKind, float]
    """The gaps of devices that were caused within this label and no label below it, by cause."""


class _Node:
    """One label in the tree."""

    __slots__ = ("busy", "count", "cpu_us", "idle", "idle_us", "kernels", "name", "parent", "talked")

    def __init__(self, parent: int, name: str) -> None:
        self.parent, self.name = parent, name
        self.count, self.cpu_us, self.idle_us, self.kernels = 0, 0.0, 0.0, 0
        self.busy: Cover | None = None
        self.talked: Cover | None = None
        self.idle: dict[GapKind, float] = {}


class Labels:
    """The ranges of one trace by thread."""

    def __init__(self) -> None:
        self._names = Names()
        self._ranges: dict[int, Slices] = defaultdict(Slices)

    def add(self, name: str, start: float, dur: float, thread: int) -> None:
        self._ranges[thread].add(start, start + dur, self._names.number(name))

    def finish(self, host: Host, gaps: Iterable[DeviceGap]) -> list[LabelTime]:
        """Return the labels by path, the longest first within each."""
        if not self._ranges:
            return []
        busy = Covered(
            sorted(chain.from_iterable(zip(d.starts, d.ends, strict=True) for d in host.devices.values()))
        )
        nodes = [_Node(_ROOT, "")]
        nested = self._nest(nodes, busy)
        main = max(nested, key=lambda thread: len(nested[thread]))
        for node, start, end, talks in self._kernels(host, nested, main):
            own = nodes[node]
            own.busy = own.busy or Cover()
            own.busy.add(start, end)
            own.kernels += 1
            if talks:
                own.talked = own.talked or Cover()
                own.talked.add(start, end)
        ordered = sorted((gap for gap in gaps if gap.kind != "edges"), key=lambda gap: gap.at)
        for gap, stack in zip(ordered, nested[main].open_at(gap.at for gap in ordered), strict=True):
            idle = nodes[stack[-1][1] if stack else _ROOT].idle
            idle[gap.kind] = idle.get(gap.kind, 0.0) + gap.end - gap.start
        return _rows(nodes, has_device=bool(host.devices), launched=host.knows_launches)

    def _nest(self, nodes: list[_Node], busy: Covered) -> dict[int, Slices]:
        """Fill the tree, and return the ranges with the numbers of their nodes as names."""
        numbers: dict[tuple[int, int], int] = {}
        nested: dict[int, Slices] = {}
        for thread, ranges in self._ranges.items():
            nested[thread] = of_nodes = Slices()
            still: list[tuple[float, int]] = []
            for start, end, name in ranges:
                while still and still[-1][0] <= start:
                    still.pop()
                above = still[-1][1] if still else _ROOT
                node = numbers.get((above, name))
                if node is None and len(nodes) < _MOST:
                    node = numbers[above, name] = len(nodes)
                    nodes.append(_Node(above, self._names[name]))
                if node is None:
                    continue
                own = nodes[node]
                own.count += 1
                own.cpu_us += end - start
                own.idle_us += end - start - busy.within(start, end)
                still.append((end, node))
                of_nodes.add(start, end, node)
        return nested

    @staticmethod
    def _kernels(host: Host, nested: dict[int, Slices], main: int) -> Iterator[tuple[int, float, float, int]]:
        """Yield (node, start, end, 1 if it communicates) of each kernel whose launch is known."""
        by_thread: dict[int, list[tuple[float, float, float, int]]] = defaultdict(list)
        for device in host.devices.values():
            for start, end, correlation, talks in zip(
                device.starts, device.ends, device.correlations, device.talks, strict=True
            ):
                launched = host.launch_of(correlation)
                if launched is not None:
                    thread = launched[1] if launched[1] in nested else main
                    by_thread[thread].append((launched[0], start, end, talks))
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
    kept = {_ROOT, *sorted(range(1, len(nodes)), key=lambda at: -nodes[at].cpu_us)[:KEPT]}
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
                )
            )
        below = sorted(children[number], key=lambda at: (nodes[at].cpu_us, nodes[at].name))
        todo += ((at, (*path, nodes[at].name)) for at in below if at in kept)
    return rows


def _with_below(nodes: list[_Node], which: str) -> array[float]:
    """Return the covered time of each label with all labels below it."""
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
