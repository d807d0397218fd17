"""Causes of the time in which a device had nothing to run, gap by gap.

A gap ends with a kernel. If this kernel was launched before the gap began, the device itself took the time.
Otherwise the program launched the kernel too late, and what the program's threads did in the gap is the
cause. HolisticTraceAnalysis makes the same distinction, and calls the second case `host_wait`. Here the
device also took the time if more than half of the gap, and over 1 ms, came after the launch.

This file has more than 500 lines, because every cause is found in the same columns of calls and kernels.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import compress, count, islice, repeat
from operator import add, itemgetter, le, sub
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from stepscope_report.timeline.activity.device_work import Rows
from stepscope_report.timeline.activity.doubts import NEVER, Starts
from stepscope_report.timeline.activity.intervals import CHUNK, Cover, Covered, Names, Pair, Slices, packed

if TYPE_CHECKING:
    from stepscope_report.timeline.activity.nesting import Nested  # a cycle: `nesting` imports this module

GapKind: TypeAlias = Literal[
    "synchronisation", "data loader", "garbage collection", "compilation", "memory allocation", "copies",
    "collective", "slow launches", "no operator", "queued", "unknown", "edges",
]  # fmt: skip
GAP_KINDS: tuple[GapKind, ...] = get_args(GapKind)
"""Causes of gaps.

`synchronisation`: a call waited until the device had run all queued work. `copies`: the program was in a call
that copies. `collective`: the program was in a collective on the CPU. `slow launches`: operators ran on the
CPU, and launched more slowly than the device ran. `no operator`: no operator ran. `queued`: the next kernel
had been launched, and waited for another stream or its turn. `unknown`: the launch of the next kernel was not
recorded. `edges`: the time before the first and after the last kernel of the recording, unless a call of
another cause took most of it. The other causes are named for the call that the program was in."""
ON_HOST = frozenset(GAP_KINDS) - {"queued", "unknown", "edges"}
"""Causes that HolisticTraceAnalysis calls `host_wait`."""

_SYNC = re.compile(
    r"\w*[Ss]ynchronize(Stream|Device|Event)?(WithTimeout)?(_\w+)?|ur(QueueFinish|EventWait)"
    r"|(cu|cuda|hip|aclrt)Memcpy(2D|3D|2d|ToSymbol|FromSymbol|WithStream)?(_\w+)?"
)
_ALLOCATES = re.compile(
    r"(cu|cuda|hip|aclrt)(Mem)?(Malloc|Free|Alloc|Create|Map|Unmap|Release|AddressReserve|SetAccess)\w*"
    r"|urUSM(\w*Alloc|Free)|(cuda|hip)?Host(Alloc|Register|Unregister|Malloc|Free)\w*|(cuda|hip)(Host|Malloc|Free)\w*"
)
_NOT_ALLOCATING = re.compile(r"\w*(Async|FromPool)(_\w+)?|cudaHostGetDevicePointer\w*|cuMemcpy\w*")
_COPIES = re.compile(r"\w*Memcpy\w*")
_COMPILES = re.compile(
    r".*\(dynamo_timed\)|compile_fx\S*|TorchDynamo Compile\S*|triton\S*compile\S*", re.IGNORECASE
)
_LOADS = re.compile(
    r"enumerate\(DataLoader\)#.*|\[?(data[ _-]?load(er|ing)?|next[ _-]?batch|get[ _-]?batch)\]?",
    re.IGNORECASE,
)
GC = "Python GC"
"""Name that torch gives garbage collections, if `record_python_gc_info` is on."""
_FILE = re.compile(r"(.+\.py)\((\d+)\): (.+)")
_NOT_OURS = re.compile(
    r"(^|.*/)(torch|site-packages|dist-packages|lib/python3\.\d+)/|<frozen|(contextlib|threading|queue|functools)\.py"
)
"""Files in a call stack that are not the user's code. Kineto leaves out the part of a path before `torch`."""
_LONG_US = 1000.0
"""Time in us. A call that takes longer is long. A launch alone delays no kernel for longer."""
SOON_US = 1.0
"""Largest time in us by which a call may seem to end before the kernel that it waited for has ended."""
_WAITS = 64
"""Largest number of waits for streams that are compared with kernels."""
KEPT = 64
"""Largest number of `DeviceGaps` of one trace. Further ones are added up by cause."""
OTHERS = "others"


class DeviceGaps(msgspec.Struct):
    """All gaps of the devices of a trace with the same cause, call and place."""

    kind: GapKind
    call: str
    """The call that caused the gaps, and the operator around the call, such as
    `cudaStreamSynchronize in aten::item`; empty if unknown."""
    place: str
    """The innermost line of the user's code, such as `train.py(41): step`; empty unless the trace has
    stacks."""
    count: int = 0
    total_us: float = 0.0
    longest_us: float = 0.0


def stream_number(stream: object) -> int:
    return stream if isinstance(stream, int) and stream >= 0 else -1


class DeviceKernels:
    """Kernels of one device in order of their starts."""

    def __init__(self, rows: Rows, streams: Sequence[int], talks: Sequence[bool]) -> None:
        """
        Args:
            streams: Number of the stream of each track; -1 for a track that is no stream.
            talks: For each name of a kernel, True if the kernel communicates.
        """
        self.starts, self.ends, self.correlations = rows.starts, rows.ends(), rows.correlations
        self._rows, self._streams, self._talks = rows, streams, talks

    def talks(self) -> Iterator[bool]:
        """Yield whether each kernel communicates."""
        return map(self._talks.__getitem__, self._rows.names)

    def gaps(
        self, first: float, launches: Sequence[float], threads: Sequence[int]
    ) -> Iterator[list[tuple[float, float, float, float, int]]]:
        """Yield the gaps between kernels since the time `first`, in lists of some thousands.

        A gap is (start, end, the earlier of `launch` and `end`, launch, thread). `launch` is the time at
        which `thread` launched the next kernel, or `NEVER` if unknown.

        Args:
            launches: Time of the launch of each kernel.
            threads: Thread of the launch of each kernel.
        """
        until, columns = first, zip(self.starts, self.ends, launches, threads, strict=True)
        rows = []
        for start, end, launch, thread in columns:
            if start > until:
                rows.append((until, start, launch if launch < start else start, launch, thread))
                if len(rows) == CHUNK:
                    yield rows
                    rows = []
            if end > until:
                until = end
        yield rows

    def running(self, at_us: float, stream: int) -> Iterator[float]:
        """Yield the ends of the kernels that run on a stream at a moment."""
        for start, end, track in zip(self.starts, self.ends, self._rows.tracks, strict=True):
            if self._streams[track] == stream and start < at_us < end:
                yield end


@lru_cache(1 << 12)
def _kind_of(call: str) -> GapKind | None:
    """Return the kind of gap that a call into a device's runtime causes, or None if it causes no gaps."""
    if _SYNC.fullmatch(call):
        return "synchronisation"
    if _ALLOCATES.fullmatch(call) and not _NOT_ALLOCATING.fullmatch(call):
        return "memory allocation"
    return "copies" if _COPIES.fullmatch(call) else None


class Host:
    """The calls of threads and the kernels of devices, collected while a trace is read. From these, `gaps`
    finds the causes of gaps.
    """

    def __init__(self, operators: Nested) -> None:
        self.names, self._operators = Names(), operators
        self.devices: dict[int | str, DeviceKernels] = {}
        self.frames: dict[int, Slices] = defaultdict(Slices)
        """{thread: Python functions}. Empty if the trace has no stacks."""
        self._launched, self._launched_by = Starts(), Starts()
        self._launcher: int | None = None
        """The thread of the first call. To save memory, `_launched_by` has only calls of other threads."""
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._syncs: list[tuple[float, float, int, int]] = []
        """(end, start, thread, number of the name) of the calls that synchronise."""
        self._waits: list[tuple[int | str, int, float]] = []
        """(device, stream, start) of the waits for a stream, from the device's own records."""
        self._held: dict[GapKind, Cover] = defaultdict(Cover)
        """{kind of call: times in which any thread was in such a call}."""
        self._calls: dict[GapKind, Slices] = defaultdict(Slices)
        self._long: set[float] = set()
        """Starts of the calls that took more than `_LONG_US`."""

    def thread(self, thread: tuple[int | str, int | str]) -> int:
        return self._threads.setdefault(thread, len(self._threads))

    def launched(
        self, correlations: Sequence[int], starts_us: Sequence[float], threads: Sequence[int]
    ) -> None:
        """Add the times and threads of calls into a device's runtime. A call without a correlation has -1."""
        self._launched.extend(correlations, starts_us)
        if self._launcher is None:
            self._launcher = next(iter(threads), None)
        if self._launcher is not None and threads.count(self._launcher) < len(threads):
            others = [thread != self._launcher for thread in threads]
            self._launched_by.extend(compress(correlations, others), compress(threads, others))

    def calls(
        self, names: Sequence[str], starts: Sequence[float], durs: Sequence[float], threads: Sequence[int]
    ) -> None:
        """Add calls into the runtime of a device."""
        if max(durs, default=0.0) > _LONG_US:
            self._long.update(start for start, dur in zip(starts, durs, strict=True) if dur > _LONG_US)
        causes = set(filter(_kind_of, set(names)))
        if not causes:
            return
        for name, start, dur, thread in zip(names, starts, durs, threads, strict=True):
            if name not in causes:
                continue
            kind = _kind_of(name)
            if kind == "synchronisation":
                self._syncs.append((start + dur, start, thread, self.names.number(name)))
            elif kind is not None:
                self._hold(kind, name, start, dur)

    def wait(self, device: int | str, stream: int, start: float) -> None:
        """Add the device's record of a wait for a stream."""
        if len(self._waits) < _WAITS:
            self._waits.append((device, stream, start))

    def unsynced(self) -> int:
        """Return the number of kernels that still run when a wait for their stream begins."""
        return sum(
            end > start + SOON_US
            for device, stream, start in self._waits
            if device in self.devices
            for end in self.devices[device].running(start, stream)
        )

    def mark(self, name: str, start: float, dur: float) -> None:
        """Add a range of the user or of torch."""
        if _LOADS.fullmatch(name):
            self._hold("data loader", name, start, dur)
        elif _COMPILES.fullmatch(name):
            self._hold("compilation", name, start, dur)

    def collective(self, name: str, start: float, dur: float) -> None:
        """Add a collective on the CPU."""
        self._hold("collective", name, start, dur)

    def frame(self, name: str, start: float, dur: float, thread: int) -> None:
        """Add a function of Python."""
        if name == GC:
            self._hold("garbage collection", "", start, dur)
        else:
            self.frames[thread].add(start, dur, self.names.number(name))

    def _hold(self, kind: GapKind, name: str, start: float, dur: float) -> None:
        self._held[kind].add(start, start + dur)
        self._calls[kind].add(start, dur, self.names.number(name))

    @property
    def knows_launches(self) -> bool:
        """True if the trace has calls that launched kernels."""
        return bool(self._launched)

    def launches_of(self, correlations: Sequence[int]) -> tuple[array[float], Sequence[int]]:
        """Return the time and the thread of the call that launched each kernel; `NEVER` for an unknown
        time.
        """
        launcher = _NO_THREAD if self._launcher is None else self._launcher
        threads = array("i", [launcher]) * len(correlations)
        if self._launched_by:
            for at, thread in enumerate(self._launched_by.of(correlations)):
                if thread != NEVER:
                    threads[at] = int(thread)
        return self._launched.of(correlations), threads

    def gaps(self, first: float, last: float) -> Gaps:
        """Return all gaps of all devices between two times, with their causes."""
        gaps = Gaps()
        judge = _Judge(
            self._held,
            self._syncs,
            self._operators,
            self._long,
            knows_launches=self.knows_launches,
        )
        for device in self.devices.values():
            begun, ended = max(first, min(device.starts)), max(first, max(device.ends))
            judge.judge_edge(first, begun, gaps)
            for rows in device.gaps(begun, *self.launches_of(device.correlations)):
                judge.judge(rows, gaps)
            judge.judge_edge(ended, last, gaps)
        threads = gaps.threads
        gaps.calls, gaps.places = (array("i", [_NO_TEXT]) * len(threads) for _ in range(2))
        for number, name in judge.synced.items():
            gaps.calls[number] = gaps.texts.number(self.names[name])
        del judge
        for thread in sorted(set(threads)):
            own = array("q", compress(count(), map(thread.__eq__, threads)))
            moments = array("d", map(gaps.at.__getitem__, own))
            ascends = all(map(le, moments, islice(moments, 1, None)))
            self._place(thread, gaps, own if ascends else sorted(own, key=gaps.at.__getitem__))
        return gaps

    def _place(self, thread: int, gaps: Gaps, order: Sequence[int]) -> None:
        """Set the call and the place of the gaps that a thread caused, from the slices that were open then.

        Args:
            thread: The thread, or -1 if unknown.
            order: The numbers of the thread's gaps, ascending by `gaps.at`.
        """
        names, texts, calls = self.names, gaps.texts, gaps.calls
        for operators in (self._operators.threads.get(thread), self._operators.beyond.get(thread)):
            for number, around in gaps.open_in(operators, order, (_SYNCHRONISATION,)):
                if operator := self._operators.outermost(around):
                    calls[number] = texts.number(f"{texts[calls[number]]} in {operator}")
        for kind, slices in self._calls.items():  # use the innermost call that was open at `gaps.at`
            for number, around in gaps.open_in(slices, order, (_NUMBERS[kind],)):
                calls[number] = texts.number(names[around[-1][1]])
        lines: dict[tuple[int, ...], int] = {}
        for number, stack in gaps.open_in(self.frames.get(thread), order, _PLACED):
            key = tuple(map(itemgetter(1), stack))
            line = lines.get(key)
            if line is None:
                line = lines[key] = texts.number(self._line(stack))
            gaps.places[number] = line

    def _line(self, stack: Sequence[tuple[float, int]]) -> str:
        """Return the innermost frame of the user's code, else the innermost frame of any file, else an empty
        text.
        """
        frames = [self.names[name] for _, name in reversed(stack)]
        files = [frame for frame in frames if _FILE.fullmatch(frame)]
        own = next((frame for frame in files if not _NOT_OURS.match(frame)), None)
        return own or next(iter(files), "")


class Gaps:
    """Times in which a device ran nothing, each with its cause. A gap takes 33 bytes."""

    def __init__(self) -> None:
        self.texts = Names()
        self.texts.number("")
        self.starts, self.ends = array("d"), array("d")
        self.at = array("d")
        """For each gap, the moment at which the calls that may have caused it are looked up."""
        self.kinds = array("b")
        """Index of each gap's cause in `GAP_KINDS`."""
        self.threads = array("i")
        """The thread that caused each gap, or -1."""
        self.calls, self.places = array("i"), array("i")
        """Number in `texts` of each gap's `DeviceGaps.call`, and of its `DeviceGaps.place`."""

    def extend(self, *columns: Sequence[Any]) -> None:
        """Add gaps, given as columns: starts, ends, `at`, `kinds`, `threads`."""
        own: list[array[Any]] = [self.starts, self.ends, self.at, self.kinds, self.threads]
        for column, values in zip(own, columns, strict=True):
            column.frombytes(packed(column.typecode, values))

    def open_in(
        self, slices: Slices | None, order: Sequence[int], kinds: Container[int]
    ) -> Iterator[tuple[int, list[tuple[float, int]]]]:
        """Yield (number of a gap, slices that were open at `at`) for each gap of these kinds that has open
        slices.

        Args:
            order: The numbers of the gaps, ascending by `at`.
        """
        if slices is None:
            return
        own = [number for number in order if self.kinds[number] in kinds]
        for number, still in zip(own, slices.open_at(map(self.at.__getitem__, own)), strict=True):
            if still:
                yield number, still

    def end_by(self, last: float) -> None:
        """Cut the gaps at the time `last`: drop gaps that start later, and shorten gaps that end later."""
        kept = [number for number, start in enumerate(self.starts) if start < last]
        columns: list[array[Any]] = [self.starts, self.ends, self.at, self.kinds, self.calls, self.places]
        for column in columns:
            column[:] = array(column.typecode, [column[number] for number in kept])
        self.ends[:] = array("d", (min(end, last) for end in self.ends))


_NUMBERS = {kind: number for number, kind in enumerate(GAP_KINDS)}
_SYNCHRONISATION, _COPYING, _SLOW, _NO_OPERATOR = map(
    GAP_KINDS.index, ("synchronisation", "copies", "slow launches", "no operator")
)
_QUEUED, _UNKNOWN, EDGES = map(GAP_KINDS.index, ("queued", "unknown", "edges"))
_PLACED = frozenset(range(len(GAP_KINDS))) - {_QUEUED, _UNKNOWN, EDGES}
_AFTER_SYNCS = frozenset((_COPYING, _SLOW, _NO_OPERATOR))
"""Causes that become `synchronisation` if a call synchronised at the start of the gap."""
_NO_THREAD = -1
_NO_TEXT = 0
"""Number of the empty text."""


class _Judge:
    """Finds the causes of gaps."""

    def __init__(
        self,
        held: dict[GapKind, Cover],
        syncs: list[tuple[float, float, int, int]],
        operators: Nested,
        long: Container[float],
        *,
        knows_launches: bool,
    ) -> None:
        """
        Args:
            long: Starts of long calls. A kernel launched by such a call may have waited for the call.
        """
        self._long = long
        self._knows_launches, self._main = knows_launches, operators.main
        known = [kind for kind in ("copies", *reversed(GAP_KINDS)) if kind in held]
        self._held = [(_NUMBERS[kind], Covered(held[kind].stretches())) for kind in dict.fromkeys(known)]
        self.synced: dict[int, int] = {}
        """{number of a gap: number of the name of the call that synchronised}."""
        self._syncs = sorted(syncs)
        self._ends = array("d", map(itemgetter(0), self._syncs))
        self._threads = list(operators.covered())

    def judge(self, rows: Sequence[tuple[float, float, float, float, int]], gaps: Gaps) -> None:
        """Find the causes of gaps, given as rows of `DeviceKernels.gaps`, and add them to `gaps`."""
        if not rows:
            return
        starts, ends, untils, launches, threads = zip(*rows, strict=True)
        ran: Iterator[float] = repeat(0.0)
        for covered in self._threads:
            ran = map(add, ran, covered.within(starts, untils))
        held = self._holders(starts, untils)
        first, knows, special = len(gaps.starts), self._knows_launches, bool(held or self._syncs)
        kinds, moments, by = list[int](), list[float](), list(threads)
        add_kind, add_moment = kinds.append, moments.append
        for start, until, end, launch, on_cpu in zip(starts, untils, ends, launches, ran, strict=False):
            moment, kind = (start + until) / 2, _SLOW if on_cpu > (until - start) / 2 else _NO_OPERATOR
            held_us = end - until  # the part of the gap after the launch
            if launch <= start or (
                held_us > _LONG_US and held_us > until - start and launch not in self._long
            ):
                kind, moment = _QUEUED, launch
            elif launch == NEVER and knows:
                kind, moment, by[len(kinds)] = _UNKNOWN, start, _NO_THREAD
            else:
                if launch == NEVER:
                    by[len(kinds)] = self._main
                if special:
                    kind = held.get(len(kinds), kind)
                    sync = self._sync(start, until) if kind in _AFTER_SYNCS else None
                    if sync is not None:
                        ended, began, by[len(kinds)], self.synced[first + len(kinds)] = sync
                        kind, moment = _SYNCHRONISATION, (began + ended) / 2
            add_kind(kind)
            add_moment(moment)
        gaps.extend(starts, ends, moments, kinds, by)

    def judge_edge(self, start: float, end: float, gaps: Gaps) -> None:
        """Add the time before the first or after the last kernel, unless it is empty. The cause is the kind
        of call that was open for more than half of the time, such as a data loader, or else `edges`.
        """
        if start < end:
            kind = self._holders([start], [end]).get(0, EDGES)
            gaps.extend([start], [end], [(start + end) / 2], [kind], [self._main])

    def _holders(self, starts: Sequence[float], untils: Sequence[float]) -> dict[int, int]:
        """Return {number of a gap: number of the kind of call that was open for more than half of the gap}.

        If several kinds were open, the first in `GAP_KINDS` counts, and `copies` only if no other was open.
        """
        holders: dict[int, int] = {}
        for kind, covered in self._held:
            for number, us in enumerate(covered.within(starts, untils)):
                if us > (untils[number] - starts[number]) / 2:
                    holders[number] = kind
        return holders

    def _sync(self, start: float, until: float) -> tuple[float, float, int, int] | None:
        """Return the call that synchronised at the time `start`, when the device became idle, and that ended
        before the next launch, or None.
        """
        for at in range(bisect_left(self._ends, start - SOON_US), len(self._syncs)):
            sync = self._syncs[at]
            if sync[0] > until + SOON_US:
                return None
            if sync[1] <= start:
                return sync
        return None


def by_cause(gaps: Gaps) -> list[DeviceGaps]:
    """Return the totals of the gaps by cause, call and place, the longest total first.

    Totals beyond `KEPT` are added up by cause and come last.
    """
    times: dict[tuple[int, int, int], array[float]] = defaultdict(lambda: array("d"))
    keys = zip(gaps.kinds, gaps.calls, gaps.places, strict=True)
    for key, us in zip(keys, map(sub, gaps.ends, gaps.starts), strict=True):
        times[key].append(us)
    texts = gaps.texts
    sums = [
        DeviceGaps(GAP_KINDS[kind], texts[call], texts[place], len(own), sum(own), max(own))
        for (kind, call, place), own in times.items()
    ]
    rows = sorted(sums, key=lambda row: (-row.total_us, row.kind, row.call, row.place))
    rest: dict[GapKind, DeviceGaps] = {}
    for row in rows[KEPT:]:
        others = rest.setdefault(row.kind, DeviceGaps(row.kind, OTHERS, ""))
        _add(others, row.count, row.total_us, row.longest_us)
    return [*rows[:KEPT], *rest.values()]


def _add(row: DeviceGaps, count: int, us: float, longest_us: float) -> None:
    row.count += count
    row.total_us += us
    row.longest_us = max(row.longest_us, longest_us)


def in_steps(gaps: Gaps, steps: Sequence[Pair]) -> list[dict[GapKind, float]]:
    """Return {cause: time of the gaps} for each step. The steps must be in order."""
    if not steps:
        return []
    inside = [defaultdict[GapKind, float](float) for _ in steps]
    firsts = [start for start, _ in steps]
    for start, end, kind in zip(gaps.starts, gaps.ends, gaps.kinds, strict=True):
        at = max(0, bisect_right(firsts, start) - 1)
        while at < len(steps) and firsts[at] < end:
            common = min(end, steps[at][1]) - max(start, firsts[at])
            if common > 0:
                inside[at][GAP_KINDS[kind]] += common
            at += 1
    return [dict(kinds) for kinds in inside]
