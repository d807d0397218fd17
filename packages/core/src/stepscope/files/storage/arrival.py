"""A file that comes from another host, piece by piece."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.files.storage.atomic import private
from stepscope.files.storage.temporary import temporary

PIECE = 4 << 20
"""Bytes of one piece: who sends it is held for some milliseconds."""


class Arrival:
    """One file on its way into its place, under a name of its own until it is whole."""

    def __init__(self, target: Path) -> None:
        """Raises `OSError`: there is no room, or no such place."""
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
