"""Results of independent parts of work, in order, with one more try for a part whose worker died."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from typing import NamedTuple, TypeVar

from stepscope.timeline.execution.child_processes import ChildProcesses

_P = TypeVar("_P")
_R = TypeVar("_R")
_DIED = (BrokenExecutor, MemoryError)


class Lost(NamedTuple):
    """A part whose worker died twice."""

    why: str


def results(
    executor: Executor, function: Callable[[_P], _R], parts: Sequence[_P], sizes: Sequence[int]
) -> Generator[_R | Lost, None, None]:
    """Yield the function's result for each part, in their order. Close the iterator if you end early.

    Args:
        sizes: Of the parts. The largest begins first, so that it does not run alone at the end.
    """
    futures = dict[int, Future[_R]]()
    try:
        for at in sorted(range(len(parts)), key=lambda at: -sizes[at]):
            futures[at] = executor.submit(function, parts[at])
        for at, part in enumerate(parts):
            outcome = _result(futures.pop(at), executor, function, part)
            yield outcome
    except BaseException:  # Ctrl-C too: the user does not wait for the rest of a large file
        _stop(executor, futures.values())
        raise


def _result(first: Future[_R], executor: Executor, function: Callable[[_P], _R], part: _P) -> _R | Lost:
    try:
        return first.result()
    except _DIED:
        pass
    # Once more in a worker: what killed one, such as too little memory, would end this process as well.
    try:
        second = executor.submit(function, part)
    except BrokenExecutor:  # a pool of `multiprocessing`, which has no worker any more
        return function(part)
    try:
        return second.result()
    except _DIED as error:
        return Lost(str(error))


def _stop(executor: Executor, futures: Iterable[Future[_R]]) -> None:
    """Return once none of the calls runs any more."""
    running = [future for future in futures if not future.cancel()]
    if isinstance(executor, ChildProcesses):
        executor.kill()
    wait(running)
