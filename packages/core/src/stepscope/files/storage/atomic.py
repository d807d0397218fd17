"""Writes of files under a temporary name, which are renamed when complete."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from stepscope.errors import ours
from stepscope.files.layout import sidecar_of


@cache
def boot_id() -> str | None:
    """Return the id of this boot of the kernel, or None if unknown. Processes with the same id share a wall
    clock.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except ours(OSError):
        return None


def is_running(pid: int) -> bool:
    """Return whether a process `pid` runs on this machine, under any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except ours(OSError, OverflowError):  # owned by another user, or a number that is no pid
        return True
    return True


_NAME = re.compile(r"^\..*\.(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}$", re.DOTALL)


def temporary(path: Path) -> Path:
    """Return a hidden path beside `path` that no other writer uses."""
    name = f".{path.name[:80]}.{_place() or '0' * 8}-{os.getpid()}-{os.urandom(6).hex()}"
    return path.parent / name  # `with_name` would refuse the path `.`


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove temporary files in and below `folder` whose processes on this machine have ended. Return their
    paths.
    """
    if _place() is None:
        return []
    return [path for path in _abandoned(folder) if _remove(path)]


def _abandoned(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            parts = _NAME.match(name)
            if parts and parts["place"] == _place() and not is_running(int(parts["pid"])):
                yield Path(parent, name)


def _remove(path: Path) -> bool:
    import shutil  # imported here, because it takes 7 ms and is rarely needed

    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    return False


@cache
def _place() -> str | None:
    """Return eight hex digits that identify this boot and pid namespace, in which process ids are unique;
    None if unknown.
    """
    boot = boot_id()
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except ours(OSError):
        return None
    return None if boot is None else f"{crc32(f'{boot} {pids}'.encode()):08x}"


private = partial(os.open, mode=0o600)
"""`opener` for a new file that only its owner may read."""
PIECE = 4 << 20
"""Size of one piece of a file that is sent to another host, in bytes. Sending takes some milliseconds."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, replacing an existing file. Readers see either the old file or the complete new
    file.

    The folder is created if needed. The mode is 0600, because traces are private to the user.

    Raises:
        OSError: the file cannot be written. No temporary file remains.
    """
    name = temporary(path)
    try:  # a Ctrl-C may come once the file exists
        with _created(name) as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):  # if the folder is gone, raise the first error
            name.unlink()
        raise


def _created(path: Path) -> BinaryIO:
    try:
        return open(path, "xb", opener=private)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb", opener=private)


def append_whole(handle: int, size: int, data: bytes) -> int:
    """Append `data` to an open file of `size` bytes, and return the new size. No other code may write to the
    file.

    Raises:
        OSError: The file cannot be written, for example because the disk is full. The file keeps its old
            size, so that no partial line remains.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except BaseException:  # also an exception of a signal handler
        os.ftruncate(handle, size)
        os.lseek(handle, size, os.SEEK_SET)
        raise
    return size + len(data)


def append_lines(path: Path, records: Iterable[object]) -> int:
    """Append records as JSON lines to a file, which is created if needed. Return its new size.

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
    """Create an empty file. Return False if the file already exists, so that only one of several processes
    gets True.

    Return True also if the file cannot be created.
    """
    try:
        with open(path, "xb", opener=private):
            return True
    except FileExistsError:
        return False
    except ours(OSError):
        return True


class Arrival:
    """A file that is received from another host piece by piece. Its name is temporary until it is
    complete.
    """

    def __init__(self, target: Path) -> None:
        """Raise `OSError` if the temporary file cannot be created."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target, self._name = target, temporary(target)
        self._file = open(self._name, "xb", opener=private)  # noqa: SIM115  # closed by `finish` or `give_up`
        self.bytes = 0

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self.bytes += len(piece)

    def finish(self) -> None:
        self._file.close()
        os.replace(self._name, self._target)

    def give_up(self) -> None:
        try:
            self._file.close()  # raises if the disk is full
        finally:
            self._name.unlink(missing_ok=True)


_BLOCK = 8 << 20
"""Bytes of one compression call, which takes 6 ms. Between calls, this thread takes the GIL for a moment."""


def compress(file: Path) -> Path:
    """Compress `file` to `<name>.gz` in the same folder, and remove `file`. Return the new path.

    igzip releases the GIL, so that other threads continue.
    """
    from isal import igzip  # imported here, in the compressing thread, because it takes 9 ms

    compressed = file.with_name(file.name + ".gz")
    sink = igzip.open(compressed, "wb", compresslevel=1)  # type: ignore[no-untyped-call]  # isal
    with file.open("rb") as source, sink:
        shutil.copyfileobj(source, sink, _BLOCK)
    file.unlink()
    return compressed


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the path of `<stem><suffix>` in `folder`, with a number after the stem if that file exists."""
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists() and not sidecar_of(path).exists())
