"""The fast way of a merge: byte strings are replaced in the text of events, and decoding it once proves the
result.

Decoding and encoding each event takes ten times as long. But the changes that a file's events need hardly
differ from batch to batch. So the changes are learned from one batch, as needles, and applied to the next:

    needle                written            marked                final
    thread                "pid":0,"tid":7    "pid":M1,"tid":T17    "pid":412,"tid":7
    flow id               "id":57            "GJ..1":100157        "id":100157
    time                  "ts":17.250        "GJ..2":93.250        "ts":93.250

          batch                          of the file, as decompressed
            |
      1. mark: written -> marked         `_replaced`; counts the replacements
            |
      2. prove: decode once              `_decoder`; takes marked and unchanged values, refuses all others
            +--- not proven ---------->  learn again from this batch (`Template._learned`); if that fails too,
            |                            `Rewriter` decodes each event by itself
      3. unmark: marked -> final         `_replaced`; counts again; the timeline takes the result

1. A mark is a key or a number that was drawn when this process began, so no file can contain it.
2. The decoder refuses an event whose pid, tid, time or id is neither marked nor allowed to stay, in any
   spelling. Events with a mark are counted, so a mark inside an argument or a name is noticed.
3. The replacements are counted again. This is how a mistake of the searching library would show.

If a count differs, nothing has been written. Times that move by whole seconds, and by a day at least, need no
marks: every event has one, and a time that was not moved is outside the range that the decoder accepts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil, floor
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from stepscope_report.timeline.merge.crossing import Lines, Moved
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, Place, Tracks
from stepscope_report.timeline.readers.json_array import array_of, last_boundary, raw_elements
from stepscope_report.timeline.rows import Row

_SECONDS = 16
"""Largest number of needles for the times of a batch: one for each second, or for each ten, hundred or
thousand seconds."""
_FAR_S = 86_400
_PIDS = 4
"""Largest number of additional pids of a file that are searched for in every batch. If a file has more, only
the pids of the latest learned batch are searched for."""
_NEEDLES = 32
_EARLY = 1 << 15
"""Number of bytes at the beginning of a file from which the changes are learned first: most files begin with
similar events."""
_SECOND_NS = 1_000_000_000
_SECOND_US = 1_000_000
_EXACT_US = 1 << 53
_BEHIND = {b",", b"\n", b" ", b"}"}
"""Bytes that may follow a number."""
_THREAD = re.compile(rb'"pid"(:\s*)\d+(,\s*)"tid"(:\s*)\d+(\s*[,}])')
_ID = re.compile(rb'"id":\s*(?=\d)')
_TIME = re.compile(rb'"ts"(:\s*)\d')

_DRAWN = int.from_bytes(os.urandom(8), "big")
_KEY = bytes(b"GJKQVWXZ"[_DRAWN >> 3 * at & 7] for at in range(20))
"""A key of letters that are rare in JSON, so a search runs at 5 GB/s."""
_MARKED_ID, _MARKED_TIME = b'"%b1"' % _KEY, b'"%b2"' % _KEY
_MARKED_PID = 10**15 + _DRAWN % 10**13 * 100
"""The mark of the row's pid. The marks of other pids in the file are the next numbers, at most `_NEEDLES`."""
_MARKED_TID = 10**9 + _DRAWN % 10**7 * 100
"""The number in front of the tids of the row's pid. Other pids in the file have the next numbers. For tids of
up to nine digits, the marks are below 2^63."""
_OF_ID = -1

split: Callable[[bytes, bytes], Sequence[bytes]] = (
    bytes.split if find_spec("stringzilla") is None else import_module("stringzilla").split
)
"""StringZilla's `split` if StringZilla is installed, else the one of `bytes`. StringZilla's parts are views,
which take a quarter of the time of copies."""

Phase: TypeAlias = Literal["X", "i", "s", "f", "t", "I", "B", "E", "b", "e", "n"]
"""The phases of plain events, which are neither metadata nor counters."""
_NEVER = Literal["\0"]
"""The type of a field that a plain event does not have."""


class Plain(msgspec.Struct, gc=False, kw_only=True):
    """The fields that a merge may change, in an event of Kineto's layout.

    The fields are in Kineto's order, because msgspec looks for the next field first. An event is not plain if
    a field is absent or has another type, or if it has `bind_id` or `id2`.
    """

    ph: Phase
    id: Annotated[int, msgspec.Meta(ge=0)] = -1
    pid: int
    tid: int
    ts: float
    bind_id: _NEVER = "\0"
    id2: _NEVER = "\0"


class _Needle(NamedTuple):
    """A byte string in events that are alike, and its replacements."""

    written: bytes
    final: bytes
    kind: int = 0
    """Kind of the value: `_OF_ID`, or the pid that the needle's mark stands for."""
    marked: bytes = b""
    """The replacement until the batch is proven. Needles of times have none."""


_plain = msgspec.json.Decoder(list[Plain]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Template:
    """The fast way of a merge, for one file. If the fast way does not fit a batch, the attempt has only two
    effects: the batch's threads may get tracks, and an unaligned row may get its shift.
    """

    def __init__(self, row: Row, place: Place, ids: FlowIds, tracks: Tracks, cut: Cut, lines: Lines) -> None:
        self._lines = lines
        self._row = row
        self._place = place
        self._ids = ids
        self._tracks = tracks
        self._cut = cut
        self._tids: dict[tuple[int, int], int] = {}
        """{(pid, tid) in the file: tid in the timeline}"""
        self._pids: set[int] = set()
        """Pids in the latest learned batches, without the row's pid."""
        self._id: list[_Needle] = []
        self._plan: _Plan | None = None

    def rewritten(self, array: bytes) -> tuple[bytes | memoryview, int] | None:
        """Return the rewritten events of the array, without brackets, and their number, or None if the fast
        way does not fit.

        Raises:
            DecodeError: The array is no JSON.
        """
        if self._plan is None:
            self._plan = self._learned_early(array)
        done = None if self._plan is None else self._plan.carried_out(array)
        learned = self._learned(array) if done is None else None
        # If nothing was learned, only this batch is unusual: keep the plan for the next one.
        if learned is not None:
            self._plan = learned
            done = learned.carried_out(array)
        if done is None or self._plan is None:
            return None
        text, events = done
        moved = self._lines.place(events, self._plan.tracks)
        if moved:
            text = self._on_lines(text, moved)
        return memoryview(text)[1:-1], len(events)

    def _on_lines(self, array: bytes, moved: list[Moved]) -> bytes:
        elements: list[bytes | msgspec.Raw] = [*raw_elements(array)]
        for at, track, line in moved:
            fields = _fields(elements[at])
            fields["tid"] = msgspec.Raw(b"%d" % self._tracks.beside(self._row, track, line))
            elements[at] = msgspec.json.encode(fields)
        return array_of(elements)

    def _learned_early(self, array: bytes) -> _Plan | None:
        """Return a plan for the first events of a file, or None if the fast way does not fit these events."""
        cut = last_boundary(array[:_EARLY])
        try:
            return self._learned(array[:cut] + b"]") if cut else None
        except msgspec.DecodeError:  # the text was not cut between events
            return None

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
        # Every event is written, so each thread needs a track.
        threads = self._threads(events, thread.groups())
        if len(threads.needles) > _NEEDLES:
            return None
        if any(event.id >= 0 for event in events):
            self._id = self._ids_of(array)
        decode = _decoder(
            threads.pids, tuple(sorted(threads.tids)),
            (times.first, times.beyond), times.one_by_one is not None,
            (int(self._ids.prefix) * 10, (int(self._ids.prefix) + 1) * self._ids.below),
        )  # fmt: skip
        return _Plan(times, [*self._id, *threads.needles], threads.tids, decode)

    def _ids_of(self, array: bytes) -> list[_Needle]:
        match = _ID.search(array)
        if match is None:
            return []
        before = array[max(0, match.start() - 64) : match.start()]
        written, prefix = before[len(before.rstrip(b", \n")) :] + match[0], self._ids.prefix
        return [_Needle(written, written + prefix, _OF_ID, written.replace(b'"id"', _MARKED_ID) + prefix)]

    def _threads(self, events: list[Plain], glue: tuple[bytes, ...]) -> _Threads:
        own = self._row.pid
        pairs = dict.fromkeys([(event.pid, event.tid) for event in events])
        for pair in pairs:
            if pair not in self._tids:
                self._tids[pair] = self._tracks.foreign(self._row, str(pair[0]), str(pair[1]))
        others = {pid for pid, _ in pairs} - {own}
        self._pids = self._pids | others if len(self._pids | others) <= _PIDS else others
        colon, between, before_tid, behind = glue
        start = b'"pid"%b%%d%b"tid"%b' % (colon, between, before_tid)
        needles = list[_Needle]()
        pids, tracks = {own}, dict[int, int]()
        for number, pid in enumerate((own, *sorted(self._pids))):
            kind, before = _MARKED_PID + number, b"%d" % (_MARKED_TID + number)
            tids = {tid: new for (file_pid, tid), new in self._tids.items() if file_pid == pid}
            moved = any(tid != new for tid, new in tids.items())
            if pid == own:
                tracks = {tid: new for tid, new in tids.items() if tid == new}
                tids = {tid: new for tid, new in tids.items() if tid != new}
            if moved:
                tids = {tid: new for tid, new in tids.items() if (pid, tid) in pairs}
                ends = [(b"%d%b" % (tid, behind), b"%d%b" % (new, behind)) for tid, new in tids.items()]
            else:
                ends = [(b"", b"")] if pid != own else []
            needles += [
                _Needle(start % pid + end, start % own + new, kind, start % kind + before + new)
                for end, new in ends
            ]
            pids |= {kind} if ends else set()
            tracks |= {int(b"%b%d" % (before, new)): new for new in tids.values()}
        return _Threads(needles, tuple(sorted(pids)), tracks)

    def _times(self, array: bytes, events: list[Plain]) -> _Times | None:
        times = [event.ts for event in events]
        earliest, latest = int(min(times)), int(max(times)) + 1
        written = _TIME.search(array)
        if min(times) < 0 or written is None:
            return None
        self._place.at(int(times[0]) * 1000)  # the first time decides where an unaligned row is
        first, last = self._bounds()
        at = [self._place.at(us * 1000) for us in (earliest, latest)]
        if any(position is None or not first * 1000 <= position <= last * 1000 for position in at):
            return None
        colon, shift_ns = written[1], self._place.shift_ns
        if shift_ns == 0:
            return _Times(first, last)
        if shift_ns is not None and shift_ns % _SECOND_NS == 0:
            moved = _seconds(earliest, latest, shift_ns // _SECOND_NS, b'"ts"' + colon)
            if moved is not None:
                return moved._replace(first=max(first, moved.first), beyond=min(last, moved.beyond))
        if len(str(earliest)) != len(str(latest)):
            return None
        return _Times(first, last, one_by_one=_EachTime(self._place, colon, len(str(earliest))))

    def _bounds(self) -> tuple[int, int]:
        """Return the first and the last selected `ts` that is plausible, at most 1 us too narrow."""
        first, last = self._place.believed
        start, end = self._cut
        first = first if start is None else max(first, start)
        last = last if end is None or (last is not None and last < end) else end
        return ceil(first / 1000), _EXACT_US if last is None else floor(last / 1000)


class _Threads(NamedTuple):
    needles: list[_Needle]
    pids: tuple[int, ...]
    """The pids of a marked batch."""
    tids: dict[int, int]
    """{tid in a marked batch: tid in the timeline}."""


class _EachTime(NamedTuple):
    """A change that is applied to each time separately. All times have `digits` digits before the point; all
    or none have three decimals.
    """

    place: Place
    colon: bytes
    digits: int

    def moved(self, text: bytes) -> tuple[bytes, int] | None:
        """Change and mark all times. Return the text and their number, or None if a time has another form."""
        first, *parts = text.split(b'"ts"' + self.colon)
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
        marked = _MARKED_TIME + self.colon
        pieces = [b"%b%d.%03d%b" % (marked, *divmod(ns, 1000), part[end:]) for ns, part in moved]
        return first + b"".join(pieces), len(parts)


class _Times(NamedTuple):
    """The replacements that move a file's times, and the range [first, beyond) of the moved times in us."""

    first: int
    beyond: int
    needles: tuple[_Needle, ...] = ()
    """Needles for a move by whole seconds: the leading digits are the same in most of a batch."""
    one_by_one: _EachTime | None = None


def _seconds(earliest: int, latest: int, shift: int, start: bytes) -> _Times | None:
    """Return needles for a move by `shift` seconds, or None if each time has to be moved by itself."""
    if abs(shift) < _FAR_S:
        return None
    unit = next(unit for unit in (1000, 100, 10, 1) if shift % unit == 0)
    shift //= unit
    numbers = range(earliest // (_SECOND_US * unit), latest // (_SECOND_US * unit) + 1)
    alike = len(str(numbers[0])) == len(str(numbers[-1]))
    if len(numbers) > _SECONDS or not alike or numbers[0] == 0 or numbers[0] + shift <= 0:
        return None
    needles = [_Needle(b"%b%d" % (start, number), b"%b%d" % (start, number + shift)) for number in numbers]
    # The range is exact, because needles also match longer times: `"ts": 44` begins 443 seconds too.
    first, last = ((number + shift) * _SECOND_US * unit for number in (numbers[0], numbers[-1]))
    return _Times(first, last + _SECOND_US * unit, tuple(needles))


class _Plan(NamedTuple):
    """The changes that a file's events need."""

    times: _Times
    needles: list[_Needle]
    tracks: dict[int, int]
    """{tid in a marked batch: tid in the timeline}."""
    decode: Callable[[bytes], list[Any]]

    def carried_out(self, array: bytes) -> tuple[bytes, list[Any]] | None:
        """Return the changed text and its marked events, or None if the plan does not fit the array."""
        text, at = array, 0
        for needle in self.times.needles:
            text, count = _replaced(text, needle.written, needle.final)
            at += count
        replaced = list[tuple[_Needle, int]]()
        counts = dict[int, int]()
        for needle in self.needles:
            text, count = _replaced(text, needle.written, needle.marked)
            if count:
                replaced.append((needle, count))
                counts[needle.kind] = counts.get(needle.kind, 0) + count
        one_by_one = self.times.one_by_one
        if one_by_one is not None:
            moved = one_by_one.moved(text)
            if moved is None:
                return None
            text, at = moved
        try:
            events = self.decode(text)
        except msgspec.DecodeError:
            return None
        if (one_by_one is not None or self.times.needles) and at != len(events):
            return None  # every event has a time, so one was not moved
        if any(count != _marked(kind, events) for kind, count in counts.items()):
            return None
        if one_by_one is not None:
            text, again = _replaced(text, _MARKED_TIME, b'"ts"')
            if again != at:
                return None
        for needle, count in replaced:
            text, again = _replaced(text, needle.marked, needle.final)
            if again != count:
                return None
        return text, events


def _replaced(text: bytes, old: bytes, new: bytes) -> tuple[bytes, int]:
    """Replace `old` in the text, and return the number of replacements too."""
    parts = split(text, old)
    return (new.join(parts) if len(parts) > 1 else text), len(parts) - 1


def _marked(kind: int, events: list[Any]) -> int:
    """Count the events with the pid `kind`, or with a marked id if `kind` is `_OF_ID`."""
    if kind == _OF_ID:
        return len([1 for event in events if event.marked_id >= 0])
    return len([1 for event in events if event.pid == kind])


@lru_cache(4)
def _decoder(
    pids: tuple[int, ...],
    tids: tuple[int, ...],
    times: tuple[int, int],
    each_time: bool,
    ids: tuple[int, int],
) -> Callable[[bytes], list[Any]]:
    """Return a decoder that accepts only plain events in which every value is marked or may stay.

    Args:
        times: The first accepted time, and the first time beyond the last accepted one.
        each_time: True if the keys of times are marked.
        ids: The lowest marked id, and the highest marked id plus 1.
    """
    pid: Any = Literal[pids]
    tid: Any = Literal[tids]
    time: Any = Annotated[float, msgspec.Meta(ge=float(times[0]), lt=float(times[1]))]
    fields: list[Any] = [
        ("ph", Phase),
        ("marked_id", Annotated[int, msgspec.Meta(ge=ids[0], lt=ids[1])], -1),
        ("pid", pid),
        ("tid", tid),
        ("ts", time),
        ("dur", float, 0.0),
        ("id", _NEVER, "\0"),
        ("bind_id", _NEVER, "\0"),
        ("id2", _NEVER, "\0"),
    ]
    if each_time:
        fields.append(("unmarked_ts", _NEVER, "\0"))
    keys = {"marked_id": _MARKED_ID.decode().strip('"')}
    if each_time:
        keys |= {"ts": _MARKED_TIME.decode().strip('"'), "unmarked_ts": "ts"}
    event: Any = msgspec.defstruct("Proven", fields, rename=keys, kw_only=True, gc=False)
    return msgspec.json.Decoder(list[event]).decode
