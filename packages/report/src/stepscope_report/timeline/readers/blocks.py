"""Blocks of a plain or gzip file: one block is in memory, whatever the file's size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

from stepscope.files.storage import open_file
from stepscope_report.timeline.readers.contract import Notes

BLOCK = 1 << 17
"""Number of bytes of a block. The block, its changed copy and its events as objects fit into a core's cache
together.

igzip takes a sixth longer with blocks of half the size.
"""
_STEP = 1 << 12
_KEPT = 8 << 20
_GZIP = b"\x1f\x8b"
INFLATED = 250
"""Largest ratio of inflated to compressed size that is accepted: traces reach 10 to 50, deflate allows
1,032."""
_SMALL = 64 << 20
"""Number of bytes that any file may inflate to, whatever the ratio."""


@cache
def keep_memory() -> None:
    """Make glibc keep freed memory: after 8 MB were allocated and freed, glibc keeps up to 16 MB.

    Otherwise the kernel clears new memory for every block of a file, which takes a fifth of a merge's time.
    """
    bytes(_KEPT)


def read_blocks(
    path: Path, notes: Notes, on_read: Callable[[int], None] | None = None, size: int = BLOCK
) -> Iterator[bytes]:
    """Yield the decompressed content up to the file's end or damage, which `notes` records.

    Args:
        on_read: Called with the number of bytes of each read of the file.
        size: Bytes of a block. Smaller blocks than `BLOCK` are better only for the beginning of a file.
    """
    try:
        with open_file(path) as file:
            read = partial(_read, file, size, on_read)
            first = read()
            if not first:
                notes.file("empty")
            if first.startswith(_GZIP):
                yield from _gunzip(first, size, read, partial(_slowly, path), notes)
            elif first:
                yield first
                yield from iter(read, b"")
    except OSError as error:
        notes.file(f"cannot be read: {error.strerror or error}")


def _read(file: BinaryIO, size: int, on_read: Callable[[int], None] | None) -> bytes:
    data = file.read(size)
    if on_read is not None and data:
        on_read(len(data))
    return data


def _gunzip(
    data: bytes,
    size: int,
    read: Callable[[], bytes],
    slowly: Callable[[int, int], Iterator[bytes]],
    notes: Notes,
) -> Iterator[bytes]:
    """Yield the content of all gzip members, in order."""
    # Imported here, because a report may import this package without reading a file.
    from isal import igzip_lib

    start, taken, given, inflated = 0, len(data), 0, 0
    """Numbers of bytes: `start` in the file before this member, `taken` read so far, `given` yielded from
    this member, `inflated` yielded from all members."""
    try:
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while True:
            # A block may inflate to a thousand blocks, of which only one is held at a time.
            if block := member.decompress(data, size):
                given += len(block)
                inflated += len(block)
                if inflated > max(_SMALL, INFLATED * taken):
                    notes.file(f"left out from here on: it inflates to over {INFLATED} times its size")
                    return
                yield block
            data = b""
            if member.eof:
                start = taken - len(member.unused_data)
                data = member.unused_data
                if not data:
                    data = read()
                    taken += len(data)
                if not data.strip(b"\0"):  # some writers pad
                    return
                member, given = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP), 0
            elif member.needs_input:
                data = read()
                taken += len(data)
                if not data:
                    notes.file("cut off: its gzip stream does not end")
                    return
    except (igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc] # isal's stub: an instance
        notes.file(f"damaged: {error}")
        yield from slowly(start, given)


def _slowly(path: Path, start: int, given: int) -> Iterator[bytes]:
    """Yield the bytes of a damaged member after the first `given` bytes, in small steps and without checking
    its checksum.

    A decompressor that fails returns nothing of the block in which it failed.
    """
    with path.open("rb") as file:
        file.seek(start)
        try:
            _skip_header(file)
            member = zlib.decompressobj(-zlib.MAX_WBITS)
            while not member.eof and (data := member.unconsumed_tail or file.read(_STEP)):
                block = member.decompress(data, _STEP)
                if len(block) > given:
                    yield block[given:]
                given = max(0, given - len(block))
        except (zlib.error, ValueError):
            return


def _skip_header(file: BinaryIO) -> None:
    """Skip the header of a gzip member (RFC 1952, 2.3). Raises ValueError if there is none."""
    head = file.read(10)
    if len(head) < 10 or not head.startswith(_GZIP):
        raise ValueError("no gzip header")
    flags = head[3]
    if flags & 4:
        file.read(int.from_bytes(file.read(2), "little"))
    for bit in (8, 16):  # name, comment
        while flags & bit and file.read(1) not in (b"\0", b""):
            pass
    if flags & 2:
        file.read(2)
