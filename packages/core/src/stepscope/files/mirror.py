"""What of a step's folder was copied to the mirror and compared with its copy: a record for each host."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

import msgspec

from stepscope.errors import RecordError
from stepscope.files.atomic import write_atomic
from stepscope.files.layout import StepLayout
from stepscope.files.reading import read_record


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when its copy was found equal to it."""

    size_bytes: int
    mtime_ns: int
    md5: str
    """Hex. Against accidents, as stores state it; it proves nothing against an attacker."""


class MirrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`mirror_<host>.json`. It is copied last: where it lies in the mirror, the files it names are whole."""

    format: int = 1
    url: str
    """Of the run's copy, without the step."""
    files: dict[str, Copied] = {}
    """By path in the step's folder: copied, and compared with the copy."""
    failed: dict[str, str] = {}
    """What could not be copied, and why."""


def files_below(root: Path) -> dict[str, os.stat_result]:
    """A step's files that belong into its copy, by relative path: no temporary ones, links or records."""
    found = {}
    for folder, names, files in os.walk(root):
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
                found[relative] = status
    return found


def is_copied(copied: Copied | None, status: os.stat_result) -> bool:
    """Whether a file is still as it was when it was compared with its copy."""
    return copied is not None and (copied.size_bytes, copied.mtime_ns) == (status.st_size, status.st_mtime_ns)


def record_of(step: StepLayout, host: str, url: str) -> MirrorRecord:
    """What `host` knows of the step's copy at `url`; an empty record where it knows nothing."""
    try:
        found = read_record(step.mirror_record(host), MirrorRecord)
    except (OSError, RecordError):
        return MirrorRecord(url=url)
    return found if found.url == url else MirrorRecord(url=url)


def write_record(step: StepLayout, host: str, record: MirrorRecord) -> None:
    write_atomic(step.mirror_record(host), msgspec.json.format(msgspec.json.encode(record)))


def uncopied(step: StepLayout, host: str, url: str) -> list[str]:
    """The files of a step whose copy at `url` was not found equal to what they are now."""
    record = record_of(step, host, url)
    return [
        path
        for path, status in files_below(step.root).items()
        if not is_copied(record.files.get(path), status)
    ]
