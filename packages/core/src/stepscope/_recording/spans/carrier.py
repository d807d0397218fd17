"""Carriers: the place of the running code, sent to another process or thread and attached there.

Threads of `loop.run_in_executor` get the place without a carrier (`keep_places`).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from stepscope._recording.process import failures
from stepscope._recording.spans import slot
from stepscope._recording.spans.scopes import NOWHERE, Place, Scope, current, inherited
from stepscope.errors import ours
from stepscope.files.values import MAX_TEXT

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self  # typing.Self is 3.11+

    from stepscope._recording.spans.span import Span
    from stepscope.files.spans import SpanLink


_KEEPS = "__stepscope_keeps_places__"
"""The attribute that marks a `run_in_executor` that `keep_places` replaced, and any wrapper of it made
since."""
T = TypeVar("T")
_NOT_CONFIGURED = (
    "the spans of this process are not recorded: a carrier of another process' step is attached here, and "
    "this process is not configured. Fix: make it a worker of the capture, or call configure(...) here with "
    "the caller's save_path"
)


class Carrier(TypedDict, total=False):
    """A place in one process' spans, as JSON-able data. Send it along and `attach` it on the other side."""

    process: str
    """`ProcessInfo.key` of the process of `span`. Without a recorded span, the process that made the carrier:
    `host_pid123`."""
    span: int
    captured: int
    """The captured step whose files hold `span`."""
    run: str
    """The run of that step."""
    step: int
    """The step that owns the work."""
    policy_version: int
    trajectory: str
    turn: int
    traceparent: str
    """`span` in W3C trace context, for OpenTelemetry's propagators."""


def carrier() -> Carrier | None:
    """Return a carrier of the running code's place, to be sent to another process or thread; None outside all
    scopes.
    """
    scope = current.get()
    if scope is None:
        return None
    _, step, policy_version, trajectory, turn = inherited(scope)
    data = Carrier()
    link, traceparent, run_id = _recorded(scope)
    if link is not None:
        data["process"], data["span"] = link.process, link.span
        if link.step is not None:
            data["captured"] = link.step
            step = link.step if step is None else step
            if run_id is not None:
                data["run"] = run_id
    if step is not None:
        data["step"] = step
    if policy_version is not None:
        data["policy_version"] = policy_version
    if trajectory is not None:
        data["trajectory"] = trajectory
    if turn is not None:
        data["turn"] = turn
    if data and link is None:
        data["process"] = f"{os.uname().nodename}_pid{os.getpid()}"
    if traceparent is not None:
        data["traceparent"] = traceparent
    return data or None


def attach(carried: Carrier | Mapping[str, object] | None) -> Scope:
    """Return a context manager (`with` and `async with`) in which new spans become children of the carrier's
    span.

    None is allowed and changes nothing, so that callers need not check whether a capture is on. Unknown keys
    are ignored: the other side may be newer. A mapping that holds another tracer's `traceparent` (the headers
    of a request, say) is a carrier too.

    A method that `profile_step` times may attach a carrier in its body. The method's own span then hangs
    below the carrier's span too, if it is a top span and the same task or thread attaches.
    """
    if carried is None:
        return Place()
    process, span, trajectory = carried.get("process"), _int(carried.get("span")), carried.get("trajectory")
    link = None
    process = process if isinstance(process, str) and len(process) <= MAX_TEXT else None
    if process is not None and span is not None:
        # For import time: a carrier names a span only during a capture, and recording loads this anyway.
        from stepscope.files.spans import SpanLink

        link = SpanLink(process=process, span=span, step=_int(carried.get("captured")))
    context = carried.get("traceparent")
    if not isinstance(context, str) or not (_is_ours(context, link) or _is_valid(context)):
        context = None
    elif process is None:
        process = context  # another tracer's, so another process than any of ours
    run_id = carried.get("run")
    run_id = run_id if isinstance(run_id, str) and len(run_id) <= MAX_TEXT else None
    kind = Place if process is None else functools.partial(Attached, process, run_id)
    return kind(
        step=_int(carried.get("step")),
        policy_version=_int(carried.get("policy_version")),
        trajectory=trajectory if isinstance(trajectory, str) else None,
        turn=_int(carried.get("turn")),
        link=link,
        context=context,
    )


def keep_places() -> None:
    """Make functions called by `loop.run_in_executor` inherit the place of the calling code during a capture.

    `asyncio.to_thread` copies the context, but `run_in_executor` does not: a tool that runs there would leave
    its trajectory.
    """
    loops = [
        getattr(sys.modules.get(module), name, None)
        for module, name in (("asyncio", "BaseEventLoop"), ("uvloop", "Loop"))
    ]
    for loop in loops:
        if loop is not None and not hasattr(loop.run_in_executor, _KEEPS):
            loop.run_in_executor = _keeping(loop.run_in_executor)


def _keeping(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_in_executor(loop: object, executor: object, func: Callable[..., Any], *args: Any) -> Any:
        scope = None if slot.active is None else current.get()
        if scope is None or not _is_of_threads(executor) or inspect.iscoroutinefunction(func):
            return run(loop, executor, func, *args)
        return run(loop, executor, _run_at, scope, func, *args)

    setattr(run_in_executor, _KEEPS, True)
    return run_in_executor


def _is_of_threads(executor: object) -> bool:
    from concurrent.futures import ThreadPoolExecutor  # for import time: a loop with executors has it

    return executor is None or isinstance(executor, ThreadPoolExecutor)


def _run_at(scope: Scope, func: Callable[..., T], *args: Any) -> T:
    token = current.set(scope)
    try:
        return func(*args)
    finally:
        current.reset(token)


def _recorded(scope: Scope | None) -> tuple[SpanLink | None, str | None, str | None]:
    """Return the nearest recorded span at or above `scope`: its link (None for another tracer's span), its
    `traceparent`, and the run of the link.
    """
    while scope is not None:
        link, traceparent = scope.reference(), scope.traceparent()
        if link is not None or traceparent is not None:
            return link, traceparent, scope.run_of_reference()
        scope = scope.parent
    return None, None, None


def _is_ours(traceparent: str, link: SpanLink | None) -> bool:
    """Return whether a `traceparent` was made by `carrier`; it is then passed on unchanged, because checking
    takes 2 us.
    """
    return link is not None and len(traceparent) <= MAX_TEXT


def _is_valid(traceparent: str) -> bool:
    # For import time: only another tracer's carrier comes here.
    from stepscope.files.trace_context import parse_traceparent

    return parse_traceparent(traceparent) is not None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Attached(Place):
    """The place of a carrier.

    A decorated method begins its span before its body attaches the carrier. If that span is a top span, it
    becomes a child of the carrier's span (`Span.hang_below`), and spans recorded in the attached place become
    children of the method's span.

    In a process that no capture records, the spans below a carrier of a captured step are written into the
    folder of that step (`slot.visit`).
    """

    __slots__ = ("_method", "_process", "_run_id", "visit")

    def __init__(self, process: str, run_id: str | None, **place: Any) -> None:
        super().__init__(**place)
        self._process = process
        self._run_id = run_id
        self._method: Span | None = None
        self.visit: slot.Visit | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            if self.parent is not None and self.parent.hang_below(self, self._process):
                self._method = cast("Span", self.parent)
            if self._run_id is not None and slot.session() is None:
                self._begin_visit(self._run_id)
            return self
        except BaseException:  # of a signal's handler: nobody leaves what was not entered
            self._leave(None)
            raise

    def _begin_visit(self, run_id: str) -> None:
        link = self.link
        if link is None or link.step is None:
            return
        if slot.visit is None:
            if slot.active is None:
                failures.warn_once(_NOT_CONFIGURED)
            return
        try:
            self.visit = slot.visit(self._process, run_id, link.step)
        except ours() as error:
            failures.note("recording work for another process' step", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self.visit is not None:
            self.visit.left()

    def reference(self) -> SpanLink | None:
        return None if self._hangs_method() else self.link

    def run_of_reference(self) -> str | None:
        return self._run_id

    def traceparent(self) -> str | None:
        return None if self._hangs_method() else self.context

    def _hangs_method(self) -> bool:
        """Return whether the method's span is a child of the carrier's span, and spans of the attached place
        are its children.
        """
        method = self._method
        return method is not None and method.caller is not NOWHERE and bool(self.link or self.context)
