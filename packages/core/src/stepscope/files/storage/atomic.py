"""Files of the output tree, written under a temporary name and renamed, so that they are never incomplete."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.errors import ours
from stepscope.files.storage.temporary import temporary

private = partial(os.open, mode=0o600)
"""`opener` for a new file that only its owner may read."""
PIECE = 4 << 20
"""Number of bytes of one piece; sending a piece takes some milliseconds."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` and replace an old file: readers see the old one or the new one, complete.

    Creates the folder. The file's mode is 0600, because traces are private to the user.

    Raises:
        OSError: the file cannot be written. Nothing is left behind.
    """
    name = temporary(path)
    try:  # a Ctrl-C may come as soon as the file exists
        with _created(name) as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):  # its folder may be gone: the error that matters is the first
            name.unlink()
        raise


def _created(path: Path) -> BinaryIO:
    try:
        return open(path, "xb", opener=private)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb", opener=private)


def append_whole(handle: int, size: int, data: bytes) -> int:
    """Append `data` to an open file of `size` bytes, which only the caller writes. Return its new size.

    Raises:
        OSError: The file cannot be written, for example because the disk is full. No partial line remains, so
            that earlier lines stay readable.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except BaseException:  # of a signal's handler too
        os.ftruncate(handle, size)
        os.lseek(handle, size, os.SEEK_SET)
        raise
    return size + len(data)


def append_lines(path: Path, records: Iterable[object]) -> int:
    """Append records as lines of JSON to a file, which is created if needed. Return its new size.

    Raises:
        OSError: The file cannot be written.
    """
    data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        handle = os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o600)
    try:
        while data:
            data = data[os.write(handle, data) :]
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def create_once(path: Path) -> bool:
    """Create an empty file. Return False if it already exists, so that only one of several processes gets
    True.

    True as well if the file cannot be created.
    """
    try:
        with open(path, "xb", opener=private):
            return True
    except FileExistsError:
        return False
    except ours(OSError):
        return True


class Arrival:
    """A file from another host, received piece by piece, under a temporary name until it is complete."""

    def __init__(self, target: Path) -> None:
        """Raise `OSError` if the temporary file cannot be created."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target, self._name = target, temporary(target)
        self._file = open(self._name, "xb", opener=private)  # noqa: SIM115  # until its end
        self.bytes = 0

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self.bytes += len(piece)

    def finish(self) -> None:
        self._file.close()
        os.replace(self._name, self._target)

    def give_up(self) -> None:
        try:
            self._file.close()  # on a full disk it raises
        finally:
            self._name.unlink(missing_ok=True)
