"""Merges, which write all spans, counters and traces of a step into one file, on one clock.

Here are the records of a merge: the selected part of a step, and what was written of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import msgspec

from stepscope_report.timeline.model import FileProblem, ProcessClock
from stepscope_report.timeline.rows import Row


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a step that a timeline shows: everything by default."""

    roles: tuple[str, ...] | None = None
    """Names or globs of roles, or None for all. Processes of these roles are shown completely, other
    processes only with their spans of these roles."""
    ranks: Collection[int | range] | None = None
    """Selected ranks, and ranges of ranks (`sys.maxsize` for an open end), or None for all. Processes without
    a rank (a driver) are always shown."""
    from_ms: float | None = None
    """Milliseconds after the step's opening, or None for no limit. Events that end before are left out."""
    to_ms: float | None = None
    """Milliseconds after the step's opening, or None for no limit. Events that begin later are left out."""
    requests: Literal["all"] | None = None
    """`all` for arrows from every turn to its engine passes, None for arrows of the slowest trajectories."""
    max_mb: float | None = None
    """Largest size of the written file in 10^6 bytes, or None for no limit. Spans come first; traces share
    the rest equally."""

    def role(self, *roles: str) -> bool:
        """Return whether one of these roles is selected."""
        wanted = self.roles
        return wanted is None or any(fnmatchcase(role, glob) for role in roles for glob in wanted)

    def rank(self, rank: int | None) -> bool:
        return self.ranks is None or rank is None or any(map(partial(_holds, rank), self.ranks))

    def limits_ns(self, opened_ns: int) -> tuple[int | None, int | None]:
        """Return `from_ms` and `to_ms` in unix ns."""
        return _at(self.from_ms, opened_ns), _at(self.to_ms, opened_ns)

    def words(self) -> dict[str, object]:
        """Return {field: JSON value} of the fields that narrow the selection. A range is text: `8-15`."""
        return {
            name: _plain(value) for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


def _holds(rank: int, ranks: int | range) -> bool:
    return rank in ranks if isinstance(ranks, range) else rank == ranks


def _at(since_ms: float | None, opened_ns: int) -> int | None:
    return None if since_ms is None else opened_ns + round(since_ms * 1_000_000)


def _plain(value: object) -> object:
    if isinstance(value, range):
        return _spelled(value)
    if isinstance(value, Collection) and not isinstance(value, str):
        items = sorted(value, key=_start) if isinstance(value, Set) else value
        return [_plain(item) for item in items]
    return value


def _start(ranks: int | range) -> int:
    return ranks.start if isinstance(ranks, range) else ranks


def _spelled(ranks: range) -> str:
    if ranks.step > 1:
        return f"{ranks.start}:{ranks.stop}:{ranks.step}"
    if ranks.stop == ranks.start + 1:
        return str(ranks.start)
    return f"{ranks.start}-{'' if ranks.stop == sys.maxsize else ranks.stop - 1}"


class MergedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the timeline. No event begins with the first field, `role`. Otherwise readers would take the
    rows, at the end of the file, for events.
    """

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
    """The uncertainty (+-) of the row's times against the owner's, or None if unknown."""
    offset_ns: int = 0
    """Lead of the process' wall clock at the opening, which was subtracted."""
    drift_ppm: float | None = None
    """Drift against the owner's clock, which was subtracted, or None if not known."""
    matched: int = 0
    """Number of collectives that the offset and the drift are based on."""
    note: str | None = None
    """Reason why collectives do not improve the clock of the row, or None."""
    reason: str | None = None
    """Reason why the row is unaligned, or None if it is aligned."""
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
    """Number of events on a further line of their thread, because they overlap other events without
    nesting."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a merged timeline. The file contains this record too, as `stepscope`."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Origin of the times in unix ns on the owner's clock: an event is at `base_ns` + `ts` * 1000."""
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

    The workers of an engine, which leave only traces, are checked separately from the Ray actors that hold
    engines. An actor's rank is its position among the actors, and often equals the rank of a worker.
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
