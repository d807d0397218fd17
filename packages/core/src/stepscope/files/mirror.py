"""Records of the files of a step that were copied to the mirror: one for each host."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

import msgspec

from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record, read_records


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when the store had all of it."""

    size_bytes: int
    mtime_ns: int


class MirrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`mirror_<host>.json`. It is copied last: in the mirror, the files that it names are complete."""

    format: int = 1
    url: str
    """Of the run's copy, without the step."""
    files: dict[str, Copied] = {}
    """By path in the step's folder."""
    failed: dict[str, str] = {}
    """Files that could not be copied, and why."""


def files_below(root: Path) -> dict[str, os.stat_result]:
    """Return a step's files for its copy, by relative path: no temporary ones, links or records.

    Raises:
        OSError: a folder cannot be read.
    """
    statuses = {}
    for folder, names, files in os.walk(root, onerror=_unless_it_is_gone):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if name.startswith(".") or (path.parent == root and name.startswith("mirror_")):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue  # renamed or removed meanwhile
            if S_ISREG(status.st_mode):
                statuses[relative] = status
    return statuses


def _unless_it_is_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def is_copied(copied: Copied | None, status: os.stat_result) -> bool:
    """Return whether a file is still as it was when it was copied."""
    return copied is not None and (copied.size_bytes, copied.mtime_ns) == (status.st_size, status.st_mtime_ns)


def record_of(step: StepLayout, host: str, url: str) -> MirrorRecord:
    """Return what `host` copied of a step to `url`; an empty record if nothing."""
    try:
        record = read_record(step.mirror_record(host), MirrorRecord)
    except (OSError, RecordError):
        return MirrorRecord(url=url)
    return record if record.url == url else MirrorRecord(url=url)


def write_record(step: StepLayout, host: str, record: MirrorRecord) -> None:
    write_atomic(step.mirror_record(host), msgspec.json.format(msgspec.json.encode(record)))


def uncopied(step: StepLayout, host: str, url: str) -> list[str]:
    """Return the files of a step that were not copied to `url`, or changed since."""
    return _missing(files_below(step.root), record_of(step, host, url))


def is_whole(step: StepLayout, url: str) -> bool:
    """Return whether a host has copied all files of this folder to `url`, as they are now.

    Any host: where hosts share the folder, one of them copies it, and a run that goes on may do so elsewhere.
    """
    files = files_below(step.root)
    records = read_records(step.mirror_records(), MirrorRecord)
    return not files or any(record.url == url and not _missing(files, record) for record in records)


def _missing(files: dict[str, os.stat_result], record: MirrorRecord) -> list[str]:
    return [path for path, status in files.items() if not is_copied(record.files.get(path), status)]
