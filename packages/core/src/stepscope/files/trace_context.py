"""Ids of a step's spans in OpenTelemetry and W3C trace context (`traceparent`).

An id is a hash of the run, the step, the process and the span's number. So the carrier made during a span and
the later export of the step have the same ids.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class TraceContext(NamedTuple):
    """The ids of a span of any tracer."""

    trace_id: str
    """32 lower-case hexadecimal digits, as in W3C trace context and OTLP JSON."""
    span_id: str
    """16 lower-case hexadecimal digits."""


_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_LONGEST = 200
"""Longest accepted `traceparent`. Version 00 has 55 characters; later versions may append fields."""


def parse_traceparent(header: object) -> TraceContext | None:
    """Return the span in a `traceparent` header, or None if the header is invalid by W3C trace context."""
    match = _HEADER.fullmatch(header) if isinstance(header, str) and len(header) <= _LONGEST else None
    if match is None or (match[0].startswith("00") and match[3] is not None):
        return None
    return TraceContext(match[1], match[2])


def trace_id_of(run_id: str, step: int) -> str:
    """Return the trace id of a step."""
    from hashlib import sha256  # imported here: OpenSSL takes 4 MB, and plain traces do not need it

    return sha256(f"{run_id}/{step}/trace".encode()).hexdigest()[:32]


class SpanIds:
    """Ids of the spans of one process in one captured step."""

    def __init__(self, run_id: str, step: int, process: str) -> None:
        from hashlib import sha256  # as above

        self.trace_id = trace_id_of(run_id, step)
        self._process = sha256(f"{run_id}/{step}/{process}/".encode())

    def span_id(self, span: int) -> str:
        """Return the id of the span with the number `span`."""
        digest = self._process.copy()
        digest.update(b"%d" % span)
        return digest.hexdigest()[:16]

    def traceparent(self, span: int) -> str:
        """Return the `traceparent` header of a span, with the flag `sampled`."""
        return f"00-{self.trace_id}-{self.span_id(span)}-01"
