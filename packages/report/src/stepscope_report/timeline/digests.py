"""Digests: contents of a step's traces, kept so that the next reader need not open the traces.

The first reader writes the digests. The exporter does not, because it is a thread of the training process,
and reading a trace holds the GIL. A digest is valid only for the same files and the same versions of readers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.storage import MAX_BYTES, open_file, read_file, write_atomic
from stepscope_report.timeline.activity.event_names import GROUP, named_collectives
from stepscope_report.timeline.readers.contract import GROUP as READERS

FORMAT = 4
"""Version of the digests' content. Increase it if different content is read from the same trace."""
SMALLEST = 1 << 16
"""Traces with fewer bytes get no digest, because they are read in 0.02 s."""
_TAIL = 1 << 12
_NUMBERS = ", ".join(map(str, range(4096))).encode()
"""Dictionary for zlib. Each trace lists the ranks of its process groups: with 1,024 ranks, the lists are half
of a digest."""
_T = TypeVar("_T")


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when it was read."""

    size_bytes: int
    mtime_ns: int
    tail: int
    """CRC of the file's last 4 KiB, where gzip has its own checksum."""


Stamps: TypeAlias = tuple[Stamp, ...]


class Digest(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """One file in a step's folder of digests: JSON, packed by `packed`."""

    format: int = FORMAT
    made_by: tuple[str, ...]
    """Result of `_versions`, on which the content depends."""
    files: tuple[str, ...]
    """Paths of the files, relative to the step's folder."""
    stamps: Stamps
    content: _T


class Digests:
    """The digests of one step. They are written only if the folder belongs to the user who reads."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._ours = _is_ours(layout.root)

    def kept(self, paths: Sequence[Path], kind: type[_T], of: str = "") -> _T | None:
        """Return the kept content of these files, or None if they have no valid digest.

        Args:
            kind: Type of the content.
            of: Name that separates different contents of the same files.
        """
        try:
            packed = read_file(self._path(paths, of))
            digest = msgspec.json.decode(unpacked(packed), type=cast(Any, Digest)[kind])
        except Exception:  # whatever is wrong with a digest, the traces can be read
            return None
        valid = digest.format == FORMAT and digest.made_by == _versions() and digest.stamps
        return digest.content if valid and digest.stamps == self.stamps(paths) else None

    def stamps(self, paths: Iterable[Path]) -> Stamps:
        """Return the stamps of these files; empty if a file cannot be read."""
        try:
            return tuple(map(_stamp, paths))
        except OSError:
            return ()

    def keep(self, paths: Sequence[Path], content: object, before: Stamps, of: str = "") -> None:
        """Write the digest of these files, unless the files changed since they had the stamps `before`."""
        if not self._ours or sum(stamp.size_bytes for stamp in before) < SMALLEST:
            return
        if before != self.stamps(paths):
            return
        names = tuple(os.fsencode(name).decode(errors="replace") for name in self._names(paths))
        digest = Digest(made_by=_versions(), files=names, stamps=before, content=content)
        with suppress(OSError):  # a full or read-only disk: the next reader reads the traces
            write_atomic(self._path(paths, of), packed(msgspec.json.encode(digest)))

    def _path(self, paths: Iterable[Path], of: str) -> Path:
        return self._layout.digest_of([of, *self._names(paths)])

    def _names(self, paths: Iterable[Path]) -> list[str]:
        return [path.relative_to(self._layout.root).as_posix() for path in paths]


def _is_ours(folder: Path) -> bool:
    """Return whether the folder belongs to this user, and its digests are not behind a symbolic link."""
    try:
        return folder.stat().st_uid == os.geteuid() and not StepLayout(folder).digests.is_symlink()
    except OSError:
        return False


def _stamp(path: Path) -> Stamp:
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        file.seek(max(0, status.st_size - _TAIL))
        return Stamp(status.st_size, status.st_mtime_ns, zlib.crc32(file.read(_TAIL)))


def packed(data: bytes) -> bytes:
    """Compress the JSON of a digest."""
    packer = zlib.compressobj(zdict=_NUMBERS)
    return packer.compress(data) + packer.flush()


def unpacked(data: bytes) -> bytes:
    """Return the JSON of a digest, cut after `MAX_BYTES`."""
    return zlib.decompressobj(zdict=_NUMBERS).decompress(data, MAX_BYTES)


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of packages that read traces, and the user's patterns of collectives."""
    points = sorted((*entry_points(group=GROUP), *entry_points(group=READERS)), key=lambda point: point.name)
    names = dict.fromkeys(("stepscope", *(point.dist.name for point in points if point.dist is not None)))
    return (*(f"{name} {_version(name)}" for name in names), *filter(None, [named_collectives()]))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
