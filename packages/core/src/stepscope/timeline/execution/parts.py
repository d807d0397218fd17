"""Results of independent parts of work, in order, with one more try for a part whose worker died."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from stepscope.timeline.execution.child_processes import ChildProcesses
from stepscope.timeline.execution.near import NearFiles, size_of

_P = TypeVar("_P")
_R = TypeVar("_R")
_DIED = (BrokenExecutor, MemoryError)


class Lost(NamedTuple):
    """A part whose worker died twice."""

    why: str


def results(
    executor: Executor,
    function: Callable[[_P], _R],
    parts: Sequence[_P],
    files: Sequence[Sequence[Path]],
    then: Callable[[_R], _R] | None = None,
    away: Callable[[_P], _P] | None = None,
) -> Generator[_R | Lost, None, None]:
    """Yield the function's result for each part, in their order. Close the iterator if you end early.

    Args:
        files: Of each part. The largest part begins first, so that it does not run alone at the end.
        then: Called here with each result of a `NearFiles`, as soon as it comes.
        away: Called with each part for another machine, whose result is sent instead.
    """
    submit = partial(_submitted, executor, function, then, away)
    sizes = [sum(size_of(path, executor) for path in paths) for paths in files]
    futures = dict[int, Future[_R]]()
    try:
        for at in sorted(range(len(parts)), key=lambda at: -sizes[at]):
            futures[at] = submit(files[at], parts[at])
        for at, part in enumerate(parts):
            outcome = _result(futures.pop(at), partial(submit, files[at], part), partial(function, part))
            yield outcome
    except BaseException:  # Ctrl-C too: the user does not wait for the rest of a large file
        _stop(executor, futures.values())
        raise


def _submitted(
    executor: Executor,
    function: Callable[[_P], _R],
    then: Callable[[_R], _R] | None,
    away: Callable[[_P], _P] | None,
    files: Sequence[Path],
    part: _P,
) -> Future[_R]:
    if isinstance(executor, NearFiles):
        return executor.submit_near(files, function, part, then, away)
    return executor.submit(function, part)


def _result(first: Future[_R], again: Callable[[], Future[_R]], here: Callable[[], _R]) -> _R | Lost:
    try:
        return first.result()
    except _DIED:
        pass
    # Once more in a worker: what killed one, such as too little memory, would end this process as well.
    try:
        second = again()
    except BrokenExecutor:  # a pool of `multiprocessing`, which has no worker any more
        return here()
    try:
        return second.result()
    except _DIED as error:
        return Lost(str(error))


def _stop(executor: Executor, futures: Iterable[Future[_R]]) -> None:
    """Return once none of the calls runs any more."""
    running = [future for future in futures if not future.cancel()]
    if isinstance(executor, (ChildProcesses, NearFiles)):
        executor.kill()
    wait(running)
