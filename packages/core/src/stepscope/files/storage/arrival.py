"""A file from another host, received piece by piece."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.files.storage.atomic import private
from stepscope.files.storage.temporary import temporary

PIECE = 4 << 20
"""Bytes of one piece, which occupies its sender for some milliseconds."""


class Arrival:
    """One incoming file, under a temporary name until it is complete."""

    def __init__(self, target: Path) -> None:
        """Raise `OSError` if the temporary file cannot be created."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target, self._name = target, temporary(target)
        self._file = open(self._name, "xb", opener=private)  # noqa: SIM115  # until its end
        self.bytes = 0

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self.bytes += len(piece)

    def finish(self) -> None:
        self._file.close()
        os.replace(self._name, self._target)

    def give_up(self) -> None:
        self._file.close()
        self._name.unlink(missing_ok=True)
