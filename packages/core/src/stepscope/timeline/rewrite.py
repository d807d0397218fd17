"""Foreign events, as bytes, with new pids, tids, ids and times; every other byte of their values as it was.

Two ways to the same result. In the layout of Kineto, a batch is cut at the fields that change and joined
again, once it is checked that there is one such place for each event. The other way decodes each event into
its fields, takes whatever order, layout and types of ids there are, and costs a multiple.
"""

from __future__ import annotations

import re
from itertools import repeat
from operator import contains
from typing import NamedTuple

import msgspec

from stepscope.timeline.ids import FlowIds
from stepscope.timeline.place import Place
from stepscope.timeline.readers.blocks import Notes
from stepscope.timeline.readers.elements import NO_JSON, Batch
from stepscope.timeline.rows import Axis, Row
from stepscope.timeline.tracks import Tracks

NO_TIME = "events without a time"
NOT_THEN = "events whose time is not near the step"

_PLACE = rb'("pid":\s*(?:\d+|"[^"\\]*"),\s*"tid":\s*(?:\d+|"[^"\\]*"),\s*"ts":\s*)'
_WHOLE = re.compile(_PLACE + rb"(\d{1,16})(?=(?:\.\d+)?\s*[,}])")
_TO_NS = re.compile(_PLACE + rb"(\d{1,16}(?:\.\d{1,3})?)(?=\s*[,}])")
_ID = re.compile(rb'("ph":\s*"[a-zA-Z]",\s*"id":\s*)(\d{1,9})(?=\s*,)')
_PAIR = re.compile(rb'"pid":\s*"?([^",]*)"?,\s*"tid":\s*"?([^",]*)"?,')
_FEW = 64
"""Events that are not worth another attempt: metadata stand together, so halves of a batch soon have none."""
_LASTS = (b'"B"', b'"E"', b'"b"', b'"e"')
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
        self._last = axis.last
        self._cut = cut
        self._notes = notes
        self._places: dict[bytes, bytes] = {}
        self._kineto = True
        """Whether this file's batches, or most of one, have gone the quick way lately."""
        self.written = 0
        """Events."""
        self.outside = 0
        """Events left out because they are not between `from` and `to`."""

    def rewrite(self, batch: Batch) -> bytes:
        """The batch as text to stand between brackets; empty where nothing is left of it."""
        text = self._quickly(batch) if self._cut == (None, None) else None
        if text is not None:
            self.written += len(batch.elements)
            self._kineto = True
            return text
        count = len(batch.elements)
        if self._kineto and count > _FEW and self._cut == (None, None):
            self._kineto = False  # unless a part of this one goes the quick way after all
            halves = batch.elements[: count // 2], batch.elements[count // 2 :]
            texts = [self.rewrite(Batch(b",\n".join(half), half)) for half in halves]
            return b",\n".join(text for text in texts if text)
        events = [event for raw in batch.elements if (event := self._one(raw)) is not None]
        self.written += len(events)
        return b",\n".join(events)

    def _quickly(self, batch: Batch) -> bytes | None:
        """None: it is not laid out so that this would surely be right."""
        text, count = batch.text, len(batch.elements)
        if self._row.unaligned is not None or text.count(b'"ph"') != count:
            return None
        if b'"M"' in text or b'"C"' in text:  # metadata and counters: more than renamed
            return None
        if b'"id' in text or b"bind_id" in text:
            renamed = self._ids_moved(text)
            if renamed is None:
                return None
            text = renamed
        shift_ns = self._place.shift_ns
        whole = shift_ns is not None and shift_ns % 1000 == 0
        shift_us = 0 if shift_ns is None else shift_ns // 1000
        parts = (_WHOLE if whole else _TO_NS).split(text)
        # One place for each event: as many as events, and between two of them another event begins.
        if len(parts) != 3 * count + 1 or not all(map(contains, parts[:-1:3], repeat(b'"ph"'))):
            return None
        if whole:
            times = [int(us) + shift_us for us in parts[2::3]]
        else:
            times = self._place.positions(_nanoseconds(parts[2::3]))
        if min(times) < 0 or max(times) > (self._last // 1000 if whole else self._last):
            return None
        places = self._places
        parts[1::3] = [places.get(place) or self._new_place(place) for place in parts[1::3]]
        parts[2::3] = (
            [b"%d" % us for us in times] if whole else [b"%d.%03d" % divmod(ns, 1000) for ns in times]
        )
        return b"".join(parts)

    def _ids_moved(self, text: bytes) -> bytes | None:
        parts = _ID.split(text)
        if len(parts) // 3 != text.count(b'"id') or b"bind_id" in text:
            return None
        first = self._ids.first
        parts[2::3] = [b"%d" % (first + int(number)) for number in parts[2::3]]
        return b"".join(parts)

    def _new_place(self, place: bytes) -> bytes:
        pair = _PAIR.match(place)
        pid, tid = ("", "") if pair is None else (pair[1].decode(), pair[2].decode())
        new = b'"pid": %d, "tid": %d, "ts": ' % (self._row.pid, self._tracks.foreign(self._row, pid, tid))
        self._places[place] = new
        return new

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
            self._tracks.name_known(track)
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


def _nanoseconds(texts: list[bytes]) -> list[int]:
    pairs = (text.partition(b".") for text in texts)
    return [int(us) * 1000 + int(below.ljust(3, b"0")) for us, _, below in pairs]


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
