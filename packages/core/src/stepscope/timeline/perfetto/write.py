"""A merged timeline as Perfetto's protobuf: takes the events of the JSON, and writes TracePackets of them.

A slice is two packets there, an end ends whatever began last, and where times are equal the order decides. So
all events are sorted, on the disk, and slices that overlap without nesting get a track of their own.
Messages and field numbers: protos/perfetto/trace of the Perfetto project.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import ROUND_FLOOR, Decimal
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stepscope.files.storage.temporary import temporary
from stepscope.timeline.perfetto import wire
from stepscope.timeline.perfetto.spill import Record, Spill
from stepscope.timeline.perfetto.strings import Strings
from stepscope.timeline.perfetto.tracks import PerfettoTracks, Track

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
"""TrackEvent.Type; also what a record is, and besides:"""
_SLICE, _FLOW, _LAST_FLOW = 5, 6, 7
_AS_IT_COMES, _LONGEST_FIRST, _BEHIND = 0, 1, 2
"""The order of records with equal times."""
_SEQUENCE = wire.number(10, 1)
_CLEARED, _NEEDED = wire.number(13, 1), wire.number(13, 2)
_REALTIME, _BOOTTIME = 1, 6
_TOGETHER = 1000
"""Packets that are compressed at a time."""
_ASYNC = {"b": _BEGIN, "e": _END, "n": _INSTANT, "S": _BEGIN, "F": _END, "T": _INSTANT, "p": _INSTANT}
_FLOWS = {"s": _FLOW, "t": _FLOW, "f": _LAST_FLOW}
_FLOW_BITS = 53
"""Of a flow's id in the JSON. Above them stands a number for category and name, by which ids differ there."""


class _Event(msgspec.Struct):
    """What matters of a JSON event."""

    ph: str
    pid: int = 0
    tid: int = 0
    ts: msgspec.Raw = msgspec.Raw(b"0")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    name: Any = ""
    cat: Any = None
    id: Any = None
    id2: Any = None
    bind_id: Any = None
    flow_out: Any = False
    s: Any = "t"
    args: Any = None


_MALFORMED = "malformed"
_events = msgspec.json.Decoder(list[_Event]).decode
_event = msgspec.json.Decoder(_Event).decode


class PerfettoFile:
    """The file while it is written, as `TimelineFile` is. Until `finish`, events are beside it, in runs."""

    def __init__(self, sink: BinaryIO, base_ns: int, folder: Path, *, compress: bool) -> None:
        from isal import isal_zlib  # not when a report imports this package

        self._sink = sink
        self._gzip = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31) if compress else None
        self._compress = compress
        self._base_ns = base_ns
        self._spill = Spill(folder)
        self._seq = 0
        self._raw = 0
        self._tracks = PerfettoTracks()
        self._names = Strings(2, 10, 23)
        self._categories = Strings(1, 3, 22)
        self._words = Strings(3, 1, 10)
        self._flow_kinds: dict[tuple[str, str], int] = {}
        self._without_place: Counter[str] = Counter()
        self._heads: dict[tuple[int, int], bytes] = {}
        self._packets: list[bytes] = []

    @property
    def written(self) -> int:
        """About how large the file becomes with what was given so far; rather more than less."""
        return self._raw if not self._compress else self._spill.size * 5 // 4

    def settle(self) -> int:
        self._spill.flush()
        return self.written

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        found = sorted(self._without_place.items())
        return [
            f"{count} events of kind {kind!r}, for which Perfetto's format has no place"
            for kind, count in found
        ]

    def objects(self, events: list[dict[str, object]]) -> None:
        self.events(b",\n".join(map(msgspec.json.encode, events)))

    def events(self, text: bytes | memoryview) -> None:
        """Events as JSON, with commas between them."""
        if not text:
            return
        array = b"".join((b"[", text, b"]"))
        try:
            events = _events(array)
        except (msgspec.ValidationError, RecursionError):  # one has a field of a type that makes no sense
            events = list(self._one_by_one(array))
        for event in events:
            try:
                self._take(event)
            except (ArithmeticError, RecursionError, ValueError):
                self._without_place[_MALFORMED] += 1

    def finish(self, metadata: object) -> None:
        """Writes all that was given. `metadata` becomes the trace's attribute `stepscope`, as JSON."""
        self._put(wire.block(6, _clocks(self._base_ns)))
        said = wire.text(1, "stepscope") + wire.block(3, msgspec.json.encode(metadata))
        self._put(wire.block(126, wire.block(1, said)))
        for descriptor in self._tracks.descriptors():
            self._put(wire.block(60, descriptor))
        self._put(_CLEARED)
        for strings in (self._categories, self._names, self._words):
            for interned in strings.interned():
                self._put(wire.block(12, interned) + _NEEDED)
        self._write_events()
        self._out()
        if self._gzip is not None:
            self._sink.write(self._gzip.flush())

    def close(self) -> None:
        self._spill.close()

    def _one_by_one(self, array: bytes) -> Iterator[_Event]:
        for raw in msgspec.json.decode(array, type=list[msgspec.Raw]):
            for candidate in (bytes(raw), _with_plain_args(raw)):
                try:
                    yield _event(candidate)
                    break
                except (msgspec.ValidationError, RecursionError):
                    continue
            else:
                self._without_place[_MALFORMED] += 1

    def _take(self, event: _Event) -> None:
        phase, at = event.ph, _ns(event.ts)
        if phase == "X":
            dur = max(_ns(event.dur), 0)
            track = self._tracks.thread(event.pid, event.tid)
            self._add(at, _LONGEST_FIRST, -dur, track, _SLICE, self._said(event) + self._bound(event))
        elif phase == "M":
            args = event.args if isinstance(event.args, dict) else {}
            self._tracks.describe(str(event.name), event.pid, event.tid, args)
        elif phase in _FLOWS:
            self._flow(event, at)
        elif phase == "C":
            self._counter(event, at)
        elif phase in _ASYNC:
            key = (str(event.cat), str(event.id if event.id is not None else event.id2))
            track = self._tracks.concurrent(event.pid, key, str(event.name))
            self._add(at, _AS_IT_COMES, 0, track, _ASYNC[phase], self._said(event))
        elif phase in ("B", "E"):
            track = self._tracks.pushed(event.pid, event.tid)
            self._add(at, _AS_IT_COMES, 0, track, _BEGIN if phase == "B" else _END, self._said(event))
        elif phase in ("i", "I", "R"):
            track = self._tracks.thread(event.pid, event.tid)
            self._add(at, _BEHIND, 0, track, _INSTANT, self._said(event))
        else:
            self._without_place[phase] += 1

    def _add(self, at: int, order: int, then: int, track: int, kind: int, payload: bytes) -> None:
        self._seq += 1
        self._raw += len(payload) + 40
        self._spill.add((at, order, then, self._seq, track, kind, payload))

    def _said(self, event: _Event) -> bytes:
        """Name, category and arguments."""
        said = self._names.field(str(event.name))
        if event.cat is not None:
            said += self._categories.field(str(event.cat))
        if event.args:
            args = event.args if isinstance(event.args, dict) else {"args": event.args}
            said += b"".join(wire.block(4, self._annotation(word, value)) for word, value in args.items())
        return said

    def _annotation(self, word: str | None, value: object) -> bytes:
        """DebugAnnotation; those in an array have no name."""
        named = b"" if word is None else self._words.field(word)
        if isinstance(value, str):
            return named + wire.text(6, value)
        if isinstance(value, bool):
            return named + wire.number(2, value)
        if isinstance(value, int):
            return named + _integer(value)
        if isinstance(value, float):
            return named + wire.double(5, value)
        if isinstance(value, dict):
            return named + b"".join(wire.block(11, self._annotation(each, value[each])) for each in value)
        if isinstance(value, list):
            return named + b"".join(wire.block(12, self._annotation(None, each)) for each in value)
        return named + wire.text(6, "null")

    def _bound(self, event: _Event) -> bytes:
        if event.bind_id is None:
            return b""
        return wire.fixed(47 if event.flow_out else 48, self._flow_id(event.bind_id, "", ""))

    def _flow(self, event: _Event, at: int) -> None:
        number = self._flow_id(event.id, str(event.cat), str(event.name))
        track = self._tracks.thread(event.pid, event.tid)
        payload = number.to_bytes(8, "little") + self._names.field(str(event.name))
        self._add(at, _BEHIND, 0, track, _FLOWS[event.ph], payload)

    def _flow_id(self, found: object, category: str, name: str) -> int:
        kind = self._flow_kinds.setdefault((category, name), len(self._flow_kinds))
        try:
            number = found if isinstance(found, int) else int(str(found), 0)
        except ValueError:
            number = zlib.crc32(str(found).encode(errors="replace"))
        return kind << _FLOW_BITS & 0xFFFF_FFFF_FFFF_FFFF | number & (1 << _FLOW_BITS) - 1

    def _counter(self, event: _Event, at: int) -> None:
        values = event.args if isinstance(event.args, dict) else {}
        for word, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            track = self._tracks.counter(event.pid, str(event.name), word, alone=len(values) == 1)
            whole = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
            payload = wire.number(30, int(value)) if whole else wire.double(44, float(value))
            self._add(at, _AS_IT_COMES, 0, track, _COUNTER, payload)

    def _write_events(self) -> None:
        """All records by their time, with the ends of slices between them."""
        ends: list[tuple[int, int]] = []
        together: list[Record] = []
        for record in self._spill.sorted():
            if together and together[0][0] != record[0]:
                self._write_together(together, ends)
                together = []
            while ends and not together and ends[0][0] <= record[0]:
                at, uuid = heappop(ends)
                self._event(at, _END, uuid, b"")
            together.append(record)
        if together:
            self._write_together(together, ends)
        while ends:
            at, uuid = heappop(ends)
            self._event(at, _END, uuid, b"")

    def _write_together(self, records: list[Record], ends: list[tuple[int, int]]) -> None:
        """Records of one moment. An arrow belongs to the innermost slice that begins then, or to a mark."""
        at = records[0][0]
        begun: dict[int, list[Any]] = {}
        out: list[list[Any]] = []
        for _, _, then, _, number, kind, payload in records:
            track = self._tracks.tracks[number]
            if kind == _SLICE:
                uuid = self._lane(track, at, at - then)
                begun[number] = [_BEGIN, uuid, payload]
                out.append(begun[number])
                if then:
                    heappush(ends, (at - then, uuid))
                else:
                    out.append([_END, uuid, b""])
            elif kind in (_FLOW, _LAST_FLOW):
                arrow = wire.fixed(47 if kind == _FLOW else 48, int.from_bytes(payload[:8], "little"))
                if number in begun:
                    begun[number][2] += arrow
                else:
                    out.append([_INSTANT, self._running(track, at), payload[8:] + arrow])
            else:
                uuid = track.uuid if kind != _INSTANT else self._running(track, at)
                out.append([kind, uuid, payload])
        for kind, uuid, payload in out:
            self._event(at, kind, uuid, payload)

    def _lane(self, track: Track, start: int, end: int) -> int:
        """The uuid of the first lane of a track in which the slice nests."""
        for running in track.lanes:
            while running and running[-1][1] <= start:
                running.pop()
        fits = (lane for lane, running in enumerate(track.lanes) if not running or end <= running[-1][1])
        lane = next(fits, len(track.lanes))
        uuid, descriptor = self._tracks.lane(track, lane)
        if descriptor is not None:
            self._put(wire.block(60, descriptor))
        if end > start:
            track.lanes[lane].append((start, end))
        return uuid

    def _running(self, track: Track, at: int) -> int:
        """The uuid of the lane with the slice that began last, of those that run."""
        running = [(*slices[-1], lane) for lane, slices in enumerate(track.lanes) if slices]
        _, _, lane = max((each for each in running if each[1] >= at), default=(0, 0, 0))
        return self._tracks.lane(track, lane)[0]

    def _event(self, at: int, kind: int, uuid: int, payload: bytes) -> None:
        said = self._heads.get((kind, uuid))
        if said is None:
            said = self._heads[kind, uuid] = wire.number(9, kind) + wire.number(11, uuid)
        self._put(wire.number(8, at) + wire.block(11, said + payload) + _NEEDED)

    def _put(self, packet: bytes) -> None:
        self._packets.append(wire.block(1, packet + _SEQUENCE))
        if len(self._packets) >= _TOGETHER:
            self._out()

    def _out(self) -> None:
        text = b"".join(self._packets)
        self._sink.write(text if self._gzip is None else self._gzip.compress(text))
        self._packets = []


def _with_plain_args(raw: msgspec.Raw) -> bytes:
    """The event with its arguments as one text: a number in them is larger than a double."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    args = bytes(fields.get("args", b"")).decode(errors="replace")
    return msgspec.json.encode({**fields, "args": {"args": args}})


def _clocks(base_ns: int) -> bytes:
    """ClockSnapshot: times count from the base, and this is what time it was then."""
    pairs = ((_BOOTTIME, 0), (_REALTIME, base_ns))
    return b"".join(wire.block(1, wire.number(1, clock) + wire.number(2, at)) for clock, at in pairs)


def _integer(value: int) -> bytes:
    if -(1 << 63) <= value < 1 << 63:
        return wire.number(4, value)
    return wire.number(3, value) if 0 <= value < 1 << 64 else wire.text(6, str(value))


def _ns(us: msgspec.Raw) -> int:
    """A time in us as it stands in the JSON, in whole ns."""
    whole, _, below = bytes(us).strip(b'"').partition(b".")
    if len(below) <= 3 and (below.isdigit() or not below) and whole.isdigit():
        return int(whole) * 1000 + int(below.ljust(3, b"0"))
    try:
        exact = Decimal(bytes(us).strip(b'"').decode()) * 1000
        return int(exact.to_integral_value(ROUND_FLOOR))
    except (ArithmeticError, ValueError):
        return 0


@contextmanager
def perfetto_file(path: Path, base_ns: int) -> Iterator[PerfettoFile]:
    """A file that replaces what is at `path` when the block ends well; gzip if its name ends so.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    name = temporary(path)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as sink:
            with closing(
                PerfettoFile(sink, base_ns, path.parent, compress=path.name.endswith(".gz"))
            ) as file:
                yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
