"""Times, tracks and ids of events in the merged timeline.

A time is mapped exactly. A row keeps the pid of its process unless another row has this pid. A thread keeps
its tid unless another thread of the row has this tid. So most events need no change. Other pids and tids get
free numbers far below 2^32, the limit of Perfetto. Flow ids and async ids get the number of their file as a
prefix. All ids stay below 10^15, so that a double represents them exactly.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from decimal import ROUND_FLOOR, Context, Decimal
from itertools import count
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope_report.timeline.rows import Axis, Row, offset_at, steady

JsonEvent: TypeAlias = dict[str, object]
"""An event whose JSON is not written yet."""
_NUMBER = re.compile(r'"?(-?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?)"?')
_EXACT = Context(prec=200)
_FIRST_TID = 10_000_000
"""The first tid that a merge gives, above all pids of Linux (2^22): Perfetto takes a thread whose tid is its
pid for the main thread."""
_DIGITS = 15
"""Number of digits of the largest ids, which are those of `FlowIds._others`."""
_OWN = "\0stepscope"
"""The key of stepscope's own tracks, in the place of a file's pid; no file has such a pid."""
_BESIDE = "\0beside"
"""The key of the additional lines of a track, for slices that cross others. It stands in the place of a
file's pid, as `_OWN` does; no file has such a pid."""
_FURTHER = 1 << 30
"""Number of additional pids, which all rows share equally. They lie above all pids of Linux and below 2^31,
as Perfetto's own format requires."""
_OF_A_ROW = 1 << 11
"""Number of tids that belong to one row alone. Further tids of a row may also occur in other rows."""


class Cut(NamedTuple):
    """The selected time, in ns since the axis' base, or None for no limit."""

    start: int | None
    end: int | None

    def holds(self, first: int, last: int) -> bool:
        """Return whether a part of the time from `first` to `last` is selected."""
        return (self.end is None or first <= self.end) and (self.start is None or last >= self.start)


class Place:
    """Time mapping of one file. Positions are ns since the axis' base; a `ts` is decimal text in us."""

    def __init__(self, row: Row, base_ns: int | None, axis: Axis) -> None:
        self._row = row
        self._clock = row.clock
        self._axis = axis
        self._base_ns = base_ns or 0

    @property
    def shift_ns(self) -> int | None:
        """Number that is added to `ts` * 1000, or None if the number differs between events, or is not known
        yet.
        """
        if self._row.shift_ns is None or not (self._clock is None or steady(self._clock)):
            return None
        return self._shift_at(0)

    def positions(self, times_ns: list[int]) -> list[int]:
        """Return the positions of times in ns since the file's base, for an aligned row."""
        shift_ns = self.shift_ns
        if shift_ns is not None:
            return [ns + shift_ns for ns in times_ns]
        return [ns + self._shift_at(ns) for ns in times_ns]

    def at(self, ts_ns: int) -> int | None:
        """Return the position of a time in ns since the file's base, or None if it is no plausible time of
        this step.
        """
        if self._row.shift_ns is None:
            self._row.shift_ns = self._axis.shift_of(ts_ns + self._base_ns - self._axis.base_ns)
        position = ts_ns + self._shift_at(ts_ns)
        first, last = self.believed
        return position if first <= position and (last is None or position <= last) else None

    def of(self, ts: str) -> tuple[int, str] | None:
        """Return (position, decimals below a ns) of a `ts`, or None if it is no plausible time of
        this step.
        """
        number = _NUMBER.fullmatch(ts)
        if number is None:
            return None
        exact = _EXACT.multiply(Decimal(number[1]), Decimal(1000))
        whole = int(exact.to_integral_value(ROUND_FLOOR, _EXACT))
        position = self.at(whole)
        if position is None:
            return None
        below = _EXACT.subtract(exact, Decimal(whole))
        return position, "" if not below else format(below, "f").partition(".")[2]

    @property
    def believed(self) -> tuple[int, int | None]:
        """Return the first and the last position of this step; the last is None if any later position is
        plausible.
        """
        return (0, None) if self._row.unaligned is not None else (self._axis.first, self._axis.last)

    def _shift_at(self, ts_ns: int) -> int:
        offset_ns = 0 if self._clock is None else offset_at(self._clock, ts_ns + self._base_ns)
        return self._base_ns - self._axis.base_ns - offset_ns + (self._row.shift_ns or 0)


class FlowIds:
    """The flow, async and object ids of one file."""

    def __init__(self, file: int, files: int) -> None:
        """
        Args:
            file: Number of the file, from 1. 0 is for stepscope's own arrows.
            files: Number of files.
        """
        lowest = 10 ** len(str(files))  # so that all prefixes have the same length
        self.prefix = b"%d" % (lowest + file)
        """Prefix of the file's ids. An id that is less than `below` follows the prefix unchanged."""
        self._free = _DIGITS - len(self.prefix)
        self.below = 10 ** (self._free - 1)
        self._others: dict[tuple[bytes, object], int] = {}

    def number(self, written: bytes, scope: object = None) -> int:
        """Return the new id for an id written as JSON. Different ids stay different."""
        if scope is None and written.isdigit() and int(written) < self.below:
            return int(b"%b%d" % (self.prefix, int(written)))
        # Strings and large numbers get a number with one more digit behind the prefix than other ids have.
        other = self._others.setdefault((written, scope), len(self._others))
        return int(b"%b%0*d" % (self.prefix, self._free, other))

    def renamed(self, written: msgspec.Raw, scope: object) -> msgspec.Raw:
        """Return the new id as JSON of the same type: a number, or a string with a hexadecimal number.

        Args:
            scope: Pid of the event, which owns a local id. Only `id2` has local ids.
        """
        text = bytes(written)
        if text.startswith(b"{"):  # `id2`: {"local": id} or {"global": id}
            ids = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            moved = {
                kind: hex(self.number(bytes(written_id), (kind, scope))) for kind, written_id in ids.items()
            }
            return msgspec.Raw(msgspec.json.encode(moved))
        number = self.number(text)
        return msgspec.Raw(b'"%#x"' % number if text.startswith(b'"') else b"%d" % number)


class _RowTracks(msgspec.Struct):
    tids: dict[str, dict[str, int]] = {}
    """{pid in a file: {tid in the file: tid in the timeline}}."""
    labels: dict[str, str] = {}
    counters: dict[str, int] = {}
    first: str | None = None


class Tracks:
    """Tracks of one timeline. Processes in a file become tracks in the row of the file's process."""

    def __init__(self, pids: Iterable[int]) -> None:
        """
        Args:
            pids: The pids of all rows.
        """
        self.pids = list(pids)
        self._pids = set(self.pids)
        self._rows: dict[int, _RowTracks] = defaultdict(_RowTracks)
        """{pid: its tracks}."""
        self._count = Counter[tuple[int, bool]]()
        """{(pid of a row, True for further lines): its tracks}. Each row has its own count, so that no
        row changes the tids of another. Further lines have one, too, and thus change no thread's tid."""
        self._taken: set[tuple[int, int]] = set()
        """(pid, tid) in the timeline of everything that has a track."""
        self._names: dict[tuple[int, str, str], str] = {}
        """{(pid of the row, pid and tid in a file): name of the thread, as the file has it}."""
        self._beside: dict[tuple[int, int], tuple[str, str, int]] = {}
        """{(pid, tid) of a further line of a thread: pid and tid in the file, number of the line}."""
        self._unnamed: dict[tuple[int, int], str] = {}
        self.metadata: list[JsonEvent] = []
        """Metadata that has been added since the last call of `take`."""

    def own(self, row: Row, name: str, sort: int, owner: str = _OWN) -> int:
        """Return the tid of the track with this name that belongs to `owner` (stepscope or a reader)."""
        tid = self._rows[row.pid].tids.get(owner, {}).get(name)
        if tid is None:
            tid = self._new(row, owner, name)
            self.call(row, tid, name, sort)
        return tid

    def call(self, row: Row, tid: int, name: str, sort: int) -> None:
        """Give a track its name and its place in the row."""
        self.metadata += _named("thread", row.pid, tid, name, sort)

    def foreign(self, row: Row, pid: str, tid: str) -> int:
        """Return the tid of a thread that a file names by `pid` and `tid` (as text, without quotes)."""
        known = self._rows[row.pid].tids.get(pid, {}).get(tid)
        if known is None:
            name = f"thread {tid}" if tid.lstrip("-").isdigit() else tid or "no thread"
            known = self._new(row, pid, tid)
            self._unnamed[row.pid, known] = self.prefixed(row, pid, name)
        return known

    def beside(self, row: Row, track: int, line: int) -> int:
        """Return the tid of a further line of a track of a file, for slices that cross others."""
        threads = self._rows[row.pid].tids
        known = threads.get(_BESIDE, {}).get(f"{track} {line}")
        if known is None:
            pid, tid = next(
                (pid, tid) for pid in threads for tid in threads[pid] if threads[pid][tid] == track
            )
            known = self._new(row, _BESIDE, f"{track} {line}")
            self._beside[row.pid, known] = pid, tid, line
        return known

    def called(self, row: Row, pid: str, tid: str, name: str) -> None:
        """Record the name that a file gives a thread."""
        self._names[row.pid, pid, tid] = name

    def name_known(self, row: Row, tid: int) -> None:
        """Record that a file itself names this track."""
        self._unnamed.pop((row.pid, tid), None)

    def describe(self, row: Row, pid: str, field: str, value: str) -> bool:
        """Record a file's description of one of its pids: `labels` ("CPU", "GPU 0"), or else its `name`.

        Returns:
            True if the description was new.
        """
        known = self._rows[row.pid]
        before = known.labels.get(pid)
        if field == "labels":
            known.labels[pid] = "" if value == "CPU" else value
        elif known.first is None:
            known.first = pid
        elif known.first != pid:
            known.labels.setdefault(pid, value)
        return known.labels.get(pid) != before

    def prefixed(self, row: Row, pid: str, name: str) -> str:
        """Return a thread's name with the device's name in front, because the row is the whole process."""
        name = name.strip()  # Kineto's names end with a space: `stream 7 `
        label = self._rows[row.pid].labels.get(pid, "")
        return f"{label} {name}" if label and label not in name else name

    def counters(self, row: Row, pid: str) -> int:
        """Return the pid under which to write the counters of `pid` in a file. Each of the file's pids gets a
        different one, because viewers identify a counter by pid and name.
        """
        known = self._rows[row.pid].counters
        if pid not in known:
            known[pid] = self._further(row, pid) if known else row.pid
        return known[pid]

    def take(self) -> list[JsonEvent]:
        """Remove and return the metadata that is not written yet."""
        taken, self.metadata = self.metadata, []
        return taken

    def take_unnamed(self) -> list[JsonEvent]:
        """Remove and return names for the tracks that no file has named."""
        names = [_meta("thread_name", pid, tid, name=name) for (pid, tid), name in self._unnamed.items()]
        for (row, known), (pid, tid, line) in self._beside.items():
            name = self._names.get((row, pid, tid), f"thread {tid}")
            # Viewers sort threads by this index, for which Kineto writes the tid.
            names += _named("thread", row, known, f"{name} ({line + 1})", int(tid) if tid.isdigit() else 0)
        self._unnamed.clear()
        self._beside.clear()
        return names

    def _further(self, row: Row, pid: str) -> int:
        rows = len(self.pids)
        first = _FURTHER + row.place % rows * (_FURTHER // rows)
        further = next(free for free in count(first) if free not in self._pids)
        self._pids.add(further)
        name = self.prefixed(row, pid, "counters")
        self.metadata += _named("process", further, 0, f"{row.name}: {name}", row.place * 10 + 1)
        return further

    def _new(self, row: Row, pid: str, tid: str) -> int:
        # Use the file's own tid, so that events need no change, unless another thread of this row has it. Tid
        # 0, which ROCm gives a stream, is not used: Perfetto takes it for the machine's idle thread.
        own = int(tid) if tid.isascii() and tid.isdigit() and len(tid) < 10 else _FIRST_TID
        is_beside = pid == _BESIDE
        first = _FIRST_TID + row.place * _OF_A_ROW + is_beside * _OF_A_ROW // 2
        first += self._count[row.pid, is_beside]
        free = own if 0 < own < _FIRST_TID else first
        while (row.pid, free) in self._taken:
            free = max(free, first - 1) + 1
        self._taken.add((row.pid, free))
        self._count[row.pid, is_beside] += 1
        self._rows[row.pid].tids.setdefault(pid, {})[tid] = free
        return free


def row_metadata(row: Row) -> Iterator[JsonEvent]:
    """Yield the name, place and labels of a row."""
    yield from _named("process", row.pid, 0, row.name, row.place * 10)
    info = row.info
    labels = [info.host, f"pid {info.pid}"] if info.pid else [info.host]
    if row.unaligned is not None:
        labels.append(f"unaligned: {row.unaligned}")
    if row.shift_ns:
        labels.append(f"shown {row.shift_ns / 1e9:+,.3f} s from its own clock")
    yield _meta("process_labels", row.pid, 0, labels=", ".join(labels))


def _named(what: str, pid: int, tid: int, name: str, sort: int) -> Iterator[JsonEvent]:
    """Yield the name and the place of a `process` or a `thread`."""
    yield _meta(f"{what}_name", pid, tid, name=name)
    yield _meta(f"{what}_sort_index", pid, tid, sort_index=sort)


def _meta(event: str, pid: int, tid: int, **args: object) -> JsonEvent:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def microseconds(ns: int) -> msgspec.Raw:
    """Return a time as a trace has it: us, with all digits of the ns."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))
