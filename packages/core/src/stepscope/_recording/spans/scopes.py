"""Scopes: the innermost span, trajectory and turn of the running task.

A ContextVar has the innermost scope. Other values are inherited along `parent` and resolved when a span is
written, so that entering a span costs one get and one set. Tasks, `gather` and `asyncio.to_thread` copy the
context. A plain `threading.Thread` starts with an empty context, except in free-threaded Python from
3.14 on: pass it a `carrier()`, and `attach` the carrier there.

A scope can be entered once, as in OpenTelemetry. Leaving it sets the ContextVar to its parent. The token of
`ContextVar.set` is not used for that, because each open scope would then have one more object for the garbage
collector.
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

# Looked up once for speed, because agent loops enter a scope for each turn, captured or not.
_current, _enter = current.get, current.set


class _Left:
    """An awaitable that completes at once."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_LEFT = _Left()


class Scope:
    """One level of context. Fields that are None are inherited from `parent`."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None

    log: object = None
    """The log of a span, or None in other scopes."""

    if TYPE_CHECKING:
        entered: bool
        """True once the scope was entered. Spans use `start_ns` instead."""
        parent: Scope | None
        resolved: Inherited | None
        turns: Iterator[int] | None
        """Counter for turns without an index, if the scope is a trajectory."""
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
        except BaseException:  # raised by a signal handler; `with` will not leave this scope
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
        except BaseException:  # raised by a signal handler
            self._leave(error)
            raise

    def hand_on(self) -> None:
        """Leave the scope in the running task without ending the span. The span ends later, with the call's
        result, in any task.
        """
        if _current() is self:
            _enter(self.parent)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    # Not an `async def`, which would leave the scope only when it is awaited. An exception could prevent
    # that.
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Awaitable[None]:
        try:
            return _LEFT
        finally:
            self.__exit__(kind, error, trace)

    def refuse_entry(self) -> Self:
        """Record an error, because this scope was entered before. The second block is not recorded."""
        name = getattr(self, "stage", "place")
        fix = "write span(...), trajectory(...), turn(...) or attach(...) in each `with`"
        error = CaptureError(f"{name!r} is entered a second time, and is one stretch of work. Fix: {fix}")
        failures.note(f"the second `with` of {name!r}", error)
        return self

    def _leave(self, error: BaseException | None) -> None:
        """Leave this scope and the scopes within it. If the running task or thread is not in this scope, only
        record the end of the span.
        """
        scope = innermost = _current()
        while scope is not None and scope is not self:
            scope = scope.parent
        # None in another task or thread, for example an async generator that the event loop finalises.
        if scope is None:
            self._ended_elsewhere(error)
            return
        _enter(self.parent)
        while error is not None and innermost is not None and innermost is not self:
            innermost._ended_elsewhere(error)  # an error prevented the exit of this scope
            innermost = innermost.parent
        self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        """Record the end of a span. Do nothing for other scopes."""

    def _ended_elsewhere(self, error: BaseException | None) -> None:
        """Record the end of a span, and leave no scope."""

    def set(self, **attrs: AttrValue) -> None:
        """Add attributes to the span. Do nothing if neither a capture nor the flight recorder records."""

    def add(
        self,
        stage: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> None:
        """Add a finished child span, for work that an engine or a service has measured.

        If neither a capture nor the flight recorder records, do nothing.

        Args:
            start_ns: Start, on the clock of `time.monotonic_ns()` of this host.
            end_ns: End, on the same clock.
        """

    def reference(self) -> SpanLink | None:
        """Return a link to the recorded span of this scope, for other processes and steps, or None."""
        return None

    def run_of_reference(self) -> str | None:
        """Return the run id of the span in `reference`, or None if unknown."""
        return None

    def traceparent(self) -> str | None:
        """Return the W3C trace context of the span in `reference`, or of a span of another tracer, or
        None.
        """
        return None

    def hang_below(self, place: Place, process: str) -> bool:
        """Make this span a child of the caller's span, whose carrier was attached within this span. Return
        whether this succeeded.
        """
        return False


class Placing(TypedDict, total=False):
    """Keyword arguments that set the place of a span."""

    step: int | None
    policy_version: int | None
    trajectory: str | None
    turn: int | None


class UncapturedTurn(Scope):
    """A turn without a capture. Spans of a capture that opens during the turn have its number.

    Like `Span`, it has no `__init__`, for speed; `api.turn` sets its fields.
    """

    __slots__ = ("entered", "parent", "policy_version", "resolved", "turn")


class UncapturedTrajectory(Scope):
    """A trajectory without a capture, like `UncapturedTurn`. `api.trajectory` sets its fields."""

    __slots__ = ("entered", "parent", "policy_version", "resolved", "step", "trajectory", "turns")


class Place(Scope):
    """A scope that sets a place and is not recorded, such as an attached carrier."""

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
        """
        Args:
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
        """Return a copy of the place without its parent scope, so that spans are not part of a reference
        cycle.
        """
        return Place(
            step=self.step, link=self.link, context=self.context, trajectory=self.trajectory, turn=self.turn
        )

    def equals(self, other: Place) -> bool:
        """Return whether both places are from carriers of the same caller."""
        own = (self.link, self.context, self.trajectory, self.turn)
        return own == (other.link, other.context, other.trajectory, other.turn)


NOWHERE = Place()
"""The caller of a span in which carriers of several callers were attached."""

Inherited: TypeAlias = "tuple[str | None, int | None, int | None, str | None, int | None]"
"""(role, step, policy version, trajectory, turn) of a scope, including inherited values.

A plain tuple, because the garbage collector stops tracking tuples of such values."""

_NOTHING: Inherited = (None, None, None, None, None)


def inherited(scope: Scope | None) -> Inherited:
    """Return the fields of `scope` with inherited values, and cache them in the scope, so that a child reads
    only its parent.
    """
    if scope is None:
        return _NOTHING
    fields = scope.resolved
    if fields is None:
        parent = scope.parent
        above = _NOTHING if parent is None else parent.resolved or _resolved(parent)
        fields = scope.resolved = _inside(scope, above)
    return fields


def _resolved(scope: Scope) -> Inherited:
    """Return `inherited(scope)` if the scopes above have no cached fields yet. This is not recursive, because
    the chain of scopes may be long.
    """
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
        # Another trajectory does not inherit the turn.
        trajectory, turn = bounded(scope.trajectory), None
    if scope.turn is not None:
        turn = scope.turn
    return role, step, policy_version, trajectory, turn


class Mark:
    """A mark of the current scope of a task or thread, to return to it later.

    If a signal handler raises before the first line of `__exit__`, the scope stays entered. Returning to an
    earlier mark leaves such a scope.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self) -> None:
        self._scope = _current()
        self._token: Token[Scope | None] | None = _enter(self._scope)

    def leave_inner(self) -> None:
        """Leave the scopes that this task or thread has entered since the mark."""
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
            pass  # the mark was made in another task or thread


def role_at(scope: Scope | None) -> str | None:
    """Return the role at `scope`, or None if no scope sets a role."""
    role, *_ = inherited(scope)
    return role


def trajectory_at(scope: Scope | None) -> str | None:
    """Return the trajectory that `scope` is part of, or None."""
    return inherited(scope)[3]


def next_turn() -> int | None:
    """Return the next turn number, counted from 0, of the enclosing trajectory, or None outside of
    trajectories.
    """
    scope = current.get()
    while scope is not None and scope.trajectory is None:
        scope = scope.parent
    if scope is None:
        return None
    if scope.turns is None:
        scope.turns = itertools.count()
    return next(scope.turns)


class _Off(Scope):
    """A replacement for a span that is not recorded. It does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


OFF = _Off()
"""The span that is used while nothing is recorded, and for calls whose span could not be opened."""
