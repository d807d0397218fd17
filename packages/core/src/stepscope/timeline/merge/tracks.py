"""The tracks of a merged timeline: each gets a tid of its own in its row, and a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeAlias

import msgspec

from stepscope.timeline.merge.ids import FIRST_TID
from stepscope.timeline.step.rows import Row

Event: TypeAlias = dict[str, object]
_OWN = "\0stepscope"
"""In the place of a file's pid: no file has this one."""


_FURTHER = 1 << 30
"""Further pids, above all of Linux: so many, in equal shares for the rows. All are below 2^31, as Perfetto's
own format wants."""
_OF_A_ROW = 1 << 11
"""Tids of a row, before they are another row's as well."""


class RowTracks(msgspec.Struct, frozen=True, kw_only=True):
    """Tracks of one row, as far as they are known: its share of the state of `Tracks`."""

    pids: list[int]
    """Of all rows."""
    tids: list[tuple[str, str, int]]
    """(pid, tid) in a file, and the tid in the timeline."""
    labels: list[tuple[str, str]]
    counters: list[tuple[str, int]]
    first: str | None


class Tracks:
    """Tracks of one timeline. Processes in a file become tracks in the row of the file's process."""

    def __init__(self, pids: Iterable[int]) -> None:
        """`pids`: of all rows."""
        self.pids = list(pids)
        """Of the rows."""
        self._pids = set(self.pids)
        self._tids: dict[tuple[int, str, str], int] = {}
        self._count = Counter[int]()
        """Tracks by row. They are numbered within a row, so that no row changes the numbers of another."""
        self._taken: set[tuple[int, int]] = set()
        """(pid, tid) in the timeline of all that has a track."""
        self._unnamed: dict[tuple[int, int], str] = {}
        self._labels: dict[tuple[int, str], str] = {}
        self._counters: dict[tuple[int, str], int] = {}
        self._first: dict[int, str] = {}
        self.metadata: list[Event] = []
        """Written since somebody last took them from here."""

    @classmethod
    def of(cls, row: Row, known: RowTracks) -> Tracks:
        """Return the tracks of one row, with which `adopt` ends."""
        tracks = cls(known.pids)
        tracks.adopt(row, known)
        return tracks

    def known(self, row: Row) -> RowTracks:
        """Return what is known of a row's tracks, once all their metadata is written."""
        return RowTracks(
            pids=self.pids,
            tids=[(pid, tid, taken) for (at, pid, tid), taken in self._tids.items() if at == row.pid],
            labels=[(pid, label) for (at, pid), label in self._labels.items() if at == row.pid],
            counters=[(pid, taken) for (at, pid), taken in self._counters.items() if at == row.pid],
            first=self._first.get(row.pid),
        )

    def adopt(self, row: Row, known: RowTracks) -> None:
        """Take over what is known of a row's tracks."""
        self._pids.update(taken for _, taken in known.counters)
        self._tids.update({(row.pid, pid, tid): taken for pid, tid, taken in known.tids})
        self._taken.update((row.pid, taken) for _, _, taken in known.tids)
        self._count[row.pid] = len(known.tids)
        self._labels.update({(row.pid, pid): label for pid, label in known.labels})
        self._counters.update({(row.pid, pid): taken for pid, taken in known.counters})
        if known.first is not None:
            self._first[row.pid] = known.first

    def own(self, row: Row, name: str, sort: int, owner: str = _OWN) -> int:
        """Return the tid of the track that `owner` (stepscope or a reader) calls by this name."""
        known = len(self._tids)
        tid = self._tid(row, owner, name)
        if len(self._tids) > known:
            self.call(row, tid, name, sort)
        return tid

    def call(self, row: Row, tid: int, name: str, sort: int) -> None:
        """Give a track its name and its place."""
        self.metadata += named("thread", row.pid, tid, name, sort)

    def foreign(self, row: Row, pid: str, tid: str) -> int:
        """Return the tid of a thread that a file names by `pid` and `tid` (as text, without quotes)."""
        key = (row.pid, pid, tid)
        if key not in self._tids:
            name = f"thread {tid}" if tid.lstrip("-").isdigit() else tid or "no thread"
            self._unnamed[row.pid, self._tid(row, pid, tid)] = self.prefixed(row, pid, name)
        return self._tids[key]

    def name_known(self, row: Row, tid: int) -> None:
        """Note that a file names this track itself."""
        self._unnamed.pop((row.pid, tid), None)

    def describe(self, row: Row, pid: str, field: str, value: str) -> bool:
        """Note a file's description of one of its pids: `labels` ("CPU", "GPU 0"), or the weaker `name`.

        Returns:
            Whether it was not known.
        """
        key = (row.pid, pid)
        before = self._labels.get(key)
        if field == "labels":
            self._labels[key] = "" if value == "CPU" else value
        elif self._first.setdefault(row.pid, pid) != pid:
            self._labels.setdefault(key, value)
        return self._labels.get(key) != before

    def prefixed(self, row: Row, pid: str, name: str) -> str:
        """Return a thread's name behind the device's: the row is the whole process."""
        name = name.strip()  # Kineto's are `stream 7 `
        label = self._labels.get((row.pid, pid), "")
        return f"{label} {name}" if label and label not in name else name

    def counters(self, row: Row, pid: str) -> int:
        """Return the pid for counters of one of a file's pids: viewers know a counter by pid and name."""
        key = (row.pid, pid)
        if key not in self._counters:
            first = all(taken != row.pid for taken, _ in self._counters)
            self._counters[key] = row.pid if first else self._further(row, pid)
        return self._counters[key]

    def take(self) -> list[Event]:
        """Take the metadata that is still to be written."""
        taken, self.metadata = self.metadata, []
        return taken

    def take_unnamed(self) -> list[Event]:
        """Take names for the tracks that no file has named."""
        names = [_meta("thread_name", pid, tid, name=name) for (pid, tid), name in self._unnamed.items()]
        self._unnamed.clear()
        return names

    def _further(self, row: Row, pid: str) -> int:
        rows = len(self.pids)
        first = _FURTHER + row.place % rows * (_FURTHER // rows)
        further = next(free for free in count(first) if free not in self._pids)
        self._pids.add(further)
        name = self.prefixed(row, pid, "counters")
        self.metadata += named("process", further, 0, f"{row.name}: {name}", row.place * 10 + 1)
        return further

    def _tid(self, row: Row, pid: str, tid: str) -> int:
        key = (row.pid, pid, tid)
        if key not in self._tids:
            # Its own, so that its events need no change, unless that is another's of this row. Not 0, which
            # ROCm calls a stream: Perfetto takes that for the machine's idle thread, which gets no name.
            own = int(tid) if tid.isascii() and tid.isdigit() and len(tid) < 10 else FIRST_TID
            first = FIRST_TID + row.place * _OF_A_ROW + self._count[row.pid]
            free = own if 0 < own < FIRST_TID else first
            while (row.pid, free) in self._taken:
                free = max(free, first - 1) + 1
            self._taken.add((row.pid, free))
            self._count[row.pid] += 1
            self._tids[key] = free
        return self._tids[key]


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
