"""Safe reading of a run's files. A file may hold anything, of any size, whatever its name."""

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
"""Largest length of a line in bytes. A longer line is no record; the file may not be text at all."""
MAX_BYTES = 64 << 20
"""The largest file that is read in one piece."""
T = TypeVar("T")
_making = Lock()
"""msgspec reads the fields of a type when it is first used, and crashes if two threads do so at once."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. A pipe would never answer, and a device would never end.

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
    """Yield the files below a folder, without those that disappear meanwhile: the run may still write."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def size_below(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
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
        size = os.fstat(file.fileno()).st_size  # without it each small file gets a buffer of `max_bytes`
        data = file.read(min(size, max_bytes) + 1)
    if len(data) > max_bytes:
        raise RecordError(f"{path} holds more than {max_bytes} bytes")
    return data


def lines_of(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, whether it is complete). An overlong line comes in pieces."""
    while line := stream.readline(LONGEST_LINE):
        yield line, line.endswith(b"\n") or len(line) == LONGEST_LINE


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the readable records of a file of JSON lines, in order; empty if there is no file."""
    try:
        lines = read_file(path).split(b"\n")
    except (OSError, RecordError):
        return []
    decoder, records = _decoder_of(kind), []
    for line in lines:
        with suppress(ValueError, RecursionError):  # the end, or cut off when its writer was killed
            records.append(decoder.decode(line))
    return records


def read_first(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file's first line, or None if that line is no record, or the file cannot be
    read.
    """
    with suppress(OSError, RecordError, StopIteration), open_file(path) as file:
        return decode(next(lines_of(file))[0], kind)
    return None


def read_record(path: Path, kind: type[T]) -> T:
    """Return the one record that a JSON file holds.

    Raises:
        OSError: the file cannot be read.
        RecordError: the file holds something else. The message says what.
    """
    return decode(read_file(path), kind)


def read_records(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Return the records of the files that can be read and hold one, in the files' order."""
    records = []
    for path in paths:
        with suppress(OSError, RecordError):
            records.append(read_record(path, kind))
    return records


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record in `data`, which is JSON.

    Raises:
        RecordError: `data` is something else. The message says what.
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
