"""Files of the output tree, written under a temporary name and renamed, so that they are never incomplete."""

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
    """Return the id of the running kernel, whose processes share one wall clock; None if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except ours(OSError):
        return None


def is_running(pid: int) -> bool:
    """Return whether a process with the id `pid` runs on this machine, under any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except ours(OSError, OverflowError):  # of another user, or a number from a damaged file
        return True
    return True


_NAME = re.compile(r"^\..*\.(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}$", re.DOTALL)


def temporary(path: Path) -> Path:
    """Return a hidden name beside `path` that no other writer uses."""
    name = f".{path.name[:80]}.{_place() or '0' * 8}-{os.getpid()}-{os.urandom(6).hex()}"
    return path.parent / name  # `with_name` refuses `.`


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove the temporary files of dead processes of this machine in and below `folder`. Return their
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
    import shutil  # import time: 7 ms, and seldom needed

    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    return False


@cache
def _place() -> str | None:
    """Return eight hex digits for the scope of process ids: this boot and pid namespace, or None if
    unknown."""
    boot = boot_id()
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except ours(OSError):
        return None
    return None if boot is None else f"{crc32(f'{boot} {pids}'.encode()):08x}"


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


_BLOCK = 8 << 20
"""Number of bytes of one compression call (6 ms). After each call, the GIL is taken from the training thread
for a moment."""


def compress(file: Path) -> Path:
    """Compress a file to `<name>.gz` beside it, and remove it. Return the new path.

    igzip releases the GIL: other threads go on.
    """
    from isal import igzip  # import time: 9 ms, spent in the thread that compresses

    compressed = file.with_name(file.name + ".gz")
    sink = igzip.open(compressed, "wb", compresslevel=1)  # type: ignore[no-untyped-call]  # isal
    with file.open("rb") as source, sink:
        shutil.copyfileobj(source, sink, _BLOCK)
    file.unlink()
    return compressed


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the path of `<stem><suffix>` in `folder`, with a number after the stem if the name is in use."""
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists() and not sidecar_of(path).exists())
