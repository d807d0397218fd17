"""Pools of processes that read a step's traces: child processes, or workers on machines with the files."""

from __future__ import annotations

import os
import signal
import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

_P = TypeVar("_P")
_R = TypeVar("_R")

SMALL = 16 << 20
"""Total size of files on disk, in bytes, below which child processes cost more time than they save."""
_MOST = 8


class Lost(NamedTuple):
    """The result for a part that no process could read, because the machine with the part's files is gone."""

    why: str


class NodeLostError(BrokenExecutor):
    """Raised if no machine that has the files of a call answers."""


class NearFiles(Executor):
    """An executor whose workers may see other files than this machine does."""

    elsewhere: Mapping[Path, int]
    """Absolute paths of traces that this machine does not have, with their sizes in bytes."""

    @abstractmethod
    def submit_near(self, files: Sequence[Path], fn: Callable[[_P], _R], part: _P) -> Future[_R]:
        """Call a function on a machine that has these files.

        The future raises `NodeLostError` if no machine has them, or if the machine died.
        """

    @abstractmethod
    def kill(self) -> None:
        """End all calls."""


def files_elsewhere(executor: Executor | None) -> Mapping[Path, int]:
    """Return {path: size in bytes} of the traces that only workers of the executor can read."""
    return executor.elsewhere if isinstance(executor, NearFiles) else {}


def size_of(path: Path, executor: Executor | None = None) -> int:
    """Return the size of a file in bytes; 0 if no machine has it."""
    try:
        return path.stat().st_size
    except OSError:
        return files_elsewhere(executor).get(path, 0)


@contextmanager
def workers(jobs: int | None, size: int) -> Iterator[Executor | None]:
    """Yield a pool of `jobs` child processes, which end with the block, or None if this process does the
    work.

    The children import the program's main module, as `multiprocessing` does. Use this only in commands.

    Args:
        jobs: None means one for each idle core, or this process alone if the files are small.
        size: Total size of the files, in bytes.
    """
    count = jobs if jobs is not None else idle_cores() if size >= SMALL else 1
    if count < 2 or not sys.executable or hasattr(sys, "frozen"):
        yield None
        return
    before = set(active_children())
    executor = ProcessPoolExecutor(count, get_context("spawn"), initializer=_begin)
    try:
        yield executor
    except BaseException:  # Ctrl-C too: the user does not wait until a large file is read
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - before:
            child.kill()
        raise
    finally:
        executor.shutdown()


def _begin() -> None:
    """Prepare a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
    os.dup2(2, 1)  # output of a reader must not mix with the command's JSON


def idle_cores() -> int:
    """Return the number of usable cores that were idle in the last minute, between 1 and 8."""
    usable = len(os.sched_getaffinity(0))
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    return max(1, min(usable, round(idle), _MOST))


def results(
    executor: Executor, function: Callable[[_P], _R], parts: Sequence[_P], files: Sequence[Sequence[Path]]
) -> Generator[_R | Lost, None, None]:
    """Yield the function's result for each part, in the order of the parts.

    If a child process dies, this process handles the remaining parts. Close the generator if you stop early.

    Args:
        files: The files of each part. The largest part begins first, so that no other process waits for it
            at the end.
    """
    sizes = [sum(size_of(path, executor) for path in paths) for paths in files]
    futures = dict[int, Future[_R] | None]()
    try:
        for at in sorted(range(len(parts)), key=lambda at: -sizes[at]):
            futures[at] = _submitted(executor, function, parts[at], files[at])
        for at, part in enumerate(parts):
            result = _result(futures.pop(at), partial(function, part))
            yield result
    except BaseException:
        for future in futures.values():
            if future is not None:
                future.cancel()
        if isinstance(executor, NearFiles):
            executor.kill()
        raise


def _submitted(
    executor: Executor, function: Callable[[_P], _R], part: _P, files: Sequence[Path]
) -> Future[_R] | None:
    if isinstance(executor, NearFiles):
        return executor.submit_near(files, function, part)
    try:
        return executor.submit(function, part)
    except (BrokenExecutor, OSError):  # a child died meanwhile, or no process can be started
        return None


def _result(future: Future[_R] | None, here: Callable[[], _R]) -> _R | Lost:
    try:
        if future is not None:
            return future.result()
    except NodeLostError as error:
        return Lost(str(error))
    except (BrokenExecutor, MemoryError):  # try again here, where no other part is in memory
        pass
    return here()
