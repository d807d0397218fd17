"""Contract of a fleet, which sends captures to worker processes. Implemented in `ray_fleet`."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

from stepscope._recording.fanout.fetch import Home
from stepscope._recording.fanout.messages import PrepareRequest, StartRequest, StopRequest
from stepscope.errors import ConfigError
from stepscope.files.clock import ClockOffset
from stepscope.files.manifest.records import State


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOutcome:
    """Outcome of one call to one worker."""

    name: str
    """The name in messages: `actor[3]`, with the actor id."""
    state: State
    """`ok`, or the state that the manifest records for a worker that failed."""
    reason: str | None = None
    late: bool = False
    """True if the failure is that no answer came before the deadline: the worker may be busy or starting."""
    process: str | None = None
    """`ProcessInfo.key` of the worker, or None if it has not answered yet."""
    clock: ClockOffset | None = None
    roles: tuple[str, ...] = ()
    """Result of `prepare`: the roles whose work the worker does."""
    warnings: tuple[str, ...] = ()
    """Result of `prepare`: lines on configured things that no process has."""
    apart: bool = False
    """Result of `start`: True if the worker writes to a folder that this process does not see."""


class Fleet(Protocol):
    """The workers of one capture. One instance per capture."""

    async def prepare(self, request: PrepareRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Pay the profiler's one-off costs on all workers at once; `failed` where it cannot work."""
        ...

    async def start(self, request: StartRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Open the capture on all workers at once. Return one outcome for each; a worker's failure never
        raises.

        If this is cancelled, workers that were asked to start are stopped before the cancellation is raised.
        """
        ...

    async def stop(self, request: StopRequest, deadline_s: float) -> list[WorkerOutcome]:
        """Close the capture at once on all workers that began, or may have begun. Return one outcome for
        each.
        """
        ...

    async def drain(self, timeout_s: float) -> list[WorkerOutcome]:
        """Wait until the workers have written their files. An outcome is `failed`, with the unfinished files,
        at the deadline.
        """
        ...

    async def gather(
        self, capture_id: str, engine_files: dict[str, list[str]], home: Home, left_s: Callable[[], float]
    ) -> list[WorkerOutcome]:
        """Fetch the files of the workers that are apart, until `left_s` returns 0. Return one outcome for
        each.

        Args:
            engine_files: {host: paths in the step's folder} of files that engines wrote there.
        """
        ...

    def release(self, capture_id: str) -> None:
        """Tell the workers, without waiting, that all files of the capture are here, so that they need not
        keep them.
        """
        ...


def not_workers(group: object, role: object) -> ConfigError:
    """Return the error for a value that is not a worker, given as `capture(workers=group)` or {role:
    group}.
    """
    is_empty = group is None or (isinstance(group, Sized) and not len(group))
    item = group[0] if isinstance(group, Sequence) and group else group
    kind = type(item).__qualname__
    fix = "pass the Ray actor handles of the workers; pip install 'stepscope[ray]' if Ray is missing"
    if isinstance(item, type):
        kind, fix = item.__qualname__, f"pass what {item.__name__}.remote(...) returned, not the class"
    elif kind.startswith("ActorClass("):
        fix = f"pass what {kind[11:-1]}.remote(...) returned, not the class"
    elif is_empty:
        fix = "leave it out"
    return ConfigError(
        "capture(workers=)" if role is None else f"capture(workers=)[{role!r}]",
        group if is_empty or isinstance(group, str) else kind if item is group else f"a list of {kind}",
        "a Ray actor handle, a sequence of them in rank order, {number: handle}, or {role: any of these}",
        fix,
    )
