"""Lateness of event loops in which spans run.

The sampling thread schedules a callback on each loop, and measures how late the loop runs it. While a loop is
blocked, the time since the scheduling counts, so that a hang is visible while it lasts. If the block began
before the scheduling, the value is too small, by at most one tick of the sampler.

While a loop is blocked, its running task shows which call blocks it, and at which line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import CO_COROUTINE
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

from stepscope._recording.process.identity import running_loop
from stepscope._recording.spans import redaction, tasks
from stepscope._recording.spans.maker import SpanMaker, SpanObserver
from stepscope._recording.spans.scopes import Placing, inherited
from stepscope._recording.spans.span import Span
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import BLOCKED_NS, EVENT_LOOP, IN, CounterKind

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from typing_extensions import Unpack

    from stepscope._recording.spans.wrapping import Declared
    from stepscope.files.values import AttrValue

LOOKS = 8
"""Number of spans whose event loops are looked up after each sample. Later spans have no extra cost."""
MOST_LOOPS = 16
_MOST_PLACES = 32
"""Largest number of places in the code that have series of their own, for each loop."""


class LoopFinder(SpanObserver):
    """Observer of the next few spans of a log, which finds their event loops.

    While it is active, it replaces the log's own observer (a profiler's windows) and passes spans on to it.
    """

    def __init__(self, log: SpanMaker, seen: Callable[[AbstractEventLoop], None]) -> None:
        self._log = log
        self._seen = seen
        self._behind: SpanObserver | None = None
        self._left = 0

    def look(self) -> None:
        """Look up the event loop of the next `LOOKS` spans."""
        if self._log.observer is not self:
            self._behind = self._log.observer
            self._left = LOOKS
            self._log.observer = self

    def leave(self) -> None:
        """Stop looking up event loops."""
        if self._log.observer is self:
            self._log.observer = self._behind

    def new(
        self,
        log: SpanMaker,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        **place: Unpack[Placing],
    ) -> Span:
        """See `SpanMaker.new`."""
        self._ask()
        if self._behind is not None:
            return self._behind.new(log, stage, role, attrs, **place)
        return Span(log, stage, role, attrs, **place)

    def begin(
        self, log: SpanMaker, declared: Declared, attrs: Mapping[str, AttrValue] | None, first: bool
    ) -> Span:
        """See `SpanMaker.begin`."""
        self._ask()
        if self._behind is not None:
            return self._behind.begin(log, declared, attrs, first)
        return Span(log, declared.stage, declared.role, attrs).__enter__()

    def _ask(self) -> None:
        loop = running_loop()
        if loop is not None:
            self._seen(loop)
        self._left -= 1
        if self._left <= 0:
            self.leave()


class _Watched:
    """One event loop, and its latest callback."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        """Watch a loop that runs on this thread."""
        self.loop = ref(loop)
        self.name = threading.current_thread().name
        self._thread_id = threading.get_ident()
        self._number = 0
        """Number of the latest callback. Earlier callbacks are ignored when they run."""
        self._sent_ns: int | None = None
        self._latest_ns = 0
        self._places = set[str]()

    def place(self) -> str | None:
        """Return the innermost span, with its attribute `name`, and the line of the task that blocks the
        loop: `env tool search, tools.py:33`. Return None if the loop is not late by half of `BLOCKED_NS`, or
        if no task with a span runs.
        """
        loop, sent_ns = self.loop(), self._sent_ns
        if loop is None or sent_ns is None or time.monotonic_ns() - sent_ns < BLOCKED_NS // 2:
            return None
        task = tasks.current_task(loop)
        span = None if task is None else tasks.span_of(task)
        if span is None or self._sent_ns != sent_ns:  # the loop has run meanwhile
            return None
        role, code = inherited(span)[0] or span.log.process.role, _line_of(loop, task, self._thread_id)
        line = "?" if code is None else f"{Path(code[0].co_filename).name}:{code[1]}"
        name = (span.attrs or {}).get("name")
        stage = span.stage
        if isinstance(name, str):
            stage += f" {redaction.written({'name': name}, span.log.redact)['name']}"
        place = f"{role} {stage}, {line}"
        if len(self._places) < _MOST_PLACES:
            self._places.add(place)
        return place if place in self._places else None

    def late_ns(self) -> int | None:
        """Return the largest lateness of the loop in ns since `late_ns` was last called, or None if the loop
        is not running.
        """
        loop = self.loop()
        if loop is None or not loop.is_running():
            self._sent_ns = None  # ignore the callback if the loop runs again
            self._number += 1
            return None
        sent_ns = self._sent_ns
        late_ns, self._latest_ns = self._latest_ns, 0
        if sent_ns is not None:
            return max(late_ns, time.monotonic_ns() - sent_ns)
        self._send(loop)
        return late_ns

    def _send(self, loop: AbstractEventLoop) -> None:
        self._number += 1
        self._sent_ns = time.monotonic_ns()
        try:
            loop.call_soon_threadsafe(self._answer, self._number)
        except ours(RuntimeError):  # the loop was closed meanwhile
            self._sent_ns = None

    def _answer(self, number: int) -> None:
        """Record that callback `number` runs. Called on the loop."""
        sent_ns = self._sent_ns
        if number == self._number and sent_ns is not None:
            self._latest_ns = max(self._latest_ns, time.monotonic_ns() - sent_ns)
            self._sent_ns = None


def _line_of(loop: AbstractEventLoop, task: object, thread_id: int) -> tasks.Place:
    """Return the line of the innermost coroutine that runs on a loop.

    A running coroutine does not tell what it awaits (`cr_await`), so the stack of the loop's thread is read.

    Args:
        thread_id: The thread on which the loop was seen. A loop in C, as uvloop is, does not tell its thread.
    """
    frame = sys._current_frames().get(getattr(loop, "_thread_id", None) or thread_id)
    while frame is not None and not frame.f_code.co_flags & CO_COROUTINE:
        frame = frame.f_back
    return tasks.place_of(task) if frame is None else (frame.f_code, frame.f_lineno or 0)


class EventLoops(CounterSource):
    """Largest lateness of each event loop, under the name of its thread. While a call blocks a loop, the
    value is also reported under thread and call: `MainThread in env tool search, tools.py:33`.
    """

    name = EVENT_LOOP
    unit = "ms"
    kind: CounterKind = "interval"

    def __init__(self, log: SpanMaker) -> None:
        self._finder = LoopFinder(log, self._see)
        self._watched: dict[int, _Watched] = {}
        """{id of a loop: its record}. Writers: `_see` (in the recorded code) and `sample`."""
        self._finder.look()

    def sample(self) -> Mapping[str, float]:
        self._finder.look()
        values: dict[str, float] = {}
        for key, watched in tuple(self._watched.items()):
            if (loop := watched.loop()) is None or loop.is_closed():
                self._watched.pop(key, None)
                continue
            late_ns = watched.late_ns()
            if late_ns is not None:
                values[watched.name] = max(values.get(watched.name, 0.0), late_ns / 1e6)
                if (place := watched.place()) is not None:
                    values[f"{watched.name}{IN}{place}"] = late_ns / 1e6
        return values

    def close(self) -> None:
        self._finder.leave()

    def _see(self, loop: AbstractEventLoop) -> None:
        """Watch a loop from now on. Called in the recorded code, so it must not raise."""
        if id(loop) in self._watched or len(self._watched) >= MOST_LOOPS:
            return
        with suppress(TypeError):  # a loop of another library may not support weak references
            self._watched[id(loop)] = _Watched(loop)
