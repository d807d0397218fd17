"""Parts of the manifest, one per process, read back and folded into one."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope.files.manifest.format_1 import from_format_1
from stepscope.files.manifest.records import FORMAT, Absent, Expectation, Manifest, ProcessPart, State
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.processes import is_running
from stepscope.files.storage.reading import read_file

_WORSE: tuple[State, ...] = ("skipped", "ok", "pending", "partial", "missing", "failed")
"""From what does not count to the worst."""
_LOST = (
    "it began, and its part of the manifest is not in this folder, or cannot be read: a disk that is full or "
    "that its host does not share, a file that was removed or damaged"
)


def read_parts(step: StepLayout) -> tuple[list[ProcessPart], dict[Path, str]]:
    """All parts in a step's folder by file name, other runs' too; and why any other file there is none."""
    found, unreadable = part_files(step)
    return list(found.values()), unreadable


def part_files(
    step: StepLayout, *, but: Path | None = None, as_written: bool = False
) -> tuple[dict[Path, ProcessPart], dict[Path, str]]:
    """As `read_parts`, and where each part stands.

    Args:
        but: Not read: who asks has that one in memory.
        as_written: What a process that is gone still owed stays pending. Otherwise it is missing.
    """
    read = {path: _part(path) for path in sorted(step.processes.glob("[!.]*.json")) if path != but}
    if not as_written:
        read = {path: _settled(path, part) for path, part in read.items()}
    parts = {path: part for path, part in read.items() if isinstance(part, ProcessPart)}
    return parts, {path: reason for path, reason in read.items() if isinstance(reason, str)}


def _part(path: Path) -> ProcessPart | str:
    try:
        return _decoded(read_file(path))
    except (OSError, RecordError) as error:
        return f"{type(error).__name__}: {error}"


class _Head(msgspec.Struct):
    format: int


def _decoded(data: bytes) -> ProcessPart:
    """Raises RecordError: it is no part of a manifest."""
    try:
        version = msgspec.json.decode(data, type=_Head).format
        if version == FORMAT:
            return msgspec.json.decode(data, type=ProcessPart)
        if version == 1:
            return msgspec.convert(from_format_1(msgspec.json.decode(data)), ProcessPart)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RecordError(str(error)) from None
    raise RecordError(
        f"format {version}: a later version of stepscope wrote it, this one reads up to {FORMAT}"
    )


def _settled(path: Path, part: ProcessPart | str) -> ProcessPart | str:
    """As `settled`, of the part as it is now."""
    if isinstance(part, str) or not _is_abandoned(part):
        return part
    last = _part(path)  # again: it may have written its last word just before it went
    return last if isinstance(last, str) else settled(last)


def settled(part: ProcessPart) -> ProcessPart:
    """Return the part, in which a process that is gone owes nothing: what did not come is missing."""
    if not _is_abandoned(part):
        return part
    return msgspec.structs.replace(part, expected=tuple(map(_lost, part.expected)))


def _is_abandoned(part: ProcessPart) -> bool:
    owes = any(item.state == "pending" for item in part.expected)
    return owes and part.process.host == socket.gethostname() and not is_running(part.process.pid)


def _lost(item: Expectation) -> Expectation:
    if item.state != "pending":
        return item
    reason = f"the process is gone: {item.reason}"
    return msgspec.structs.replace(item, state="missing", pending=None, reason=reason)


def fold(parts: Sequence[ProcessPart]) -> Manifest:
    """The manifest of one run's parts of one step: the owner first, then by role, rank, host and pid.

    Who began, by the owner's word, and has no part here is missing.

    Raises:
        RecordError: there is no part at all, or they are of several runs or steps.
    """
    captures = {(part.run_id, part.step) for part in parts}
    if len(captures) != 1:
        found = ", ".join(f"step {step} of run {run}" for run, step in sorted(captures)) or "nothing"
        raise RecordError(f"a manifest is folded from the parts of one run and one step; got {found}")
    ((run_id, step),) = captures
    processes = tuple(sorted(_with_lost(parts), key=_order))
    return Manifest(run_id=run_id, step=step, state=worst(_states(processes)), processes=processes)


def _with_lost(parts: Sequence[ProcessPart]) -> Iterator[ProcessPart]:
    here = {part.process.key for part in parts}
    for part in parts:
        said = {absent.process for absent in part.absent}
        lost = {key: name for key, name in part.began.items() if key not in here and key not in said}
        absent = tuple(
            Absent(name=name, state="missing", reason=_LOST, process=key) for key, name in lost.items()
        )
        yield msgspec.structs.replace(part, absent=part.absent + absent) if absent else part


def worst(states: Iterable[State]) -> State:
    """The worst state; `skipped` only when there is nothing else."""
    return max(states, key=_WORSE.index, default="skipped")


def write_manifest(step: StepLayout, manifest: Manifest) -> None:
    """Puts `manifest.json` in place, whole.

    Raises:
        OSError: the disk or the folder does not let us.
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
