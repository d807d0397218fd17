"""Where the running code stands: the innermost span, trajectory and turn of this task; carriers of that.

One ContextVar holds the innermost scope; everything else is inherited along `parent`, resolved when a span is
written, so that entering a span costs one get and one set. Tasks, `gather` and `asyncio.to_thread` copy the
context; a bare `threading.Thread` starts without one (before Python 3.14): hand it a `carrier()` and `attach`
it there.

One file above 400 lines: scopes, and what reads and moves them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from stepscope.files.values import MAX_TEXT, AttrValue, settled, whole
from stepscope.recording.spans import slot

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # typing.Self is 3.11+

    from stepscope.files.spans import SpanLink

current: ContextVar[Scope | None] = ContextVar("stepscope_scope", default=None)

SHARED = cast("Token[Scope | None]", object())
"""In the place of a scope's token: it has copies, and which of them is left is decided when it is."""


class Scope:
    """One level of context. What it leaves None is inherited. The fields are those of its kinds."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None

    if TYPE_CHECKING:
        parent: Scope | None
        said: Inherited | None
        token: Token[Scope | None] | None
        """How to leave it; None before it is entered and once it is left, SHARED when entered again."""
        origin: Scope
        """Only of copies (`_again`): whose."""
    else:
        __slots__ = ()

    def __enter__(self) -> Self:
        if self.token is not None:
            return self._again()
        self.said = None
        self.parent = current.get()
        self.token = current.set(self)
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
            current.reset(token)
        except ValueError:
            pass  # closed by another task or thread (an async generator finalised by the loop)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _again(self) -> Self:
        """Enters a copy: an object that is entered more than once stands for a scope each time."""
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
        """Leaves the innermost that this task or thread is in of this object and its copies, if any."""
        scope = self._entered()
        if scope is self:
            self.token = None
            current.set(self.parent)
            self._ended(error)
        elif scope is not None:
            scope.__exit__(kind, error, trace)

    def _entered(self) -> Scope | None:
        scope = current.get()
        for _ in range(_DEEPEST):
            if scope is None or scope is self or getattr(scope, "origin", None) is self:
                break
            scope = scope.parent
        return scope

    def _ended(self, error: BaseException | None) -> None:
        """What there is to say at the end of it."""

    def set(self, **attrs: AttrValue) -> None:
        """Adds attributes to the span. Without a capture there is no span and this does nothing."""

    def add(
        self,
        stage: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> None:
        """Adds a span below this one that is over: what somebody else has timed (an engine, a service).

        Args:
            start_ns, end_ns: Of this host's CLOCK_MONOTONIC, as `time.monotonic_ns()`.

        Without a capture there is no span and this does nothing.
        """

    def reference(self) -> SpanLink | None:
        """The recorded span that this scope stands for, named for other processes and steps."""
        return None

    def awaits_place(self, process: str) -> bool:
        """Whether this is a running span that this very task or thread entered, that says nothing of its own
        place, and whose process is not `process` (its key, or the end of it: host and pid).
        """
        return False


class Place(Scope):
    """A scope that says something and records nothing: an attached carrier, an uncaptured trajectory."""

    __slots__ = (
        "link", "origin", "parent", "policy_version", "process", "said", "step", "token", "trajectory",
        "turn",
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
    ) -> None:
        """Args: process: Of a carrier: where it was made."""
        self.said = self.parent = self.token = None
        self.step = step
        self.policy_version = policy_version
        self.trajectory = trajectory
        self.turn = turn
        self.link = link
        self.process = process

    def reference(self) -> SpanLink | None:
        return self.link

    def _copy(self) -> Scope:
        return type(self)(
            step=self.step,
            policy_version=self.policy_version,
            trajectory=self.trajectory,
            turn=self.turn,
            link=self.link,
            process=self.process,
        )


_DEEPEST = 10_000
"""Levels of scopes that are looked at: no loop of ours is endless."""


class Caller(Place):
    """Who called the method that a top span times: put above that span once the method has attached it."""

    __slots__ = ()

    def says(self, place: Place) -> bool:
        return (self.link, self.trajectory, self.turn) == (place.link, place.trajectory, place.turn)

    def forget(self) -> None:
        self.link = self.step = self.policy_version = self.trajectory = self.turn = None


class Attached(Place):
    """A carrier's place. A decorated method begins its span before its body attaches the carrier: if that
    span is a top one it hangs below the carrier's too, and what is attached below it.
    """

    __slots__ = ("_caller",)

    _caller: Caller | None

    def __enter__(self) -> Self:
        if self.token is not None:
            return self._again()
        super().__enter__()
        self._caller = None
        top = self.parent
        for _ in range(_DEEPEST):
            if top is None or isinstance(top, Attached) or top.parent is None:
                break
            top = top.parent
        if isinstance(top, Caller):
            if top.says(self):
                self._caller = top
            else:
                top.forget()  # one call that works for several callers hangs below none of them
            self._forget_said()
        elif top is not None and self.process is not None and top.awaits_place(self.process):
            self._caller = top.parent = Caller(
                step=self.step,
                policy_version=self.policy_version,
                trajectory=self.trajectory,
                turn=self.turn,
                link=self.link,
            )
            self._forget_said()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._forget_said()  # once more: the writing thread may have been in the middle of a line
        super().__exit__(kind, error, trace)

    def reference(self) -> SpanLink | None:
        # Below the method's own span, as long as that one hangs below the caller's.
        return None if self._caller is not None and self._caller.link is not None else self.link

    def _forget_said(self) -> None:
        """An `open` line may have been written already: the line of the end says the new place."""
        scope: Scope | None = self
        for _ in range(_DEEPEST):
            if scope is None:
                break
            scope.said = None
            scope = scope.parent


class Inherited(NamedTuple):
    """What a scope says or, where it says nothing, the nearest one above it."""

    role: str | None = None
    step: int | None = None
    policy_version: int | None = None
    trajectory: str | None = None
    turn: int | None = None


_NOTHING = Inherited()


def inherited(scope: Scope | None) -> Inherited:
    """What holds at `scope`. Remembered there, so that a child costs one look at its parent."""
    chain: list[Scope] = []
    while scope is not None and scope.said is None and len(chain) < _DEEPEST:
        chain.append(scope)
        scope = scope.parent
    said = _NOTHING if scope is None or scope.said is None else scope.said
    for inner in reversed(chain):
        # A turn belongs to the trajectory it stands in: another trajectory does not inherit it.
        turn = inner.turn if inner.turn is not None or inner.trajectory is not None else said.turn
        said = Inherited(
            said.role if inner.role is None else inner.role,
            said.step if inner.step is None else inner.step,
            said.policy_version if inner.policy_version is None else inner.policy_version,
            said.trajectory if inner.trajectory is None else inner.trajectory,
            turn,
        )
        inner.said = said
    return said


class Carrier(TypedDict, total=False):
    """A place in one process' spans, as JSON-able data: send it along, `attach` it on the other side."""

    process: str
    """That of `span`; where no span is recorded, the process that made this: `host_pid123`."""
    span: int
    captured: int
    """The captured step in whose files `span` stands."""
    step: int
    """The step that owns the work."""
    policy_version: int
    trajectory: str
    turn: int


def carrier() -> Carrier | None:
    """Where this code stands now, to be sent to another process or thread; None when nowhere."""
    here = current.get()
    if here is None:
        return None
    said = inherited(here)
    data = Carrier()
    link = link_of(here)
    step = said.step
    if link is not None:
        data["process"], data["span"] = link.process, link.span
        if link.step is not None:
            data["captured"] = link.step
            step = link.step if step is None else step
    if step is not None:
        data["step"] = step
    if said.policy_version is not None:
        data["policy_version"] = said.policy_version
    if said.trajectory is not None:
        data["trajectory"] = said.trajectory
    if said.turn is not None:
        data["turn"] = said.turn
    if data and link is None:
        data["process"] = f"{os.uname().nodename}_pid{os.getpid()}"
    return data or None


def attach(carried: Carrier | Mapping[str, object] | None) -> Scope:
    """A context manager (`with` and `async with`) under which spans hang below the carrier's span.

    None is allowed and changes nothing, so that a caller need not ask whether a capture is on. Unknown keys
    are ignored: the other side may be newer. Inside a method that `profile_step` times, the method's own span
    hangs below the carrier's span too, if nothing stands above it and the same task or thread attaches.
    """
    if carried is None:
        return Place()
    process, span, trajectory = carried.get("process"), _int(carried.get("span")), carried.get("trajectory")
    link = None
    process = process if isinstance(process, str) and len(process) <= MAX_TEXT else None
    if process is not None and span is not None:
        # A carrier names a span when a capture is on somewhere: who is recorded has loaded this already.
        from stepscope.files.spans import SpanLink

        link = SpanLink(process=process, span=span, step=_int(carried.get("captured")))
    kind = Place if process is None else Attached
    return kind(
        step=_int(carried.get("step")),
        policy_version=_int(carried.get("policy_version")),
        trajectory=trajectory if isinstance(trajectory, str) else None,
        turn=_int(carried.get("turn")),
        link=link,
        process=process,
    )


def link_of(scope: Scope | None) -> SpanLink | None:
    """The nearest recorded span at or above `scope`, named for other processes and other steps."""
    while scope is not None:
        link = scope.reference()
        if link is not None:
            return link
        scope = scope.parent
    return None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def trajectory(
    trajectory_id: str,
    /,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """One agent rollout: a span of stage `trajectory`, whose id all inside carries. Plain or async `with`.

    Args:
        trajectory_id: Unique within the run.
        step: The step that consumes it, if another than the one being captured (async RL).
        policy_version: Of the weights it was begun with.
        attrs: Further attributes of the span.

    Without a capture only the id is kept, so that a capture opened meanwhile still names what it sees.
    """
    session = slot.active
    step, policy_version = whole(step), whole(policy_version)
    if session is None:
        return Place(step=step, policy_version=policy_version, trajectory=str(trajectory_id))
    return session.placed_span(
        "trajectory",
        "agent_loop",
        attrs,
        step=step,
        policy_version=policy_version,
        trajectory=str(trajectory_id),
    )


def turn(index: int, *, attrs: Mapping[str, AttrValue] | None = None) -> Scope:
    """One model or tool call round inside a trajectory: a span of stage `turn`. Plain or async `with`."""
    session = slot.active
    if session is None:
        return Place(turn=whole(index))
    return session.placed_span("turn", "agent_loop", attrs, turn=whole(index))


def span(
    stage: str,
    *,
    role: str | None = None,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """A timed stretch of code, while a capture is on. Plain or async `with`; `.set(key=value)` adds to it.

    Args:
        stage: What is done.
        role: Who does it; the enclosing span's role, or the process', by default.
        step: The step that owns the work, if another than the one being captured.
        policy_version: Of the weights in use.
        attrs: str, int, float, bool or None values.
    """
    session = slot.active
    if session is None:
        return OFF
    if step is None and policy_version is None:
        return session.log.new(stage, role, settled(attrs) if attrs else None)
    return session.placed_span(stage, role, attrs, step=whole(step), policy_version=whole(policy_version))


class _Off(Scope):
    """What stands for a span where there is none: one shared object that does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


OFF = _Off()
"""Without a capture, and where a span could not be opened."""
