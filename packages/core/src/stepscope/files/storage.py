"""Atomic writes under a temporary name, and safe reads of files that may have any content and any size."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar
from zlib import crc32

import msgspec

from stepscope.errors import RecordError, ours


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


_PF_EXITING = 0x4
"""Flag of a process that is ending (Linux's `sched.h`). Its sockets may be closed while it still frees a
GPU's memory."""


def is_running(pid: int) -> bool:
    """Return whether a process `pid` runs on this machine, under any user. A killed process does not run,
    even if its parent has not read its status yet.
    """
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return status[0] not in "ZX" and not int(status[6]) & _PF_EXITING
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it has ended meanwhile, or the system has no such files
        return not os.path.exists("/proc/self/stat")
    # A process of another user, or too large a number.
    except ours(OSError, OverflowError, IndexError, ValueError):
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
    except BaseException as error:
        with suppress(OSError):  # if the folder is gone, raise the first error
            name.unlink()
        if isinstance(error, OSError) and error.errno is not None:  # the user knows the file by this name
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def write_new(path: Path, data: bytes) -> bool:
    """Write `data` to `path` as `write_atomic` does, unless the file exists. Return whether it was written.

    Raises:
        OSError: the file cannot be written.
    """
    name = temporary(path)
    write_atomic(name, data)
    try:
        os.link(name, path)
    except FileExistsError:
        return False
    except ours(OSError):  # a file system without links
        os.replace(name, path)
    finally:
        with suppress(OSError):
            name.unlink()
    return True


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
    except BaseException:  # BaseException, because a signal handler may raise
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


def create_once(path: Path, since_ns: int) -> bool:
    """Create an empty file. Return False if the file already exists, so that only one of several processes
    gets True.

    Return True also if the file cannot be created.

    Args:
        since_ns: Unix time in ns. An older file, such as one from before a resume of the run, is replaced.
    """
    try:
        with suppress(FileNotFoundError):
            if path.stat().st_mtime_ns < since_ns:
                path.unlink()
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


LONGEST_LINE = 4 << 20
"""Longest line in bytes. A longer line is not a record; the file may not even be text."""
MAX_BYTES = 64 << 20
"""Size of the largest file that is read as a whole, in bytes."""
T = TypeVar("T")
_making = Lock()
"""Lock for the first use of a type in msgspec, which crashes if two threads inspect a type at once."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file and nothing else, because a read of a pipe could block, and a device may have no
    end.

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
        with suppress(ValueError, RecursionError):  # an empty line, or one that a killed writer cut off
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
