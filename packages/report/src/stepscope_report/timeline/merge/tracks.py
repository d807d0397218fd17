"""The tracks of a merged timeline: each gets a tid of its own in its row, and a name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeAlias

import msgspec

from stepscope_report.timeline.merge.mapping import FIRST_TID
from stepscope_report.timeline.step.rows import Row

Event: TypeAlias = dict[str, object]
_OWN = "\0stepscope"
"""The key of stepscope's own tracks, in the place of a file's pid; no file has such a pid."""
_BESIDE = "\0beside"
"""The key of further lines of threads, likewise."""
_FURTHER = 1 << 30
"""Number of further pids, which begin above all pids of Linux and are shared equally by the rows. All are
below 2^31, as Perfetto's own format requires."""
_OF_A_ROW = 1 << 11
"""Number of tids that a row has for itself; further ones may also occur in other rows."""


class RowTracks(msgspec.Struct):
    tids: dict[str, dict[str, int]] = {}
    """The tid in the timeline, by the pid and the tid in a file."""
    labels: dict[str, str] = {}
    counters: dict[str, int] = {}
    first: str | None = None


class Tracks:
    """Tracks of one timeline. Processes in a file become tracks in the row of the file's process."""

    def __init__(self, pids: Iterable[int]) -> None:
        """`pids`: The pids of all rows."""
        self.pids = list(pids)
        self._pids = set(self.pids)
        self._rows: dict[int, RowTracks] = defaultdict(RowTracks)
        """{pid: its tracks}."""
        self._count = Counter[int]()
        """Number of tracks of each row. Numbers count within a row, so that no row changes the numbers of
        another."""
        self._taken: set[tuple[int, int]] = set()
        """(pid, tid) in the timeline of everything that has a track."""
        self._names: dict[tuple[int, str, str], str] = {}
        """{(pid of the row, pid and tid in a file): name of the thread, as the file has it}."""
        self._beside: dict[tuple[int, int], tuple[str, str, int]] = {}
        """{(pid, tid) of a further line of a thread: pid and tid in the file, number of the line}."""
        self._unnamed: dict[tuple[int, int], str] = {}
        self.metadata: list[Event] = []
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
        self.metadata += named("thread", row.pid, tid, name, sort)

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
        """Record a file's description of one of its pids: `labels` ("CPU", "GPU 0"), or the weaker `name`.

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
        name = name.strip()  # Kineto's are `stream 7 `
        label = self._rows[row.pid].labels.get(pid, "")
        return f"{label} {name}" if label and label not in name else name

    def counters(self, row: Row, pid: str) -> int:
        """Return the pid for counters of one of a file's pids: viewers know a counter by pid and name."""
        known = self._rows[row.pid].counters
        if pid not in known:
            known[pid] = self._further(row, pid) if known else row.pid
        return known[pid]

    def take(self) -> list[Event]:
        """Remove and return the metadata that is not written yet."""
        taken, self.metadata = self.metadata, []
        return taken

    def take_unnamed(self) -> list[Event]:
        """Remove and return names for the tracks that no file has named."""
        names = [_meta("thread_name", pid, tid, name=name) for (pid, tid), name in self._unnamed.items()]
        for (row, known), (pid, tid, line) in self._beside.items():
            name = self._names.get((row, pid, tid), f"thread {tid}")
            # Viewers sort threads by this number, which Kineto writes as the tid.
            names += named("thread", row, known, f"{name} ({line + 1})", int(tid) if tid.isdigit() else 0)
        self._unnamed.clear()
        self._beside.clear()
        return names

    def _further(self, row: Row, pid: str) -> int:
        rows = len(self.pids)
        first = _FURTHER + row.place % rows * (_FURTHER // rows)
        further = next(free for free in count(first) if free not in self._pids)
        self._pids.add(further)
        name = self.prefixed(row, pid, "counters")
        self.metadata += named("process", further, 0, f"{row.name}: {name}", row.place * 10 + 1)
        return further

    def _new(self, row: Row, pid: str, tid: str) -> int:
        # Its own, so that its events need no change, unless that is another's of this row. Not 0, which
        # ROCm calls a stream: Perfetto takes that for the machine's idle thread, which gets no name.
        own = int(tid) if tid.isascii() and tid.isdigit() and len(tid) < 10 else FIRST_TID
        first = FIRST_TID + row.place * _OF_A_ROW + self._count[row.pid]
        free = own if 0 < own < FIRST_TID else first
        while (row.pid, free) in self._taken:
            free = max(free, first - 1) + 1
        self._taken.add((row.pid, free))
        self._count[row.pid] += 1
        self._rows[row.pid].tids.setdefault(pid, {})[tid] = free
        return free


def row_metadata(row: Row) -> Iterator[Event]:
    """Yield the name, place and labels of a row."""
    yield from named("process", row.pid, 0, row.name, row.place * 10)
    info = row.info
    labels = [info.host, f"pid {info.pid}"] if info.pid else [info.host]
    if row.unaligned is not None:
        labels.append(f"unaligned: {row.unaligned}")
    if row.shift_ns:
        labels.append(f"shown {row.shift_ns / 1e9:+,.3f} s from its own clock")
    yield _meta("process_labels", row.pid, 0, labels=", ".join(labels))


def named(what: str, pid: int, tid: int, name: str, sort: int) -> Iterator[Event]:
    """Yield the name and the place of a `process` or a `thread`."""
    yield _meta(f"{what}_name", pid, tid, name=name)
    yield _meta(f"{what}_sort_index", pid, tid, sort_index=sort)


def _meta(event: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def microseconds(ns: int) -> msgspec.Raw:
    """Return a time as a trace has it: us, with all digits of the ns."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))
