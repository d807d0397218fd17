"""Rows that an earlier merge of a step wrote, and that would become the same again: joined as they lie.

A timeline says behind its events where each row's piece is, and of what it was made: of these files, in this
place, on this clock, by this code. A merge takes those pieces that still hold, without decompressing them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.files.storage.reading import open_file
from stepscope.timeline.merge.row_writer import Common, RowTraces, Told
from stepscope.timeline.merge.write import EventsFile, Stored, behind_events

SETTLED_NS = 2_000_000_000
"""A file that was changed so lately may change again and look the same: file systems have slow clocks."""
_BLOCK = 1 << 18
_BEYOND = 1 << 62
"""Bytes that no text has."""
_CODE = Path(__file__).parent


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A row in a timeline."""

    made_of: str
    stored: Stored
    told: Told


class _Behind(msgspec.Struct):
    rows: list[Kept] = msgspec.field(name="stepscopeRows")


class Earlier:
    """The rows of a timeline that was there."""

    def __init__(self, file: BinaryIO | None, rows: Sequence[Kept]) -> None:
        self._file = file
        self._rows = {row.made_of: row for row in rows}

    def of(self, made_of: str | None) -> Kept | None:
        """The row that was made of that, where its piece is whole."""
        kept = None if made_of is None else self._rows.get(made_of)
        return kept if kept is not None and self._whole(kept.stored) else None

    def join(self, kept: Kept, out: EventsFile) -> Stored | None:
        """Puts it into another timeline. None: it cannot stand there."""
        if self._file is None or (kept.stored.follows and not out.follows):
            return None
        self._file.seek(kept.stored.at)
        stored = out.append(kept.stored.piece, self._file, kept.stored.size, follows=kept.stored.follows)
        if stored.piece.size > 0 and (stored.size, stored.crc) != (kept.stored.size, kept.stored.crc):
            raise OSError("the timeline that was there was written to meanwhile; merge again")
        return stored

    def _whole(self, stored: Stored) -> bool:
        from isal import isal_zlib  # not when a report imports this package

        piece = stored.piece
        if self._file is None or not 0 <= piece.size < _BEYOND or (stored.size <= 0 < piece.size):
            return False
        left, crc = stored.size, 0
        try:
            self._file.seek(stored.at)
            while left > 0 and (data := self._file.read(min(left, _BLOCK))):
                left -= len(data)
                crc = isal_zlib.crc32(data, crc)
        except (OSError, OverflowError, ValueError):
            return False
        return left == 0 and crc == stored.crc


@contextmanager
def earlier_rows(path: Path) -> Iterator[Earlier]:
    """Of the timeline at `path`; none where there is no timeline, or none of ours."""
    try:
        file = open_file(path)  # a pipe would never answer
    except OSError:
        yield Earlier(None, [])
        return
    with file:
        yield Earlier(file, _rows(file))


def made_of(of: RowTraces, common: Common) -> str | None:
    """All that decides what a row's traces become, as a number. None: that may change unseen."""
    files = [_state(trace.path) for trace in of.traces]
    code = _code()
    if code is None or None in files:
        return None
    tracks, digits = common.tracks, len(str(common.files))
    said = (code, of, files, tracks.owned(of.row), tracks.pids, common.axis, common.cut, digits)
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()


def _rows(file: BinaryIO) -> list[Kept]:
    text = behind_events(file)
    try:
        return [] if text is None else msgspec.json.decode(text, type=_Behind).rows
    except (msgspec.DecodeError, RecursionError):
        return []


def _state(path: bytes) -> tuple[int, ...] | None:
    """What changes when the file does."""
    try:
        there = os.stat(path)
    except OSError:
        return None
    changed_ns = max(there.st_mtime_ns, there.st_ctime_ns)
    if time.time_ns() - changed_ns < SETTLED_NS:
        return None
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns


@cache
def _code() -> str | None:
    """Of which merging is made, as it is installed. None: it is not in files."""
    try:
        found = hashlib.sha256(" ".join(map(version, ("msgspec", "isal", "stringzilla"))).encode())
        files = [path.read_bytes() for path in sorted(_CODE.rglob("*.py"))]
    except (OSError, PackageNotFoundError):
        return None
    for text in files:
        found.update(text)
    return found.hexdigest() if files else None
