"""The state of this process for `stepscope why`: open spans, stacks of threads, and coroutines of tasks.

The thread that polls for orders makes the state while the user's threads continue. If many calls are at the
same place, the state contains only some of them, because 20,000 trajectories may be in flight.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.process import fork
from stepscope._recording.process.shutdown import on_sigterm
from stepscope._recording.recorder import nccl_ras
from stepscope._recording.recorder.collectives import collectives_here
from stepscope._recording.recorder.engine_queues import engine_states
from stepscope._recording.spans import collective_calls, lines, scopes, tasks
from stepscope._recording.spans.span import Span
from stepscope._recording.spans.tasks import DEPTH, frame_of
from stepscope.errors import ours
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SEQUENCE, only_waits
from stepscope.files.states import RECENT_NS, Communicator, CounterNow, OpenSpan, ProcessState, Task, Thread
from stepscope.files.values import bounded

T = TypeVar("T")


def in_time(name: str, ask: Callable[[], T], seconds: float) -> T | None:
    """Call `ask` on a separate thread. Return the result, or None if `ask` raises or takes longer
    than `seconds`.

    Args:
        name: Noun phrase for the log. An exception is logged at level DEBUG.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except ours() as error:
            logging.getLogger("stepscope").debug("stepscope: %s: %s", name, error)

    try:
        thread = threading.Thread(target=run, name="stepscope-why", daemon=True)
        thread.start()
    except ours(RuntimeError):  # no more threads
        return None
    thread.join(seconds)
    return answers[0] if answers else None


def communicators_in_time() -> tuple[Communicator, ...]:
    """Return the communicators that NCCL's RAS service reports; empty if it does not answer in time."""
    return in_time("asking NCCL's RAS", nccl_ras.communicators, nccl_ras.ANSWER_S) or ()


MOST = 1000
"""Largest number of innermost spans in a state, and of the tasks in `_Calls._rest`."""
ALIKE = 50
"""Largest number of calls at one place in a state. The oldest calls are kept."""
_BLOCKED_S = 0.1
"""An event loop counts as blocked if one callback takes longer than this."""
_ASK_S = 0.5
"""Longest wait for a library that may block."""
_BITE_S = 0.004
"""Time of work between two pauses. Without pauses, Python lets a thread keep the interpreter for 5 ms."""
_REST_S = 0.0005
"""Length of a pause, in which another thread may take the interpreter and keep it until that thread waits."""
_BATCH = 20
"""Number of items between two readings of the clock."""
_RUNNERS = (("run_forever", "base_events.py"), ("run", "runners.py"))
"""(name, file) of asyncio's methods whose `self` is a running loop, or has the attribute `_loop`."""
_RUNS_LOOP = frozenset({"run_until_complete", "run_forever"})
"""Methods of an event loop. They have no Python frame if the loop is written in C, as uvloop is."""

Group: TypeAlias = "tuple[str, str | None, tuple[int, int] | None]"
"""(stage, role, place) of calls that count as alike. The place is (id of the code object, line). The id is
used because it is faster to hash than the code object."""


def state_of(
    process: ProcessInfo,
    run_id: str,
    open_spans: Sequence[Span],
    *,
    step: int | None,
    step_age_ns: int | None,
    workers: dict[str, str],
    sampler: Sampler | None = None,
) -> ProcessState:
    """Return the state of this process now.

    Args:
        open_spans: The open spans of all logs.
        step: Number of the running step, or None.
        step_age_ns: Time since the step began, or None.
        workers: {`ProcessInfo.key`: name} of the workers whose flight recorder is on.
        sampler: The sampler of this process' counters, or None.
    """
    began, callbacks = time.monotonic(), _callbacks()
    now_ns = time.monotonic_ns()
    spans, found = _Calls(open_spans).read(now_ns)
    open_ = [span for span in open_spans if span.end_ns is None and span.attrs and SEQUENCE in span.attrs]
    if callbacks:
        time.sleep(max(0.0, began + _BLOCKED_S - time.monotonic()))
    return ProcessState(
        process=process,
        run_id=run_id,
        at_ns=time.time_ns(),
        step=step,
        step_age_ns=step_age_ns,
        workers=workers,
        ancestors=tuple(_ancestors()),
        spans=spans,
        threads=tuple(_threads(callbacks)),
        tasks=found,
        counters=() if sampler is None else tuple(_counters(sampler, now_ns)),
        engines=tuple(engine_states(sampler, now_ns)),
        collectives=in_time("reading torch's flight recorder", partial(collectives_here, open_), _ASK_S),
        addresses=nccl_ras.addresses(),
    )


class _Calls:
    """Selection of open spans and tasks of this process for its state."""

    def __init__(self, open_spans: Sequence[Span]) -> None:
        spans = [span for span in open_spans if span.attrs is None or not _is_collective_of_a_call(span)]
        self._spans = sorted(spans, key=attrgetter("start_ns"))
        self._kept: dict[int, Span] = {}
        """{number of a selected span: the span}."""
        self._task_of: dict[int, Any] = {}
        """{number of a span: the first task in it}."""
        self._groups: dict[int, Group] = {}
        """{number of a span with a task: its group}."""
        self._rest: list[Any] = []
        """Tasks without a span, and the second and later tasks of a span. Their number is limited."""
        self._pause_at = time.monotonic() + _BITE_S

    def read(self, now_ns: int) -> tuple[tuple[OpenSpan, ...], tuple[Task, ...]]:
        """Return records of the selected spans and tasks."""
        self._read_tasks()
        leaves, left_out = self._leaves()
        self._keep_with_those_above(leaves)
        kept = tuple(self._kept.values())
        spans = tuple(self._open_span(span, now_ns, left_out.get(span.id, 0)) for span in self._paced(kept))
        own = [self._task_of[number] for number in self._kept if number in self._task_of]
        found = [tasks.task_of(task, self._kept) for task in self._paced([*own, *self._rest])]
        known = {task.id for task in found}
        return spans, tuple(_without_unknown(task, known) for task in found)

    def _paced(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items. Sleep after each stretch of work, so that other threads get the interpreter."""
        for first in range(0, len(items), _BATCH):
            if time.monotonic() > self._pause_at:
                time.sleep(_REST_S)
                self._pause_at = time.monotonic() + _BITE_S
            yield from items[first : first + _BATCH]

    def _read_tasks(self) -> None:
        """Assign all tasks to their spans.

        The objects that are made for a task are not tracked by the garbage collector. Many tracked objects
        would cause a collection, which scans all of the user's objects and holds the GIL.
        """
        beside: Counter[Group] = Counter()
        known: dict[Group, Group] = {}
        for task in self._paced(tasks.all_tasks(_loops())):
            if task.done():
                continue
            span, innermost = tasks.span_of(task), tasks.place_of(task)
            place = None if innermost is None else (id(innermost[0]), innermost[1])
            group = ("", None, place) if span is None else (span.stage, span.role, place)
            group = known.setdefault(group, group)
            if span is not None and span.id not in self._task_of:
                self._task_of[span.id] = task
                self._groups[span.id] = group
            elif beside[group] < ALIKE and len(self._rest) < MOST:
                beside[group] += 1
                self._rest.append(task)

    def _leaves(self) -> tuple[list[Span], dict[int, int]]:
        """Return (innermost open spans, counts). At most `ALIKE` spans of each group and `MOST` in total are
        returned. The counts are {number of the group's first span: count of spans that are left out}.
        """
        above, open_ = set[int | None](), list[Span]()
        for span in self._paced(self._spans):
            if span.end_ns is None:
                open_.append(span)
                above.add(_number(_parent_of(span)))
        counts: Counter[Group] = Counter()
        first: dict[Group, Span] = {}
        ranked: list[tuple[int, Span]] = []
        for span in self._paced(open_):
            if span.id in above:
                continue
            group = self._groups.get(span.id) or (span.stage, span.role, None)
            if counts[group] < ALIKE:
                ranked.append((counts[group], span))
                first.setdefault(group, span)
            counts[group] += 1
        # The oldest span of each place comes first, then the second oldest of each place.
        ranked.sort(key=lambda item: item[0])
        kept = [span for _, span in ranked[:MOST]]
        shown = Counter(self._groups.get(span.id) or (span.stage, span.role, None) for span in kept)
        return kept, {span.id: counts[group] - shown[group] for group, span in first.items()}

    def _keep_with_those_above(self, leaves: Sequence[Span]) -> None:
        """Select `leaves` and all open spans above them."""
        for leaf in leaves:
            span: Span | None = leaf
            while span is not None and span.id not in self._kept:
                self._kept[span.id] = span
                span = _parent_of(span)

    def _open_span(self, span: Span, now_ns: int, alike: int) -> OpenSpan:
        role, _, _, trajectory, turn = scopes.inherited(span)
        _, link, _ = lines.parent_of(span, span.log)
        return OpenSpan(
            span=span.id,
            parent=_number(_parent_of(span)),
            link=link,
            role=bounded(str(role or span.log.process.role)),
            stage=bounded(str(span.stage)),
            age_ns=max(0, now_ns - span.start_ns),
            trajectory=trajectory,
            turn=turn,
            thread=span.thread,
            waits=only_waits(str(span.stage), span.attrs),
            alike=alike,
        )


def _is_collective_of_a_call(span: Span) -> bool:
    """Return whether a span is a collective within another span. The stack of the outer call already shows
    the collective.
    """
    return span.attrs is not None and SEQUENCE in span.attrs and _parent_of(span) is not None


def _parent_of(span: Span) -> Span | None:
    """Return the nearest open span above `span` in the same log, or None."""
    scope: Any = span.parent  # Any and no `cast`, which would be a function call for each of 60,000 spans
    while scope is not None and (scope.log is not span.log or scope.end_ns is not None):
        scope = scope.parent
    return cast("Span | None", scope)


def _number(span: Span | None) -> int | None:
    return None if span is None else span.id


def _without_unknown(task: Task, known: set[int]) -> Task:
    if known.issuperset(task.awaited):
        return task
    return msgspec.structs.replace(task, awaited=tuple(number for number in task.awaited if number in known))


def _counters(sampler: Sampler, now_ns: int) -> Iterator[CounterNow]:
    for series, mean in sampler.means(now_ns - RECENT_NS, now_ns).items():
        yield CounterNow(name=series.name, of=series.of, value=mean)


def _ancestors() -> Iterator[int]:
    """Yield the process ids of the parent, its parent, and so on."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except ours(OSError, ValueError, IndexError):  # the process has ended, or the system is not Linux
            return


def _threads(before: dict[int, tuple[FrameType, int]]) -> Iterator[Thread]:
    """Yield the threads of this process, without stepscope's threads.

    Args:
        before: Result of `_callbacks` from `_BLOCKED_S` ago. A loop that still runs the same callback counts
            as blocked.
    """
    stacks, now = sys._current_frames(), _callbacks()
    running = _running() if now else {}
    for thread in threading.enumerate():
        ident = thread.ident or 0
        stack = _interrupted(stacks.get(ident))
        if stack is None or thread.name.startswith("stepscope-"):
            continue
        callback = now.get(ident)
        is_blocked = callback is not None and before.get(ident) == callback
        inside = {id(frame) for frame in _outwards(stack)}
        yield Thread(
            id=fork.native_id_of(thread),
            name=bounded(thread.name),
            frames=tuple(frame_of(frame) for frame, _ in zip(_users(stack), range(DEPTH), strict=False)),
            in_loop=not _RUNS_LOOP.isdisjoint(stack.f_code.co_names),
            blocks=is_blocked,
            task=next((task for task, frame in running.items() if frame in inside), None),
        )


def _interrupted(stack: FrameType | None) -> FrameType | None:
    """If stepscope's SIGTERM handler is on the stack, return the interrupted stack; else return `stack`."""
    handler = next((frame for frame in _outwards(stack) if frame.f_code is on_sigterm.__code__), None)
    return stack if handler is None else handler.f_back


def _outwards(stack: FrameType | None) -> Iterator[FrameType]:
    while stack is not None:
        yield stack
        stack = stack.f_back


def _users(stack: FrameType | None) -> Iterator[FrameType]:
    """Return the frames of a stack, innermost first, without frames of stepscope's wrappers of
    collectives.
    """
    return (frame for frame in _outwards(stack) if frame.f_code.co_filename != collective_calls.__file__)


def _callbacks() -> dict[int, tuple[FrameType, int]]:
    """Return {id of a thread: (frame of the callback that its event loop is running, position in the frame)}.

    asyncio's loop has a new frame for each callback (position 0). A loop in C has no such frames, so the
    innermost frame of its thread and the position in that frame are returned.
    """
    found = {}
    for ident, stack in sys._current_frames().items():
        inner: FrameType | None = None
        for frame in _outwards(stack):
            code = frame.f_code
            if code.co_name == "_run" and code.co_filename.endswith("asyncio/events.py"):
                found[ident] = frame, 0
                break
            if not _RUNS_LOOP.isdisjoint(code.co_names):
                if inner is not None and inner.f_code.co_name not in _RUNS_LOOP:
                    found[ident] = stack, stack.f_lasti
                break
            inner = frame
    return found


def _running() -> dict[int, int]:
    """Return {id of a running task: id of its coroutine's frame}."""
    every = tasks.all_tasks(_loops())
    current = (tasks.current_task(loop) for loop in {task.get_loop() for task in every})
    return {id(task): id(getattr(task.get_coro(), "cr_frame", None)) for task in current if task is not None}


def _loops() -> list[Any]:
    """Return the running event loops of this process: loops of asyncio, and loops in C that `asyncio.run` has
    started.
    """
    frames = (frame for stack in sys._current_frames().values() for frame in _outwards(stack))
    runs = [
        frame for frame in frames if (frame.f_code.co_name, Path(frame.f_code.co_filename).name) in _RUNNERS
    ]
    return list(
        {getattr(runner, "_loop", runner) for frame in runs if (runner := frame.f_locals.get("self"))}
    )
