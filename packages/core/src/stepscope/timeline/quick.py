"""The quick way through a merge: events stay text, in which needles are replaced, and one decoding proves it.

What has to change in a file's events, and how that is written there, hardly differs from one batch to the
next. So it is learned from one batch, as byte strings and what to put in their place, and done to the next
ones unseen. The result is then decoded once, into a type that has no room for an event whose pid, tid, time
or id is not one that it should have now; and each replacement is counted against the events that needed it,
so that none was made in an argument or a name. Where that does not come out even, nothing was done: the batch
is learned from anew, and else goes the thorough way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import ceil, floor
from operator import attrgetter, countOf
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.timeline.ids import FlowIds
from stepscope.timeline.place import Place
from stepscope.timeline.rows import Row
from stepscope.timeline.tracks import Tracks

_SECONDS = 4
"""So many different seconds in a batch are replaced one by one."""
_PIDS = 4
"""So many of a file's further pids are looked for in every batch; if there are more, those of the batch that
was learned from."""
_NEEDLES = 32
_SECOND_NS = 1_000_000_000
_SECOND_US = 1_000_000
_EXACT_US = float(1 << 53)
_BEHIND = {b",", b"\n", b" ", b"}"}
"""What may stand behind a number, of what is not a part of it."""
_THREAD = re.compile(rb'"pid"(:\s*)\d+(,\s*)"tid"(:\s*)\d+(\s*[,}])')
_ID = re.compile(rb'[\s,]*"id":\s*(?=\d)')
_TIME = re.compile(rb'"ts"(:\s*)\d')

Phase: TypeAlias = Literal["X", "i", "s", "f", "t", "I", "B", "E", "b", "e", "n"]
"""Of a plain event: neither metadata nor a counter."""
_NEVER = Literal["\0"]
"""The type of a field that a plain event does not have."""


class Plain(msgspec.Struct, gc=False, kw_only=True):
    """The fields that a merge may change, of an event that has them as Kineto writes them.

    In Kineto's order, since msgspec looks for the next field first. An event without one of them, with
    another type, or with `bind_id` or `id2`, is not plain.
    """

    ph: Phase
    id: Annotated[int, msgspec.Meta(ge=0)] = -1
    pid: int
    tid: int
    ts: float
    bind_id: _NEVER = "\0"
    id2: _NEVER = "\0"


class Cut(NamedTuple):
    """What is kept, in ns since the axis' base; None: no limit."""

    start: int | None
    end: int | None


_plain = msgspec.json.Decoder(list[Plain]).decode
_tid = attrgetter("tid")
_id = attrgetter("id")
_UNCHANGED = 0, 0
_Needle: TypeAlias = tuple[bytes, bytes, tuple[int, ...]]
"""What is replaced, by what, and the tids that the events have then."""


class Quick:
    """Of one file. It changes nothing but the tracks, to which it makes known what is new."""

    def __init__(self, row: Row, place: Place, ids: FlowIds, tracks: Tracks, cut: Cut) -> None:
        self._row = row
        self._place = place
        self._ids = ids
        self._tracks = tracks
        self._cut = cut
        self._tids: dict[tuple[int, int], int] = {}
        """By the file's (pid, tid)."""
        self._pids: set[int] = set()
        """Those of others that were found lately."""
        self._id = b""
        self._plan: _Plan | None = None

    def rewritten(self, array: bytes) -> tuple[memoryview, int] | None:
        """The events of the array, without its brackets, and how many. None: they have to be looked at.

        Raises:
            DecodeError: it is no JSON.
        """
        done = None if self._plan is None else self._plan.carried_out(array)
        if done is None:
            self._plan = self._learned(array)
            done = None if self._plan is None else self._plan.carried_out(array)
        return done

    def _learned(self, array: bytes) -> _Plan | None:
        try:
            events = _plain(array)
        except msgspec.ValidationError:
            return None
        thread = _THREAD.search(array)
        if not events or thread is None:
            return None
        times = self._times(array, events)
        if times is None:
            return None
        needles = self._threads(events, thread.groups())  # all of these events are kept: so are their tracks
        if needles is None:
            return None
        some_id = _ID.search(array)
        if some_id is not None:
            self._id = some_id[0]
        return _Plan(
            needles=needles,
            times=times,
            id_needle=self._id,
            id_prefix=self._ids.prefix,
            decode=_decoder(self._row.pid, self._allowed(needles), times.first, times.last, self._ids),
        )

    def _threads(self, events: list[Plain], glue: tuple[bytes, ...]) -> list[_Needle] | None:
        own = self._row.pid
        pairs = dict.fromkeys([(event.pid, event.tid) for event in events])
        for pair in pairs:
            if pair not in self._tids:
                self._tids[pair] = self._tracks.foreign(self._row, str(pair[0]), str(pair[1]))
        others = {pid for pid, _ in pairs} - {own}
        self._pids = self._pids | others if len(self._pids | others) <= _PIDS else others
        colon, between, before_tid, behind = glue
        start = b'"pid"%b%%d%b"tid"%b' % (colon, between, before_tid)
        found = list[_Needle]()
        for pid in (own, *sorted(self._pids)):  # first its own: what others become must not be replaced again
            tids = {tid: new for (of, tid), new in self._tids.items() if of == pid}
            if any(tid != new for tid, new in tids.items()):
                found += [
                    (start % pid + b"%d%b" % (tid, behind), start % own + b"%d%b" % (new, behind), (new,))
                    for tid, new in tids.items()
                    if (pid, tid) in pairs and (pid, tid) != (own, new)
                ]
            elif pid != own:
                found.append((start % pid, start % own, tuple(tids)))
        again = {needle for needle, _, _ in found} & {new for _, new, _ in found}
        return None if again or len(found) > _NEEDLES else found

    def _allowed(self, needles: list[_Needle]) -> tuple[int, ...]:
        kept = {tid for (pid, tid), new in self._tids.items() if pid == self._row.pid and tid == new}
        return tuple(kept.union(*(tids for _, _, tids in needles)))

    def _times(self, array: bytes, events: list[Plain]) -> _Times | None:
        times = [event.ts for event in events]
        earliest, latest = int(min(times)), int(max(times)) + 1
        written = _TIME.search(array)
        if min(times) < 0 or written is None:
            return None
        self._place.at(int(times[0]) * 1000)  # the first one decides where an unaligned row is
        first, last = self._bounds()
        at = [self._place.at(us * 1000) for us in (earliest, latest)]
        if any(position is None or not first * 1000 <= position <= last * 1000 for position in at):
            return None
        colon, shift_ns = written[1], self._place.shift_ns
        if shift_ns == 0:
            return _Times(first, last)
        if shift_ns is not None and shift_ns % _SECOND_NS == 0 and earliest >= _SECOND_US:
            seconds = range(earliest // _SECOND_US, latest // _SECOND_US + 1)
            shift = shift_ns // _SECOND_NS
            alike = len(str(seconds[0])) == len(str(seconds[-1]))
            if len(seconds) <= _SECONDS and alike and seconds[0] + shift > 0:
                return _seconds(first, last, seconds, shift, b'"ts"' + colon)
        if len(str(earliest)) != len(str(latest)):
            return None
        return _Times(first, last, each=_EachTime(self._place, colon, len(str(earliest))))

    def _bounds(self) -> tuple[float, float]:
        """Of a `ts` that is believed and asked for, in the merged file. At most 1 us too narrow."""
        first, last = self._place.believed
        start, end = self._cut
        first = first if start is None else max(first, start)
        last = last if end is None or (last is not None and last < end) else end
        return float(ceil(first / 1000)), _EXACT_US if last is None else float(floor(last / 1000))


class _EachTime(NamedTuple):
    """How times are moved that have so many digits, and all or none of them three more behind the point."""

    place: Place
    colon: bytes
    digits: int

    def moved(self, text: bytes) -> tuple[bytes, int] | None:
        start_of = b'"ts"' + self.colon
        first, *parts = text.split(start_of)
        point, end = self.digits, self.digits + 4
        if {part[point : point + 1] for part in parts} == {b"."}:
            written = [part[:point] + part[point + 1 : end] for part in parts]
        else:
            end = point
            written = [part[:point] + b"000" for part in parts]
        together = b"".join(written)
        if len(together) != len(written) * (self.digits + 3) or not together.isdigit():
            return None
        if not {part[end : end + 1] for part in parts} <= _BEHIND:
            return None
        moved = zip(self.place.positions(list(map(int, written))), parts, strict=True)
        pieces = [b"%b%d.%03d%b" % (start_of, *divmod(ns, 1000), part[end:]) for ns, part in moved]
        return first + b"".join(pieces), len(parts)


class _Times(NamedTuple):
    """What happens to the times of a file, and between what they are then, in us."""

    first: float
    last: float
    seconds: tuple[tuple[bytes, bytes], ...] = ()
    """Where they move by whole seconds: the digits that say these, the same in most of a batch."""
    each: _EachTime | None = None

    def moved(self, text: bytes) -> tuple[bytes, int] | None:
        """The text, and how many times were moved in it."""
        if self.each is not None:
            return self.each.moved(text)
        count = 0
        for needle, new in self.seconds:
            text, found = _replaced(text, needle, new)
            count += found
        return text, count

    @property
    def all(self) -> bool:
        """Whether every time moves."""
        return self.each is not None or bool(self.seconds)


def _seconds(first: float, last: float, seconds: range, shift: int, start: bytes) -> _Times:
    in_order = seconds if shift < 0 else reversed(seconds)  # so that none is moved twice
    needles = [(b"%b%d" % (start, second), b"%b%d" % (start, second + shift)) for second in in_order]
    # No wider than that: `"ts": 44` is also how 443 seconds begin.
    begin, end = (seconds[0] + shift) * _SECOND_US, (seconds[-1] + shift + 1) * _SECOND_US
    return _Times(max(first, float(begin)), min(last, float(end)), tuple(needles))


class _Plan:
    """What is to be done to a file's events."""

    def __init__(
        self,
        *,
        needles: list[_Needle],
        times: _Times,
        id_needle: bytes,
        id_prefix: bytes,
        decode: Callable[[bytes], list[Any]],
    ) -> None:
        self._needles = needles
        self._times = times
        self._id_needle = id_needle
        self._id_new = id_needle + id_prefix
        self._decode = decode

    def carried_out(self, array: bytes) -> tuple[memoryview, int] | None:
        """None: it is not the right one for these events."""
        text, ids = _replaced(array, self._id_needle, self._id_new) if self._id_needle else (array, 0)
        counts = []
        for needle, new, _ in self._needles:
            text, count = _replaced(text, needle, new)
            counts.append(count)
        moved = self._times.moved(text)
        if moved is None:
            return None
        text, times = moved
        try:
            events = self._decode(text)
        except msgspec.DecodeError:
            return None
        if ids != len(events) - countOf(map(_id, events), -1):
            return None
        if self._id_needle and ids != array.count(b'"id"'):
            return None  # spelled otherwise somewhere: that one might look changed already
        if self._times.all and (times != len(events) or text.count(b'"ts"') != times):
            return None
        if self._needles:  # also where none was found: a tid that stands here may be another thread's
            by_tid = Counter(map(_tid, events))
            for (_, _, tids), count in zip(self._needles, counts, strict=True):
                if count != sum(by_tid[tid] for tid in tids):
                    return None
        return memoryview(text)[1:-1], len(events)


def _replaced(text: bytes, needle: bytes, new: bytes) -> tuple[bytes, int]:
    """As `bytes.replace`, which searches twice and does not say how often."""
    parts = text.split(needle)
    return (new.join(parts), len(parts) - 1) if len(parts) > 1 else (text, 0)


def _decoder(
    pid: int, tids: tuple[int, ...], first: float, last: float, ids: FlowIds
) -> Callable[[bytes], list[Any]]:
    """Takes nothing but plain events that are as they should be in the merged file."""
    tid: Any = Literal[tids]
    time: Any = Annotated[float, msgspec.Meta(ge=first, le=last)]
    lowest, beyond = int(ids.prefix) * 10, (int(ids.prefix) + 1) * ids.below
    fields: list[Any] = [
        ("ph", Phase),
        ("id", Annotated[int, msgspec.Meta(ge=lowest, lt=beyond)], -1),
        ("pid", Literal[pid]),
        ("tid", tid),
        ("ts", time),
        ("bind_id", _NEVER, "\0"),
        ("id2", _NEVER, "\0"),
    ]
    event: Any = msgspec.defstruct("Proven", fields, kw_only=True, gc=False)
    return msgspec.json.Decoder(list[event]).decode
