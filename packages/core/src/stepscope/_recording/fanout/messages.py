"""Requests to the workers of a capture, and their answers."""

from __future__ import annotations

import msgspec

from stepscope.config import ProfileConfig
from stepscope.files.manifest.records import Ending
from stepscope.files.sidecar import ProcessInfo


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a worker for something. The same for all workers, but for what says which of them it is."""

    run_id: str
    config: ProfileConfig
    role: str | None = None
    """The role; None to find it by the decorated methods of the worker's class, or else use `worker`."""
    position: int | None = None
    """Index among the workers given: the rank, where nothing better says."""
    world_size: int | None = None
    replica: int | None = None
    """Number of the inference replica that the worker belongs to, if any."""


class StartRequest(WorkerRequest, frozen=True, kw_only=True):
    """Opens a capture in a worker."""

    capture_id: str
    step: int
    spans_only: str | None = None
    """Reason why no profiler of ours starts there, or None to let the configuration decide."""
    owner_part: str | None = None
    """The file name of the owner's part of the manifest: who does not see it shares no folder with it."""


class StartAnswer(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessInfo
    refused: str | None = None
    """Reason why no session was opened; None when one was."""
    off: bool = False
    """The refusal is on purpose: stepscope is off in this process."""
    apart: bool = False
    """True if this process writes to a folder that the owner does not see."""


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    capture_id: str
    ending: Ending | None = None
    """Reason why the capture ended early on the owner's side."""
    discard: str | None = None
    """Reason to discard the recording (the worker started too late); None to keep it."""


class PrepareRequest(WorkerRequest, frozen=True, kw_only=True):
    """Makes a worker ready for captures to come."""

    record_only: bool = False
    """Start the flight recorder alone: no profiler is tried."""


class PrepareAnswer(msgspec.Struct, frozen=True, kw_only=True):
    roles: tuple[str, ...]
    """All roles that the worker does the work of, its own first."""
    problem: str | None = None
    """Reason why its profiler cannot work."""
    warnings: tuple[str, ...] = ()
    """A line for each thing that the configuration asks for and nobody has."""
    recorder: ProcessInfo | None = None
    """The process, if its flight recorder records."""
