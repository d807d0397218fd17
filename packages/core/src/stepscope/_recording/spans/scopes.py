"""Scopes: the innermost span, trajectory and turn of the running task.

One ContextVar holds the innermost scope. Everything else is inherited along `parent` and resolved when a
span is written, so that entering a span costs one get and one set. Tasks, `gather` and `asyncio.to_thread`
copy the context. A bare `threading.Thread` starts without one (before Python 3.14): hand it a `carrier()`
and `attach` it there.

A scope is entered once, as in OpenTelemetry. Leaving it puts its parent back. The token of `ContextVar.set`
would do so too, but nobody keeps it: the garbage collector would walk through one more object for each open
scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Generator, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from stepscope._recording.process import failures
from stepscope.errors import CaptureError, ours
from stepscope.files.values import AttrValue, bounded

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # typing.Self is 3.11+

    from stepscope.files.spans import SpanLink

current: ContextVar[Scope | None] = ContextVar("stepscope_scope", default=None)

# Looked up once: agent loops enter a scope for each turn, captured or not.
_current, _enter = current.get, current.set


class _Left:
    """An awaitable that waits for nothing."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_LEFT = _Left()


class Scope:
    """One level of context. A field that is None is inherited from `parent`."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None

    log: object = None
    """The log of a span; None in other scopes."""

    if TYPE_CHECKING:
        entered: bool
        """True once it was entered. Spans tell it by their start."""
        parent: Scope | None
        resolved: Inherited | None
        turns: Iterator[int] | None
        """Numbers of its turns that are counted, if it is a trajectory."""
    else:
        __slots__ = ()

    def __enter__(self) -> Self:
        if self.entered:
            return self.refuse_entry()
        self.entered = True
        self.resolved = None
        self.parent = _current()
        try:
            _enter(self)
            return self
        except BaseException:  # of a signal's handler: nobody leaves what was not entered
            _enter(self.parent)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if _current() is self:
                _enter(self.parent)
            else:
                self._leave(error)
        except BaseException:  # of a signal's handler
            self._leave(error)
            raise

    def hand_on(self) -> None:
        """Leave the running task, but go on: the end comes with what the call returned, in any task."""
        if _current() is self:
            _enter(self.parent)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    # No coroutine: that would leave the scope when it is awaited, which an exception may keep from happening.
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Awaitable[None]:
        try:
            return _LEFT
        finally:
            self.__exit__(kind, error, trace)

    def refuse_entry(self) -> Self:
        """Note that this scope was entered before: its second block runs untimed."""
        name = getattr(self, "stage", "place")
        fix = "write span(...), trajectory(...), turn(...) or attach(...) in each `with`"
        error = CaptureError(f"{name!r} is entered a second time, and is one stretch of work. Fix: {fix}")
        failures.note(f"the second `with` of {name!r}", error)
        return self

    def _leave(self, error: BaseException | None) -> None:
        """Leave this scope and those inside of it, if the running task or thread is in it."""
        scope = innermost = _current()
        while scope is not None and scope is not self:
            scope = scope.parent
        if scope is None:  # closed by another task or thread (an async generator finalised by the loop)
            self._ended_elsewhere(error)
            return
        _enter(self.parent)
        while error is not None and innermost is not None and innermost is not self:
            innermost._ended_elsewhere(error)  # it was not left: the error came up before it could be
            innermost = innermost.parent
        self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        """Record the end, if this is a span."""

    def _ended_elsewhere(self, error: BaseException | None) -> None:
        """Record an end that is no end of this task's or thread's scopes."""

    def set(self, **attrs: AttrValue) -> None:
        """Add attributes to the span; do nothing without a capture."""

    def add(
        self,
        stage: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> None:
        """Add a finished span below this one: work that an engine or a service has timed.

        Without a capture there is no span and this does nothing.

        Args:
            start_ns: Of this host's CLOCK_MONOTONIC, as `time.monotonic_ns()`.
            end_ns: Likewise.
        """

    def reference(self) -> SpanLink | None:
        """Return the recorded span of this scope, named for other processes and steps; None without one."""
        return None

    def traceparent(self) -> str | None:
        """Return the W3C trace context of the span that `reference` returns, or of another tracer's span."""
        return None

    def hang_below(self, place: Place, process: str) -> bool:
        """Return whether this is a span that hangs below the caller whose carrier its body attaches."""
        return False


class Placing(TypedDict, total=False):
    """The fields of a scope that state its place, as keyword arguments."""

    step: int | None
    policy_version: int | None
    trajectory: str | None
    turn: int | None


class UncapturedTurn(Scope):
    """A turn that nobody records, so that a capture that opens meanwhile still knows it.

    It has no `__init__`, as `Span`. `api.turn` makes it.
    """

    __slots__ = ("entered", "parent", "policy_version", "resolved", "turn")


class UncapturedTrajectory(Scope):
    """A trajectory that nobody records, as `UncapturedTurn`. `api.trajectory` makes it."""

    __slots__ = ("entered", "parent", "policy_version", "resolved", "step", "trajectory", "turns")


class Place(Scope):
    """A scope with a place that records nothing: an attached carrier, for example."""

    __slots__ = (
        "context", "entered", "link", "parent", "policy_version", "resolved", "step", "trajectory", "turn",
        "turns",
    )  # fmt: skip

    def __init__(
        self,
        *,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
        link: SpanLink | None = None,
        context: str | None = None,
    ) -> None:
        """Args:
        context: The `traceparent` of the carrier.
        """
        self.entered = False
        self.resolved = self.parent = self.turns = None
        self.step = step
        self.policy_version = policy_version
        self.trajectory = trajectory
        self.turn = turn
        self.link = link
        self.context = context

    def reference(self) -> SpanLink | None:
        return self.link

    def traceparent(self) -> str | None:
        return self.context

    def caller(self) -> Place:
        """Return the place alone, without the scope that it was entered in: spans are part of no cycle."""
        return Place(link=self.link, context=self.context, trajectory=self.trajectory, turn=self.turn)

    def equals(self, other: Place) -> bool:
        """Return whether the places are one caller's."""
        own = (self.link, self.context, self.trajectory, self.turn)
        return own == (other.link, other.context, other.trajectory, other.turn)


NOWHERE = Place()
"""The caller of a span that works for several callers."""

Inherited: TypeAlias = "tuple[str | None, int | None, int | None, str | None, int | None]"
"""Role, step, policy version, trajectory and turn of a scope, those of the scopes above it included.

A plain tuple, because the garbage collector looks at one once and never again.
"""

_NOTHING: Inherited = (None, None, None, None, None)


def inherited(scope: Scope | None) -> Inherited:
    """Return the fields that hold at `scope`, and keep them there: a child then looks at its parent alone."""
    if scope is None:
        return _NOTHING
    fields = scope.resolved
    if fields is None:
        parent = scope.parent
        above = _NOTHING if parent is None else parent.resolved or _resolved(parent)
        fields = scope.resolved = _inside(scope, above)
    return fields


def _resolved(scope: Scope) -> Inherited:
    """As `inherited`, where nobody has looked at the scopes above either: a chain may be long."""
    chain = [scope]
    while (parent := chain[-1].parent) is not None and parent.resolved is None:
        chain.append(parent)
    fields = _NOTHING if parent is None else parent.resolved or _NOTHING
    for inner in reversed(chain):
        fields = inner.resolved = _inside(inner, fields)
    return fields


def _inside(scope: Scope, fields: Inherited) -> Inherited:
    role, step, policy_version, trajectory, turn = fields
    if scope.role is not None:
        role = scope.role
    if scope.step is not None:
        step = scope.step
    if scope.policy_version is not None:
        policy_version = scope.policy_version
    if scope.trajectory is not None:
        # A turn belongs to its trajectory: another trajectory does not inherit it.
        trajectory, turn = bounded(scope.trajectory), None
    if scope.turn is not None:
        turn = scope.turn
    return role, step, policy_version, trajectory, turn


class Mark:
    """A position in the scopes of a task or thread, to return to.

    Python looks for signals before the first line of `__exit__`. If a handler raises there, the scope stays
    entered. Returning to a mark from before leaves it.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self) -> None:
        self._scope = _current()
        self._token: Token[Scope | None] | None = _enter(self._scope)

    def leave_inner(self) -> None:
        """Leave the scopes that were entered since, in this task or thread and inside of the marked one."""
        token, self._token = self._token, None
        scope = _current()
        if scope is self._scope:
            return
        while scope is not None and scope is not self._scope:
            scope = scope.parent
        if token is None or scope is not self._scope:
            return
        try:
            current.reset(token)
        except ours(ValueError):
            pass  # the mark is of another task or thread


def role_at(scope: Scope | None) -> str | None:
    """Return the role that holds at `scope`; None if no scope has one."""
    role, *_ = inherited(scope)
    return role


def next_turn() -> int | None:
    """Count a turn of the trajectory that the running task is in, from 0. None outside of trajectories."""
    scope = current.get()
    while scope is not None and scope.trajectory is None:
        scope = scope.parent
    if scope is None:
        return None
    if scope.turns is None:
        scope.turns = itertools.count()
    return next(scope.turns)


class _Off(Scope):
    """Shared stand-in for a span that is not recorded. It does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


OFF = _Off()
"""The span without a capture, and of a call whose span could not be opened."""
