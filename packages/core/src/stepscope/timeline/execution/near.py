"""Executors of several machines, which run a call where its files lie."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

_P = TypeVar("_P")
_T = TypeVar("_T")
_NOTHING: Mapping[Path, int] = MappingProxyType({})


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
    return executor.elsewhere if isinstance(executor, NearFiles) else _NOTHING


def size_of(path: str | bytes | os.PathLike[str], executor: Executor | None = None) -> int:
    """Return the size of a file in bytes; 0 if nobody has it."""
    try:
        return os.stat(path).st_size
    except OSError:
        return files_elsewhere(executor).get(Path(os.fsdecode(path)), 0)
