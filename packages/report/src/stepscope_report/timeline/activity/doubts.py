"""Doubts about a trace: signs that the profiler lost events or recorded wrong times.

Every launch has a kernel that begins after the launch, and a stream runs its kernels one after another. If a
trace contradicts this, its busy times and idle times cannot be trusted.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress, count, repeat
from operator import lt, sub

from stepscope_report.timeline.activity.intervals import Stretches
from stepscope_report.timeline.readers.nsys import WARNS

LOST = "launches without a kernel: the profiler lost device work, so that busy times are too short"
EARLY = "kernels that begin before their launch: the device's clock is wrong"
OVERRUN = "kernels that last on while their stream runs the next ones: durations are wrong"
UNSYNCED = "kernels that run on while a wait for their stream begins: the device's clock is wrong"
"""`torch.profiler._trace_validator` checks for this and for `EARLY` too."""
UNRECORDED = "waits for a CUDA event whose record is not known, or is later than the wait"
NO_SIZES = "collectives without their group, type or size: bandwidths lack them"
SHARED_NUMBER = "numbers of the forward pass that several operators of the backward pass share"
LINKS = frozenset({UNRECORDED, NO_SIZES, SHARED_NUMBER})
"""Checks of torch's validator besides `EARLY` and `UNSYNCED`. Wrong links between events change no time."""
DOUBTS = frozenset({LOST, EARLY, OVERRUN, UNSYNCED})
_LAUNCH = re.compile(r"(cu|hip)\w*Launch(?!Host)")
_CAPTURE = re.compile(r"(?:cu|cuda|hip)Stream(Begin|End)Capture")
"""Calls around the launches that a stream puts into a graph. Such a launch runs no kernel."""
_PAGE = 1 << 12
NEVER = float("inf")
"""The start of an id whose start is unknown."""
_FEW = 10
"""Number of events that may be missing at the edges of a recording before the trace is doubted."""
_SHARE = 20
"""There is a doubt if more than one in `_SHARE` events is bad. A smaller share of kernels may be missing
because they ran after the recording had ended."""
_EARLY_US = 10.0
_OVERLAP = 10
"""A stream is doubted if kernels overlap for more than one in `_OVERLAP` of the stream's busy time. A
kernel may begin a little before the previous kernel has ended."""


_RECORD = re.compile(r"cudaEventRecord(WithFlags)?(_ptsz)?")


def is_doubt(problem: str) -> bool:
    """Return whether a problem of a trace puts the times of the trace in doubt."""
    return problem not in LINKS and not problem.startswith(WARNS)


class Starts:
    """The earliest start of each id. An id takes 8 bytes, because ids are nearly consecutive."""

    def __init__(self) -> None:
        self._pages: dict[int, array[float]] = {}

    def add(self, number: int, start_us: float) -> None:
        page = self._pages.get(number // _PAGE)
        if page is None:
            page = self._pages[number // _PAGE] = array("d", [NEVER]) * _PAGE
        at = number % _PAGE
        if start_us < page[at]:
            page[at] = start_us

    def extend(self, numbers: Iterable[int], starts_us: Iterable[float]) -> None:
        """Add the starts of ids. Negative ids are ignored."""
        first, page = -2 * _PAGE, array("d")
        for number, start_us in zip(numbers, starts_us, strict=True):
            at = number - first
            if not 0 <= at < _PAGE:
                if number < 0:
                    continue
                at = number % _PAGE
                first = number - at
                if first // _PAGE not in self._pages:
                    self._pages[first // _PAGE] = array("d", [NEVER]) * _PAGE
                page = self._pages[first // _PAGE]
            if start_us < page[at]:
                page[at] = start_us

    def __bool__(self) -> bool:
        return bool(self._pages)

    def columns(self) -> tuple[array[int], array[float]]:
        """Return the ids that have a start, and their starts."""
        numbers, starts = array("q"), array("d")
        for number, page in self._pages.items():
            numbers.extend(compress(count(number * _PAGE), map(NEVER.__gt__, page)))
            starts.extend(filter(NEVER.__gt__, page))
        return numbers, starts

    def of(self, numbers: Iterable[int]) -> array[float]:
        """Return the start of each id, or infinity for an unknown id, in the order of `numbers`."""
        found, first, page = array("d"), -2 * _PAGE, array("d")
        nothing = array("d", [NEVER]) * _PAGE
        append = found.append
        for number in numbers:
            at = number - first
            if not 0 <= at < _PAGE:
                at = number % _PAGE
                first = number - at
                page = self._pages.get(first // _PAGE, nothing)
            append(page[at])
        return found

    def get(self, number: int) -> float | None:
        page = self._pages.get(number // _PAGE)
        start_us = NEVER if page is None else page[number % _PAGE]
        return None if start_us == NEVER else start_us


class Stream:
    """Overlaps of the kernels of one stream. Kernels may be added in several ascending runs, because CUPTI's
    buffers come in any order.
    """

    __slots__ = ("begun", "busy_us", "end_us", "last_us", "overlap_us", "overruns")

    def __init__(self) -> None:
        self.busy_us = self.overlap_us = 0.0
        self.end_us = self.last_us = -NEVER
        self.begun = 0
        """Number of kernels that have begun during the kernel with the latest end."""
        self.overruns = 0

    def extend(self, starts_us: Iterable[float], durs_us: Iterable[float]) -> None:
        busy_us, end_us, last_us = self.busy_us, self.end_us, self.last_us
        for start_us, dur_us in zip(starts_us, durs_us, strict=True):
            busy_us += dur_us
            if start_us < last_us:
                end_us, self.begun = -NEVER, 0
            last_us = start_us
            if start_us < end_us:
                self.overlap_us += min(end_us - start_us, dur_us)
                self.begun += 1
                self.overruns += self.begun == 2
            if start_us + dur_us > end_us:
                end_us, self.begun = start_us + dur_us, 0
        self.busy_us, self.end_us, self.last_us = busy_us, end_us, last_us


class Links:
    """Links between events by numbers, checked as torch's validator checks them.

    Each thread of the forward pass has its own sequence numbers. Unlike the validator, this class separates
    the threads.
    """

    def __init__(self) -> None:
        self._recorded = Starts()
        self._waits = array("d")
        """For each wait, two numbers: its time in us, and the correlation of the record that it waits for (-1
        if not stated)."""
        self._calls = self._without = 0
        self._names: dict[str, int] = {}
        self._backward: dict[int, Starts] = defaultdict(Starts)
        """{thread of the forward pass: {sequence number: number of a name, or -1 for several names}}."""
        self._shared = 0

    def called(self, names: Sequence[str], starts_us: Sequence[float], correlations: Sequence[int]) -> None:
        """Add calls into CUDA."""
        _add_some(self._recorded, _is_record, names, starts_us, correlations)

    def wait(self, start_us: float, record: int | None) -> None:
        """Add a wait for a CUDA event.

        Args:
            record: Correlation of the call that recorded the event.
        """
        self._waits.extend((start_us, -1 if record is None else record))

    def collective(self, *, complete: bool) -> None:
        """Add a collective.

        Args:
            complete: True if the collective states its kind, group, type and sizes.
        """
        self._calls += 1
        self._without += not complete

    def backward(self, names: Sequence[str], threads: Sequence[int], sequences: Sequence[int]) -> None:
        """Add operators of the backward pass, with the threads and sequence numbers of their forward
        operators. A number that is not stated is -1.
        """
        numbers = {name: self._names.setdefault(name, len(self._names)) for name in set(names)}
        for name, thread, sequence in zip(names, threads, sequences, strict=True):
            if sequence < 0:
                continue
            of_thread, own = self._backward[max(thread, 0)], numbers[name]
            known = of_thread.get(sequence)
            if known is None or known not in (own, -1):
                self._shared += known is not None
                of_thread.add(sequence, own if known is None else -1)

    def doubts(self) -> Iterator[tuple[str, int]]:
        """Yield each doubt with its number of events. A few records may be missing at the edges of a
        recording. Missing sizes are a doubt only if some collective states its sizes (from torch 2.2 on).
        """
        unrecorded = 0
        for at in range(0, len(self._waits), 2):
            recorded_us = self._recorded.get(int(self._waits[at + 1])) if self._waits[at + 1] >= 0 else None
            unrecorded += recorded_us is None or recorded_us > self._waits[at]
        if unrecorded > _FEW and unrecorded * _SHARE > len(self._waits) // 2:
            yield UNRECORDED, unrecorded
        if 0 < self._without < self._calls:
            yield NO_SIZES, self._without
        if self._shared > _FEW:
            yield SHARED_NUMBER, self._shared


def _add_some(
    to: Starts,
    kind: Callable[[str], bool],
    names: Sequence[str],
    starts_us: Sequence[float],
    correlations: Sequence[int],
) -> None:
    """Add to `to` the starts of the calls whose names `kind` accepts."""
    different = set(names)
    own = set(filter(kind, different))
    if len(own) == len(different):
        to.extend(correlations, starts_us)
    elif own:
        to.extend(
            [
                correlation if name in own else -1
                for name, correlation in zip(names, correlations, strict=True)
            ],
            starts_us,
        )


@lru_cache(1 << 12)
def _is_launch(call: str) -> bool:
    return _LAUNCH.match(call) is not None


@lru_cache(1 << 12)
def _is_record(call: str) -> bool:
    return _RECORD.fullmatch(call) is not None


class Launches:
    """The launches of a trace, and the work of devices that was launched."""

    def __init__(self) -> None:
        self._called, self._ran = Starts(), Starts()
        self._streams: dict[tuple[int | str, int | str], Stream] = defaultdict(Stream)
        self._captures: dict[str, list[float]] = {"Begin": [], "End": []}

    def called(self, names: Sequence[str], starts_us: Sequence[float], correlations: Sequence[int]) -> None:
        """Add calls into CUDA or HIP. A call without a correlation has -1."""
        _add_some(self._called, _is_launch, names, starts_us, correlations)
        captures = {name: match[1] for name in set(names) if (match := _CAPTURE.match(name)) is not None}
        if captures:
            for name, start_us in zip(names, starts_us, strict=True):
                if name in captures:
                    self._captures[captures[name]].append(start_us)

    def _lost(self, called: Iterable[float], ran: Iterable[float]) -> int:
        """Return the number of launches that have no kernel, although no stream put them into a graph."""
        lost = sorted(compress(called, map(NEVER.__eq__, ran)))
        begun, ended = sorted(self._captures["Begin"]), sorted(self._captures["End"])
        if ended and (not begun or ended[0] < begun[0]):
            begun.insert(0, -NEVER)
        pairs = zip(begun, chain(ended, repeat(NEVER)), strict=False)
        captures = Stretches((begin, end) for begin, end in pairs if begin < end)
        return len(lost) - sum(bisect_left(lost, end) - bisect_left(lost, begin) for begin, end in captures)

    def ran(self, correlations: Sequence[int], starts_us: Sequence[float]) -> None:
        """Add the starts of work on devices, with the correlations of its launches."""
        self._ran.extend(correlations, starts_us)

    def stream(self, stream: tuple[int | str, int | str]) -> Stream:
        return self._streams[stream]

    def doubts(self) -> Iterator[tuple[str, int]]:
        """Yield each doubt with its number of events."""
        numbers, called = self._called.columns()
        ran = self._ran.of(numbers)
        launches, lost = len(called), self._lost(called, ran)
        early = sum(map(lt, ran, map(sub, called, repeat(_EARLY_US))))
        if self._ran and lost > _FEW and lost * _SHARE > launches:
            yield LOST, lost
        if early > _FEW and early * _SHARE > launches:
            yield EARLY, early
        overruns = sum(s.overruns for s in self._streams.values() if s.overlap_us * _OVERLAP > s.busy_us)
        if overruns:
            yield OVERRUN, overruns
