"""Causes of the time in which a device had nothing to run, gap by gap.

A gap ends with a kernel. If that kernel was launched before the gap began, the device itself took the time;
else the program launched too late, and what its threads did meanwhile is the cause. HolisticTraceAnalysis
separates the same two and calls the second `host_wait`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope_report.timeline.activity.doubts import Starts
from stepscope_report.timeline.activity.intervals import Cover, Covered, Names, Pair, Slices

GapKind: TypeAlias = Literal[
    "synchronisation", "data loader", "garbage collection", "compilation", "memory allocation", "copies",
    "collective", "slow launches", "no operator", "queued", "unknown", "edges",
]  # fmt: skip
GAP_KINDS: tuple[GapKind, ...] = get_args(GapKind)
"""Causes of gaps.

`synchronisation`: a call waited until the device had run all that was queued. `copies`: the program was in a
call that copies. `collective`: in a collective on the CPU. `slow launches`: operators ran on the CPU, which
launched more slowly than the device ran. `no operator`: none ran. `queued`: the next kernel was launched
before, and waited for another stream or its turn. `unknown`: the launch of the next kernel was not recorded.
`edges`: before the first and after the last kernel of the recording."""
ON_HOST = frozenset(GAP_KINDS) - {"queued", "unknown", "edges"}
"""Causes that HolisticTraceAnalysis calls `host_wait`."""

_SYNC = re.compile(
    r"\w*Synchronize(Stream|Device|Event)?(WithTimeout)?(_\w+)?"
    r"|(cu|cuda|hip|aclrt)Memcpy(2D|3D|2d|ToSymbol|FromSymbol)?(_\w+)?"
)
_ALLOCATES = re.compile(
    r"(cu|cuda|hip|aclrt)(Mem)?(Malloc|Free|Alloc|Create|Map|Unmap|Release|AddressReserve|SetAccess)\w*"
    r"|(cuda|hip)?Host(Alloc|Register|Unregister|Malloc|Free)\w*|(cuda|hip)(Host|Malloc|Free)\w*"
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
"""Files of a call stack that are no code of the user. Kineto leaves out the part of a path before `torch`."""
SOON_US = 1.0
"""Time in us by which a call may seem to end before the kernel that it waited for."""
_WAITS = 64
"""Number of waits for streams that are compared with kernels."""
KEPT = 64
"""Number of rows of a trace; further ones are added up by cause."""
OTHERS = "others"


class DeviceGaps(msgspec.Struct):
    """Gaps of the devices of a trace with one cause, in one call at one place."""

    kind: GapKind
    call: str
    """The call that caused the gaps, with the operator around it: `cudaStreamSynchronize in aten::item`, or
    empty."""
    place: str
    """The innermost line of the user's code, `train.py(41): step`; empty unless the trace has stacks."""
    count: int = 0
    total_us: float = 0.0
    longest_us: float = 0.0


class Gap(NamedTuple):
    """Time in which a device ran nothing, up to the kernel that ends it."""

    start: float
    end: float
    launch: float | None
    """Time of the call that launched the kernel, or None if the trace does not say."""
    thread: int | None
    """Thread that launched it."""


class _Cause(NamedTuple):
    gap: Gap
    kind: GapKind
    thread: int | None
    at: float
    """A moment within what caused it, at which open calls are looked up."""
    call: str


class DeviceKernels:
    """Kernels of one device, in 33 bytes each."""

    def __init__(self) -> None:
        self.starts, self.ends, self.correlations = array("d"), array("d"), array("q")
        self.streams = array("q")
        """Number of the stream of each kernel, or -1."""
        self.talks = bytearray()
        """1 for each kernel that communicates."""

    def add(self, start: float, end: float, correlation: int, stream: object, *, talks: bool) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.correlations.append(correlation)
        self.streams.append(stream if isinstance(stream, int) and stream >= 0 else -1)
        self.talks.append(talks)

    def running(self, at_us: float, stream: int) -> Iterator[float]:
        """Yield the ends of the kernels of a stream that run at a moment."""
        for start, end, own in zip(self.starts, self.ends, self.streams, strict=True):
            if own == stream and start < at_us < end:
                yield end


@lru_cache(1 << 12)
def _kind_of(call: str) -> GapKind | None:
    """Return the kind of gaps that a call into the runtime of a device may cause."""
    if _SYNC.fullmatch(call):
        return "synchronisation"
    if _ALLOCATES.fullmatch(call) and not _NOT_ALLOCATING.fullmatch(call):
        return "memory allocation"
    return "copies" if _COPIES.fullmatch(call) else None


class Host:
    """Calls of threads and kernels of devices: kept while a trace is read, judged at its end."""

    def __init__(self) -> None:
        self.names = Names()
        self.devices: dict[int | str, DeviceKernels] = defaultdict(DeviceKernels)
        self.frames: dict[int, Slices] = defaultdict(Slices)
        """Functions of Python by thread, where the trace has stacks."""
        self._operators: dict[int, Slices] = defaultdict(Slices)
        self._launched, self._launched_by = Starts(), Starts()
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._syncs: list[tuple[float, float, int, int]] = []
        """(end, start, thread, name)."""
        self._waits: list[tuple[int | str, int, float]] = []
        """(device, stream, start) of the waits for a stream, as the device's own records have them."""
        self._held: dict[GapKind, Cover] = defaultdict(Cover)
        """Times in calls of each kind, on any thread."""
        self._calls: dict[GapKind, Slices] = defaultdict(Slices)

    def thread(self, thread: tuple[int | str, int | str]) -> int:
        return self._threads.setdefault(thread, len(self._threads))

    def call(self, name: str, start: float, dur: float, thread: int, correlation: int) -> None:
        """Add a call into the runtime of a device."""
        end = start + dur
        if correlation >= 0:
            self._launched.add(correlation, start)
            self._launched_by.add(correlation, thread)
        kind = _kind_of(name)
        if kind == "synchronisation":
            self._syncs.append((end, start, thread, self.names.number(name)))
        elif kind is not None:
            self._hold(kind, name, start, end)

    def wait(self, device: int | str, stream: int, start: float) -> None:
        """Add the device's record of a wait for a stream."""
        if len(self._waits) < _WAITS:
            self._waits.append((device, stream, start))

    def unsynced(self) -> int:
        """Return the number of kernels that run while a wait for their stream begins."""
        return sum(
            end > start + SOON_US
            for device, stream, start in self._waits
            if device in self.devices
            for end in self.devices[device].running(start, stream)
        )

    def operator(self, name: str, start: float, dur: float, thread: int) -> None:
        self._operators[thread].add(start, start + dur, self.names.number(name))

    def mark(self, name: str, start: float, dur: float) -> None:
        """Add a range of the user or of torch."""
        if _LOADS.fullmatch(name):
            self._hold("data loader", name, start, start + dur)
        elif _COMPILES.fullmatch(name):
            self._hold("compilation", name, start, start + dur)

    def collective(self, name: str, start: float, dur: float) -> None:
        """Add a collective on the CPU."""
        self._hold("collective", name, start, start + dur)

    def frame(self, name: str, start: float, dur: float, thread: int) -> None:
        """Add a function of Python."""
        if name == GC:
            self._hold("garbage collection", "", start, start + dur)
        else:
            self.frames[thread].add(start, start + dur, self.names.number(name))

    def _hold(self, kind: GapKind, name: str, start: float, end: float) -> None:
        self._held[kind].add(start, end)
        self._calls[kind].add(start, end, self.names.number(name))

    @property
    def knows_launches(self) -> bool:
        """True if the trace has calls that launched kernels."""
        return bool(self._launched)

    def launch_of(self, correlation: int) -> tuple[float, int] | None:
        """Return (time, thread) of the call that launched a kernel."""
        start = self._launched.get(correlation) if correlation >= 0 else None
        return None if start is None else (start, int(self._launched_by.get(correlation) or 0))

    def gaps(self, first: float, last: float) -> Iterable[DeviceGap]:
        """Return each gap of each device between two times, with its cause, by thread and time."""
        judge = _Judge(
            self._held,
            self._syncs,
            self._operators,
            self.names,
            knows_launches=self.knows_launches,
        )
        judged, placed = _Gaps(), _Gaps()
        by_thread: dict[int, array[int]] = defaultdict(lambda: array("q"))
        for device in self.devices.values():
            for gap in self._gaps_of(device, first, last):
                cause = judge.cause(gap)
                by_thread[-1 if cause.thread is None else cause.thread].append(len(judged.at))
                judged.add(DeviceGap(gap.start, gap.end, cause.kind, cause.call, "", cause.at))
        for thread, own in sorted(by_thread.items()):
            for found in self._placed(thread, judged, sorted(own, key=judged.at.__getitem__)):
                placed.add(found)
        return placed

    def _gaps_of(self, device: DeviceKernels, first: float, last: float) -> Iterator[Gap]:
        starts, ends = device.starts, device.ends
        until, edge = first, True
        for at in sorted(range(len(starts)), key=starts.__getitem__):
            start = starts[at]
            if start > until:
                launched = None if edge else self.launch_of(device.correlations[at])
                launch, thread = launched or (None, None)
                yield Gap(until, start, start if edge else launch, -1 if edge else thread)
            edge = False
            until = max(until, ends[at])
        if until < last:
            yield Gap(until, last, last, -1)

    def _placed(self, thread: int, gaps: _Gaps, order: Sequence[int]) -> Iterator[DeviceGap]:
        """Yield the gaps of one thread, or of no known one (-1), with the operators and the lines that were
        open in their causes. `order` has the gaps' numbers by time.
        """
        nothing = Slices()
        operators, frames = self._operators.get(thread, nothing), self.frames.get(thread, nothing)
        around_of, stack_of = (
            some.open_at(gaps.at[number] for number in order) for some in (operators, frames)
        )
        for number, around, stack in zip(order, around_of, stack_of, strict=True):
            gap = gaps[number]
            call = gap.call
            if gap.kind == "synchronisation" and around:
                call = f"{call} in {self.names[_outermost(around, self.names)]}"
            where = "" if gap.kind in ("queued", "unknown", "edges") else self._line(stack)
            yield DeviceGap(gap.start, gap.end, gap.kind, call or self._called(gap), where, gap.at)

    def _called(self, cause: DeviceGap) -> str:
        """Return the call of a kind that covers most of a gap's middle."""
        if cause.kind not in self._calls:
            return ""
        around = next(self._calls[cause.kind].open_at([cause.at]))
        return self.names[around[-1][1]] if around else ""

    def _line(self, stack: Sequence[tuple[float, int]]) -> str:
        """Return the innermost frame of the user's code, else of any."""
        frames = [self.names[name] for _, name in reversed(stack)]
        files = [frame for frame in frames if _FILE.fullmatch(frame)]
        own = next((frame for frame in files if not _NOT_OURS.match(frame)), None)
        return own or next(iter(files), "")


class DeviceGap(NamedTuple):
    start: float
    end: float
    kind: GapKind
    call: str
    place: str
    at: float


class _Gaps:
    """Gaps in 33 bytes each."""

    def __init__(self) -> None:
        self._texts = Names()
        self._starts, self._ends, self.at = array("d"), array("d"), array("d")
        self._kinds, self._calls, self._places = array("b"), array("i"), array("i")

    def add(self, gap: DeviceGap) -> None:
        self._starts.append(gap.start)
        self._ends.append(gap.end)
        self.at.append(gap.at)
        self._kinds.append(_NUMBERS[gap.kind])
        self._calls.append(self._texts.number(gap.call))
        self._places.append(self._texts.number(gap.place))

    def __getitem__(self, number: int) -> DeviceGap:
        return DeviceGap(
            self._starts[number],
            self._ends[number],
            GAP_KINDS[self._kinds[number]],
            self._texts[self._calls[number]],
            self._texts[self._places[number]],
            self.at[number],
        )

    def __iter__(self) -> Iterator[DeviceGap]:
        return map(self.__getitem__, range(len(self.at)))


_NUMBERS = {kind: number for number, kind in enumerate(GAP_KINDS)}


def _outermost(around: Sequence[tuple[float, int]], names: Names) -> int:
    """Return the outermost operator of torch that is open: `aten::item`, not what it calls."""
    return next((name for _, name in around if "::" in names[name]), around[-1][1])


class _Judge:
    """Decides what caused a gap."""

    def __init__(
        self,
        held: dict[GapKind, Cover],
        syncs: list[tuple[float, float, int, int]],
        operators: dict[int, Slices],
        names: Names,
        *,
        knows_launches: bool,
    ) -> None:
        self._names, self._knows_launches = names, knows_launches
        self._main = max(operators, key=lambda thread: len(operators[thread]), default=None)
        self._held = [(kind, Covered(held[kind].stretches())) for kind in GAP_KINDS if kind in held]
        self._syncs = sorted(syncs)
        self._ends = array("d", map(itemgetter(0), self._syncs))
        self._threads = {
            thread: Covered((start, end) for start, end, _ in slices) for thread, slices in operators.items()
        }

    def cause(self, gap: Gap) -> _Cause:
        start, end, launch, thread = gap
        if thread == -1:
            return _Cause(gap, "edges", None, start, "")
        if launch is not None and launch <= start:
            return _Cause(gap, "queued", thread, launch, "")
        if launch is None and self._knows_launches:
            return _Cause(gap, "unknown", None, start, "")
        thread = self._main if thread is None else thread
        until = end if launch is None else min(launch, end)
        middle, half = (start + until) / 2, (until - start) / 2
        for kind, covered in self._held:
            if kind != "copies" and covered.within(start, until) > half:
                return _Cause(gap, kind, thread, middle, "")
        sync = self._sync(start, until)
        if sync is not None:
            ended, began, by, name = sync
            return _Cause(gap, "synchronisation", by, (began + ended) / 2, self._names[name])
        for kind, covered in self._held:
            if kind == "copies" and covered.within(start, until) > half:
                return _Cause(gap, kind, thread, middle, "")
        ran = sum(threads.within(start, until) for threads in self._threads.values())
        return _Cause(gap, "slow launches" if ran > half else "no operator", thread, middle, "")

    def _sync(self, start: float, until: float) -> tuple[float, float, int, int] | None:
        """Return the call that waited when the device became idle, and ended before the next launch."""
        for at in range(bisect_left(self._ends, start - SOON_US), len(self._syncs)):
            sync = self._syncs[at]
            if sync[0] > until + SOON_US:
                return None
            if sync[1] <= start:
                return sync
        return None


def by_cause(gaps: Iterable[DeviceGap]) -> list[DeviceGaps]:
    """Return the gaps added up by cause, call and place, the longest total first."""
    sums: dict[tuple[GapKind, str, str], DeviceGaps] = {}
    for gap in gaps:
        key = gap.kind, gap.call, gap.place
        row = sums.get(key)
        if row is None:
            row = sums[key] = DeviceGaps(*key)
        _add(row, 1, gap.end - gap.start, gap.end - gap.start)
    rows = sorted(sums.values(), key=lambda row: (-row.total_us, row.kind, row.call, row.place))
    rest: dict[GapKind, DeviceGaps] = {}
    for row in rows[KEPT:]:
        others = rest.setdefault(row.kind, DeviceGaps(row.kind, OTHERS, ""))
        _add(others, row.count, row.total_us, row.longest_us)
    return [*rows[:KEPT], *rest.values()]


def _add(row: DeviceGaps, count: int, us: float, longest_us: float) -> None:
    row.count += count
    row.total_us += us
    row.longest_us = max(row.longest_us, longest_us)


def in_steps(gaps: Iterable[DeviceGap], steps: Sequence[Pair]) -> list[dict[GapKind, float]]:
    """Return the time of the gaps within each of the ascending steps, by cause."""
    inside = [defaultdict[GapKind, float](float) for _ in steps]
    starts = [start for start, _ in steps]
    for gap in gaps:
        at = max(0, bisect_right(starts, gap.start) - 1)
        while at < len(steps) and starts[at] < gap.end:
            common = min(gap.end, steps[at][1]) - max(gap.start, starts[at])
            if common > 0:
                inside[at][gap.kind] += common
            at += 1
    return [dict(kinds) for kinds in inside]
