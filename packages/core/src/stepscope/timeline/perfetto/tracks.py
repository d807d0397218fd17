"""The tracks of a Perfetto trace: where each event of a merged timeline goes, and what describes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from stepscope.timeline.perfetto import wire

_FIRST = 1 << 32
"""Uuids below are those of processes: their pids."""
_LANE = 40
_EXPLICIT = 3
Key: TypeAlias = tuple[object, ...]


@dataclass
class Named:
    """A process or a thread as the metadata describes it."""

    name: str = ""
    sort: int = 0
    labels: str = ""


@dataclass
class Track:
    """One track, and what runs on it while the trace is written."""

    uuid: int
    descriptor: bytes
    """None of its name, which may come later."""
    name: str
    thread: tuple[int, int] | None
    """The pid and tid whose name it has."""
    lanes: list[list[tuple[int, int]]] = field(default_factory=lambda: [[]])
    """(start, end) of the slices that are open, in each lane."""


class PerfettoTracks:
    """Of one trace."""

    def __init__(self) -> None:
        self.processes: dict[int, Named] = {}
        self.threads: dict[tuple[int, int], Named] = {}
        self._by_key: dict[Key, int] = {}
        self.tracks: list[Track] = []

    def describe(self, event: str, pid: int, tid: int, args: dict[str, object]) -> None:
        """What a metadata event says."""
        what, _, said = event.partition("_")
        known = self.process(pid) if what == "process" else self.threads.setdefault((pid, tid), Named())
        if said == "name":
            known.name = str(args.get("name", ""))
        elif said == "labels":
            known.labels = str(args.get("labels", ""))
        elif said == "sort_index" and isinstance(index := args.get("sort_index"), int):
            known.sort = index

    def process(self, pid: int) -> Named:
        return self.processes.setdefault(pid, Named())

    def thread(self, pid: int, tid: int) -> int:
        """The number of a thread's track."""
        return self._number(("thread", pid, tid), pid, "", thread=(pid, tid))

    def pushed(self, pid: int, tid: int) -> int:
        """Of its begin and end events, which nest among themselves."""
        return self._number(("pushed", pid, tid), pid, "", thread=(pid, tid))

    def concurrent(self, pid: int, key: Key, name: str) -> int:
        """Of the asynchronous events of one id."""
        return self._number(("async", pid, *key), pid, name)

    def counter(self, pid: int, name: str, value: str, *, alone: bool) -> int:
        named = name if alone else f"{name} {value}"
        return self._number(("counter", pid, named), pid, named, counter=True)

    def _number(
        self, key: Key, pid: int, name: str, thread: tuple[int, int] | None = None, *, counter: bool = False
    ) -> int:
        number = self._by_key.get(key)
        if number is None:
            self.process(pid)
            number = self._by_key[key] = len(self.tracks)
            own = thread is not None and key[0] == "thread"
            described = b"" if own else wire.number(5, pid)
            self.tracks.append(Track(_FIRST + number, described + wire.block(8, b"") * counter, name, thread))
        return number

    def descriptors(self) -> Iterator[bytes]:
        """Root, processes in their order, then tracks."""
        yield wire.number(1, 0) + wire.number(19, 1) + wire.number(20, 1)
        for pid, process in self.processes.items():
            said = wire.number(1, pid) + wire.text(6, process.name) + wire.number(3, process.sort)
            said += wire.text(8, process.labels) if process.labels else b""
            place = wire.number(11, _EXPLICIT) + wire.number(12, process.sort)
            yield wire.number(1, pid) + wire.block(3, said) + place
        for track in self.tracks:
            yield self._described(track)

    def lane(self, track: Track, lane: int) -> tuple[int, bytes | None]:
        """(uuid, the descriptor if it is new) of a lane. Lane 0 is the track itself."""
        if lane < len(track.lanes):
            return track.uuid + (lane << _LANE), None
        track.lanes.append([])
        name = f"{self._name(track)} (overlapping {lane + 1})"
        uuid = track.uuid + (lane << _LANE)
        return uuid, wire.number(1, uuid) + wire.number(5, track.uuid) + wire.text(2, name)

    def _name(self, track: Track) -> str:
        thread = None if track.thread is None else self.threads.get(track.thread)
        return track.name if thread is None else thread.name

    def _described(self, track: Track) -> bytes:
        described = wire.number(1, track.uuid) + track.descriptor
        if track.thread is None or track.descriptor:
            return described + wire.text(2, self._name(track))
        (pid, tid), name = track.thread, self._name(track)
        sort = self.threads.get(track.thread, Named()).sort
        said = wire.number(1, pid) + wire.number(2, tid) + wire.text(5, name) + wire.number(3, sort)
        return described + wire.block(4, said) + wire.number(12, sort)
