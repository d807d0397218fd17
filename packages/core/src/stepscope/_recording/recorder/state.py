"""State of this process: its open spans, the stacks of its threads, and the coroutines of its tasks."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.recorder.collectives import collectives_here
from stepscope._recording.recorder.engine_queues import engine_states
from stepscope._recording.recorder.in_time import in_time
from stepscope._recording.spans import lines, scopes
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import WAIT, WAITING
from stepscope.files.states import RECENT_NS, CounterNow, Frame, OpenSpan, ProcessState, Task, Thread
from stepscope.files.values import MAX_TEXT, bounded

MOST = 1000
"""Spans and tasks that a state holds at most, the oldest: it is read by people."""
DEPTH = 40
"""Frames of a stack that it holds, the innermost."""
_ASK_S = 0.5
"""Longest wait for a library that may block."""
_TRIES = 10
_RUNS_LOOP = frozenset({"run_until_complete", "run_forever"})
"""Methods of an event loop that show no frame of their own where it is written in C, as uvloop is."""
_WRAPPERS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper", "anext_awaitable")
"""Types of awaited objects that name what they wrap to the garbage collector alone, first."""


def state_of(
    process: ProcessInfo,
    run_id: str,
    spans: list[Span],
    *,
    step: int | None,
    step_age_ns: int | None,
    workers: dict[str, str],
    sampler: Sampler | None = None,
) -> ProcessState:
    """Return the state of this process now.

    Args:
        spans: Those that have not ended.
        sampler: Of its counters; None without any.
    """
    now_ns = time.monotonic_ns()
    return ProcessState(
        process=process,
        run_id=run_id,
        at_ns=time.time_ns(),
        step=step,
        step_age_ns=step_age_ns,
        workers=workers,
        spans=tuple(_open_span(span, now_ns) for span in spans[:MOST]),
        threads=tuple(_threads()),
        tasks=tuple(_tasks())[:MOST],
        counters=() if sampler is None else tuple(_counters(sampler, now_ns)),
        engines=tuple(engine_states(sampler, now_ns)),
        collectives=in_time("reading torch's flight recorder", collectives_here, _ASK_S),
    )


def _counters(sampler: Sampler, now_ns: int) -> Iterator[CounterNow]:
    for series, mean in sampler.means(now_ns - RECENT_NS, now_ns).items():
        yield CounterNow(name=series.name, of=series.of, value=mean)


def _open_span(span: Span, now_ns: int) -> OpenSpan:
    role, _, _, trajectory, turn = scopes.inherited(span)
    parent, link, _ = lines.parent_of(span)
    return OpenSpan(
        span=span.id,
        parent=parent,
        link=link,
        role=bounded(str(role or span.log.process.role)),
        stage=bounded(str(span.stage)),
        age_ns=max(0, now_ns - span.start_ns),
        trajectory=trajectory,
        turn=turn,
        thread=span.thread,
        waits=span.stage in WAITING or (span.attrs or {}).get(WAIT) is True,
    )


def _threads() -> Iterator[Thread]:
    stacks, own = sys._current_frames(), threading.get_ident()
    for thread in threading.enumerate():
        stack = stacks.get(thread.ident or 0)
        if stack is not None and thread.ident != own and not thread.name.startswith("stepscope-"):
            yield Thread(
                id=thread.native_id or 0,
                name=bounded(thread.name),
                frames=tuple(_frames(stack)),
                in_loop=not _RUNS_LOOP.isdisjoint(stack.f_code.co_names),
            )


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    for _ in range(DEPTH):
        if frame is None:
            return
        yield _frame(frame)
        frame = frame.f_back


def _frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _tasks() -> Iterator[Task]:
    for task in _all_tasks(sys.modules.get("asyncio.tasks")):
        if not task.done():
            frames, awaits = _chain(task.get_coro())
            yield Task(name=bounded(task.get_name()), frames=frames, awaits=awaits, span=_span_of(task))


def _all_tasks(module: Any) -> list[Any]:
    """Return the tasks of all event loops. `asyncio.all_tasks` returns those of one, which nothing names."""
    known = getattr(module, "_all_tasks", None) or getattr(module, "_scheduled_tasks", None) or ()
    for _ in range(_TRIES):
        try:
            return list(known)
        except ours(RuntimeError):  # a task began or ended meanwhile
            continue
    return []


def _chain(coroutine: Any) -> tuple[tuple[Frame, ...], str]:
    """Return the frames of a coroutine and of those that it awaits, and the type that the last one awaits."""
    frames: list[Frame] = []
    awaited = coroutine
    for _ in range(DEPTH):
        if type(awaited).__name__ in _WRAPPERS:
            awaited = next(iter(gc.get_referents(awaited)), None)
        frame = next(
            (
                getattr(awaited, name)
                for name in ("cr_frame", "ag_frame", "gi_frame")
                if getattr(awaited, name, None)
            ),
            None,
        )
        if frame is None:
            break
        frames.insert(0, _frame(frame))
        names = ("cr_await", "ag_await", "gi_yieldfrom")
        awaited = next((getattr(awaited, name) for name in names if hasattr(awaited, name)), None)
    return tuple(frames), "" if awaited is None else f"{type(awaited).__name__}"[:MAX_TEXT]


def _span_of(task: Any) -> int | None:
    """Return the number of the innermost span that a task runs in, where Python tells its context."""
    if not hasattr(task, "get_context"):  # Python before 3.12
        return None
    scope = task.get_context().get(scopes.current)
    while scope is not None and not isinstance(scope, Span):
        scope = scope.parent
    return None if scope is None or scope.end_ns is not None else scope.id
