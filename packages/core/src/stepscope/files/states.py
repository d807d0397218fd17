"""States of processes for `stepscope why`: what each process is doing at one moment."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.files.clock import Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink

RECENT_NS = 10_000_000_000
"""Time in ns before a state over which its counters are averaged: 10 s."""


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A span that has not ended. A state lists children before their parents."""

    span: Int
    parent: Int | None = None
    """Number of the parent span in the same process, or None."""
    link: SpanLink | None = None
    """The parent span in another process, or None."""
    role: str
    stage: str
    age_ns: Int
    trajectory: str | None = None
    turn: Int | None = None
    thread: Int
    """Native id of the thread that opened the span."""
    waits: bool = False
    """True if the stage of the span only waits."""
    alike: Int = 0
    """Number of similar younger spans (innermost, of the same stage, at the same place) that the state leaves
    out."""


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame of a Python stack."""

    file: str
    line: Int
    function: str


class Thread(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Python thread."""

    id: Int
    """Native id of the thread."""
    name: str
    frames: tuple[Frame, ...]
    """Frames of the stack, innermost first."""
    in_loop: bool = False
    """True if the innermost frame runs an event loop."""
    blocks: bool = False
    """True if the thread's event loop has been in one callback for at least 0.1 s."""
    task: Int | None = None
    """Number of the task that runs in the thread, or None. The innermost frames belong to the task."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One asyncio task that is not done."""

    id: Int
    """Number of the task, unique in the process."""
    name: str
    frames: tuple[Frame, ...]
    """Frames of the task's coroutines, innermost first."""
    awaits: str
    """The object that the innermost coroutine awaits, as text, such as `ObjectRef` of Ray."""
    span: Int | None = None
    """Number of the task's innermost span, or None. A task that was created within a span belongs to this
    span."""
    awaited: tuple[Int, ...] = ()
    """Numbers of the tasks that this task awaits."""


class CounterNow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The mean of one counter over the last `RECENT_NS`. Counters of the kind `total` are left out."""

    name: str
    of: str = ""
    """The measured object: `GPU 3`, `replica 0`. Empty for the process or host itself."""
    value: float


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The requests in one engine, from its counters."""

    name: str
    """`replica 0`."""
    sampled_ns: Int
    """Time in ns since the engine's counters were read."""
    still_ns: Int | None
    """Time in ns in which the engine had requests and generated no token; the true time may be longer. None
    if the engine has no requests."""
    requests: Int
    running: float | None = None
    waiting: float | None = None
    kv_percent: float | None = None


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group of torch.distributed."""

    name: str
    description: str
    ranks: tuple[Int, ...]
    """Global ranks; empty if unknown."""
    entered: Int
    """Number of the last collective that this process entered, or 0 or less before the first."""


class PendingCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that this process has entered and that has not completed."""

    group: str
    description: str
    number: Int | None
    """Number of the collective in its group, or None for a send or receive."""
    op: str
    """`all_reduce`, `recv 3<-0`."""
    state: str
    """`scheduled` or `started`."""
    age_ns: Int


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """The process groups of a process, and its pending collectives, the oldest first."""

    rank: Int
    """Global rank in torch.distributed."""
    groups: tuple[ProcessGroup, ...]
    pending: tuple[PendingCollective, ...]


class CommunicatorRank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank of an NCCL communicator that is behind, dead or silent."""

    rank: Int
    """Rank in the communicator."""
    host: str
    """IP address of the rank's host, or `unknown`."""
    pid: Int
    state: Literal["behind", "dead", "silent"]
    """`behind`: the rank has launched fewer collectives than another rank. `dead`: its process has died.
    `silent`: it does not answer NCCL."""
    op: str = ""
    """Kind of collective in which the rank is behind, such as `AllReduce`; empty if the rank is dead or
    silent."""
    begun: Int | None = None
    """Number of these collectives that the rank has launched, or None if the rank is dead or silent."""
    others: Int | None = None
    """Number of these collectives that the most advanced ranks have launched, or None if the rank is dead or
    silent."""


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """An NCCL communicator whose ranks differ in state, as reported by NCCL's RAS service."""

    hash: str
    size: Int
    ranks: tuple[CommunicatorRank, ...]
    """The ranks that are behind, dead or silent, up to a limit."""
    others: tuple[tuple[str, Int], ...]
    """(IP address, process id) of the ranks that are not behind, dead or silent."""


class RayCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a Ray actor that has not returned."""

    caller: str | None
    """Id of the calling actor, or None if the driver or a task called."""
    actor: str
    """Id of the called actor."""
    method: str
    """Class and name of the called method, such as `Trainer.update`."""
    state: str
    """State of the call as Ray names it: `RUNNING`, `SUBMITTED_TO_WORKER`..."""
    age_ns: Int
    pid: Int | None = None


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one process at one moment."""

    format: Int = 1
    process: ProcessInfo
    run_id: str
    at_ns: Int
    """Time of the state in unix ns."""
    step: Int | None
    """The running step, in the process that runs the training loop; else None."""
    step_age_ns: Int | None = None
    workers: dict[str, str] = {}
    """{`ProcessInfo.key`: name} of the workers whose states this process expects."""
    ancestors: tuple[Int, ...] = ()
    """Process ids of the parent, its parent, and so on."""
    spans: tuple[OpenSpan, ...]
    threads: tuple[Thread, ...]
    tasks: tuple[Task, ...]
    counters: tuple[CounterNow, ...] = ()
    engines: tuple[EngineState, ...] = ()
    """The engines in this process, and engines that this process queries over HTTP."""
    collectives: Collectives | None = None
    communicators: tuple[Communicator, ...] = ()
    """The communicators of the whole job that NCCL's RAS service reports. At most two ranks query the
    service."""
    addresses: tuple[str, ...] = ()
    """IP addresses of the host, by which NCCL's RAS service identifies it."""
    ray_calls: tuple[RayCall, ...] = ()
    """The open calls of all actors of the job, as Ray reports them. Only in the driver's state."""
    more: bool = False
    """True if a second state will follow, with the answers of Ray and NCCL's RAS service."""
