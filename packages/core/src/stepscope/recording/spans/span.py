"""Spans while they are open: live objects that their log writes a moment later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from threading import get_native_id
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink
from stepscope.files.trace_context import SpanIds
from stepscope.files.values import AttrValue, attr_values
from stepscope.recording.process.failures import describe
from stepscope.recording.spans import slot
from stepscope.recording.spans.scopes import Place, Placing, Scope, current

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


class SpanSink(Protocol):
    """The log of a span, as the span needs it."""

    process: ProcessInfo
    step: int | None
    ids: Iterator[int]
    redact: tuple[str, ...]
    """Patterns of attributes whose values are not written."""
    trace: SpanIds
    roles: set[str]
    """Roles of the spans that are written."""
    opened: Callable[[Span], None]
    """Called by a span when it opens."""

    @property
    def is_closing(self) -> bool:
        """True if it writes its last spans, or has written them."""
        ...


class _Thread(threading.local):
    """Cached native id of the running thread. Asking the kernel takes 0.2 us of a span's 1.0 us."""

    def __init__(self) -> None:
        self.id = get_native_id()


thread = _Thread()
# Looked up once: a span that goes through `current` for each of them takes a twentieth longer.
_current, _enter, _leave = current.get, current.set, current.reset


class Span(Scope):
    """One recorded stretch of code. `SpanMaker.new` makes it; `SpanMaker.begin` makes and enters it.

    It has no `__init__`, because calling one takes a quarter of a whole span's time.
    """

    __slots__ = (
        "attrs", "end_ns", "error", "id", "log", "origin", "parent", "resolved", "role", "stage", "start_ns",
        "thread", "token",
    )  # fmt: skip

    log: SpanSink
    stage: str
    role: str | None
    attrs: Mapping[str, AttrValue] | None
    thread: int
    id: int
    start_ns: int
    end_ns: int | None
    error: str | None

    def __enter__(self) -> Self:
        if self.token is not None or self.end_ns is not None:
            return self._again()
        log = self.log
        self.thread = thread.id
        self.parent = _current()
        self.token = _enter(self)
        self.id = next(log.ids)
        self.start_ns = monotonic_ns()
        log.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = monotonic_ns()
        # As Scope.__exit__, spelled out: a call is a tenth of a span.
        token, self.token = self.token, None
        try:
            _leave(token)  # type: ignore[arg-type]  # None and SHARED raise TypeError
        except ValueError:
            pass
        except TypeError:
            self.token = token
            self._end_again(kind, error, trace)
            return
        if error is not None:
            try:
                self.error = describe(error)
            except RecursionError:  # at the limit of the user's recursion: there is no depth to call it
                self.error = type(error).__name__
        self.end_ns = end_ns  # last: the writing thread takes a span with an end as complete

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.error = describe(error)
        self.end_ns = monotonic_ns()

    def _copy(self) -> Scope:
        session = slot.active  # of this capture, or of a later one
        return super()._copy() if session is None else session.log.new(self.stage, self.role, self.attrs)

    def set(self, **attrs: AttrValue) -> None:
        """Add attributes; later values win."""
        copy = None if self.end_ns is None else self._entered()
        if copy is not None and copy is not self:
            copy.set(**attrs)
            return
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
        span = PlacedSpan(self.log, stage, role, attrs)
        span.parent, span.token = self, None
        span.thread = thread.id
        span.id = next(self.log.ids)
        span.start_ns, span.end_ns = start_ns, max(start_ns, end_ns)
        self.log.opened(span)

    def reference(self) -> SpanLink:
        return SpanLink(process=self.log.process.key, span=self.id, step=self.log.step)

    def traceparent(self) -> str:
        return self.log.trace.traceparent(self.id)

    def awaits_place(self, process: str) -> bool:
        if self.parent is not None or self.token is None or self.log.process.key.endswith(process):
            return False
        if self.thread != thread.id or self.log.is_closing or (self.step, self.trajectory) != (None, None):
            return False
        here = _current()
        try:
            _leave(self.token)  # only the task that entered it can: in a copy of its context this raises
        except ValueError:
            return False
        self.token = _enter(here)
        return True


class PlacedSpan(Span):
    """A span with a place of its own: a trajectory, a turn, another step's work."""

    __slots__ = ("policy_version", "step", "trajectory", "turn", "turns")

    def __init__(
        self,
        log: SpanSink,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
    ) -> None:
        self.log = log
        self.stage = stage
        self.role = role
        self.attrs = attrs
        self.resolved = self.end_ns = self.error = self.token = self.turns = None
        self.step = step
        self.policy_version = policy_version
        self.trajectory = trajectory
        self.turn = turn

    def _copy(self) -> Scope:
        session = slot.active
        place = Placing(
            step=self.step,
            policy_version=self.policy_version,
            trajectory=self.trajectory,
            turn=self.turn,
        )
        if session is None:
            return Place(**place)
        return session.placed_span(self.stage, self.role, self.attrs, **place)


def mark(log: SpanSink, stage: str, attrs: Mapping[str, AttrValue] | None, **place: Unpack[Placing]) -> None:
    """Record a span without length, below the one that runs."""
    now_ns = monotonic_ns()
    record(log, stage, attrs, now_ns, now_ns, **place)


def record(
    log: SpanSink,
    stage: str,
    attrs: Mapping[str, AttrValue] | None,
    start_ns: int,
    end_ns: int,
    **place: Unpack[Placing],
) -> None:
    """Record a span that is over, below the one that runs."""
    span = PlacedSpan(log, stage, None, attrs, **place)
    span.parent, span.token = _current(), None
    span.thread = thread.id
    span.id = next(log.ids)
    span.start_ns, span.end_ns = start_ns, end_ns
    log.opened(span)
