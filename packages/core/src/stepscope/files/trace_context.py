"""Ids of a step's spans in OpenTelemetry and in W3C trace context (`traceparent`).

The ids are computed from the run, the step, the process and the number of the span. So a carrier, made while
the span runs, and a writer, which sends the step later, compute the same ids.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class TraceContext(NamedTuple):
    """A span of any tracer."""

    trace_id: str
    """32 lower-case hexadecimal digits, as W3C and OTLP JSON write it."""
    span_id: str
    """16 lower-case hexadecimal digits."""


_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_LONGEST = 200
"""Largest length of a `traceparent`. Version 00 has 55 characters; later versions may append parts."""


def parse_traceparent(header: object) -> TraceContext | None:
    """Return the span that a `traceparent` names; None where W3C trace context calls it invalid."""
    match = _HEADER.fullmatch(header) if isinstance(header, str) and len(header) <= _LONGEST else None
    if match is None or (match[0].startswith("00") and match[3] is not None):
        return None
    return TraceContext(match[1], match[2])


def trace_id_of(run_id: str, step: int) -> str:
    """Return the trace id of a step."""
    from hashlib import sha256  # here: OpenSSL takes 4 MB, and a report on plain traces needs none

    return sha256(f"{run_id}/{step}/trace".encode()).hexdigest()[:32]


class SpanIds:
    """Ids of the spans of one process in one captured step."""

    def __init__(self, run_id: str, step: int, process: str) -> None:
        from hashlib import sha256  # the same

        self.trace_id = trace_id_of(run_id, step)
        self._process = sha256(f"{run_id}/{step}/{process}/".encode())

    def span_id(self, span: int) -> str:
        """Return the id of the span with this number in its process' file."""
        digest = self._process.copy()
        digest.update(b"%d" % span)
        return digest.hexdigest()[:16]

    def traceparent(self, span: int) -> str:
        """Return the `traceparent` header of the span. Its flag says that the span is sampled."""
        return f"00-{self.trace_id}-{self.span_id(span)}-01"
