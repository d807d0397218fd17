"""Safe reading of a run's files, which may have any content and any size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar

import msgspec

from stepscope.errors import RecordError

LONGEST_LINE = 4 << 20
"""Longest line in bytes. A longer line is not a record; the file may not even be text."""
MAX_BYTES = 64 << 20
"""Size of the largest file that is read as a whole, in bytes."""
T = TypeVar("T")
_making = Lock()
"""A lock, because msgspec inspects a type on first use, and crashes if two threads do this at once."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. Refuse others: a read of a pipe could block, and a device may have no end.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(None, "it is no regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in sorted order. Folders that disappear meanwhile are skipped, because
    the run may still write.
    """
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def size_below(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    size_bytes = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size
    return size_bytes


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read.
        RecordError: the file is larger than `max_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size  # else each read would allocate `max_bytes`
        data = file.read(min(size, max_bytes) + 1)
    if len(data) > max_bytes:
        raise RecordError(f"{path} holds more than {max_bytes} bytes")
    return data


def lines_of(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, True if complete). A line longer than `LONGEST_LINE` is yielded in pieces."""
    while line := stream.readline(LONGEST_LINE):
        yield line, line.endswith(b"\n") or len(line) == LONGEST_LINE


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the readable records of a file of JSON lines, in order; empty if the file cannot be read."""
    try:
        lines = read_file(path).split(b"\n")
    except (OSError, RecordError):
        return []
    decoder, records = _decoder_of(kind), []
    for line in lines:
        with suppress(ValueError, RecursionError):  # empty, or cut off because its writer was killed
            records.append(decoder.decode(line))
    return records


def read_first(path: Path, kind: type[T]) -> T | None:
    """Return the record in the first line of a file, or None if there is no such record or no such file."""
    with suppress(OSError, RecordError, StopIteration), open_file(path) as file:
        return decode(next(lines_of(file))[0], kind)
    return None


def read_record(path: Path, kind: type[T]) -> T:
    """Return the record in a JSON file.

    Raises:
        OSError: the file cannot be read.
        RecordError: the file contains something else. The message has the details.
    """
    return decode(read_file(path), kind)


def read_records(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Return the records in `paths`, in order. Files that cannot be read, or contain something else, are
    skipped.
    """
    records = []
    for path in paths:
        with suppress(OSError, RecordError):
            records.append(read_record(path, kind))
    return records


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a record from JSON.

    Raises:
        RecordError: `data` is something else. The message has the details.
    """
    try:
        record: T = _decoder_of(kind).decode(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(str(error)) from None
    return record


def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    with _making:
        return _decoder(kind)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def renew_lock() -> None:
    """Replace the lock in a forked child, because another thread of the parent may have held it."""
    global _making
    _making = Lock()
