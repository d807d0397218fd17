"""Writing of a merged timeline: gzip as it comes, in place when it is whole."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.files.storage.temporary import temporary

_RAW = -15
"""The window of zlib's functions that makes a deflate stream without a header: 15 bits."""
_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""Of a gzip member (RFC 1952, 2.3) without a time and a name."""
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Written(msgspec.Struct, frozen=True):
    """Checksum and size of a text that was compressed as a piece of a timeline."""

    crc: int = 0
    length: int = 0
    """Bytes of the text. 0: nothing was written."""


class Sink:
    """A file, with the number of bytes that were written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.written = 0
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.written += len(data)


class EventWriter:
    """Writer of events as a piece of a deflate stream, compressed apart from all other pieces.

    So pieces that several processes wrote can stand behind each other in one stream.
    """

    def __init__(self, sink: Sink, before: TimelineFile | None = None) -> None:
        """`before`: The file whose present piece ends where this one begins. None: this one begins a file."""
        from isal import isal_zlib  # for import time: reports import this package and write no timeline

        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = isal_zlib.compressobj(1, isal_zlib.DEFLATED, _RAW, 9)
        self._crc32 = isal_zlib.crc32
        self._sync, self._full = isal_zlib.Z_SYNC_FLUSH, isal_zlib.Z_FULL_FLUSH
        self._sink = sink
        self._before = before
        self._between = b""
        self._crc = self._length = 0

    @property
    def written(self) -> int:
        """Bytes of the file, as of the last `flush`."""
        return self._sink.written

    def events(self, text: bytes | memoryview) -> None:
        """Write events as JSON, with commas between them."""
        if text:
            if self._before is not None and not self._length:
                self._before.interrupt()
            self._put(self._between)
            self._put(text)
            self._between = b",\n"

    def objects(self, events: list[dict[str, object]]) -> None:
        self.events(b",\n".join(map(msgspec.json.encode, events)))

    def flush(self) -> int:
        """Write what the compressor holds back, and return the size of the file."""
        if self._before is not None and not self._length:
            return self._before.flush()
        self._sink.write(self._deflate.flush(self._sync))
        return self.written

    def end(self) -> Written:
        """End the piece at a whole byte."""
        if self._length:
            self._sink.write(self._deflate.flush(self._full))
        return Written(self._crc, self._length)

    def _put(self, text: bytes | memoryview) -> None:
        self._sink.write(self._deflate.compress(text))
        self._crc = self._crc32(text, self._crc)
        self._length += len(text)


class TimelineFile(EventWriter):
    """A timeline while it is written. It takes events; `finish` closes the JSON."""

    def __init__(self, file: BinaryIO, base_ns: int) -> None:
        super().__init__(Sink(file))
        self._sink.write(_HEADER)
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def interrupt(self) -> None:
        """Begin a piece of another writer behind the events so far."""
        self._put(self._between)
        self._sink.write(self._deflate.flush(self._full))

    @contextmanager
    def piece(self) -> Iterator[EventWriter]:
        """Yield the writer of a piece. Meanwhile this one writes nothing."""
        writer = EventWriter(self._sink, self)
        yield writer
        self._count(writer.end())

    def append(self, path: Path, written: Written) -> None:
        """Append a piece that `piece_file` wrote."""
        if not written.length:
            return
        self.interrupt()
        with open(path, "rb") as file:
            while data := file.read(_CHUNK):
                self._sink.write(data)
        self._count(written)

    def finish(self, metadata: object) -> None:
        """End the events and write `metadata` behind them as `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        self._sink.write(self._deflate.flush())
        self._sink.write(struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))

    def _count(self, piece: Written) -> None:
        from isal import isal_zlib

        if piece.length:
            self._crc = isal_zlib.crc32_combine(self._crc, piece.crc, piece.length)
            self._length += piece.length
            self._between = b",\n"


@contextmanager
def piece_file(path: Path, token: bytes) -> Iterator[EventWriter | None]:
    """Yield the writer of a piece in the file that holds `token` only. None: there is none.

    It creates none: the merge removes the file when it gives a call up, which may come here later.

    Raises:
        OSError: The disk is full.
    """
    try:
        file = open(path, "r+b")  # noqa: SIM115  # closed below
    except OSError:
        yield None
        return
    with full_disk_names(path), file:
        if file.read(len(token) + 1) != token:
            yield None
            return
        file.seek(0)
        file.truncate()
        yield EventWriter(Sink(file))


@contextmanager
def full_disk_names(path: Path) -> Iterator[None]:
    """Give the errors of a full disk the name of the file that was written."""
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
            yield TimelineFile(sink, base_ns)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
