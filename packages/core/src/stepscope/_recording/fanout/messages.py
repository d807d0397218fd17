"""Requests to the workers of a capture, their answers, and the outcomes of the calls."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stepscope.config import ProfileConfig
from stepscope.files.clock import ClockOffset
from stepscope.files.manifest.records import Ending, State
from stepscope.files.sidecar import ProcessInfo


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a worker. It is the same for all workers, except the fields that identify the worker."""

    run_id: str
    config: ProfileConfig
    role: str | None = None
    """The role, or None to use the role of the decorated methods of the worker's class, else `worker`."""
    position: int | None = None
    """Index among the given workers, which is the rank if nothing better is known; None if unknown."""
    world_size: int | None = None
    replica: int | None = None
    """Number of the inference replica that the worker belongs to, or None."""


class StartRequest(WorkerRequest, frozen=True, kw_only=True):
    """Opens a capture in a worker."""

    capture_id: str
    step: int
    spans_only: str | None = None
    """Reason why no profiler starts there, or None to let the configuration decide."""
    owner_part: str | None = None
    """File name of the owner's part of the manifest. A worker that does not see this file shares no folder
    with the owner."""


class StartAnswer(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessInfo
    refused: str | None = None
    """Reason why no session was opened, or None if one was."""
    off: bool = False
    """True if the refusal is intended, because stepscope is off in this process."""
    apart: bool = False
    """True if this process writes to a folder that the owner does not see."""


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    capture_id: str
    ending: Ending | None = None
    """Reason why the capture ended early on the owner's side, or None."""
    discard: str | None = None
    """Reason to discard the recording (the worker started too late), or None to keep it."""


class PrepareRequest(WorkerRequest, frozen=True, kw_only=True):
    """A request to get a worker ready for later captures."""

    record_only: bool = False
    """True to start only the flight recorder, without trying a profiler."""


class PrepareAnswer(msgspec.Struct, frozen=True, kw_only=True):
    roles: tuple[str, ...]
    """All roles whose work the worker does, its own role first."""
    problem: str | None = None
    """Reason why the worker's profiler cannot work, or None."""
    warnings: tuple[str, ...] = ()
    """A line for each configured thing that no process has."""
    recorder: ProcessInfo | None = None
    """The worker's identity, if its flight recorder records; else None."""


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
    died: bool = False
    """True if Ray knows that the worker died."""
    clock: ClockOffset | None = None
    roles: tuple[str, ...] = ()
    """Result of `prepare`: the roles whose work the worker does."""
    warnings: tuple[str, ...] = ()
    """Result of `prepare`: lines on configured things that no process has."""
    apart: bool = False
    """Result of `start`: True if the worker writes to a folder that this process does not see."""
