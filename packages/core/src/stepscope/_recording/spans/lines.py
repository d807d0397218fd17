"""Lines of the span file, one for each span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec

from stepscope._recording.process import failures
from stepscope._recording.spans import redaction, scopes
from stepscope._recording.spans.span import Span, SpanSink
from stepscope.errors import ours
from stepscope.files import spans as records
from stepscope.files.spans import SpanLink
from stepscope.files.values import MAX_TEXT, attr_value, bounded

Record: TypeAlias = records.Open | records.Span

_encoder = msgspec.json.Encoder()


def encoded(record: records.Header | records.End) -> bytes:
    """Encode a header or an end as a line."""
    return _encoder.encode(record) + b"\n"


def encoded_spans(batch: Sequence[Record]) -> tuple[bytes, int]:
    """Encode spans as lines. Return (lines, number of finished spans that could not be encoded).

    All spans are encoded in one call, because separate calls take twice as long.
    """
    try:
        return _encoder.encode_lines(batch), 0
    except ours():  # a value is not valid in JSON
        lines, lost = [], 0
        for record in batch:
            try:
                lines.append(_line(record))
            except ours() as error:  # only this span is lost, not the batch
                lost += isinstance(record, records.Span)
                failures.note("encoding a span", error)
        return b"".join(lines), lost


def _line(record: Record) -> bytes:
    try:
        return _encoder.encode(record) + b"\n"
    except ours():
        # Values of the user may be an int beyond 64 bits, a lone surrogate, or a role that is not text. They
        # are written as text.
        attrs = {_ascii(key): _ascii(attr_value(value)) for key, value in (record.attrs or {}).items()}
        stage, role = _ascii(record.stage), _ascii(record.role)
        return _encoder.encode(msgspec.structs.replace(record, attrs=attrs, stage=stage, role=role)) + b"\n"


def _ascii(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text)[1:-1][:MAX_TEXT]


def record_of(span: Span, end_ns: int | None, file_step: int | None, log: SpanSink) -> Record:
    """Return the record of a span: `Span`, or `Open` if `end_ns` is None.

    Args:
        file_step: The step of the file.
        log: The log that writes the file: the span's log, or a log that has taken the span over.
    """
    above = span.parent
    link = traceparent = None
    if above is not None and above.log is log:
        parent: int | None = cast(Span, above).id
    else:
        parent, link, traceparent = parent_of(span, log)
    if span.caller is not None:
        span.resolved = None  # an earlier line may have cached values without the caller
    role, step, policy_version, trajectory, turn = scopes.inherited(span)
    if step == file_step:
        step = None
    role, stage = role or log.process.role, span.stage
    if type(role) is not str or type(stage) is not str or len(role) > MAX_TEXT or len(stage) > MAX_TEXT:
        role, stage = bounded(str(role)), bounded(str(stage))
    log.roles.add(role)
    attrs = redaction.written(span.attrs, log.redact) if span.attrs else None
    place = (parent, link, traceparent, step, policy_version, trajectory, turn, span.thread, attrs)
    if end_ns is None:
        return records.Open(span.id, role, stage, span.start_ns, *place)
    error, dur_ns = span.error, end_ns - span.start_ns
    if error is None:
        return records.Span(span.id, role, stage, span.start_ns, *place, dur_ns=dur_ns)
    cancelled = error == failures.CANCELLED
    error = None if cancelled else redaction.error_of(error, log.redact)
    return records.Span(
        span.id, role, stage, span.start_ns, *place, dur_ns=dur_ns, error=error, cancelled=cancelled
    )


def parent_of(span: Span, log: SpanSink) -> tuple[int | None, SpanLink | None, str | None]:
    """Return the parent as (id in this file, link to another file, `traceparent` of another tracer). At most
    one item is not None.
    """
    scope = span.caller if span.parent is None else span.parent
    while scope is not None:
        if scope.log is log or (log.taken and isinstance(scope, Span) and scope in log.taken):
            return cast(Span, scope).id, None, None
        link = scope.reference()
        if link is not None:
            return None, link, None
        traceparent = scope.traceparent()
        if traceparent is not None:
            return None, None, traceparent
        scope = scope.parent
    return None, None, None
