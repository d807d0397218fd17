"""Files of records, a JSON object in each line, as killed processes and full disks leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.files.storage.reading import lines_of, open_file

R = TypeVar("R")


class RecordFile(msgspec.Struct):
    """Usable content of one file."""

    path: Path
    problems: dict[str, int | None] = {}
    """Unusable parts, with the number of lines (None: the file)."""

    def note(self, problem: str, lines: int | None = 1) -> None:
        """Count lines that have a problem."""
        before = self.problems.get(problem)
        self.problems[problem] = lines if before is None or lines is None else before + lines

    def records(self, decode: Callable[[bytes], R], on_read: Callable[[int], None] | None) -> Iterator[R]:
        """Yield the records, and note the lines that hold none. Damage or absence raises no exception.

        Args:
            on_read: Called with the number of bytes of each read.
        """
        try:
            with open_file(self.path) as stream:
                for line, whole in lines_of(stream):
                    if on_read is not None:
                        on_read(len(line))
                    try:
                        record = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        cut = "last line cut off: its writer was killed, or the disk full"
                        self.note("lines that are no record" if whole else cut)
                    else:
                        yield record
        except OSError as error:
            self.note(f"cannot be read: {error.strerror or error}", lines=None)
