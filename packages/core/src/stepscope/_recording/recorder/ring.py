"""A ring buffer with the spans of the last steps of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from stepscope._recording.spans.maker import SpanMaker, not_kept
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.trace_context import SpanIds

SPAN_BYTES = 400
"""Memory of one span without attributes, rounded up."""
_TRIES = 10
"""Largest number of attempts to copy the ring. An attempt fails if a span opens meanwhile."""


class Copied(NamedTuple):
    """The spans of a ring, copied at one moment."""

    spans: list[Span]
    """The spans in the order of opening, which is almost the order of their starts."""
    since_ns: int
    """All spans that began after this time are in `spans`."""


class Ring(SpanMaker):
    """The latest spans of this process, as objects. When the ring is full, the oldest span is dropped."""

    def __init__(
        self, *, process: ProcessInfo, run_id: str, memory_mb: int, redact: tuple[str, ...] = ()
    ) -> None:
        limit = max(1, (memory_mb << 20) // SPAN_BYTES)
        self._spans: deque[Span] = deque(maxlen=limit)
        self._long: list[Span] = []
        """Spans that were still running when other spans of their step were dropped. Used only by the
        recorder's thread."""
        self._dropped_ns = 0
        """Spans that ended before this time were dropped. One writer: the recorder's thread."""
        super().__init__(process=process, run_id=run_id, step=None, opened=self._spans.append, redact=redact)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def last_id(self) -> int:
        """Number of the span that opened last, or 0 if the ring is empty."""
        try:
            return self._spans[-1].id
        except IndexError:
            return 0

    def take(self, running: Iterable[Span]) -> None:
        """Add the spans of a capture that are still running at its end."""
        spans = list(running)
        self.taken.update(spans)
        self._spans.extend(spans)
        try:
            self._forget_taken(self._spans[0].start_ns)
        except IndexError:  # the recorder's thread has emptied the ring
            pass

    def _forget_taken(self, before_ns: int) -> None:
        for span in [span for span in list(self.taken) if _ended_before(span, before_ns)]:
            self.taken.discard(span)

    def begin_step(self, step: int) -> None:
        """Set the step for carriers and trace contexts."""
        self.step = step
        self.trace = SpanIds(self.run_id, step, self.process.key)

    def copy(self) -> Copied:
        """Return a copy of the ring.

        Raises:
            RuntimeError: a span opened during every attempt.
        """
        for _ in range(_TRIES):
            dropped_ns = self._dropped_ns
            try:
                spans = list(self._spans)
            except ours(RuntimeError):  # the deque changed during the copy
                continue
            first_ns = spans[0].start_ns if len(spans) == self._spans.maxlen else 0
            return Copied([*self._long, *spans], max(dropped_ns, first_ns))
        raise RuntimeError("spans opened faster than the flight recorder could copy them")

    def since(self, span_id: int) -> list[Span]:
        """Return the spans that opened after the span with the number `span_id`, the last first."""
        for _ in range(_TRIES):
            try:
                return list(takewhile(lambda span: span.id > span_id, reversed(self._spans)))
            except ours(RuntimeError):
                continue
        return []

    def open_spans(self) -> list[Span]:
        return [span for span in self.copy().spans if span.end_ns is None]

    def drop_before(self, start_ns: int) -> None:
        """Drop the spans that ended before `start_ns`."""
        self._long = [span for span in self._long if not _ended_before(span, start_ns)]
        self._dropped_ns = max(self._dropped_ns, start_ns)
        try:
            while self._spans[0].start_ns < start_ns:
                span = self._spans.popleft()
                if not _ended_before(span, start_ns):
                    self._long.append(span)
        except IndexError:
            pass
        self._forget_taken(start_ns)

    def close(self) -> None:
        """Release all spans."""
        self.opened = not_kept
        self._spans.clear()
        self._long.clear()
        self.taken.clear()


def _ended_before(span: Span, start_ns: int) -> bool:
    return span.end_ns is not None and span.end_ns < start_ns
