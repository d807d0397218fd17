"""The reader of `.toy` files: a stage, its start and its end in each line."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.timeline.readers import Claim, Event, FoundFile, Notes, Origin, Recording, Slice, Track


class ToyReader:
    name = "toy"

    def claims(self, file: FoundFile) -> Claim | None:
        return Claim() if file.kind == "toy_trace" else None

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        return ToyRecording(file)


class ToyRecording:
    def __init__(self, file: FoundFile) -> None:
        self._lines = file.path.open()

    @property
    def origin(self) -> Origin:
        return Origin(clock="realtime")

    def events(self) -> Iterator[Event]:
        yield Track(track=1, name="toy")
        for line in self._lines:
            stage, start, end = line.split()
            start_ns = int(start)
            yield Slice(track=1, name=f"toy {stage}", start_ns=start_ns, dur_ns=int(end) - start_ns)

    def close(self) -> None:
        self._lines.close()
