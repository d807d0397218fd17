"""Writes a merged timeline as gzip, as it comes, and puts it in place when it is whole.

The file is one gzip member, which every reader takes. Its deflate stream may be made in pieces: each ends at
a byte and refers to nothing before itself, so that pieces by several processes, or by an earlier merge, can
stand behind each other, and their checksums are combined. What stands behind the events is a piece as well,
and the header says where it begins (a field of its own, RFC 1952, 2.3.1.1).
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import BinaryIO, TypeVar

import msgspec

from stepscope.files.storage.temporary import temporary

_COPIED = 1 << 18
_HEADER = b"\x1f\x8b\x08\x04" + bytes(4) + b"\x04\xff\x10\0SS\x0c\0"
"""Of a gzip member: deflate, compressed for speed, by no one knows whom, with a field SS of 12 bytes."""
_FIELD = Struct("<QI")
"""Where what stands behind the events begins, and the CRC-32 of its text."""
_BEHIND = b'\n],"stepscope":'
_LONGEST = 1 << 26
"""Bytes behind the events that are believed."""
_T = TypeVar("_T")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, compressed so that they can stand in any timeline."""

    size: int
    """Bytes of text. 0: there are no events in it."""
    crc: int
    """CRC-32 of the text."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where a piece lies in a timeline."""

    at: int
    size: int
    """Bytes of the file."""
    crc: int
    """CRC-32 of these."""
    follows: bool
    """Whether its text begins with the comma behind what is before it."""
    piece: Piece


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
        self._packed_crc = 0
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

    def append(
        self, piece: Piece, source: BinaryIO, size: int | None = None, *, follows: bool = False
    ) -> Stored:
        """Events that another one compressed: the next `size` bytes of `source`, or all."""
        left = 0 if piece.size == 0 else sys.maxsize if size is None else size
        if left:
            if not follows:
                self._put(self._between)
            self._between = b",\n"
        at = self._apart()
        while data := source.read(min(left, _COPIED)):
            left -= len(data)
            self._out(data)
        self._crc = self._combined(self._crc, piece)
        self._text += piece.size
        return Stored(
            at=at,
            size=self.written - at,
            crc=self._packed_crc,
            follows=follows,
            piece=piece,
        )

    def stored(self, write: Callable[[], _T]) -> tuple[_T, Stored]:
        """Calls `write`; what that gives to the file becomes a piece."""
        at, follows = self._apart(), bool(self._between)
        before = Piece(size=self._text, crc=self._crc)
        self._text = self._crc = 0
        made = write()
        piece = self.piece()
        found = Stored(at=at, size=self.written - at, crc=self._packed_crc, follows=follows, piece=piece)
        self._text, self._crc = before.size + piece.size, self._combined(before.crc, piece)
        self._begin()
        return made, found

    @property
    def follows(self) -> bool:
        """Whether events are in it already."""
        return bool(self._between)

    def _apart(self) -> int:
        """Begins a piece. Returns where."""
        self.settle()
        self._begin()  # what was written before is not where it was, for who decompresses
        self._packed_crc = 0
        return self.written

    def _combined(self, crc: int, piece: Piece) -> int:
        return self._isal.crc32_combine(crc, piece.crc, piece.size) if piece.size else crc

    def _begin(self) -> None:
        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = self._isal.compressobj(1, self._isal.DEFLATED, -15, 9)

    def _put(self, text: bytes | memoryview) -> None:
        self._crc = self._isal.crc32(text, self._crc)
        self._text += len(text)
        self._out(self._deflate.compress(text))

    def _out(self, data: bytes) -> None:
        self._sink.write(data)
        self._packed_crc = self._isal.crc32(data, self._packed_crc)
        self.written += len(data)


class TimelineFile(EventsFile):
    """The file while it is written. Give it events; `finish` closes the JSON."""

    def __init__(self, sink: BinaryIO, base_ns: int) -> None:
        super().__init__(sink)
        self.rows: list[object] = []
        """What is said at the end of the rows' pieces."""
        self._out(_HEADER + bytes(_FIELD.size))
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        return []

    def finish(self, metadata: object) -> None:
        """Ends the events; `metadata` stands behind them as `stepscope`."""
        at = self._apart()
        rows = b',"stepscopeRows":' + msgspec.json.encode(self.rows)
        text = _BEHIND + msgspec.json.encode(metadata) + rows + b"}\n"
        self._put(text)
        self._out(self._deflate.flush())
        self._out(self._crc.to_bytes(4, "little") + (self._text % (1 << 32)).to_bytes(4, "little"))
        self._sink.seek(len(_HEADER))
        self._sink.write(_FIELD.pack(at, self._isal.crc32(text)))


def behind_events(file: BinaryIO) -> bytes | None:
    """What stands there in a timeline: an object with `stepscope` and `stepscopeRows`. None: none of ours."""
    try:
        head = file.read(len(_HEADER) + _FIELD.size)
    except OSError:
        return None
    if not head.startswith(_HEADER) or len(head) < len(_HEADER) + _FIELD.size:
        return None
    at, crc = _FIELD.unpack_from(head, len(_HEADER))
    try:
        file.seek(at)
        piece = zlib.decompressobj(-zlib.MAX_WBITS)
        if piece.decompress(file.read(_COPIED), len(_BEHIND)) != _BEHIND:
            return None
        text = piece.decompress(piece.unconsumed_tail + file.read(_LONGEST), _LONGEST)
    except (OSError, OverflowError, ValueError, zlib.error):
        return None
    return b'{"stepscope":' + text if zlib.crc32(_BEHIND + text) == crc else None


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
