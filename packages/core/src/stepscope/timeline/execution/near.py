"""Executors of several machines, which run a call where its files lie, and what they run to find these."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import PIECE
from stepscope.timeline.execution.workers import idle_cores

_P = TypeVar("_P")
_T = TypeVar("_T")


class NearFiles(Executor):
    """An executor whose workers may see other files than this machine does."""

    elsewhere: Mapping[Path, int]
    """Traces that this machine does not have, with their sizes in bytes."""

    @abstractmethod
    def submit_near(
        self,
        files: Sequence[Path],
        fn: Callable[[_P], _T],
        part: _P,
        then: Callable[[_T], _T] | None = None,
        away: Callable[[_P], _P] | None = None,
    ) -> Future[_T]:
        """Call a function on a machine that has these files.

        Args:
            then: Called here with the result at once, whose result is kept instead.
            away: Called with the part if that machine is not this one, whose result is sent instead.
        """

    @abstractmethod
    def node_with(self, files: Sequence[Path], host: str) -> str | None:
        """Return the name of a machine that has all these files, `host` itself if it does. None: none has."""

    @abstractmethod
    def submit_at(self, node: str, fn: Callable[[_P], _T], part: _P) -> Future[_T]:
        """Call a function on the machine of this name."""

    @abstractmethod
    def kill(self) -> None:
        """End all calls, and let no further one begin."""


def files_elsewhere(executor: Executor | None) -> Mapping[Path, int]:
    """Return the traces that only workers of the executor see, with their sizes."""
    return executor.elsewhere if isinstance(executor, NearFiles) else {}


def size_of(path: str | bytes | os.PathLike[str], executor: Executor | None = None) -> int:
    """Return the size of a file in bytes; 0 if nobody has it."""
    try:
        return os.stat(path).st_size
    except OSError:
        return files_elsewhere(executor).get(Path(os.fsdecode(path)), 0)


class NodeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a step on a node, and how many processes it can run."""

    version: str
    """Of stepscope."""
    idle_cores: int
    files: list[tuple[Path, int]]
    """With their sizes in bytes."""


def own_version() -> str:
    return version("stepscope")


def list_files(step: Path) -> NodeFiles:
    """List the files of a step's folder, `step` being its absolute path."""
    layout = StepLayout(step)
    folders = (layout.spans, layout.counters, layout.traces, layout.processes)
    paths = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return NodeFiles(
        version=own_version(),
        idle_cores=idle_cores(),
        files=[
            (path, path.stat().st_size) for path in paths if path.is_file() and not path.name.startswith(".")
        ],
    )


def read_piece(path: Path, offset: int) -> bytes:
    """Return at most `PIECE` bytes of a file, from `offset` on."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)
