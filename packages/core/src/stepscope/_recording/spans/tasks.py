"""Asyncio tasks of this process: their spans, their position in the code, and what they wait for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterable, Iterator
from contextvars import Context
from types import CodeType, CoroutineType, FrameType
from typing import Any, TypeAlias, cast

from stepscope._recording.spans import scopes
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files.states import Frame, Task
from stepscope.files.values import MAX_TEXT, bounded

DEPTH = 40
"""Largest number of frames of a stack in a state. The innermost frames are kept."""
_TRIES = 10
_WRAPPERS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper", "anext_awaitable")
"""Types of awaited objects that wrap another awaitable. Only the garbage collector gives access to the other
awaitable, as the first referent of the object."""
_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITED = ("cr_await", "ag_await", "gi_yieldfrom")
_HOLDERS = {"_wait": "fs", "wait_for": "fut", "__aexit__": "self"}
"""{function of asyncio that awaits an internal future: name of the local variable that leads to the
user's futures}."""

Place: TypeAlias = "tuple[CodeType, int] | None"
"""(innermost code object of a task, line), or None."""


def all_tasks(loops: Iterable[Any]) -> list[Any]:
    """Return the tasks of all event loops, including tasks that are done.

    Args:
        loops: All event loops. Needed for Python 3.14, which has no list of all tasks.
    """
    module: Any = sys.modules.get("asyncio.tasks")
    if module is None:
        return []
    known: Any = getattr(module, "_all_tasks", None)
    if known is None:
        known = getattr(module, "_scheduled_tasks", ())
    # list() of the WeakSet's data is atomic, so that no task begins or ends meanwhile. An iteration of the
    # WeakSet is not.
    tasks = [task for item in list(getattr(known, "data", known)) if (task := item()) is not None]
    eager = _copied(getattr(module, "_eager_tasks", ()))
    if sys.version_info >= (3, 14):
        eager += [task for loop in loops for task in module.all_tasks(loop)]
    return tasks + eager


def _copied(items: Iterable[Any]) -> list[Any]:
    for _ in range(_TRIES):
        try:
            return list(items)
        except ours(RuntimeError):  # changed meanwhile
            continue
    return []


def current_task(loop: Any) -> Any:
    """Return the running task of a loop, or None."""
    return sys.modules["asyncio.tasks"].current_task(loop)


def span_of(task: Any) -> Span | None:
    """Return the innermost open span of a task, or None."""
    context = _context_of(task)
    scope = None if context is None else context.get(scopes.current)
    while scope is not None and not isinstance(scope, Span):
        scope = scope.parent
    return scope if scope is not None and scope.end_ns is None else None


def _context_of(task: Any) -> Context | None:
    if hasattr(task, "get_context"):
        return cast(Context, task.get_context())
    # Before Python 3.12, tasks have no such method. The context is an attribute, or in a C task only a
    # referent.
    for item in gc.get_referents(task):
        if type(item) is Context:
            return item
    return cast("Context | None", getattr(task, "_context", None))


def place_of(task: Any) -> Place:
    inner, awaited = None, task.get_coro()
    # Coroutines of `async def` need none of the checks in `_chain`, which take 5 us for each of 20,000 tasks.
    while type(awaited) is CoroutineType:
        inner, awaited = awaited, awaited.cr_await
    frame = None if inner is None else inner.cr_frame
    if awaited is not None and type(awaited).__name__ != "FutureIter":
        for frame, _ in _chain(awaited):  # noqa: B007 - the last frame is used
            pass
    return None if frame is None else (frame.f_code, frame.f_lineno or 0)


def task_of(task: Any, shown: Container[int]) -> Task:
    """Return the state of a task.

    Args:
        shown: Numbers of the spans in the state.
    """
    chain = list(_chain(task.get_coro()))
    awaits = "" if not chain or chain[-1][1] is None else f"{type(chain[-1][1]).__name__}"[:MAX_TEXT]
    waiter = getattr(task, "_fut_waiter", None)
    source = _source_of(waiter)
    if _is_threads(source):
        awaits = "ObjectRef" if hasattr(source, "object_ref") else "a thread's future"
        source = None
    span = span_of(task)
    return Task(
        id=id(task),
        name=bounded(task.get_name()),
        frames=tuple(frame_of(frame) for frame, _ in reversed(chain)),
        awaits=awaits,
        span=span.id if span is not None and span.id in shown else None,
        awaited=tuple(
            id(item)
            for item in _awaited(waiter if source is None else source, chain[-1][0] if chain else None)
        ),
    )


def frame_of(frame: FrameType) -> Frame:
    return Frame(
        frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
    )  # an artificial frame has no line number


def _chain(coroutine: Any) -> Iterator[tuple[FrameType, Any]]:
    """Yield (frame, awaited object) for a coroutine, the coroutine that it awaits, and so on."""
    awaited = coroutine
    for _ in range(DEPTH):
        if type(awaited).__name__ in _WRAPPERS:
            awaited = next(iter(gc.get_referents(awaited)), None)
        frame = next((frame for name in _FRAMES if (frame := getattr(awaited, name, None))), None)
        following = next((getattr(awaited, name) for name in _AWAITED if hasattr(awaited, name)), None)
        if frame is not None:
            yield frame, following
        elif following is None:  # a coroutine in C, as of Ray's methods, has no frame but awaits
            return
        awaited = following


def _source_of(waiter: Any) -> Any:
    """If `asyncio.wrap_future` or `asyncio.shield` has made `waiter`, return the future that ends it; else
    None.

    Both functions reference that future only in a callback.
    """
    for callback, *_ in getattr(waiter, "_callbacks", None) or ():
        for cell in getattr(callback, "__closure__", None) or ():
            try:
                source = cell.cell_contents
            except ours(ValueError):  # an empty cell
                continue
            is_future = _is_threads(source) or hasattr(source, "get_loop")
            if is_future and source is not waiter and not source.done():
                return source
    return None


def _is_threads(source: object) -> bool:
    """Return whether an object is a `concurrent.futures.Future`, which a thread, a process or Ray
    completes.
    """
    return hasattr(source, "set_running_or_notify_cancel")


def _awaited(waiter: Any, frame: FrameType | None) -> Iterator[Any]:
    """Yield the unfinished tasks that a task waits for.

    Args:
        waiter: The future that wakes the task.
        frame: The task's innermost frame.
    """
    found: Iterable[Any] = [waiter]
    if frame is not None and "asyncio" in frame.f_code.co_filename:
        held = frame.f_locals.get(_HOLDERS.get(frame.f_code.co_name, ""), waiter)
        found = _copied(getattr(held, "_tasks", held if isinstance(held, (set, list)) else [held]))
    for item in found:
        # `asyncio.gather` waits for one future with children.
        for future in getattr(item, "_children", [item]):
            if hasattr(future, "get_coro") and not future.done():
                yield future
