"""Scopes: the innermost span, trajectory and turn of the running task.

One ContextVar holds the innermost scope. Everything else is inherited along `parent` and resolved when a
span is written, so that entering a span costs one get and one set. Tasks, `gather` and `asyncio.to_thread`
copy the context. A bare `threading.Thread` starts without one (before Python 3.14): hand it a `carrier()`
and `attach` it there.

A scope is entered once, as in OpenTelemetry. Leaving it puts its parent back. The token of `ContextVar.set`
would do so too, but keeping it would give the garbage collector one more object for each open scope.
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
    """An awaitable that is complete at once."""

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
    """The log of a span, or None in other scopes."""

    if TYPE_CHECKING:
        entered: bool
        """True once the scope was entered. A span derives this from its start."""
        parent: Scope | None
        resolved: Inherited | None
        turns: Iterator[int] | None
        """Counter of the turns without a given index, if the scope is a trajectory."""
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
        """Leave the scopes of the running task, but go on: the span ends later, with the call's result, in
        any task.
        """
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
        """Record that this scope was entered before. Its second block runs untimed."""
        name = getattr(self, "stage", "place")
        fix = "write span(...), trajectory(...), turn(...) or attach(...) in each `with`"
        error = CaptureError(f"{name!r} is entered a second time, and is one stretch of work. Fix: {fix}")
        failures.note(f"the second `with` of {name!r}", error)
        return self

    def _leave(self, error: BaseException | None) -> None:
        """Leave this scope and the scopes inside it, if the running task or thread is in this scope."""
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
        """Record the end of a span; do nothing for other scopes."""

    def _ended_elsewhere(self, error: BaseException | None) -> None:
        """Record the end of a span whose task or thread is not the running one, without leaving scopes."""

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
            end_ns: The end, on the same clock.
        """

    def reference(self) -> SpanLink | None:
        """Return the recorded span of this scope as a link for other processes and steps, or None if there is
        none.
        """
        return None

    def run_of_reference(self) -> str | None:
        """Return the id of the run that the span in `reference` belongs to, or None if it is not known."""
        return None

    def traceparent(self) -> str | None:
        """Return the W3C trace context of the span in `reference`, or of another tracer's span; None if there
        is neither.
        """
        return None

    def hang_below(self, place: Place, process: str) -> bool:
        """Make this a child of the caller's span if its body attached the caller's carrier. Return whether it
        is one.
        """
        return False


class Placing(TypedDict, total=False):
    """The fields of a scope that state its place, as keyword arguments."""

    step: int | None
    policy_version: int | None
    trajectory: str | None
    turn: int | None


class UncapturedTurn(Scope):
    """A turn outside of captures. If a capture opens during the turn, its spans still get the turn.

    Like `Span` it has no `__init__`: `api.turn` sets its fields.
    """

    __slots__ = ("entered", "parent", "policy_version", "resolved", "turn")


class UncapturedTrajectory(Scope):
    """A trajectory outside of captures, like `UncapturedTurn`. `api.trajectory` makes it."""

    __slots__ = ("entered", "parent", "policy_version", "resolved", "step", "trajectory", "turns")


class Place(Scope):
    """A scope that states a place but is not recorded itself, such as an attached carrier."""

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
        """Return a copy of the place without its parent scope, so that spans are in no reference cycle."""
        return Place(link=self.link, context=self.context, trajectory=self.trajectory, turn=self.turn)

    def equals(self, other: Place) -> bool:
        """Return True if both places came from carriers of the same caller."""
        own = (self.link, self.context, self.trajectory, self.turn)
        return own == (other.link, other.context, other.trajectory, other.turn)


NOWHERE = Place()
"""Stands for the caller of a span whose body attached carriers of several callers."""

Inherited: TypeAlias = "tuple[str | None, int | None, int | None, str | None, int | None]"
"""Role, step, policy version, trajectory and turn of a scope, those of the scopes above it included.

A plain tuple, because the garbage collector looks at one once and never again.
"""

_NOTHING: Inherited = (None, None, None, None, None)


def inherited(scope: Scope | None) -> Inherited:
    """Return the inherited fields of `scope`, and cache them there, so that a child only looks at its
    parent.
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
    """Return what `inherited` does when no scope above has a cache yet. The chain may be long, so this is a
    loop.
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
        # A turn belongs to its trajectory: another trajectory does not inherit it.
        trajectory, turn = bounded(scope.trajectory), None
    if scope.turn is not None:
        turn = scope.turn
    return role, step, policy_version, trajectory, turn


class Mark:
    """A position in the scopes of a task or thread, to return to.

    Python looks for signals before the first line of `__exit__`. If a handler raises there, the scope stays
    entered. Returning to an earlier mark leaves such a scope.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self) -> None:
        self._scope = _current()
        self._token: Token[Scope | None] | None = _enter(self._scope)

    def leave_inner(self) -> None:
        """Leave the scopes that this task or thread entered inside the marked one since the mark."""
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
    """Return the role that applies at `scope`, or None if no scope sets one."""
    role, *_ = inherited(scope)
    return role


def trajectory_at(scope: Scope | None) -> str | None:
    """Return the trajectory that `scope` is part of, or None."""
    return inherited(scope)[3]


def next_turn() -> int | None:
    """Return the next turn number, from 0, of the trajectory that the running task is in; None outside of
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
    """Shared replacement for a span that is not recorded. It does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


OFF = _Off()
"""Shared span used without a capture, and for calls whose span could not be opened."""
