"""Conformance tests for a `Reader`. Subclass `ReaderConformance`, and give it a reader and a file:

class TestMyReader(ReaderConformance):
    @pytest.fixture
    def reader(self):
        return MyReader()

    def write(self, folder):
        path = folder / "my.trace"
        path.write_bytes(...)
        return path
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import RecordError
from stepscope.files.sidecar import Sidecar
from stepscope_report.timeline.readers import (
    Claim,
    Counter,
    Event,
    Flow,
    FoundFile,
    Instant,
    Notes,
    Origin,
    Reader,
    Slice,
    Track,
)

_STRANGERS = {
    "torch.json": b'{"baseTimeNanoseconds": 1, "traceEvents": []}',
    "snapshot.pickle": b"\x80\x04.",
    "empty.sqlite": b"",
    "notes.txt": b"hello",
}


class ReaderConformance:
    """Tests that each `Reader` must pass."""

    @pytest.fixture
    def reader(self) -> Reader:
        """Return the reader, made as the entry point makes it."""
        raise NotImplementedError("override the fixture `reader`")

    def write(self, folder: Path) -> Path:
        """Write a valid file with some events into a folder, under a name that the reader accepts."""
        raise NotImplementedError("override `write`")

    def sidecar(self) -> Sidecar | None:
        """Return the sidecar that the reader needs for the file, or None if the reader needs no sidecar."""
        return None

    def found_file(self, path: Path) -> FoundFile:
        return FoundFile(path=path, name=f"traces/actor/{path.name}", sidecar=self.sidecar())

    def read(self, reader: Reader, path: Path) -> tuple[list[Event], dict[str, int | None]]:
        """Return the events of a file, and the notes."""
        notes = Notes()
        with closing(reader.open(self.found_file(path), notes)) as recording:
            return list(recording.events()), notes.counts

    # The contract.

    def test_it_has_a_name_and_claims_its_own_file(self, reader: Reader, tmp_path: Path) -> None:
        assert isinstance(reader, Reader)
        assert reader.name
        assert reader.claims(self.found_file(self.write(tmp_path))) == Claim()

    @pytest.mark.parametrize("name", _STRANGERS)
    def test_it_leaves_the_files_of_others_alone(self, reader: Reader, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(_STRANGERS[name])
        assert reader.claims(FoundFile(path=path, name=f"traces/actor/{name}")) is None

    def test_its_sound_file_leaves_no_notes(self, reader: Reader, tmp_path: Path) -> None:
        events, notes = self.read(reader, self.write(tmp_path))
        assert any(isinstance(event, Slice) for event in events)
        assert notes == {}

    def test_it_says_where_the_times_come_from(self, reader: Reader, tmp_path: Path) -> None:
        with closing(reader.open(self.found_file(self.write(tmp_path)), Notes())) as recording:
            origin = recording.origin
        assert isinstance(origin, Origin)
        assert origin.clock in ("realtime", "monotonic", "monotonic_raw", "unknown")
        assert origin.why is None or origin.clock == "unknown"

    def test_a_track_is_declared_before_anything_is_on_it(self, reader: Reader, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        with closing(reader.open(self.found_file(path), Notes())) as recording:
            processes = {None, *recording.origin.processes}
            declared: set[int] = set()
            for event in recording.events():
                if isinstance(event, Track):
                    assert event.pid in processes
                    declared.add(event.track)
                assert event.track in declared

    def test_times_are_whole_ns_and_durations_are_not_negative(self, reader: Reader, tmp_path: Path) -> None:
        for event in self.read(reader, self.write(tmp_path))[0]:
            if isinstance(event, Slice):
                assert type(event.start_ns) is type(event.dur_ns) is int
                assert event.dur_ns >= 0
            elif isinstance(event, Instant | Counter | Flow):
                assert type(event.at_ns) is int

    def test_overlapping_slices_come_in_the_order_of_their_start(
        self, reader: Reader, tmp_path: Path
    ) -> None:
        events, _ = self.read(reader, self.write(tmp_path))
        overlapping = {event.track for event in events if isinstance(event, Track) and event.overlapping}
        for track in overlapping:
            starts = [event.start_ns for event in events if isinstance(event, Slice) and event.track == track]
            assert starts == sorted(starts)

    def test_an_arrow_that_ends_has_begun_somewhere(self, reader: Reader, tmp_path: Path) -> None:
        flows = [event for event in self.read(reader, self.write(tmp_path))[0] if isinstance(event, Flow)]
        starts, ends = ({flow.id for flow in flows if flow.point == point} for point in ("start", "end"))
        assert ends <= starts

    def test_everything_that_it_gives_can_be_written_as_json(self, reader: Reader, tmp_path: Path) -> None:
        events, _ = self.read(reader, self.write(tmp_path))
        assert json.loads(msgspec.json.encode(events))

    def test_it_keeps_nothing_between_two_readings(self, reader: Reader, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        assert self.read(reader, path) == self.read(reader, path)

    def test_it_leaves_the_folder_as_it_was(self, reader: Reader, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        reader.claims(self.found_file(path))
        self.read(reader, path)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before

    @pytest.mark.parametrize("tenths", range(10))
    def test_a_file_that_is_cut_off_gives_what_it_has_and_says_so(
        self, reader: Reader, tmp_path: Path, tenths: int
    ) -> None:
        path = self.write(tmp_path)
        whole, _ = self.read(reader, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * tenths // 10])
        reader.claims(self.found_file(path))
        try:
            events, notes = self.read(reader, path)
        except RecordError:
            return  # the merge shows its message
        assert notes or events == whole
