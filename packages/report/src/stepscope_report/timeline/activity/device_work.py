"""Work of the devices in a trace (kernels, copies and fills) in columns.

While the file is read, work is added in the order of the file, a block at a time. After that, totals and the
overlaps on each stream are counted in the same order, and the work of each device is sorted by its starts.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import compress, islice
from operator import add, le
from typing import Any, NamedTuple

from stepscope_report.timeline.activity.doubts import Stream
from stepscope_report.timeline.activity.intervals import CHUNK, packed


class Track(NamedTuple):
    """A track of a device in the trace."""

    device: int | str
    stream: int | str
    row: tuple[int | str, int | str]
    """(pid, tid) of the track in the trace."""
    in_graph: bool
    """True for nodes of a CUDA graph, which may run at the same time on one stream."""


class Rows:
    """Columns of work on devices. A kernel, copy or fill takes 32 bytes."""

    def __init__(self) -> None:
        self.starts, self.durs = array("d"), array("d")
        self.correlations = array("q")
        self.tracks, self.names = array("I"), array("I")
        """Index of each row's track in `DeviceWork.tracks`, and number of its name in `DeviceWork.names`."""

    def columns(self) -> list[array[Any]]:
        return [self.starts, self.durs, self.correlations, self.tracks, self.names]

    def extend(self, *columns: Sequence[Any]) -> None:
        for own, values in zip(self.columns(), columns, strict=True):
            own.frombytes(packed(own.typecode, values))

    def take(self, rows: Rows, chosen: Sequence[bool]) -> None:
        """Add the rows of `rows` for which `chosen` is True."""
        for own, values in zip(self.columns(), rows.columns(), strict=True):
            own.extend(compress(values, chosen))

    def sort(self) -> None:
        """Sort by the starts."""
        if all(map(le, self.starts, islice(self.starts, 1, None))):
            return
        order = array("I", sorted(range(len(self.starts)), key=self.starts.__getitem__))
        for column in self.columns():
            values = array(column.typecode)
            for at in range(0, len(order), CHUNK):
                chunk = [column[number] for number in order[at : at + CHUNK]]
                values.frombytes(packed(column.typecode, chunk))
            column[:] = values

    def ends(self) -> array[float]:
        return array("d", list(map(add, self.starts, self.durs)))

    def chunks(self) -> Iterator[tuple[list[float], list[float], list[int], list[int]]]:
        """Yield (starts, durations, tracks, names) of the rows, some thousands at a time."""
        for at in range(0, len(self.starts), CHUNK):
            part = slice(at, at + CHUNK)
            yield (
                self.starts[part].tolist(), self.durs[part].tolist(),
                self.tracks[part].tolist(), self.names[part].tolist(),
            )  # fmt: skip


class Totals(NamedTuple):
    """Totals of all work with one name."""

    calls: int
    total_us: float
    max_us: float


class DeviceWork:
    """Work of all devices of a trace."""

    def __init__(self) -> None:
        self.rows, self.beyond = Rows(), Rows()
        """`rows` has the work within the times that are read, `beyond` the other work, which only explains
        gaps."""
        self.names: dict[str, int] = {}
        self.categories: list[str] = []
        """The category of the first event of each name."""
        self.tracks: list[Track] = []
        self._places: dict[tuple[int | str, int | str, int, bool], int] = {}

    def add(
        self,
        events: Sequence[Any],
        facts: Sequence[Any],
        starts_us: Sequence[float],
        durs: Sequence[float],
        rows: Rows,
    ) -> None:
        """Add slices of devices, with their facts, to `rows`."""
        names = [self.names.get(event.name, -1) for event in events]
        if -1 in names:
            names = [self._name(event) for event in events]
        places = [
            (event.pid, event.tid, said.device, said.node != 0)
            for event, said in zip(events, facts, strict=True)
        ]
        tracks = [self._places.get(place, -1) for place in places]
        if -1 in tracks:
            tracks = list(map(self._track, places))
        rows.extend(starts_us, durs, [said.correlation for said in facts], tracks, names)

    def _name(self, event: Any) -> int:
        number = self.names.setdefault(event.name, len(self.names))
        if number == len(self.categories):
            self.categories.append(event.cat)
        return number

    def _track(self, place: tuple[int | str, int | str, int, bool]) -> int:
        number = self._places.setdefault(place, len(self.tracks))
        if number == len(self.tracks):
            pid, tid, device, in_graph = place
            key = pid if device < 0 else device  # in a merged file, the pid is not the device's number
            self.tracks.append(Track(key, tid, (pid, tid), in_graph))
        return number

    def place(self, device_of: Callable[[int | str, int | str], str | None]) -> None:
        """Set the device of tracks whose events state no device, if `device_of` (pid, tid) returns one."""
        self.tracks = [
            track._replace(device=device_of(*track.row) or track.device)
            if track.device == track.row[0]
            else track
            for track in self.tracks
        ]

    def totals(self) -> list[Totals]:
        """Return the totals of each name, in the order of `names`."""
        counts, sums = [0] * len(self.names), [0.0] * len(self.names)
        longest = sums.copy()
        for _, durs, _, names in self.rows.chunks():
            for name, dur in zip(names, durs, strict=True):
                counts[name] += 1
                sums[name] += dur
                if dur > longest[name]:
                    longest[name] = dur
        return list(map(Totals, counts, sums, longest))

    def leave_out(self, names: Container[int]) -> None:
        """Remove all work with these names."""
        kept = Rows(), Rows()
        for rows, own in zip((self.rows, self.beyond), kept, strict=True):
            own.take(rows, [name not in names for name in rows.names])
        self.rows, self.beyond = kept

    def by_stream(
        self, computes: Sequence[bool], order_of: Callable[[tuple[int | str, int | str]], Stream] | None
    ) -> dict[tuple[int | str, int | str], float]:
        """Return {(device, stream): summed time of the computation}, and count overlaps.

        Args:
            computes: For each name, True if the work is computation.
            order_of: Returns the `Stream` that counts the overlaps on a track. None to count no overlaps.
        """
        sums: dict[tuple[int | str, int | str], float] = defaultdict(float)
        for starts_us, durs, tracks, names in self.rows.chunks():
            by_track: dict[int, list[int]] = defaultdict(list)
            for number, track in enumerate(tracks):
                by_track[track].append(number)
            for track, numbers in by_track.items():
                place, own = self.tracks[track], [durs[number] for number in numbers]
                computed = [durs[number] for number in numbers if computes[names[number]]]
                if computed:
                    sums[place.device, place.stream] = sum(computed, sums[place.device, place.stream])
                if order_of is not None and not place.in_graph:
                    order_of(place.row).extend([starts_us[number] for number in numbers], own)
        return sums

    def everything(self) -> Rows:
        """Return all rows, including the work outside of the times that are read."""
        rows = Rows()
        for part in (self.rows, self.beyond):
            rows.extend(*part.columns())
        return rows

    def by_device(self, rows: Rows) -> Iterator[tuple[int | str, Rows]]:
        """Yield the rows of each device, sorted by their starts."""
        devices = list(dict.fromkeys(self.tracks[track].device for track in dict.fromkeys(rows.tracks)))
        for device in devices:
            own = rows
            if len(devices) > 1:
                own, chosen = Rows(), [track.device == device for track in self.tracks]
                own.take(rows, [chosen[track] for track in rows.tracks])
            own.sort()
            yield device, own
