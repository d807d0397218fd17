"""Foreign events, as bytes, with new pids, tids, ids and times; every other byte of their values as it was.

Two ways to the same result. A batch of plain events (`Plain`) stays text: what has to change in it is found
by its name and replaced, once it is counted that the name stands there as often as events have such a field,
so that it is nobody else's. The other way decodes each event into its fields, takes whatever order, layout
and types of ids there are, and costs a multiple.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from stepscope.timeline.ids import FlowIds
from stepscope.timeline.place import Place
from stepscope.timeline.readers.blocks import Notes
from stepscope.timeline.readers.elements import NO_JSON, Batch, Plain, plain_batch
from stepscope.timeline.rows import Axis, Row
from stepscope.timeline.tracks import Tracks

NO_TIME = "events without a time"
NOT_THEN = "events whose time is not near the step"

_FEW = 24
"""Events that are not worth another attempt. Metadata stand together, so halves of a batch soon have none;
where all are of another kind, the attempts are a tenth of the work."""
_SECONDS = 4
"""So many different seconds in a batch are replaced one by one."""
_SECOND_NS = 1_000_000_000
_SECOND_US = 1_000_000
_LASTS = (b'"B"', b'"E"', b'"b"', b'"e"')
_BEHIND = {b",", b"\n", b" ", b"}"}
"""What may stand behind a number, of what is not a part of it."""
_THREAD = re.compile(rb'"pid":\s*(\d+),\s*"tid":\s*(\d+)(?=[\s,}])')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Cut(NamedTuple):
    """What is kept, in ns since the axis' base; None: no limit."""

    start: int | None
    end: int | None


class Rewriter:
    """Of one file."""

    def __init__(
        self, row: Row, place: Place, ids: FlowIds, tracks: Tracks, axis: Axis, cut: Cut, notes: Notes
    ) -> None:
        self._row = row
        self._place = place
        self._ids = ids
        self._tracks = tracks
        self._axis = axis
        self._cut = cut
        self._notes = notes
        self._threads: dict[tuple[int, int], int] = {}
        """Tids by the file's (pid, tid)."""
        self.written = 0
        """Events."""
        self.outside = 0
        """Events left out because they are not between `from` and `to`."""

    def rewrite(self, batch: Batch) -> bytes:
        """The batch as text to stand between brackets; empty where nothing is left of it."""
        text = None if batch.plain is None else self._quickly(batch.text, batch.plain)
        if text is not None and batch.plain is not None:
            self.written += len(batch.plain)
            return text
        elements = batch.elements
        if self._cut == (None, None) and len(elements) > _FEW:
            middle = len(elements) // 2
            halves = (b",\n".join(part) for part in (elements[:middle], elements[middle:]))
            texts = [self.rewrite(plain_batch(half)) for half in halves]
            return b",\n".join(text for text in texts if text)
        events = [event for raw in elements if (event := self._one(raw)) is not None]
        self.written += len(events)
        return b",\n".join(events)

    def _quickly(self, text: bytes, events: list[Plain]) -> bytes | None:
        """None: it is not written so that this would surely be right."""
        if self._cut != (None, None) or (b"\\" in text and b"\\u" in text):  # `p\u0069d` is a pid as well
            return None
        colon = b": " if b'"ts": ' in text else b":"
        moved = self._times_moved(text, events, colon)
        if moved is not None:
            moved = self._ids_moved(moved, events, colon)
        return None if moved is None else self._threads_moved(moved, events, colon)

    def _ids_moved(self, text: bytes, events: list[Plain], colon: bytes) -> bytes | None:
        ids = [event.id for event in events if event.id >= 0]
        if not ids:
            return text
        first, *parts = text.split(b'"id"')
        size = len(colon)
        if len(parts) != len(ids) or max(ids) >= self._ids.below:
            return None
        digits = [part[size : size + 1] for part in parts]
        if not b"".join(digits).isdigit() or {part[:size] for part in parts} != {colon}:
            return None
        return (b'"id"%b%b' % (colon, self._ids.prefix)).join([first, *(part[size:] for part in parts)])

    def _threads_moved(self, text: bytes, events: list[Plain], colon: bytes) -> bytes | None:
        found = {event.pid for event in events}
        if len(found) == 1:
            (pid,) = found
            pairs = {(pid, tid) for tid in {event.tid for event in events}}
        else:
            pairs = {(event.pid, event.tid) for event in events}
        new = [pair for pair in pairs if pair not in self._threads]
        if new:
            order = {pair: None for event in events if (pair := (event.pid, event.tid)) in new}
            for pid, tid in order:
                self._threads[pid, tid] = self._tracks.foreign(self._row, str(pid), str(tid))
        if any(self._threads[pair] != pair[1] for pair in pairs):
            return self._each_thread_moved(text, len(events), colon)
        others = found - {self._row.pid}
        if others and text.count(b'"pid"') != len(events):
            return None
        pids = [event.pid for event in events] if others else []
        for pid in others:
            old = b'"pid"%b%d,' % (colon, pid)
            if text.count(old) != pids.count(pid):
                return None
            text = text.replace(old, b'"pid"%b%d,' % (colon, self._row.pid))
        return text

    def _each_thread_moved(self, text: bytes, count: int, colon: bytes) -> bytes | None:
        """Where tids change as well: `tid` has to follow on `pid`."""
        parts = re.split(_THREAD, text)
        if len(parts) != 3 * count + 1 or text.count(b'"pid"') != count:
            return None
        pids, tids = map(int, parts[1::3]), map(int, parts[2::3])
        row = b'"pid"%b%d, "tid"%b' % (colon, self._row.pid, colon)
        parts[1::3] = [b"%b%d" % (row, self._threads[pair]) for pair in zip(pids, tids, strict=True)]
        parts[2::3] = [b""] * count
        return b"".join(parts)

    def _times_moved(self, text: bytes, events: list[Plain], colon: bytes) -> bytes | None:
        times = [event.ts for event in events]
        earliest, latest = int(min(times)), int(max(times)) + 1
        if self._row.shift_ns is None or min(times) < 0:
            return None
        first, last = self._place.at(earliest * 1000), self._place.at(latest * 1000)
        if first is None or last is None:
            return None
        shift_ns = self._place.shift_ns
        if shift_ns == 0:
            return text
        if shift_ns is not None and shift_ns % _SECOND_NS == 0 and earliest >= _SECOND_US:
            seconds = range(earliest // _SECOND_US, latest // _SECOND_US + 1)
            moved = self._seconds_moved(text, len(events), colon, seconds, shift_ns // _SECOND_NS)
            if moved is not None:
                return moved
        return self._each_time_moved(text, len(events), colon, len(str(earliest)), latest)

    def _seconds_moved(
        self, text: bytes, count: int, colon: bytes, seconds: range, shift: int
    ) -> bytes | None:
        """Where times move by whole seconds: the digits that say these, the same in most of a batch."""
        digits = {len(str(second)) for second in seconds}
        if len(seconds) > _SECONDS or len(digits) > 1 or seconds[0] + shift <= 0:
            return None
        if text.count(b'"ts"') != count:
            return None
        for second in seconds if shift < 0 else reversed(seconds):  # so that none is moved twice
            old = b'"ts"%b%d' % (colon, second)
            count -= text.count(old)
            text = text.replace(old, b'"ts"%b%d' % (colon, second + shift))
        return text if count == 0 else None

    def _each_time_moved(
        self, text: bytes, count: int, colon: bytes, digits: int, latest: int
    ) -> bytes | None:
        """Where all times have so many digits, and all or none have three more behind the point."""
        first, *parts = text.split(b'"ts"')
        start, end = len(colon), len(colon) + digits
        if len(parts) != count or len(str(latest)) != digits or {part[:start] for part in parts} != {colon}:
            return None
        whole = [part[start:end] for part in parts]
        if not b"".join(whole).isdigit():
            return None
        behind = {part[end : end + 1] for part in parts}
        if behind == {b"."}:
            below = [part[end + 1 : end + 4] for part in parts]
            end += 4
            if not b"".join(below).isdigit() or not {part[end : end + 1] for part in parts} <= _BEHIND:
                return None
            times = [int(us + ns) for us, ns in zip(whole, below, strict=True)]
        elif behind <= _BEHIND:
            times = [int(us) * 1000 for us in whole]
        else:
            return None
        moved = [divmod(ns, 1000) for ns in self._place.positions(times)]
        start_of = b'"ts"' + colon
        return first + b"".join(
            [b"%b%d.%03d%b" % (start_of, *at, part[end:]) for at, part in zip(moved, parts, strict=True)]
        )

    def _one(self, raw: msgspec.Raw) -> bytes | None:
        try:
            fields = _fields(raw)
        except msgspec.DecodeError:
            self._notes.events(NO_JSON)
            return None
        phase = bytes(fields.get("ph", b""))
        if not (self._metadata(fields) if phase == b'"M"' else self._timed(fields, phase)):
            return None
        pid, tid = _text(fields.get("pid")), _text(fields.get("tid"))
        row = self._tracks.counters(self._row, pid) if phase == b'"C"' else self._row.pid
        track = self._tracks.foreign(self._row, pid, tid)
        if phase == b'"M"':
            self._tracks.name_known(self._row, track)
        fields["pid"] = msgspec.Raw(b"%d" % row)
        fields["tid"] = msgspec.Raw(b"%d" % track)
        for name in ("id", "id2", "bind_id"):
            if name in fields:
                fields[name] = self._ids.renamed(fields[name], scope=pid)
        return _encode(fields)

    def _timed(self, fields: dict[str, msgspec.Raw], phase: bytes) -> bool:
        """Moves the event. False: it is left out."""
        if "ts" not in fields:
            self._notes.events(NO_TIME)
            return False
        at = self._place.of(bytes(fields["ts"]).decode())
        if at is None:
            self._notes.events(NOT_THEN)
            return False
        fields["ts"] = _time(*at)
        start, end = self._cut
        if phase in _LASTS or not (
            (end is not None and at[0] > end)
            or (start is not None and at[0] + _duration_ns(fields.get("dur")) < start)
        ):
            return True
        self.outside += 1
        return False

    def _metadata(self, fields: dict[str, msgspec.Raw]) -> bool:
        """Notes what a file says of processes, for whom we speak, and moves what it says of threads."""
        name, pid = _text(fields.get("name")), _text(fields.get("pid"))
        args = _args(fields)
        if name.startswith("process_"):
            for field in ("labels", "name"):
                if isinstance(value := args.get(field), str) and value:
                    self._tracks.describe(self._row, pid, field, value)
            return False
        if name == "thread_name" and isinstance(value := args.get("name"), str):
            prefixed = self._tracks.prefixed(self._row, pid, value)
            if prefixed != value:
                fields["args"] = msgspec.Raw(_encode({**args, "name": prefixed}))
        at = self._place.of(bytes(fields.pop("ts", msgspec.Raw(b""))).decode())
        if at is not None:
            fields["ts"] = _time(*at)
        return True


def _time(position: int, below_ns: str) -> msgspec.Raw:
    return msgspec.Raw(b"%d.%03d%b" % (*divmod(position, 1000), below_ns.encode()))


def _text(raw: msgspec.Raw | None) -> str:
    """A pid or tid as text: 25721 and "25721" are the same one."""
    return "" if raw is None else bytes(raw).decode().strip('"')


def _args(fields: dict[str, msgspec.Raw]) -> dict[str, object]:
    try:
        return msgspec.json.decode(fields.get("args", b"{}"), type=dict[str, object])
    except msgspec.DecodeError:
        return {}


def _duration_ns(raw: msgspec.Raw | None) -> int:
    try:
        return 0 if raw is None else int(float(bytes(raw).strip(b'"')) * 1000)
    except (ValueError, OverflowError):
        return 0
