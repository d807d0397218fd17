"""Scopes: the innermost span, trajectory and turn of the running task.

One ContextVar holds the innermost scope. Everything else is inherited along `parent` and resolved when a
span is written, so that entering a span costs one get and one set. Tasks, `gather` and `asyncio.to_thread`
copy the context. A bare `threading.Thread` starts without one (before Python 3.14): hand it a `carrier()`
and `attach` it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from stepscope.files.values import AttrValue

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # typing.Self is 3.11+

    from stepscope.files.spans import SpanLink

current: ContextVar[Scope | None] = ContextVar("stepscope_scope", default=None)

SHARED = cast("Token[Scope | None]", object())
"""Token of a scope that has copies: leaving it leaves the innermost copy."""
# Looked up once: agent loops enter a scope for each turn, captured or not.
_current, _enter, _leave = current.get, current.set, current.reset
MAX_DEPTH = 10_000
"""Levels of scopes that are visited, so that no loop is endless."""


class Scope:
    """One level of context. A field that is None is inherited from `parent`."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None

    if TYPE_CHECKING:
        parent: Scope | None
        resolved: Inherited | None
        token: Token[Scope | None] | None
        """Leaves the scope; None before it is entered and once it is left, SHARED when entered again."""
        turns: Iterator[int] | None
        """Numbers of its turns that are counted, if it is a trajectory."""
        origin: Scope
        """The scope that this is a copy of (`_again`); unset in others."""
    else:
        __slots__ = ()

    def __enter__(self) -> Self:
        if self.token is not None:
            return self._again()
        self.resolved = None
        self.parent = _current()
        self.token = _enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token = self.token
        if token is None or token is SHARED:
            self._end_again(kind, error, trace)
            return
        self.token = None
        try:
            _leave(token)
        except ValueError:
            pass  # closed by another task or thread (an async generator finalised by the loop)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _again(self) -> Self:
        """Enter a copy, because each entry of the same object is a scope of its own."""
        copy = self._copy()
        copy.origin = self
        if self.token is not None:
            self.token = SHARED
        return cast("Self", copy.__enter__())

    def _copy(self) -> Scope:
        return Place()

    def _end_again(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the innermost scope among this one and its copies that this task or thread is in, if any."""
        scope = self._entered()
        if scope is self:
            self.token = None
            current.set(self.parent)
            self._ended(error)
        elif scope is not None:
            scope.__exit__(kind, error, trace)

    def _entered(self) -> Scope | None:
        scope = current.get()
        for _ in range(MAX_DEPTH):
            if scope is None or scope is self or getattr(scope, "origin", None) is self:
                break
            scope = scope.parent
        return scope

    def _ended(self, error: BaseException | None) -> None:
        """Record the end of a scope that was entered more than once."""

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

    def awaits_place(self, process: str) -> bool:
        """Return whether a carrier from `process` may become the parent of this scope.

        True for a running top span without a place of its own, entered by this task or thread. Its process is
        not `process` (a key, or the end of one: host and pid).
        """
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

    __slots__ = ("origin", "parent", "resolved", "token", "turn")

    def _copy(self) -> Scope:
        return Place(turn=self.turn)


class UncapturedTrajectory(Scope):
    """A trajectory that nobody records, as `UncapturedTurn`. `api.trajectory` makes it."""

    __slots__ = ("origin", "parent", "policy_version", "resolved", "step", "token", "trajectory", "turns")

    def _copy(self) -> Scope:
        return Place(step=self.step, policy_version=self.policy_version, trajectory=self.trajectory)


class Place(Scope):
    """A scope with a place that records nothing: an attached carrier, for example."""

    __slots__ = (
        "context", "link", "origin", "parent", "policy_version", "process", "resolved", "step", "token",
        "trajectory", "turn", "turns",
    )  # fmt: skip

    def __init__(
        self,
        *,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
        link: SpanLink | None = None,
        process: str | None = None,
        context: str | None = None,
    ) -> None:
        """Args:
        process: The process that made the carrier.
        context: The `traceparent` of the carrier.
        """
        self.resolved = self.parent = self.token = self.turns = None
        self.step = step
        self.policy_version = policy_version
        self.trajectory = trajectory
        self.turn = turn
        self.link = link
        self.process = process
        self.context = context

    def reference(self) -> SpanLink | None:
        return self.link

    def traceparent(self) -> str | None:
        return self.context

    def _copy(self) -> Scope:
        return type(self)(
            step=self.step,
            policy_version=self.policy_version,
            trajectory=self.trajectory,
            turn=self.turn,
            link=self.link,
            process=self.process,
            context=self.context,
        )


class Inherited(NamedTuple):
    """The fields of a scope, with those it leaves None taken from the nearest scope above that has them."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None


_NOTHING = Inherited()


def inherited(scope: Scope | None) -> Inherited:
    """Return the fields that hold at `scope`, and keep them there: a child then looks at its parent alone."""
    chain: list[Scope] = []
    while scope is not None and scope.resolved is None and len(chain) < MAX_DEPTH:
        chain.append(scope)
        scope = scope.parent
    fields = _NOTHING if scope is None or scope.resolved is None else scope.resolved
    for inner in reversed(chain):
        # A turn belongs to its trajectory: another trajectory does not inherit it.
        turn = inner.turn if inner.turn is not None or inner.trajectory is not None else fields.turn
        fields = Inherited(
            fields.role if inner.role is None else inner.role,
            fields.step if inner.step is None else inner.step,
            fields.policy_version if inner.policy_version is None else inner.policy_version,
            fields.trajectory if inner.trajectory is None else inner.trajectory,
            turn,
        )
        inner.resolved = fields
    return fields


def next_turn() -> int | None:
    """Count a turn of the trajectory that the running task is in, from 0. None outside of trajectories."""
    scope = current.get()
    for _ in range(MAX_DEPTH):
        if scope is None or scope.trajectory is not None:
            break
        scope = scope.parent
    if scope is None or scope.trajectory is None:
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
