"""Choice of the processes that read a step's traces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from stepscope.timeline.execution.child_processes import ChildProcesses

SMALL = 4 << 20
"""Total size of files on disk below which a child costs more time than it saves: it starts in 0.1 s."""
_MOST = 8


@contextmanager
def workers(jobs: int | None, size: int) -> Iterator[Executor | None]:
    """Yield an executor of `jobs` processes, and end them with the block. None: this process works alone.

    Args:
        jobs: None: one for each idle core, if the files are large enough.
        size: Of the files, in bytes.
    """
    count = jobs if jobs is not None else idle_cores() if size >= SMALL else 1
    if count < 2:
        yield None
        return
    executor = ChildProcesses(count)
    try:
        yield executor
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


def idle_cores() -> int:
    """Return the number of cores that were idle in the last minute and may be used: 1 to 8."""
    usable = len(os.sched_getaffinity(0))
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    return max(1, min(usable, round(idle), _MOST))
