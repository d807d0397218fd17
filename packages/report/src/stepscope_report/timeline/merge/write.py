"""Writing of a merged timeline: gzip while events arrive, or plain into a `.json`. The file gets its name
when it is complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.files.storage.atomic import temporary

_GZIP = 31
"""The window of zlib's functions that makes a gzip file: 16 more than its 15 bits."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TimelineFile:
    """A timeline while it is written. It takes events; `finish` closes the JSON."""

    def __init__(self, file: BinaryIO, base_ns: int, *, packed: bool = True) -> None:
        """Args: packed: False for plain JSON."""
        from isal import isal_zlib  # for import time: reports import this package and write no timeline

        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = isal_zlib.compressobj(1, isal_zlib.DEFLATED, _GZIP, 9)
        self._sync = isal_zlib.Z_SYNC_FLUSH
        self._file = file
        self._packed = packed
        self.written = 0
        """Size of the file in bytes, as of the last `flush`."""
        self._between = b""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def events(self, text: bytes | memoryview) -> None:
        """Write events as JSON, with commas between them."""
        if text:
            self._put(self._between)
            self._put(text)
            self._between = b",\n"

    def objects(self, events: list[dict[str, object]]) -> None:
        self.events(b",\n".join(map(msgspec.json.encode, events)))

    def flush(self) -> int:
        """Write the bytes that the compressor holds back, and return the size of the file."""
        if self._packed:
            self._write(self._deflate.flush(self._sync))
        return self.written

    def finish(self, metadata: object) -> None:
        """End the events and append `metadata` as the field `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        if self._packed:
            self._write(self._deflate.flush())

    def _put(self, text: bytes | memoryview) -> None:
        self._write(self._deflate.compress(text) if self._packed else text)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.written += len(data)


@contextmanager
def full_disk_names(path: Path) -> Iterator[None]:
    """Add the name of the file that was being written to the errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            error.filename = os.fspath(path)
        raise


@contextmanager
def timeline_file(path: Path, base_ns: int) -> Iterator[TimelineFile]:
    """Yield a file that replaces what is at `path` when the block ends without an exception.

    If interrupted, it removes its partial output and keeps any previous timeline.

    Raises:
        OSError: The file cannot be written.
    """
    name = temporary(path)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with full_disk_names(path), os.fdopen(handle, "wb") as sink:
            yield TimelineFile(sink, base_ns, packed=path.suffix != ".json")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
