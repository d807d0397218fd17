"""Rewriting of foreign events as bytes, with new pids, tids, ids and times; other values stay the same.

Two ways lead to the same result. The fast way (`Template`) is used for batches of plain events. The thorough
way decodes each event into its fields. It supports any order, layout and type of ids, and takes ten times as
long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeAlias

import msgspec

from stepscope_report.timeline.clocks import NOT_NEAR
from stepscope_report.timeline.merge.crossing import Lines
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, Place, Tracks
from stepscope_report.timeline.merge.template import Template
from stepscope_report.timeline.readers.contract import Notes
from stepscope_report.timeline.readers.json_array import NO_JSON, array_of, raw_elements
from stepscope_report.timeline.rows import Row

NO_TIME = "events without a time"

_FEW = 24
"""Number of events below which another attempt at the fast way does not pay."""
_REPEATED = 1000
"""Number of metadata events that are cached: some writers repeat them with every event of a device."""
_CYCLE = 512
"""Number of bytes at the beginning of a batch. If they recur in the batch, its metadata may be one text
repeated: the first copy is decoded, and the other copies are compared with it."""
_APART = ("M", "C")
_APART_PHASE = re.compile(r'"ph"\s*:\s*"[{}]"'.format("".join(_APART)).encode())
_LASTS = (b'"B"', b'"E"', b'"b"', b'"e"')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Kind(msgspec.Struct, gc=False):
    ph: str = ""


_kind = msgspec.json.Decoder(_Kind).decode
_kinds = msgspec.json.Decoder(list[_Kind]).decode
Text: TypeAlias = bytes | memoryview
"""Events as JSON, with commas between them."""


class Rewriter:
    """Rewriting of one file's events."""

    def __init__(self, row: Row, place: Place, ids: FlowIds, tracks: Tracks, cut: Cut, notes: Notes) -> None:
        self.lines = Lines()
        self._row = row
        self._place = place
        self._ids = ids
        self._tracks = tracks
        self._cut = cut
        self._notes = notes
        self._template = Template(row, place, ids, tracks, cut, self.lines)
        self._metadata_before: dict[bytes, bytes | None] = {}
        """{metadata as read: metadata as written}."""
        self._repeating = False
        """True if the last array that was decoded was long and had nothing but metadata and counters."""
        self.written = 0
        """Number of events written."""
        self.outside = 0
        """Events left out because they are not between `from` and `to`."""

    def rewrite(self, array: bytes) -> Text:
        """Return the events of the next batch, without brackets. The text is empty if no event is left.

        Raises:
            DecodeError: the array is no JSON.
        """
        done: tuple[Text, int] | None = self._repeated(array) if self._repeating else None
        if done is None and not _ends_apart(array):
            done = self._template.rewritten(array)
        if done is None:
            return b",\n".join(text for text in self._parts(array) if text)
        text, count = done
        self.written += count
        return text

    def _repeated(self, array: bytes) -> tuple[bytes, int] | None:
        """Return the rewritten events of an array and their number, or None unless all are known metadata."""
        period = max(1, array.find(array[1 : 1 + _CYCLE], 2) - 1)
        unit, times = array[1 : 1 + period], (len(array) - 3) // period
        end = 1 + times * period
        if unit.rstrip().endswith(b",") and array[1:end] == unit * times:
            once, rest = self._known(unit.rstrip()[:-1]), self._known(array[end:-1])
            if once is None or rest is None:
                return None
            return b",\n".join([*once * times, *rest]), len(once) * times + len(rest)
        events = self._known(array[1:-1])
        return None if events is None else (b",\n".join(events), len(events))

    def _known(self, elements: bytes) -> list[bytes] | None:
        """Return the rewritten form of these metadata, or None if some of them are unknown."""
        try:
            written = [self._metadata_before[text] for text in map(bytes, raw_elements(b"[%b]" % elements))]
        except KeyError:
            return None
        return [text for text in written if text is not None]

    def thoroughly(self, elements: Iterable[msgspec.Raw]) -> bytes:
        """Rewrite each event by itself, whatever its form."""
        events = [event for raw in elements if (event := self._one(raw)) is not None]
        self.written += len(events)
        return b",\n".join(events)

    def _parts(self, array: bytes) -> Iterator[Text]:
        """Yield the rewritten parts of an array, with metadata and counters apart. If all events are of other
        kinds and many, yield two halves.
        """
        elements = raw_elements(array)
        self._repeating = False
        if self._cut != (None, None) or len(elements) <= _FEW:
            yield self.thoroughly(elements)
            return
        first, last = _ends(elements)
        if first or last < len(elements):
            yield self.thoroughly(elements[:first])
            yield self.rewrite(array_of(elements[first:last])) if first < last else b""
            yield self.thoroughly(elements[last:])
            self._repeating = first == len(elements)
            return
        for apart, run in _runs(array, elements):
            if apart or len(run) <= _FEW:
                yield self.thoroughly(run)
            elif len(run) < len(elements):
                yield self.rewrite(array_of(run))
            else:
                middle = len(run) // 2
                yield from (self.rewrite(array_of(half)) for half in (run[:middle], run[middle:]))

    def _one(self, raw: msgspec.Raw) -> bytes | None:
        text = bytes(raw)
        if text in self._metadata_before:
            return self._metadata_before[text]
        try:
            fields = _fields(text)
        except msgspec.DecodeError:
            self._notes.events(NO_JSON)
            return None
        phase = bytes(fields.get("ph", b""))
        if phase != b'"M"':
            return self._moved(fields, phase) if self._timed(fields, phase) else None
        written = self._moved(fields, phase) if self._metadata(fields) else None
        if len(self._metadata_before) < _REPEATED:
            self._metadata_before[text] = written
        return written

    def _moved(self, fields: dict[str, msgspec.Raw], phase: bytes) -> bytes:
        pid, tid = _text(fields.get("pid")), _text(fields.get("tid"))
        row = self._tracks.counters(self._row, pid) if phase == b'"C"' else self._row.pid
        track = self._tracks.foreign(self._row, pid, tid)
        if phase == b'"X"':
            dur_us = _duration_ns(fields.get("dur")) / 1000
            line = self.lines.line_of(track, float(bytes(fields["ts"])), dur_us)
            track = self._tracks.beside(self._row, track, line) if line else track
        if phase == b'"M"':
            self._tracks.name_known(self._row, track)
        fields["pid"] = msgspec.Raw(b"%d" % row)
        fields["tid"] = msgspec.Raw(b"%d" % track)
        for name in ("id", "id2", "bind_id"):
            if name in fields:
                fields[name] = self._ids.renamed(fields[name], scope=pid)
        return _encode(fields)

    def _timed(self, fields: dict[str, msgspec.Raw], phase: bytes) -> bool:
        """Change the times of an event. Return False if the event is to be left out."""
        if "ts" not in fields:
            self._notes.events(NO_TIME)
            return False
        at = self._place.of(bytes(fields["ts"]).decode())
        if at is None:
            self._notes.events(NOT_NEAR)
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
        """Change a metadata event, record the name or description in it, and return whether the event is
        kept. An event that describes a process is not kept, because rows have their own.
        """
        name, pid = _text(fields.get("name")), _text(fields.get("pid"))
        args = _args(fields)
        if name.startswith("process_"):
            for field in ("labels", "name"):
                value = args.get(field)
                if isinstance(value, str) and value and self._tracks.describe(self._row, pid, field, value):
                    self._metadata_before.clear()  # known thread names begin with the old description
            return False
        if name == "thread_name" and isinstance(value := args.get("name"), str):
            prefixed = self._tracks.prefixed(self._row, pid, value)
            if not prefixed:
                return False  # the track gets a name of ours: Perfetto takes an empty one for an error
            self._tracks.called(self._row, pid, _text(fields.get("tid")), prefixed)
            if prefixed != value:
                fields["args"] = msgspec.Raw(_encode({**args, "name": prefixed}))
        at = self._place.of(bytes(fields.pop("ts", msgspec.Raw(b""))).decode())
        if at is not None:
            fields["ts"] = _time(*at)
        return True


def _ends_apart(array: bytes) -> bool:
    """Return whether an array ends with metadata or a counter, so that the fast way is not tried on it."""
    return _APART_PHASE.match(array, array.rfind(b'"ph"')) is not None


def _ends(elements: list[msgspec.Raw]) -> tuple[int, int]:
    """Return the range (start, stop) of `elements` between the metadata and counters at both ends of the
    list. Kineto writes its metadata there.
    """
    first, last = 0, len(elements)
    while first < last and _is_apart(elements[first]):
        first += 1
    while last > first and _is_apart(elements[last - 1]):
        last -= 1
    return first, last


def _is_apart(raw: msgspec.Raw) -> bool:
    try:
        return _kind(raw).ph in _APART
    except msgspec.ValidationError:
        return True


def _runs(array: bytes, elements: list[msgspec.Raw]) -> Iterator[tuple[bool, list[msgspec.Raw]]]:
    """Yield (True for metadata and counters, consecutive events of that kind)."""
    try:
        phases = [kind.ph for kind in _kinds(array)]
    except msgspec.ValidationError:
        yield True, elements
        return
    for apart, run in groupby(zip(phases, elements, strict=True), lambda pair: pair[0] in _APART):
        yield apart, [element for _, element in run]


def _time(position: int, below_ns: str) -> msgspec.Raw:
    return msgspec.Raw(b"%d.%03d%b" % (*divmod(position, 1000), below_ns.encode()))


def _text(raw: msgspec.Raw | None) -> str:
    """Return a pid or tid as text: 25721 and "25721" are the same."""
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
