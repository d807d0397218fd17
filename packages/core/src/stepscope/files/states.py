"""States of processes for `stepscope why`: the calls that go on in each process at one moment."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.files.clock import Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink

RECENT_NS = 10_000_000_000
"""Length in ns of the time over which a state's counters are averaged."""


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A span that has not ended. In a state, children come before their parents."""

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
    """Number of younger innermost spans of the same stage at the same place that the state leaves out."""


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame of a Python stack."""

    file: str
    line: Int
    function: str


class Thread(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Python thread."""

    id: Int
    """Native id."""
    name: str
    frames: tuple[Frame, ...]
    """Frames of the stack, the innermost first."""
    in_loop: bool = False
    """True if the innermost frame runs an event loop."""
    blocks: bool = False
    """True if the thread's event loop has been in one callback for 0.1 s."""
    task: Int | None = None
    """Number of the task that runs in the thread, which has the innermost frames; None if no task runs."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One asyncio task that is not done."""

    id: Int
    """Number of the task in the process."""
    name: str
    frames: tuple[Frame, ...]
    """The frames of its coroutines, the innermost first."""
    awaits: str
    """The object that the innermost coroutine awaits, as text: `ObjectRef` of Ray."""
    span: Int | None = None
    """Number of the innermost span of the task, or None. A task that began inside of a span belongs to that
    span."""
    awaited: tuple[Int, ...] = ()
    """Numbers of the tasks that the task waits for."""


class CounterNow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One counter that is no total: its mean over the last seconds."""

    name: str
    of: str = ""
    """`GPU 3`, `replica 0`; empty for the process or host itself."""
    value: float


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of one engine, from its counters."""

    name: str
    """`replica 0`."""
    sampled_ns: Int
    """Time in ns since the engine's counters were last read."""
    still_ns: Int | None
    """Least time in ns for which the engine has had requests and made no token, or None if it has no
    requests."""
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
    """Number of the last collective that this process entered; at most 0 before the first."""


class PendingCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that this process entered and that has not completed."""

    group: str
    description: str
    number: Int | None
    """Number among the collectives of its group, or None for a send or receive."""
    op: str
    """`all_reduce`, `recv 3<-0`."""
    state: str
    """`scheduled` or `started`."""
    age_ns: Int


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """Process groups of a process, and its open collectives, the oldest first."""

    rank: Int
    """Global rank in torch.distributed."""
    groups: tuple[ProcessGroup, ...]
    pending: tuple[PendingCollective, ...]


class CommunicatorRank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank of a communicator of NCCL that differs from the others."""

    rank: Int
    """Rank in the communicator."""
    host: str
    """IP address of the rank's host, or `unknown`."""
    pid: Int
    state: Literal["behind", "dead", "silent"]
    """`behind`: it has launched fewer collectives. `silent`: it does not answer NCCL."""
    op: str = ""
    """Kind of the collective in which the rank is behind, such as `AllReduce`."""
    begun: Int | None = None
    """Number of these collectives that it has launched, or None if it does not answer."""
    others: Int | None = None
    """Number of these collectives that most of the others have launched."""


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """A communicator of NCCL, some of whose ranks differ, from NCCL's RAS."""

    hash: str
    size: Int
    ranks: tuple[CommunicatorRank, ...]
    """The ranks whose state differs from most of the communicator's ranks."""
    others: tuple[tuple[str, Int], ...]
    """(IP address, process id) of the ranks that do not differ."""


class RayCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a Ray actor that has not returned."""

    caller: str | None
    """Id of the actor that called, or None for the driver or a plain task."""
    actor: str
    """Id of the actor that is called."""
    method: str
    """Name of the called method with its class, such as `Trainer.update`."""
    state: str
    """State of the call, in Ray's word: `RUNNING`, `SUBMITTED_TO_WORKER`..."""
    age_ns: Int
    pid: Int | None = None


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment."""

    format: Int = 1
    process: ProcessInfo
    run_id: str
    at_ns: Int
    """Time of the state in unix ns."""
    step: Int | None
    """The step that runs, in the process that bounds steps; else None."""
    step_age_ns: Int | None = None
    workers: dict[str, str] = {}
    """{`ProcessInfo.key`: name} of the workers that this process expects to answer."""
    ancestors: tuple[Int, ...] = ()
    """Ids of the parent processes, the nearest first."""
    spans: tuple[OpenSpan, ...]
    threads: tuple[Thread, ...]
    tasks: tuple[Task, ...]
    counters: tuple[CounterNow, ...] = ()
    engines: tuple[EngineState, ...] = ()
    """The engines that this process holds or queries over HTTP."""
    collectives: Collectives | None = None
    communicators: tuple[Communicator, ...] = ()
    """The communicators of the whole job that NCCL's RAS tells of, in the states of two ranks at most."""
    addresses: tuple[str, ...] = ()
    """IP addresses of the host, by which NCCL's RAS names it."""
    ray_calls: tuple[RayCall, ...] = ()
    """The calls of all actors of the job, from Ray, in the driver's state."""
    more: bool = False
    """True if a second state follows, with the answers of Ray and of NCCL's RAS."""
