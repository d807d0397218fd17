"""Parts of the manifest (each process writes one), their reading, and the manifest that combines them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import (
    AWAITED,
    FATES,
    FORMAT,
    LATE,
    Absent,
    Expectation,
    Manifest,
    Peer,
    ProcessPart,
    State,
    of_engine,
)
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage import decode, is_running, read_file, read_records, write_atomic


def with_late_files(layout: StepLayout, parts: Sequence[ProcessPart]) -> list[ProcessPart]:
    """Return a step's parts, with files that engines have written after the deadline of their stop.

    The files are found by their sidecars, which engines also write after the capturing process has ended.
    Parts on disk are not changed.
    """
    if not any(item.pending == "late" for part in parts for item in part.expected):
        return list(parts)
    known = {artifact.path for part in parts for item in part.expected for artifact in item.artifacts}
    sidecars = read_records(layout.sidecars(), Sidecar)  # a report lists unreadable sidecars
    late = [sidecar for sidecar in sidecars if sidecar.artifact.path not in known]
    return [
        _with(part, [of for of in late if (of.step, of.run_id) == (part.step, part.run_id)]) for part in parts
    ]


def _with(part: ProcessPart, late: Sequence[Sidecar]) -> ProcessPart:
    came: dict[str, list[Artifact]] = {}
    for sidecar in late:
        came.setdefault(f"replica {sidecar.artifact.replica}", []).append(sidecar.artifact)
    expected = tuple(_entered(item, came.get(item.name, ())) for item in part.expected)
    return msgspec.structs.replace(part, expected=expected)


def _entered(item: Expectation, came: Sequence[Artifact]) -> Expectation:
    if item.pending != "late" or not came:
        return item
    ignored = {
        **item.ignored,
        **{option: why for artifact in came for option, why in artifact.ignored.items()},
    }
    ignored.pop(LATE, None)
    return of_engine(item.name, (*item.artifacts, *came), ignored)


_WORSE: tuple[State, ...] = ("skipped", "ok", "pending", "partial", "missing", "failed")
"""States in ascending order of severity."""
_LOST = (
    "it began, but its part of the manifest is not in this folder or cannot be read: it died before it wrote "
    "it, its disk is full, its host does not share this folder, or the file was removed or damaged"
)
_LOST_WITH_IT = "its process died: what it recorded of this step is lost with it"
_DIED = re.compile(r"ActorDiedError: .*\bpid: (\d+)", re.DOTALL)
"""Matches Ray's error, which states the id of the process that died."""


def read_parts(step: StepLayout) -> tuple[list[ProcessPart], dict[Path, str]]:
    """Return all parts in a step's folder, of all runs, and {path: reason} of unreadable files."""
    parts, unreadable = part_files(step)
    return list(parts.values()), unreadable


def part_files(
    step: StepLayout, *, but: Path | None = None, as_written: bool = False
) -> tuple[dict[Path, ProcessPart], dict[Path, str]]:
    """Return {path: part} of all parts, with late files, and {path: reason} of unreadable files.

    Args:
        but: Path of a part to leave out, for a caller that has this part in memory.
        as_written: True to keep pending items of dead processes; False to change them to missing.
    """
    read = {path: _part(path) for path in _paths(step) if path != but}
    if not as_written:
        read = {path: _reread(path, part) for path, part in read.items()}
    parts = {
        path: _numbered(step, path, part) for path, part in read.items() if isinstance(part, ProcessPart)
    }
    parts = dict(zip(parts, with_late_files(step, list(parts.values())), strict=True))
    if not as_written:
        parts = {path: expire_pending(part) for path, part in parts.items()}
    return parts, {path: reason for path, reason in read.items() if isinstance(reason, str)}


def _paths(step: StepLayout) -> list[Path]:
    try:
        names = os.listdir(step.processes)  # ten times faster than `Path.glob`, and called at each close
    except OSError:
        return []
    return [step.processes / name for name in sorted(names) if name.endswith(".json") and name[0] != "."]


def _numbered(step: StepLayout, path: Path, part: ProcessPart) -> ProcessPart:
    """Return the part with the number of its capture, which earlier versions stored only in the file name."""
    number = step.capture_of(path, part.process, part.run_id)
    return part if number == part.capture else msgspec.structs.replace(part, capture=number)


def _part(path: Path) -> ProcessPart | str:
    try:
        return _decoded(read_file(path))
    except (OSError, RecordError) as error:
        return f"{type(error).__name__}: {error}"


class _Head(msgspec.Struct):
    format: int


def _decoded(data: bytes) -> ProcessPart:
    """Decode a part of a manifest. Raise `RecordError` if `data` is something else."""
    version = decode(data, _Head).format
    if version == FORMAT:
        return decode(data, ProcessPart)
    raise RecordError(f"format {version}: another version of stepscope wrote it; this one reads {FORMAT}")


def _reread(path: Path, part: ProcessPart | str) -> ProcessPart | str:
    """Read a part again if its process is dead, because the process may have written the file shortly before
    it ended.
    """
    if isinstance(part, str) or not _is_abandoned(part):
        return part
    return _part(path)


def expire_pending(part: ProcessPart) -> ProcessPart:
    """Return the part. If its process is dead, its pending items are changed to missing."""
    if not _is_abandoned(part):
        return part
    return msgspec.structs.replace(part, expected=tuple(map(_lost, part.expected)))


def _is_abandoned(part: ProcessPart) -> bool:
    owes = any(item.state == "pending" for item in part.expected)
    return owes and part.process.host == socket.gethostname() and not is_running(part.process.pid)


def _lost(item: Expectation) -> Expectation:
    if item.state != "pending":
        return item
    reason = (item.reason or "").removesuffix(f"; {AWAITED['late']}")  # no longer true: the process has ended
    reason = f"the process is gone: {reason}"
    died = item.kind != "engine"  # an engine may run in another process
    return msgspec.structs.replace(item, state="missing", pending=None, reason=reason, died=died)


class Taken(Protocol):
    """A process that took part in a capture, with the attributes that `of_the_last` needs."""

    @property
    def process(self) -> ProcessInfo: ...

    @property
    def owner(self) -> bool: ...

    @property
    def capture(self) -> int: ...

    @property
    def opened(self) -> ClockAnchor: ...

    @property
    def closed(self) -> ClockAnchor | None: ...

    @property
    def imported_ns(self) -> int | None: ...

    @property
    def clocks(self) -> tuple[ClockOffset, ...]: ...


T = TypeVar("T", bound=Taken)


def of_the_last(taken: Sequence[T]) -> list[T]:
    """Return the items of the last capture of a step, which may have been captured several times.

    For each process, only its last capture counts. Processes from before a resume of the run do not count. If
    the owner captured the step again, a worker counts only if it took part again. A worker on the owner's
    host took part if it opened after the owner's previous capture. A worker on another host took part unless
    the owner measured the worker's clock in the previous capture only.
    """
    last: dict[str, T] = {}
    for one in sorted(taken, key=lambda one: one.capture):
        last[one.process.key] = one
    again = [one for one in last.values() if one.owner and one.capture > 1]
    for owner in again:
        before = max(
            (one for one in taken if one.process.key == owner.process.key and one.capture < owner.capture),
            key=lambda one: one.capture,
            default=None,
        )
        if before is not None:
            last = {
                key: worker
                for key, worker in last.items()
                if worker.owner or _took_part(worker, owner, before)
            }
    owners = [one for one in last.values() if one.owner]
    resumed = _resumed(owners)
    return [
        one
        for one in taken
        if last.get(one.process.key) is one
        if resumed is None or one is resumed or _is_after(one, resumed, owners)
    ]


def _ended_ns(one: Taken) -> int:
    return (one.closed or one.opened).wall_ns


def _resumed(owners: Sequence[T]) -> T | None:
    """Return the last owner if the run was resumed under the same id and then repeated the step, else None.

    The run was resumed if an earlier owner of the same role and rank had ended before the last owner imported
    stepscope.
    """
    last = max(owners, key=lambda one: one.opened.wall_ns, default=None)
    return last if any(_replaces(last, one) for one in owners if last is not None) else None


def _replaces(later: Taken | None, one: Taken) -> bool:
    """Return whether the owner `one` ended before `later`, an owner of the same role and rank, imported
    stepscope.
    """
    if later is None or later is one or later.imported_ns is None:
        return False
    is_place = (later.process.role, later.process.rank) == (one.process.role, one.process.rank)
    return is_place and _ended_ns(one) < later.imported_ns


_SKEW_NS = 60 * 10**9
"""Largest difference that is assumed between the clocks of two hosts."""


def _is_after(one: Taken, resumed: Taken, owners: Sequence[Taken]) -> bool:
    """Return whether the process `one` took part in the attempt that began with the import of stepscope in
    `resumed`.

    The clock of another host may be ahead or behind. If any attempt measured the clock of `one`, this attempt
    must have. Otherwise `one` must have imported stepscope in the attempt, or ended long after the attempt
    began.
    """
    since_ns = resumed.imported_ns or 0
    if one.process.host == resumed.process.host or one.imported_ns is None:
        return _ended_ns(one) >= since_ns
    if one.owner and any(_replaces(later, one) for later in owners):
        return False
    if any(clock.process == one.process.key for owner in owners for clock in owner.clocks):
        return any(clock.process == one.process.key for clock in resumed.clocks)
    return one.imported_ns >= since_ns - _SKEW_NS or _ended_ns(one) >= since_ns + _SKEW_NS


def _took_part(worker: Taken, owner: Taken, before: Taken) -> bool:
    """Return whether the worker took part in the owner's last capture `owner`, and not only in the previous
    capture `before`.
    """
    if worker.process.host == owner.process.host:
        ended = before.closed or before.opened
        return worker.opened.wall_ns > ended.wall_ns
    key = worker.process.key
    return any(c.process == key for c in owner.clocks) or all(c.process != key for c in before.clocks)


def fold(parts: Sequence[ProcessPart]) -> Manifest:
    """Combine the parts of one step of one run into a manifest: the owner first, then by role, rank, host and
    pid.

    If the step was captured several times, only the last capture counts.

    A worker that began, according to the owner, but has no part is listed as missing. So is a rank that
    another rank lists as its peer.

    Raises:
        RecordError: there are no parts, or the parts belong to several runs or steps.
    """
    captures = {(part.run_id, part.step) for part in parts}
    if len(captures) != 1:
        given = ", ".join(f"step {step} of run {run}" for run, step in sorted(captures)) or "nothing"
        raise RecordError(f"a manifest is folded from the parts of one run and one step; got {given}")
    ((run_id, step),) = captures
    first, *others = sorted(_with_lost(of_the_last(parts)), key=_order)
    first = msgspec.structs.replace(first, absent=(*first.absent, *_lost_peers([first, *others])))
    processes = first, *others
    return Manifest(run_id=run_id, step=step, state=worst(_states(processes)), processes=processes)


def _with_lost(parts: Sequence[ProcessPart]) -> Iterator[ProcessPart]:
    present = {part.process.key for part in parts}
    here = {pid for part in parts for pid in _pids_of_the_dead(part.error)}
    by_now = here | {
        pid for part in parts if part.recorder for pid in _pids_of_the_dead(part.recorder.reason)
    }
    for part in parts:
        known = present | {absent.process for absent in part.absent}
        lost = {key: name for key, name in part.began.items() if key not in known}
        absent = tuple(
            Absent(
                name=name,
                state="missing",
                reason=_LOST_WITH_IT if pid in by_now else _LOST,
                process=key,
                died=pid in here,
            )
            for key, name in lost.items()
            for pid in [key.rpartition("_pid")[2]]
        )
        yield msgspec.structs.replace(part, absent=part.absent + absent) if absent else part


def _lost_peers(parts: Sequence[ProcessPart]) -> Iterator[Absent]:
    """Yield the peers without a part. Also yield peers that died before the step ended, if their part shows
    neither a close nor a death.
    """
    left = {(part.process.role, part.process.rank) for part in parts}
    ended = (part for part in parts if part.closed or part.died)
    closed = {(part.process.role, part.process.rank) for part in ended}
    known: dict[str, Peer] = {}
    for peer in (peer for part in parts for peer in part.peers):
        before = known.setdefault(peer.process.key, peer)
        known[peer.process.key] = max(before, peer, key=lambda one: FATES.index(one.fate))
    for key, peer in sorted(known.items(), key=lambda item: item[1].process.rank or 0):
        if (peer.process.role, peer.process.rank) not in (closed if peer.fate == "died" else left):
            yield Absent(
                name=f"{peer.process.role} {peer.process.rank}",
                state="missing",
                reason=_LOST if peer.fate == "expected" else _LOST_WITH_IT,
                process=key,
                died=peer.fate == "died",
            )


def _pids_of_the_dead(error: str | None) -> list[str]:
    """Return the id of the process that died according to Ray's `error`; empty if `error` names none."""
    found = _DIED.search(error or "")
    return [] if found is None else [found[1]]


def worst(states: Iterable[State]) -> State:
    """Return the worst state, or `skipped` if there is no state."""
    return max(states, key=_WORSE.index, default="skipped")


def write_manifest(step: StepLayout, manifest: Manifest) -> None:
    """Write `manifest.json` atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomic(step.manifest, msgspec.json.format(msgspec.json.encode(manifest)))


def _states(parts: Iterable[ProcessPart]) -> Iterable[State]:
    for part in parts:
        yield from (item.state for item in part.expected)
        yield from (absent.state for absent in part.absent)


def _order(part: ProcessPart) -> tuple[bool, str, int, str, int]:
    process = part.process
    rank = -1 if process.rank is None else process.rank
    return not part.owner, process.role, rank, process.host, process.pid
