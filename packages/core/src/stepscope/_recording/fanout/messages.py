"""Requests to the workers of a capture, their answers, and the outcomes of calls."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stepscope.config import ProfileConfig
from stepscope.files.clock import ClockOffset
from stepscope.files.manifest import Ending, State
from stepscope.files.sidecar import ProcessInfo


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests to workers. Requests differ between workers only in fields that identify the
    worker.
    """

    run_id: str
    config: ProfileConfig
    role: str | None = None
    """Role of the worker. If None, the role of the decorated methods of its class, else `worker`."""
    position: int | None = None
    """Index in the given sequence of workers, which is the rank if no other source states it; None if
    unknown."""
    world_size: int | None = None
    replica: int | None = None
    """Number of the worker's inference replica, or None."""


class StartRequest(WorkerRequest, frozen=True, kw_only=True):
    """A request to open a capture in a worker."""

    capture_id: str
    step: int
    spans_only: str | None = None
    """Reason why no profiler may start, or None if the configuration decides."""
    owner_part: str | None = None
    """File name of the owner's part of the manifest. A worker that does not find this file does not share
    the folder."""


class StartAnswer(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessInfo
    refused: str | None = None
    """Reason why no session was opened, or None if a session was opened."""
    off: bool = False
    """True if no session was opened because stepscope is off in the worker."""
    apart: bool = False
    """True if the worker writes to a folder that the owner cannot read."""


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    capture_id: str
    ending: Ending | None = None
    """Reason why the capture ended early, or None."""
    discard: str | None = None
    """Reason to discard the recording (the worker started too late), or None to keep it."""


class PrepareRequest(WorkerRequest, frozen=True, kw_only=True):
    """A request to prepare a worker for captures."""

    record_only: bool = False
    """True to start only the flight recorder, without a start of the profiler."""


class PrepareAnswer(msgspec.Struct, frozen=True, kw_only=True):
    roles: tuple[str, ...]
    """All roles of the worker's functions, its own role first."""
    problem: str | None = None
    """Reason why the worker's profiler cannot work, or None."""
    warnings: tuple[str, ...] = ()
    """A line for each setting that selects nothing."""
    recorder: ProcessInfo | None = None
    """Identity of the worker if its flight recorder is on; else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOutcome:
    """Outcome of one call of one worker."""

    name: str
    """Name of the worker in messages: `actor[3]`, with the actor's class and id."""
    state: State
    """`ok`, or the state of the worker in the manifest."""
    reason: str | None = None
    late: bool = False
    """True if the worker did not answer before the deadline. The worker may be busy or starting."""
    process: str | None = None
    """`ProcessInfo.key` of the worker, or None if unknown."""
    died: bool = False
    """True if Ray reports that the worker died."""
    clock: ClockOffset | None = None
    roles: tuple[str, ...] = ()
    """Result of `prepare`: the roles of the worker's functions."""
    warnings: tuple[str, ...] = ()
    """Result of `prepare`: a line for each setting that selects nothing."""
    apart: bool = False
    """Result of `start`: True if the worker writes to a folder that the owner cannot read."""
