"""Maker of spans: the part of a log that the recorded code calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from stepscope._recording.process import failures
from stepscope._recording.spans.scopes import OFF, Placing, Scope, current
from stepscope._recording.spans.span import Span, thread
from stepscope._recording.spans.wrapping import Declared
from stepscope.errors import is_users
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.trace_context import SpanIds
from stepscope.files.values import AttrValue

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Looked up once: a span that goes through `current` for each of them takes a twentieth longer.
_current, _enter = current.get, current.set


class SpanObserver(Protocol):
    """Makes the spans in place of a log, while something else needs to see each span, such as a profiler's
    windows.
    """

    def new(
        self,
        log: SpanMaker,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        **place: Unpack[Placing],
    ) -> Span:
        """As `SpanMaker.new`."""
        ...

    def begin(
        self, log: SpanMaker, declared: Declared, attrs: Mapping[str, AttrValue] | None, first: bool
    ) -> Span:
        """As `SpanMaker.begin`."""
        ...


class SpanMaker:
    """Maker of the spans of one process."""

    step: int | None
    """The step that the spans belong to, or None if this process does not know the step."""

    def __init__(
        self,
        *,
        process: ProcessInfo,
        run_id: str,
        step: int | None,
        opened: Callable[[Span], None],
        redact: tuple[str, ...] = (),
    ) -> None:
        """Args:
        opened: Called by a span when it opens. It must not block.
        """
        self.process = process
        self.run_id = run_id
        self.step = step
        self.redact = redact
        self.ids: Iterator[int] = itertools.count(1)
        self.trace = SpanIds(run_id, step or 0, process.key)
        self.roles: set[str] = set()
        """The roles of all spans written so far. Only `lines.record_of` adds to them."""
        self.opened = opened
        self.taken: dict[Span, int] = {}
        """{span: its number in this log's file}, for the spans that another log began and that were running
        when they were handed over."""
        self.observer: SpanObserver | None = None
        """The profiler's windows, if a profiler records this process, so that its trace shows the spans too.
        The sampler of counters takes this place for a few spans at a time."""

    def open_spans(self) -> list[Span]:
        """Return the known spans that have not ended, the oldest first."""
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
        """Return a span to enter once."""
        observer = self.observer  # another thread may put another one in its place
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
        """Open the span of a call of a decorated function, and return it. In discrete mode, open its window.

        This method is `new` and `__enter__` in one frame, and keeps internal failures away from the user's
        code: it then returns OFF, and the call is not timed.

        Args:
            resumption: The index of the generator's resumption; None for a call.
            first: True if the capture has not seen this call or generator before.
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
                id=next(self.ids),
                start_ns=monotonic_ns(),
            )
            token = _enter(span)
            if parent is None:
                span.token = token
            self.opened(span)
            return span
        except RecursionError:
            return OFF  # near the limit of the user's recursion: the depth that is left is for the call
        except BaseException as failure:
            if span is not None:
                span.not_entered(failure)
            if is_users(failure):
                raise
            failures.note(f"opening the span {declared.stage}", failure)
            return OFF


def not_kept(span: Span) -> None:
    """Replace `opened` once a log is closed, so that spans that are still referenced do not keep the log
    alive.

    The garbage collector does not see spans, so it could not free the log.
    """
