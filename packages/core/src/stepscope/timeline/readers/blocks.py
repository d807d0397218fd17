"""The bytes of a file, plain or gzip, in blocks: whatever its size, one block is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 18
"""Bytes of a block; between 64 KiB and 1 MiB the size makes no difference that could be measured."""
_GZIP = b"\x1f\x8b"


class Notes:
    """What could not be used of one file: each kind of trouble, and how many events that concerns."""

    def __init__(self) -> None:
        self.counts: dict[str, int | None] = {}

    def file(self, what: str) -> None:
        """Trouble with the file as such."""
        self.counts[what] = None

    def events(self, what: str, count: int = 1) -> None:
        self.counts[what] = (self.counts.get(what) or 0) + count


def read_blocks(path: Path, notes: Notes, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yields what the file holds, decompressed, up to where it is damaged or ends; `notes` says where.

    Args:
        on_read: Called with a number of bytes of the file each time that many more were read.
    """
    try:
        with path.open("rb") as file:
            read = partial(_read, file, on_read)
            first = read()
            if not first:
                notes.file("empty")
            yield from _gunzip(first, read, notes) if first.startswith(_GZIP) else _plain(first, read)
    except OSError as error:
        notes.file(f"cannot be read: {error.strerror or error}")


def _read(file: BinaryIO, on_read: Callable[[int], None] | None) -> bytes:
    data = file.read(BLOCK)
    if on_read is not None and data:
        on_read(len(data))
    return data


def _plain(first: bytes, read: Callable[[], bytes]) -> Iterator[bytes]:
    data = first
    while data:
        yield data
        data = read()


def _gunzip(data: bytes, read: Callable[[], bytes], notes: Notes) -> Iterator[bytes]:
    """All members, one after the other."""
    from isal import igzip_lib  # not when a report imports this package

    try:
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while True:
            # A block may decompress to a thousand of them: never more than one at a time.
            if block := member.decompress(data, BLOCK):
                yield block
            data = b""
            if member.eof:
                data = member.unused_data or read()
                if not data.strip(b"\0"):  # some writers pad
                    return
                member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            elif member.needs_input:
                data = read()
                if not data:
                    notes.file("cut off: its gzip stream does not end")
                    return
    except (igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc] # isal's stub: an instance
        notes.file(f"damaged: {error}")
