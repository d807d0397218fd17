"""Sorts more records than fit in memory: sorted runs in one temporary file, merged as they are read back."""

from __future__ import annotations

import marshal
import os
import tempfile
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

Record: TypeAlias = tuple[int, int, int, int, int, int, bytes]
"""It is sorted by the first four numbers, which no two have all in common."""
_RUN = 50_000
"""Records that are sorted in memory: some 20 MB."""
_BLOCK = 128
"""Records of a run that are in memory while the runs are merged."""


class Spill:
    """Give it records, then take them back in order, once."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where there is room for a file of the size of the result. It never has a name there."""
        self._folder = folder
        self._file: BinaryIO | None = None
        self._records: list[Record] = []
        self._runs: list[list[tuple[int, int]]] = []
        self.size = 0
        """Bytes on the disk so far."""

    def add(self, record: Record) -> None:
        self._records.append(record)
        if len(self._records) >= _RUN:
            self.flush()

    def flush(self) -> None:
        """Puts what is in memory on the disk."""
        from isal import isal_zlib  # not when a report imports this package

        if not self._records:
            return
        if self._file is None:
            # Without a name: nothing is left of it, whatever happens.
            self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115 # `close` does
        self._records.sort()
        blocks = []
        for at in range(0, len(self._records), _BLOCK):
            packed = isal_zlib.compress(marshal.dumps(self._records[at : at + _BLOCK]), 1)
            self._file.write(packed)
            blocks.append((self.size, len(packed)))
            self.size += len(packed)
        self._runs.append(blocks)
        self._records = []

    def sorted(self) -> Iterator[Record]:
        self.flush()
        if self._file is not None:
            self._file.flush()
        return merge(*map(self._run, self._runs))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _run(self, blocks: list[tuple[int, int]]) -> Iterator[Record]:
        from isal import isal_zlib

        if self._file is not None:
            for at, size in blocks:
                packed = os.pread(self._file.fileno(), size, at)
                yield from marshal.loads(isal_zlib.decompress(packed))
