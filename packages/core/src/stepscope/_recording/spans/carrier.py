"""Carriers. A carrier is the place of the running code among spans. It is sent to another process or thread,
and attached there.

Threads of `loop.run_in_executor` inherit the place without a carrier (`keep_places`).
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
"""Attribute that marks a `run_in_executor` that `keep_places` has replaced. Later wrappers copy the
attribute."""
T = TypeVar("T")
_NOT_CONFIGURED = (
    "the spans of this process are not recorded: a carrier of another process' step is attached here, and "
    "this process is not configured. Fix: make it a worker of the capture, or call configure(...) here with "
    "the caller's save_path"
)


class Carrier(TypedDict, total=False):
    """A place among the spans of a process, as data that JSON can represent. Send it to another process, and
    `attach` it there.
    """

    process: str
    """`ProcessInfo.key` of the process of `span`. Without a span: the process that made the carrier, as its
    key or as `host_pid123`."""
    span: int
    captured: int
    """The captured step whose files contain `span`, or the step of the open capture if there is no span."""
    run: str
    """Id of the run of the captured step."""
    step: int
    """The step that the work belongs to."""
    policy_version: int
    trajectory: str
    turn: int
    traceparent: str
    """`span` in W3C trace context, for OpenTelemetry's propagators."""


def carrier() -> Carrier | None:
    """Return a carrier: the place of the running code among spans, to send to another process or thread.

    Outside of all spans, the carrier names only the running step. Return None if nothing is recorded.
    In the other process, pass the carrier to `attach`:

        reply = await replica.generate.remote(prompt, carried=carrier())  # the caller
        with attach(carried), span("generate"): ...  # in the method `generate`
    """
    scope = current.get()
    if scope is None:
        return _of_capture()
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


def _of_capture() -> Carrier | None:
    """Return a carrier without a span, for the step of the open capture or the running step of the flight
    recorder. None between steps.
    """
    active = slot.active
    if active is None or active.step is None:
        return None
    log = active.log
    return Carrier(process=log.process.key, run=log.run_id, captured=active.step, step=active.step)


def attach(carried: Carrier | Mapping[str, object] | None) -> Scope:
    """Return a context manager (`with` or `async with`) in which new spans are children of the carrier's
    span.

    None is accepted and has no effect, so that callers need not check whether a capture is open. Unknown keys
    are ignored, because the sender may have a newer version. A mapping with the `traceparent` of another
    tracer, such as the headers of a request, is a carrier too.

    A method that is decorated with `profile_step` may attach a carrier in its body. Then the method's own
    span becomes a child of the carrier's span too, if the method's span has no parent and was entered in the
    same task or thread.
    """
    if carried is None:
        return Place()
    process, span, trajectory = carried.get("process"), _int(carried.get("span")), carried.get("trajectory")
    link, captured = None, _int(carried.get("captured"))
    process = process if isinstance(process, str) and len(process) <= MAX_TEXT else None
    if process is not None and span is not None:
        # Imported here: a carrier has a span only during a capture, which imports this module anyway.
        from stepscope.files.spans import SpanLink

        link = SpanLink(process=process, span=span, step=captured)
    context = carried.get("traceparent")
    if not isinstance(context, str) or not (_is_ours(context, link) or _is_valid(context)):
        context = None
    elif process is None:
        process = context  # another tracer's span, so another process
    run_id = carried.get("run")
    run_id = run_id if isinstance(run_id, str) and len(run_id) <= MAX_TEXT else None
    kind = Place if process is None else functools.partial(Attached, process, run_id, captured)
    return kind(
        step=_int(carried.get("step")),
        policy_version=_int(carried.get("policy_version")),
        trajectory=trajectory if isinstance(trajectory, str) else None,
        turn=_int(carried.get("turn")),
        link=link,
        context=context,
    )


def keep_places() -> None:
    """Make functions that `loop.run_in_executor` calls inherit the place of the calling code.

    `asyncio.to_thread` copies the context, but `run_in_executor` does not, so spans of a tool in an executor
    would not belong to their trajectory.
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
    from concurrent.futures import ThreadPoolExecutor  # imported here: already imported in such a loop

    return executor is None or isinstance(executor, ThreadPoolExecutor)


def _run_at(scope: Scope, func: Callable[..., T], *args: Any) -> T:
    token = current.set(scope)
    try:
        return func(*args)
    finally:
        current.reset(token)


def _recorded(scope: Scope | None) -> tuple[SpanLink | None, str | None, str | None]:
    """Return (link, `traceparent`, run id) of the nearest recorded span at or above `scope`.

    The link is None for a span of another tracer, and each unknown value is None. All three are None if
    there is no recorded span.
    """
    while scope is not None:
        link, traceparent = scope.reference(), scope.traceparent()
        if link is not None or traceparent is not None:
            return link, traceparent, scope.run_of_reference()
        scope = scope.parent
    return None, None, None


def _is_ours(traceparent: str, link: SpanLink | None) -> bool:
    """Return whether `carrier` made `traceparent`. A validation, which takes 2 us, is then not needed."""
    return link is not None and len(traceparent) <= MAX_TEXT


def _is_valid(traceparent: str) -> bool:
    # Imported here: only carriers of other tracers need it.
    from stepscope.files.trace_context import parse_traceparent

    return parse_traceparent(traceparent) is not None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Attached(Place):
    """The scope of an attached carrier.

    The span of a decorated method begins before the method's body attaches the carrier. If that span has no
    parent, it becomes a child of the carrier's span (`Span.hang_below`), and spans within this scope become
    children of the method's span.

    In a process without a capture, spans below a carrier of a captured step are written into that step's
    folder (`slot.visit`).
    """

    __slots__ = ("_captured", "_method", "_process", "_run_id", "visit")

    def __init__(self, process: str, run_id: str | None, captured: int | None, **place: Any) -> None:
        super().__init__(**place)
        self._captured = captured
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
        except BaseException:  # raised by a signal handler; `with` will not leave this scope
            self._leave(None)
            raise

    def _begin_visit(self, run_id: str) -> None:
        if self._captured is None:
            return
        if slot.visit is None:
            if slot.active is None:
                failures.warn_once(_NOT_CONFIGURED)
            return
        try:
            self.visit = slot.visit(self._process, run_id, self._captured)
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
        """Return whether the method's span is a child of the carrier's span. Spans of this scope are then
        children of the method's span.
        """
        method = self._method
        return method is not None and method.caller is not NOWHERE and bool(self.link or self.context)
