"""End of a session's span file, and its entry in the manifest."""

from __future__ import annotations

from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest.records import Expectation
from stepscope.recording.output.manifest_part import ManifestPart
from stepscope.recording.spans.log import SpanLog, span_cost_ns


def close_spans(
    log: SpanLog, part: ManifestPart, ended: ClockAnchor, limit: int, discard: str | None
) -> None:
    """End the span file, and enter its outcome and its cost into this process' part of the manifest.

    Args:
        limit: `budget.spans`, for the reason of dropped spans.
        discard: The reason why the recordings are unwanted; None to keep them.
    """
    log.close(ended)
    # Before the outcome: an export that ends meanwhile writes the part as it is.
    part.update(spans=log.written, dropped=log.dropped)
    part.update(roles=tuple(dict.fromkeys((*part.record.roles, *sorted(log.roles)))))
    if log.failed is not None:
        part.fail("spans", log.failed, kind="spans")
    else:
        part.expect(_outcome(log, part, limit, discard))
    part.spend(spans_ns=log.written * span_cost_ns())


def _outcome(log: SpanLog, part: ManifestPart, limit: int, discard: str | None) -> Expectation:
    truncated = next((item.truncated for item in part.record.expected if item.kind == "spans"), None)
    if not log.began:  # rolled back, or ended by a signal, before there was a file
        reason = discard or "the capture was ended before it began"
        return Expectation(name="spans", kind="spans", state="skipped", reason=reason)
    if log.dropped or truncated:
        reason = truncated or f"{log.dropped} spans were dropped: budget.spans is {limit}"
        return Expectation(name="spans", kind="spans", state="partial", reason=reason, truncated=truncated)
    return Expectation(name="spans", kind="spans", state="ok")
