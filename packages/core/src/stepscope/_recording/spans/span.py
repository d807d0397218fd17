"""`Span`: a span in memory, which its log writes later."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from threading import get_native_id
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from stepscope._recording.process import fork
from stepscope._recording.process.failures import outcome_of
from stepscope._recording.spans.scopes import NOWHERE, Inherited, Place, Placing, Scope, current
from stepscope.errors import ours
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import CONSUME, SpanLink
from stepscope.files.trace_context import SpanIds
from stepscope.files.values import AttrValue, attr_values

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


class SpanSink(Protocol):
    """A log, with the attributes that its spans need."""

    process: ProcessInfo
    run_id: str
    step: int | None
    redact: tuple[str, ...]
    """`redact` of the configuration."""
    trace: SpanIds
    roles: set[str]
    """Roles of all spans written so far."""
    opened: Callable[[Span], None]
    """Called with each span that opens."""
    taken: set[Span]
    """Spans of another log, which were running when this log took them over."""


next_id = itertools.count(1).__next__
"""Returns the number of a new span, which is unique in this process."""
threads: deque[int] = deque(maxlen=64)
"""Native ids of the threads that were the last to open their first span in this process."""


class _Thread(threading.local):
    """Cache of the running thread's native id, because a query of the kernel takes 0.2 us, and a span takes
    1.0 us.
    """

    def __init__(self) -> None:
        self.id = get_native_id()
        threads.append(self.id)


thread = _Thread()
fork.forgets("native id of the thread", thread.__init__)  # type: ignore[misc]  # a forked child has one thread
# Looked up once, because attribute access on `current` would make a span 5 % slower.
_current, _enter, _reset = current.get, current.set, current.reset


class Span(msgspec.Struct, Scope, gc=False, eq=False):
    """One span. `SpanMaker.new` makes it, and `SpanMaker.begin` makes and enters it.

    Spans are not tracked by the garbage collector, because walking through all open spans again and again
    would be the largest cost in a loop of 20,000 trajectories. So a span must not be part of a reference
    cycle.
    """

    log: SpanSink
    stage: str
    role: str | None
    attrs: Mapping[str, AttrValue] | None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None
    parent: Scope | None = None
    thread: int = 0
    id: int = 0
    start_ns: int = 0
    """Start of the span (CLOCK_MONOTONIC), or 0 before the span is entered."""
    end_ns: int | None = None
    error: str | None = None
    token: Token[Scope | None] | None = None
    """Token that leaves a span without a parent, valid only in the task that entered the span; None in other
    spans."""
    caller: Place | None = None
    """Place of the caller whose carrier was attached in this span (`hang_below`), or None. Only set in a span
    without a parent."""
    resolved: Inherited | None = None
    turns: Iterator[int] | None = None

    __repr__ = object.__repr__  # the repr of a struct would print all parents and the log

    def __enter__(self) -> Self:
        if self.start_ns:
            return self.refuse_entry()
        log = self.log
        self.thread = thread.id
        self.parent = parent = _current()
        self.id = next_id()
        self.start_ns = monotonic_ns()
        try:
            token = _enter(self)
            if parent is None:
                self.token = token
            log.opened(self)
            return self
        except BaseException as error:  # raised by a signal handler; `with` will not leave this span
            self.not_entered(error)
            raise

    def not_entered(self, error: BaseException) -> None:
        """Leave and end the span, after an exception was raised while entering it."""
        _enter(self.parent)
        self._ended(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            end_ns = monotonic_ns()
            if _current() is not self:
                self._leave(error)
                return
            token, self.token = self.token, None
            try:
                _enter(self.parent) if token is None else _reset(token)  # a reset is cheaper
            except ours(ValueError):  # the token is of another context: this is a copy of the context
                _enter(None)
            if error is not None:
                try:
                    self.error = outcome_of(error)
                except RecursionError:  # the recursion limit leaves no depth for the call
                    self.error = type(error).__name__
            self.end_ns = end_ns  # set last, because the writing thread takes a span with an end as complete
        except BaseException as thrown:  # raised by a signal handler
            self._leave(error or thrown)
            raise

    def hand_on(self) -> None:
        self.token = None
        super().hand_on()

    def _ended(self, error: BaseException | None) -> None:
        self.token = None
        if error is not None:
            self.error = outcome_of(error)
        self.end_ns = monotonic_ns()

    def _ended_elsewhere(self, error: BaseException | None) -> None:
        if self.start_ns and self.end_ns is None:
            self._ended(error)

    def set(self, **attrs: AttrValue) -> None:
        """Add attributes. Later values replace earlier ones."""
        new = attr_values(attrs)
        self.attrs = {**self.attrs, **new} if self.attrs else new

    def add(
        self,
        stage: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> None:
        _append(self.log, stage, role, attrs, self, start_ns, max(start_ns, end_ns))

    def hang_below(self, place: Place, process: str) -> bool:
        """Make a span without a parent a child of the caller whose carrier is attached in it.

        The caller is written in the `span` line, because an `open` line may already be on disk. If carriers
        of several callers are attached, the span has no parent.

        Args:
            process: `ProcessInfo.key` of the carrier's process, or the end of the key.
        """
        if self.token is None or self.log.process.key.endswith(process):
            return False
        if self.caller is None:
            if (self.step, self.trajectory) != (None, None) or not self._is_of_this_task():
                return False
            self.caller = place.caller()
        elif not self.caller.equals(place):
            self.caller, place = NOWHERE, NOWHERE
        self.step, self.policy_version = place.step, place.policy_version
        self.trajectory, self.turn, self.resolved = place.trajectory, place.turn, None
        return self.caller is not NOWHERE

    def _is_of_this_task(self) -> bool:
        """Return whether the running task has entered this span. Otherwise the task has a copy of the
        context of the task that entered the span.
        """
        here = _current()
        try:
            _reset(cast("Token[Scope | None]", self.token))
        except ours(ValueError):
            return False
        finally:
            self.token = _enter(here)
        return True

    def reference(self) -> SpanLink:
        return SpanLink(process=self.log.process.key, span=self.id, step=self.log.step)

    def run_of_reference(self) -> str:
        return self.log.run_id

    def traceparent(self) -> str:
        return self.log.trace.traceparent(self.id)


# `object`'s assignment of attributes is twice as fast as a struct's. It can be set only after the class is
# made.
for _name in ("__delattr__", "__setattr__"):
    setattr(Span, _name, getattr(object, _name))


def mark(log: SpanSink, stage: str, attrs: Mapping[str, AttrValue] | None, **place: Unpack[Placing]) -> None:
    """Record a span of zero length as a child of the current span."""
    now_ns = monotonic_ns()
    record(log, stage, attrs, now_ns, now_ns, **place)


def mark_consumed(log: SpanSink, trajectory: str, begun: int | None, policy_version: int | None) -> None:
    """Record that the step consumes a trajectory."""
    attrs = {"begun": begun, "begun_version": policy_version}
    known: dict[str, AttrValue] = {name: value for name, value in attrs.items() if value is not None}
    mark(log, CONSUME, known, trajectory=trajectory)


def record(
    log: SpanSink,
    stage: str,
    attrs: Mapping[str, AttrValue] | None,
    start_ns: int,
    end_ns: int,
    **place: Unpack[Placing],
) -> None:
    """Record a finished span as a child of the current span."""
    _append(log, stage, None, attrs, _current(), start_ns, end_ns, **place)


def _append(
    log: SpanSink,
    stage: str,
    role: str | None,
    attrs: Mapping[str, AttrValue] | None,
    parent: Scope | None,
    start_ns: int,
    end_ns: int,
    **place: Unpack[Placing],
) -> None:
    span = Span(log, stage, role, attrs, parent=parent, thread=thread.id, id=next_id(), **place)
    span.start_ns, span.end_ns = start_ns, end_ns
    log.opened(span)
