"""What a merge wrote, and what it did not."""

from __future__ import annotations

import msgspec

from stepscope.timeline.model import FileProblem


class MergedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the timeline."""

    pid: int
    """In the timeline."""
    name: str
    role: str
    rank: int | None
    replica: int | None
    host: str
    native_pid: int | None
    alignment: str
    """As `ProcessClock.alignment`."""
    uncertainty_ns: int | None
    """Its times are true within +- this against the owner's. None: unknown."""
    offset_ns: int = 0
    """What its wall clock was ahead at the opening; taken out."""
    drift_ppm: float | None = None
    """How fast it gained on the owner's; taken out. None: not known."""
    matched: int = 0
    """How many collectives that rests on."""
    note: str | None = None
    """Why collectives do not say more of its clock."""
    reason: str | None = None
    """Why it is unaligned."""
    shift_ns: int = 0
    """Added to the times of an unaligned row that are nowhere near the step, so that it is shown at all: from
    a second behind the step's end on. 0: it stands where its own clock says."""


class MergedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that went into the timeline."""

    file: str
    row: int
    """Its row's pid."""
    events: int
    """Written."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and what was not. It stands in the file as well, as `stepscope`."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Unix ns on the owner's clock: an event's time is this + `ts` * 1000."""
    window_ns: tuple[int, int]
    """The step, unix ns."""
    rows: tuple[MergedRow, ...]
    files: tuple[MergedFile, ...]
    spans: int
    """Written."""
    selection: dict[str, object]
    """What narrowed it."""
    left_out: tuple[str, ...]
    """What the selection, or the lack of a reader, left out."""
    problems: tuple[FileProblem, ...]
    """What was broken or missing; the rest of each file was used."""
    joined: int = 0
    """Rows whose traces were taken from the timeline that was there: they had not changed."""

    @property
    def events(self) -> int:
        return self.spans + sum(file.events for file in self.files)
