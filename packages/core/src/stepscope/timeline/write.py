"""Writes a merged timeline as gzip, as it comes, and puts it in place when it is whole.

The file is one gzip member, which every reader takes. Its deflate stream may be made in pieces: each ends at
a byte and refers to nothing before itself, so that pieces by several processes can stand behind each other,
and their checksums are combined.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.files.temporary import temporary

_COPIED = 1 << 18
_HEADER = b"\x1f\x8b\x08" + bytes(5) + b"\x04\xff"
"""Of a gzip member: deflate, compressed for speed, by no one knows whom (RFC 1952)."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, compressed so that they can stand in any timeline."""

    size: int
    """Bytes of text. 0: there are no events in it."""
    crc: int
    """CRC-32 of the text."""


class EventsFile:
    """Events as they are compressed, with commas between them."""

    def __init__(self, sink: BinaryIO) -> None:
        from isal import isal_zlib  # not when a report imports this package

        self._isal = isal_zlib
        self._sink = sink
        self._begin()
        self._between = b""
        self._text = 0
        self._crc = 0
        self.written = 0
        """Bytes of the file, as of the last `settle`."""

    def events(self, text: bytes | memoryview) -> None:
        """Events as JSON, with commas between them."""
        if text:
            self._put(self._between)
            self._put(text)
            self._between = b",\n"

    def objects(self, events: list[dict[str, object]]) -> None:
        self.events(b",\n".join(map(msgspec.json.encode, events)))

    def settle(self) -> int:
        """What the file takes with all that was given to it: what the compressor holds back is written."""
        self._out(self._deflate.flush(self._isal.Z_SYNC_FLUSH))
        return self.written

    def piece(self) -> Piece:
        """Settles. All that was given, as another file takes it."""
        self.settle()
        return Piece(size=self._text, crc=self._crc)

    def append(self, piece: Piece, source: BinaryIO) -> None:
        """Events that another one compressed; `source` holds what it wrote."""
        if piece.size == 0:
            return
        self._put(self._between)
        self._between = b",\n"
        self.settle()
        self._begin()  # what it wrote before is not where it was, for who decompresses
        self._crc = self._isal.crc32_combine(self._crc, piece.crc, piece.size)
        self._text += piece.size
        while data := source.read(_COPIED):
            self._out(data)

    def _begin(self) -> None:
        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = self._isal.compressobj(1, self._isal.DEFLATED, -15, 9)

    def _put(self, text: bytes | memoryview) -> None:
        self._crc = self._isal.crc32(text, self._crc)
        self._text += len(text)
        self._out(self._deflate.compress(text))

    def _out(self, data: bytes) -> None:
        self._sink.write(data)
        self.written += len(data)


class TimelineFile(EventsFile):
    """The file while it is written. Give it events; `finish` closes the JSON."""

    def __init__(self, sink: BinaryIO, base_ns: int) -> None:
        super().__init__(sink)
        self._out(_HEADER)
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        return []

    def finish(self, metadata: object) -> None:
        """Ends the events; `metadata` stands behind them as `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        self._out(self._deflate.flush())
        self._out(self._crc.to_bytes(4, "little") + (self._text % (1 << 32)).to_bytes(4, "little"))


@contextmanager
def timeline_file(path: Path, base_ns: int) -> Iterator[TimelineFile]:
    """A file that replaces what is at `path` when the block ends well; otherwise nothing is left of it.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    name = temporary(path)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as sink:
            yield TimelineFile(sink, base_ns)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
