"""`SpanMaker`: the part of a log that the recorded code calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from stepscope._recording.process import failures
from stepscope._recording.spans.scopes import OFF, Placing, Scope, current
from stepscope._recording.spans.span import Span, next_id, thread
from stepscope._recording.spans.wrapping import Declared
from stepscope.errors import is_users
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.trace_context import SpanIds
from stepscope.files.values import AttrValue

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Looked up once, because attribute access on `current` would make a span 5 % slower.
_current, _enter = current.get, current.set


class SpanObserver(Protocol):
    """An object that makes spans in place of a log, because the object needs each span. A profiler's windows
    are an example.
    """

    def new(
        self,
        log: SpanMaker,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        **place: Unpack[Placing],
    ) -> Span:
        """See `SpanMaker.new`."""
        ...

    def begin(
        self, log: SpanMaker, declared: Declared, attrs: Mapping[str, AttrValue] | None, first: bool
    ) -> Span:
        """See `SpanMaker.begin`."""
        ...


class SpanMaker:
    """Base of logs: makes the spans of one process."""

    step: int | None
    """The step of the spans, or None if unknown in this process."""

    def __init__(
        self,
        *,
        process: ProcessInfo,
        run_id: str,
        step: int | None,
        opened: Callable[[Span], None],
        redact: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            opened: Called with each span that opens. It must not block.
        """
        self.process = process
        self.run_id = run_id
        self.step = step
        self.redact = redact
        self.trace = SpanIds(run_id, step or 0, process.key)
        self.roles: set[str] = set()
        """Roles of all spans written so far. One writer: `lines.record_of`."""
        self.opened = opened
        self.taken: set[Span] = set()
        """Spans of another log, which were running when this log took them over."""
        self.observer: SpanObserver | None = None
        """The profiler's windows, so that the trace shows the spans too; None without a profiler. The sampler
        of event loops takes this place for a few spans at a time."""

    def open_spans(self) -> list[Span]:
        """Return the open spans, the oldest first."""
        return []

    def new(
        self,
        stage: str,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
    ) -> Span:
        """Return a new span. It can be entered once."""
        observer = self.observer  # read once, because another thread may replace the observer
        if observer is None:
            return Span(self, stage, role, attrs, step, policy_version, trajectory, turn)
        place = Placing(step=step, policy_version=policy_version, trajectory=trajectory, turn=turn)
        return observer.new(self, stage, role, attrs, **place)

    def begin(
        self,
        declared: Declared,
        attrs: Mapping[str, AttrValue] | None,
        resumption: int | None = None,
        first: bool = True,
    ) -> Scope:
        """Enter the span of a call of a decorated function and return it. In discrete mode, also open its
        window.

        This is `new` and `__enter__` in one function. An internal error is not raised into the user's code:
        OFF is returned, and the call is not recorded.

        Args:
            resumption: Index of a generator's resumption, or None for a call.
            first: True if this call, or this generator, is new to the capture.
        """
        span = None
        try:
            if resumption is not None:
                attrs = {**(attrs or {}), "resumption": resumption}
            observer = self.observer
            if observer is not None:
                return observer.begin(self, declared, attrs, first)
            parent = _current()
            span = Span(
                self,
                declared.stage,
                declared.role,
                attrs,
                parent=parent,
                thread=thread.id,
                id=next_id(),
                start_ns=monotonic_ns(),
            )
            token = _enter(span)
            if parent is None:
                span.token = token
            self.opened(span)
            return span
        except RecursionError:
            return OFF  # the call itself needs the remaining depth
        except BaseException as failure:
            if span is not None:
                span.not_entered(failure)
            if is_users(failure):
                raise
            failures.note(f"opening the span {declared.stage}", failure)
            return OFF


def not_kept(span: Span) -> None:
    """Do nothing. `opened` of a closed log is set to this function, so that spans do not keep the log alive.

    The garbage collector does not track spans, so it could not free a cycle of a log and its spans.
    """
