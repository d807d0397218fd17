"""Writes a merged timeline as gzip, as it comes, and puts it in place when it is whole.

The file is one gzip member, which every reader takes. Its deflate stream may be made in pieces: each ends at
a byte and refers to nothing before itself, so that pieces by several processes can stand behind each other,
and their checksums are combined.

It is compressed on a thread of its own where there is an idle core for it: that takes a quarter of a merge,
and igzip needs no GIL. On a busy machine a thread would take a core from others, and 7 % more CPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from stepscope.files.temporary import temporary

_TOGETHER = 1 << 20
"""Bytes that are handed over at a time."""
_AHEAD = 2
"""So many of those wait at most: what is slower is waited for, and memory stays as it is."""
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
    """Events as they are compressed, with commas between them. `close` is always needed."""

    def __init__(self, sink: BinaryIO, *, thread: bool) -> None:
        from isal import isal_zlib  # not when a report imports this package

        self._isal = isal_zlib
        self._sink = sink
        self._begin()
        self._between = b""
        self._given: list[bytes | memoryview] = []
        self._size = 0
        self._text = 0
        self._crc = 0
        self._thread = ThreadPoolExecutor(1, "stepscope-merge") if thread else None
        self._begun: deque[Future[None]] = deque()
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
        self._hand_over()
        self._wait(0)
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

    def close(self) -> None:
        """Ends the thread. What it has not begun with is not written."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._deflate = self._isal.compressobj(1, self._isal.DEFLATED, -15, 9)

    def _put(self, text: bytes | memoryview) -> None:
        self._given.append(text)
        self._size += len(text)
        if self._size >= _TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        given, self._given, self._size = self._given, [], 0
        if self._thread is None:
            self._compress(given)
        else:
            self._begun.append(self._thread.submit(self._compress, given))
            self._wait(_AHEAD)

    def _wait(self, ahead: int) -> None:
        """Until no more than so many wait.

        Raises:
            OSError: the disk did not take one.
        """
        while len(self._begun) > ahead:
            self._begun.popleft().result()

    def _compress(self, texts: list[bytes | memoryview]) -> None:
        for text in texts:
            self._crc = self._isal.crc32(text, self._crc)
            self._text += len(text)
            self._out(self._deflate.compress(text))

    def _out(self, data: bytes) -> None:
        self._sink.write(data)
        self.written += len(data)


class TimelineFile(EventsFile):
    """The file while it is written. Give it events; `finish` closes the JSON."""

    def __init__(self, sink: BinaryIO, base_ns: int, *, thread: bool) -> None:
        super().__init__(sink, thread=thread)
        self._out(_HEADER)
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        return []

    def finish(self, metadata: object) -> None:
        """Ends the events; `metadata` stands behind them as `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        self._hand_over()
        self._wait(0)
        self._out(self._deflate.flush())
        self._out(self._crc.to_bytes(4, "little") + (self._text % (1 << 32)).to_bytes(4, "little"))


def idle_cores() -> int:
    """How many there are beside the one that we run on; none on a busy machine."""
    try:
        cores = len(os.sched_getaffinity(0))
        return cores - 1 if os.getloadavg()[0] <= cores else 0
    except (AttributeError, OSError):  # not on Linux, or without /proc
        return 0


@contextmanager
def timeline_file(path: Path, base_ns: int, *, thread: bool) -> Iterator[TimelineFile]:
    """A file that replaces what is at `path` when the block ends well; otherwise nothing is left of it.

    Args:
        thread: Whether it is compressed on one of its own.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    name = temporary(path)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as sink, closing(TimelineFile(sink, base_ns, thread=thread)) as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
