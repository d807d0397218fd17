"""Contract of analysers, which make recordings readable after a run: the entry points `stepscope.analysers`.

Some profilers leave raw data that only their vendor's tool can read, on a machine with this tool. An entry
point names a class (or function) that is called without arguments and returns an `Analyser`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast

GROUP = "stepscope.analysers"


class Analyser(Protocol):
    """Analyses one kind of recording, in a separate process."""

    name: str
    """The name in messages."""

    def waiting(self, folder: Path) -> list[Path]:
        """Return the recordings below `folder` that are not analysed yet, in order."""
        ...

    def analyse(self, recording: Path, timeout_s: float) -> str:
        """Analyse one recording and describe the result in words.

        Raises:
            StepscopeError: the analysis failed, or took longer than `timeout_s`. The recording is unchanged.
        """
        ...


def installed() -> list[EntryPoint]:
    """Return the entry points of all installed analysers, by name."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def load(point: EntryPoint) -> Analyser:
    return cast(Callable[[], Analyser], point.load())()
