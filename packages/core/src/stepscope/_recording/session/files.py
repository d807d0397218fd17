"""Files of a session, its spans and its counters, and their entries in the manifest."""

from __future__ import annotations

from stepscope._recording.counters.log import CounterLog
from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.output.manifest_part import ManifestPart
from stepscope._recording.spans.log import SpanLog, span_cost_ns
from stepscope.config import ProfileConfig
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import StepLayout
from stepscope.files.manifest.records import Expectation, State


def counters_of(
    config: ProfileConfig, layout: StepLayout, spans: SpanLog, part: ManifestPart, number: int
) -> CounterLog | None:
    """Return the counters of a session; None without a rate (`counters: off`)."""
    if not config.counters.hz:
        return None
    from stepscope._recording.counters.catalogue import openers  # import time: 15 ms

    record = part.record
    return CounterLog(
        layout.counters_of(record.process, record.run_id, number),
        Sampler(openers(spans, str(layout.root.absolute()), owner=record.owner)),
        process=record.process,
        step=record.step,
        run_id=record.run_id,
        hz=config.counters.hz,
    )


def close_counters(log: CounterLog, part: ManifestPart, ended: ClockAnchor, discard: str | None) -> None:
    """End the counter file, and enter its outcome and its cost into this process' part of the manifest."""
    log.close(ended)
    part.expect(_outcome_of_counters(log, discard))
    part.spend(counters_ns=log.sampler.cpu_ns)


def _outcome_of_counters(log: CounterLog, discard: str | None) -> Expectation:
    """Return the entry. A counter that this machine lacks is a note on it, and no problem."""
    notes = tuple(
        f"no counters of {source}: {reason}" for source, reason in sorted(log.sampler.absent.items())
    )
    if log.failed is not None:
        state: State = "partial" if log.samples else "failed"
        return Expectation(name="counters", kind="counters", state=state, reason=log.failed, notes=notes)
    if not log.began:
        reason = discard or "the capture was ended before it began"
        return Expectation(name="counters", kind="counters", state="skipped", reason=reason, notes=notes)
    if log.dropped:
        reason = f"{log.dropped} samples were dropped: a file holds {log.samples}"
        return Expectation(name="counters", kind="counters", state="partial", reason=reason, notes=notes)
    return Expectation(name="counters", kind="counters", state="ok", notes=notes)


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
        part.expect(_outcome_of_spans(log, part, limit, discard))
    part.spend(spans_ns=log.written * span_cost_ns())


def _outcome_of_spans(log: SpanLog, part: ManifestPart, limit: int, discard: str | None) -> Expectation:
    truncated = next((item.truncated for item in part.record.expected if item.kind == "spans"), None)
    if not log.began:  # rolled back, or ended by a signal, before there was a file
        reason = discard or "the capture was ended before it began"
        return Expectation(name="spans", kind="spans", state="skipped", reason=reason)
    if log.dropped or truncated:
        reason = truncated or f"{log.dropped} spans were dropped: budget.spans is {limit}"
        return Expectation(name="spans", kind="spans", state="partial", reason=reason, truncated=truncated)
    return Expectation(name="spans", kind="spans", state="ok")
