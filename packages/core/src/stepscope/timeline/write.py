"""Writes a merged timeline as gzip, as it comes, and puts it in place when it is whole.

It is compressed on a thread of its own where there is an idle core for it: that takes a quarter of a merge,
and igzip needs no GIL. On a busy machine a thread would take a core from others, and 7 % more CPU.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

_TOGETHER = 1 << 20
"""Bytes that are handed over at a time."""
_AHEAD = 2
"""So many of those wait at most: what is slower is waited for, and memory stays as it is."""


class TimelineFile:
    """The file while it is written. Give it events; `finish` closes the JSON, `close` is always needed."""

    def __init__(self, sink: BinaryIO, base_ns: int) -> None:
        from isal import isal_zlib  # not when a report imports this package

        self._sink = sink
        self._sync = isal_zlib.Z_SYNC_FLUSH
        # Level 1 of igzip: 1,000 MB/s, and a tenth of the size of such JSON. With less memory it is slower.
        self._gzip = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31, 9)
        self._between = b""
        self._given: list[bytes | memoryview] = []
        self._size = 0
        self._thread = ThreadPoolExecutor(1, "stepscope-merge") if _idle_core() else None
        self._begun: deque[Future[None]] = deque()
        self.written = 0
        """Bytes of the file, as of the last `settle`."""
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
        self._hand_over()
        self._wait(0)
        self._out(self._gzip.flush(self._sync))
        return self.written

    def left_out(self) -> list[str]:
        """What this format has no place for."""
        return []

    def finish(self, metadata: object) -> None:
        """Ends the events; `metadata` stands behind them as `stepscope`."""
        self._put(b'\n],"stepscope":' + msgspec.json.encode(metadata) + b"}\n")
        self._hand_over()
        self._wait(0)
        self._out(self._gzip.flush())

    def close(self) -> None:
        """Ends the thread. What it has not begun with is not written."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

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
            self._out(self._gzip.compress(text))

    def _out(self, data: bytes) -> None:
        self._sink.write(data)
        self.written += len(data)


def _idle_core() -> bool:
    """Whether there is one beside the one that we run on."""
    try:
        cores = len(os.sched_getaffinity(0))
        return cores > 1 and os.getloadavg()[0] <= cores
    except (AttributeError, OSError):  # not on Linux, or without /proc
        return False


@contextmanager
def timeline_file(path: Path, base_ns: int) -> Iterator[TimelineFile]:
    """A file that replaces what is at `path` when the block ends well; otherwise nothing is left of it.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as sink, closing(TimelineFile(sink, base_ns)) as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
