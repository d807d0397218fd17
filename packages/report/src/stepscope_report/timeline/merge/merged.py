"""Records of what a merge wrote, and of what it did not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from stepscope_report.timeline.model import FileProblem, ProcessClock
from stepscope_report.timeline.step.rows import Row


class MergedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the timeline. No event begins with its first field, so that the file's end is no event."""

    role: str
    pid: int
    """The pid in the timeline."""
    name: str
    rank: int | None
    replica: int | None
    host: str
    native_pid: int | None
    alignment: str
    """The alignment, as in `ProcessClock.alignment`."""
    uncertainty_ns: int | None
    """The uncertainty (+-) of its times against the owner's, or None if unknown."""
    offset_ns: int = 0
    """Lead of the process' wall clock at the opening, which was subtracted."""
    drift_ppm: float | None = None
    """Drift against the owner's clock, which was subtracted, or None if not known."""
    matched: int = 0
    """Number of collectives behind the drift."""
    note: str | None = None
    """Reason why collectives do not improve its clock."""
    reason: str | None = None
    """Reason why it is unaligned."""
    shift_ns: int = 0
    """Time that was added to an unaligned row far away from the step, so that it is visible: such rows begin
    a second after the step's end. 0 if the row is where its own clock places it."""


class MergedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that went into the timeline."""

    file: str
    row: int
    """Pid of the row that the trace went into."""
    events: int
    """Number of events written."""
    crossing: int = 0
    """Number of events on a further line of their thread, because they overlap others without nesting."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a merged timeline. The file contains this record too, as `stepscope`."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Origin of the times in unix ns on the owner's clock: an event's time is this + `ts` * 1000."""
    window_ns: tuple[int, int]
    """Start and end of the step in unix ns."""
    rows: tuple[MergedRow, ...]
    files: tuple[MergedFile, ...]
    spans: int
    """Number of spans written."""
    counters: int = 0
    """Number of values of counters written."""
    selection: dict[str, object]
    """The selection that the timeline was narrowed by."""
    left_out: tuple[str, ...]
    """Files and events that are left out because of the selection, or because no reader supports them."""
    problems: tuple[FileProblem, ...]
    """Broken or missing data. The rest of each file was used."""
    incomplete: tuple[str, ...] = ()
    """Further reasons why the step is not complete, whatever was selected."""

    @property
    def events(self) -> int:
        return self.spans + self.counters + sum(file.events for file in self.files)


def merged_row(row: Row) -> MergedRow:
    """Return the description of a row that was written."""
    info, clock = row.info, ProcessClock(alignment="unaligned")
    if row.clock is not None and row.unaligned is None:
        clock = row.clock.clock
    # A process that left nothing itself has the owner's clock at best.
    shared = clock.alignment == "owner" and row.process is None
    return MergedRow(
        pid=row.pid,
        name=row.name,
        role=info.role,
        rank=info.rank,
        replica=info.replica,
        host=info.host,
        native_pid=info.pid or None,
        alignment="same host" if shared else clock.alignment,
        uncertainty_ns=clock.uncertainty_ns,
        offset_ns=clock.offset_ns,
        drift_ppm=clock.drift_ppm,
        matched=clock.matched,
        note=None if row.clock is None else row.clock.clock.note,
        reason=row.unaligned,
        shift_ns=row.shift_ns or 0,
    )


def duplicate_ranks(rows: Iterable[Row]) -> Iterator[FileProblem]:
    """Yield a problem for each rank that several processes claim.

    The ranks of an engine's workers, which leave nothing but traces, are apart: the Ray actor that holds an
    engine has its position among the actors as its rank, and the engine's first worker often the same number.
    """
    ranks: dict[tuple[str, int | None, int, bool], set[str]] = {}
    for row in rows:
        if row.info.rank is not None:
            claim = row.info.role, row.info.replica, row.info.rank, row.process is None
            ranks.setdefault(claim, set()).add(f"pid {row.info.pid or 'unknown'} on {row.info.host}")
    for (role, replica, rank, _), processes in ranks.items():
        if len(processes) > 1:
            whose = role if replica is None else f"{role} replica {replica}"
            what = f"several processes say they are this rank; each has a row: {', '.join(sorted(processes))}"
            yield FileProblem(file=f"{whose} rank {rank}", what=what)
