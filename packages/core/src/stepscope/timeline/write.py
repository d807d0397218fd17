"""Writes a merged timeline as gzip, as it comes, and puts it in place when it is whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec


class TimelineFile:
    """The file while it is written. Give it events; `finish` closes the JSON."""

    def __init__(self, sink: BinaryIO, base_ns: int) -> None:
        from isal import isal_zlib  # not when a report imports this package

        self._sink = sink
        self._sync = isal_zlib.Z_SYNC_FLUSH
        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._gzip = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31, 9)
        self._between = b""
        self.written = 0
        """Bytes of the file so far."""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        self._put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')

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
        self._out(self._gzip.flush(self._sync))
        return self.written

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        return []

    def finish(self, metadata: object) -> None:
        """Ends the events; `metadata` stands behind them as `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        self._out(self._gzip.flush())

    def _put(self, text: bytes | memoryview) -> None:
        self._out(self._gzip.compress(text))

    def _out(self, data: bytes) -> None:
        self._sink.write(data)
        self.written += len(data)


@contextmanager
def timeline_file(path: Path, base_ns: int) -> Iterator[TimelineFile]:
    """A file that replaces what is at `path` when the block ends well; otherwise nothing is left of it.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as sink:
            yield TimelineFile(sink, base_ns)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
