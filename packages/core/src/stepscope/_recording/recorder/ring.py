"""The spans of the last steps of this process: a ring in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from stepscope._recording.spans.maker import SpanMaker, not_kept
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.trace_context import SpanIds

SPAN_BYTES = 400
"""Memory of a span without attributes, including its numbers and its place in the ring, rounded up."""
_TRIES = 10
"""Number of attempts to copy a busy ring: an attempt fails if a span opens meanwhile."""


class Copied(NamedTuple):
    """The spans of a ring, copied at one moment."""

    spans: list[Span]
    """The spans in the order of opening, which is nearly the order of their starts."""
    since_ns: int
    """Every span that began after this time, up to the moment of the copy, is in `spans`."""


class Ring(SpanMaker):
    """The latest spans of this process, as live objects. The oldest are dropped when there are too many."""

    def __init__(
        self, *, process: ProcessInfo, run_id: str, memory_mb: int, redact: tuple[str, ...] = ()
    ) -> None:
        limit = max(1, (memory_mb << 20) // SPAN_BYTES)
        self._spans: deque[Span] = deque(maxlen=limit)
        self._long: list[Span] = []
        """Spans that were still running when the spans of their step were dropped. Only the recorder's thread
        uses this list."""
        self._dropped_ns = 0
        """Time before which spans were dropped with their steps. One writer: the recorder's thread."""
        super().__init__(process=process, run_id=run_id, step=None, opened=self._spans.append, redact=redact)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def last_id(self) -> int:
        """The number of the span that opened last; 0 before the first."""
        try:
            return self.number(self._spans[-1])
        except IndexError:
            return 0

    def number(self, span: Span) -> int:
        """Return the number of a span in this log's files."""
        return span.id if span.log is self else self.taken.get(span, 0)

    def take(self, running: Iterable[Span]) -> None:
        """Also keep the spans of a capture that run when it ends."""
        for span in running:
            self.taken[span] = next(self.ids)
            self._spans.append(span)
        try:
            self._forget_taken(self._spans[0].start_ns)
        except IndexError:  # the recorder's thread has dropped them all meanwhile
            pass

    def _forget_taken(self, before_ns: int) -> None:
        for span in [span for span in list(self.taken) if _ended_before(span, before_ns)]:
            self.taken.pop(span, None)

    def begin_step(self, step: int) -> None:
        """Make carriers and trace contexts name this step from now on."""
        self.step = step
        self.trace = SpanIds(self.run_id, step, self.process.key)

    def copy(self) -> Copied:
        """Return the spans in the ring at this moment.

        Raises:
            RuntimeError: spans opened during every attempt.
        """
        for _ in range(_TRIES):
            dropped_ns = self._dropped_ns
            try:
                spans = list(self._spans)
            except ours(RuntimeError):  # the collector ran, and a span opened meanwhile
                continue
            first_ns = spans[0].start_ns if len(spans) == self._spans.maxlen else 0
            return Copied([*self._long, *spans], max(dropped_ns, first_ns))
        raise RuntimeError("spans opened faster than the flight recorder could copy them")

    def since(self, span_id: int) -> list[Span]:
        """Return the spans that opened after the one with this number, the last first."""
        for _ in range(_TRIES):
            try:
                return list(islice(reversed(self._spans), max(0, self.last_id - span_id)))
            except ours(RuntimeError):
                continue
        return []

    def open_spans(self) -> list[Span]:
        return [span for span in self.copy().spans if span.end_ns is None]

    def drop_before(self, start_ns: int) -> None:
        """Drop the spans that ended before `start_ns`. Spans that began later, or still run, stay."""
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
