"""Lines of the span file, one for each span."""

from __future__ import annotations

import msgspec

from stepscope.files import spans as records
from stepscope.files.spans import SpanLink
from stepscope.files.values import MAX_TEXT, attr_value, bounded
from stepscope.recording.spans import redaction, scopes
from stepscope.recording.spans.span import Span

_encode = msgspec.json.Encoder().encode


def encoded(record: records.Header | records.Open | records.Span | records.End) -> bytes:
    """Return `record` as a line."""
    return _encode(record) + b"\n"


def span_line(span: Span, end_ns: int | None, step: int | None = None) -> bytes:
    """Return the line of a span: an `open` one while it runs, a `span` one when it is over.

    Args:
        step: The step of the file. None: that of the span's log.
    """
    step = span.log.step if step is None else step
    try:
        return _encode(_record(span, end_ns, step)) + b"\n"
    except Exception:
        # The values are the user's: an int beyond 64 bits, a lone surrogate, a role that is no text. The span
        # is kept, and they are written as text.
        span.attrs = {_ascii(key): _ascii(attr_value(value)) for key, value in (span.attrs or {}).items()}
        span.stage = _ascii(span.stage)
        span.role = None if span.role is None else _ascii(span.role)
        return _encode(_record(span, end_ns, step)) + b"\n"


def _ascii(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text)[1:-1][:MAX_TEXT]


def _record(span: Span, end_ns: int | None, file_step: int | None) -> records.Open | records.Span:
    log, place = span.log, scopes.inherited(span)
    parent, link, traceparent = above(span)
    step = None if place.step == file_step else place.step
    role, stage = bounded(str(place.role or log.process.role)), bounded(str(span.stage))
    trajectory = place.trajectory if place.trajectory is None else bounded(place.trajectory)
    log.roles.add(role)
    attrs = redaction.written(span.attrs, log.redact) if span.attrs else None
    # Two calls, spelled out: building the second from the first would double the cost of a line.
    if end_ns is None:
        return records.Open(
            span=span.id,
            parent=parent,
            link=link,
            traceparent=traceparent,
            role=role,
            stage=stage,
            start_ns=span.start_ns,
            step=step,
            policy_version=place.policy_version,
            trajectory=trajectory,
            turn=place.turn,
            thread=span.thread,
            attrs=attrs,
        )
    return records.Span(
        span=span.id,
        parent=parent,
        link=link,
        traceparent=traceparent,
        role=role,
        stage=stage,
        start_ns=span.start_ns,
        step=step,
        policy_version=place.policy_version,
        trajectory=trajectory,
        turn=place.turn,
        thread=span.thread,
        attrs=attrs,
        dur_ns=end_ns - span.start_ns,
        error=redaction.error_of(span.error, log.redact),
    )


def above(span: Span) -> tuple[int | None, SpanLink | None, str | None]:
    """Return the parent: its id in this file, a link to a span elsewhere, or a foreign `traceparent`."""
    scope = span.parent
    while scope is not None:
        if isinstance(scope, Span) and scope.log is span.log:
            return scope.id, None, None
        link = scope.reference()
        if link is not None:
            return None, link, None
        traceparent = scope.traceparent()
        if traceparent is not None:
            return None, None, traceparent
        scope = scope.parent
    return None, None, None
