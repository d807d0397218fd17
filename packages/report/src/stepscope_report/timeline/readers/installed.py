"""Readers of stepscope and of installed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from typing import cast

from stepscope.errors import RecordError
from stepscope_report.timeline.model import FileProblem
from stepscope_report.timeline.readers.blocks import Notes
from stepscope_report.timeline.readers.contract import Claim, FoundFile, Reader, Track

GROUP = "stepscope.readers"
_METHODS = ("claims", "open")


class Readers:
    """Readers in the order in which they are asked, with the problems of those that fail.

    Readers of other packages come first, by name, because they know their files better.
    """

    def __init__(self) -> None:
        self._readers: list[Reader] = []
        self.problems: list[FileProblem] = []
        for point in _points(metadata.entry_points, tuple(map(_changed, sys.path))):
            try:
                reader = cast(Callable[[], Reader], point.load())()
                lacking = [name for name in _METHODS if not callable(getattr(reader, name, None))]
                if lacking:
                    raise TypeError(f"{type(reader).__qualname__} lacks {', '.join(lacking)}")
            except Exception as error:
                what = f"this reader ({point.value}) cannot be used: {reason(error)}"
                self.problems.append(FileProblem(file=f"{GROUP}: {point.name}", what=what))
            else:
                self._readers.append(reader)
        self._readers += _own()

    def claim(self, file: FoundFile) -> tuple[Reader, Claim] | tuple[None, None]:
        """Return the reader that knows the file, and its answer."""
        for reader in self._readers:
            try:
                claim = reader.claims(file)
            except Exception as error:
                what = f"reader {reader.name!r} failed when asked about it: {reason(error)}"
                self.problems.append(FileProblem(file=file.name, what=what))
                continue
            if claim is not None:
                return reader, claim
        return None, None


def undeclared(track: Track) -> ValueError:
    """Return the error of a track whose process the recording does not name."""
    return ValueError(f"track {track.name!r} is of process {track.pid}, which is not in Origin.processes")


@contextmanager
def failure_noted(reader: Reader, notes: Notes) -> Iterator[None]:
    """Record an exception that a reader raises in the block as a note, and end the block there."""
    try:
        yield
    except RecordError as error:
        notes.file(str(error))
    except Exception as error:
        notes.file(f"reader {reader.name!r} failed: {reason(error)}; what it gave before is used")


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@lru_cache(1)
def _points(
    entry_points: Callable[..., Iterable[metadata.EntryPoint]], folders: tuple[object, ...]
) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points by name. The search (10 ms) is repeated if one of the `folders` changed."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def _changed(folder: str) -> tuple[str, int | None]:
    """Return a folder of the import path with its time of modification."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, None


def _own() -> Sequence[Reader]:
    from stepscope_report.timeline.readers.nccl_inspector import InspectorReader
    from stepscope_report.timeline.readers.nsys import (
        NsysReader,  # import time: sqlite3, which only a merge needs
    )

    return NsysReader(), InspectorReader()
