"""States of processes: the calls that each is in at one moment, for `stepscope why`."""

from __future__ import annotations

import msgspec

from stepscope.files.clock import Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink

RECENT_NS = 10_000_000_000
"""Time whose mean a counter has in a state."""


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A span that has not ended. Innermost ones come before those that they are in."""

    span: Int
    parent: Int | None = None
    """The span above it in the same process."""
    link: SpanLink | None = None
    """The span above it in another process."""
    role: str
    stage: str
    age_ns: Int
    trajectory: str | None = None
    turn: Int | None = None
    thread: Int
    """Native id of the thread that opened it."""
    waits: bool = False
    """True if its stage only waits."""
    alike: Int = 0
    """Younger innermost spans of the same stage at the same place that the state leaves out."""


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
    """The innermost first."""
    in_loop: bool = False
    """True if its innermost frame runs an event loop, which does something else or waits."""
    blocks: bool = False
    """True if the event loop that it runs has been in one callback for 0.1 s."""
    task: Int | None = None
    """The task that it runs, in which its innermost frames are."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One asyncio task that is not done."""

    id: Int
    """Its number in the process."""
    name: str
    frames: tuple[Frame, ...]
    """The frames of its coroutines, the innermost first."""
    awaits: str
    """The object that the innermost coroutine awaits, as text: `ObjectRef` of Ray."""
    span: Int | None = None
    """The innermost span of the task. A task that began inside of a span is in it too."""
    awaited: tuple[Int, ...] = ()
    """The tasks that it waits for."""


class CounterNow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One counter that is no total: its mean over the last seconds."""

    name: str
    of: str = ""
    """`GPU 3`, `replica 0`; empty for the process or host itself."""
    value: float


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of one engine, by its counters."""

    name: str
    """`replica 0`."""
    sampled_ns: Int
    """Time since it last said its counters."""
    still_ns: Int | None
    """Time in which it has had requests and made no token, at least, or None if it has none."""
    requests: Int
    running: float | None = None
    waiting: float | None = None
    kv_percent: float | None = None


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group of torch.distributed."""

    name: str
    ranks: tuple[Int, ...]
    """Global ranks; empty if unknown."""
    entered: Int
    """Number of the last collective that this process entered; -1 before the first."""
    completed: Int


class PendingCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that this process entered and that has not completed."""

    group: str
    description: str
    number: Int | None
    """Among the collectives of its group. None for a send or receive."""
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


class RayCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a Ray actor that has not returned."""

    caller: str | None
    """Id of the actor that called, or None for the driver or a plain task."""
    actor: str
    """Id of the actor that is called."""
    method: str
    """`Trainer.update`."""
    state: str
    """Ray's word: `RUNNING`, `SUBMITTED_TO_WORKER`..."""
    age_ns: Int
    pid: Int | None = None


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment."""

    format: Int = 1
    process: ProcessInfo
    run_id: str
    at_ns: Int
    """Unix ns."""
    step: Int | None
    """The step that runs, in the process that bounds steps."""
    step_age_ns: Int | None = None
    workers: dict[str, str] = {}
    """{`ProcessInfo.key`: name} of the workers that this process expects to answer."""
    ancestors: tuple[Int, ...] = ()
    """Ids of the processes that started it, the nearest first."""
    spans: tuple[OpenSpan, ...]
    threads: tuple[Thread, ...]
    tasks: tuple[Task, ...]
    counters: tuple[CounterNow, ...] = ()
    engines: tuple[EngineState, ...] = ()
    """The engines that this process holds or asks over HTTP."""
    collectives: Collectives | None = None
    ray_calls: tuple[RayCall, ...] = ()
    """The calls of all actors of the job, as the driver knows them from Ray."""
    more: bool = False
    """A second state follows, with what Ray says."""
