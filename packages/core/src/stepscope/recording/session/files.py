"""Files of a session, its spans and its counters, and their entries in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepscope.config import ProfileConfig
from stepscope.counters import CounterSource
from stepscope.engines import EngineProfiler
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import StepLayout
from stepscope.files.manifest.records import Expectation, State, awaited
from stepscope.recording.counters.log import CounterLog
from stepscope.recording.counters.sampler import Sampler
from stepscope.recording.output.manifest_part import ManifestPart
from stepscope.recording.spans.log import SpanLog, span_cost_ns

COUNTERS, SPANS = "counters", "spans"
"""Their names in the manifest."""


class Counters:
    """The counters of one session. Without a rate, `counters: off`, there are none."""

    def __init__(
        self, config: ProfileConfig, layout: StepLayout, spans: SpanLog, part: ManifestPart, number: int
    ) -> None:
        """Args: number: Of this capture among those of this step in this process."""
        self._log: CounterLog | None = None
        self._part = part
        self._added: set[str] = set()
        if config.counters.hz:
            from stepscope.recording.counters.catalogue import openers  # import time: 15 ms

            record = part.record
            self._log = CounterLog(
                layout.counters_of(record.process, record.run_id, number),
                Sampler(openers(spans, str(layout.root.absolute()), owner=record.owner)),
                process=record.process,
                step=record.step,
                run_id=record.run_id,
                hz=config.counters.hz,
            )

    def add(self, name: str, sources: Callable[[], Iterable[CounterSource]]) -> None:
        """Sample further sources from now on, until the capture ends here. Once for each name."""
        if self._log is not None and name not in self._added:
            self._added.add(name)
            self._log.sampler.add(name, sources)

    def add_engine(self, profiler: EngineProfiler) -> None:
        """Sample the counters of an engine."""
        self.add(f"replica {profiler.replica or 0}", profiler.counters)

    def prepare(self) -> None:
        """Enter that there will be a file, and open the sources before the step begins."""
        if self._log is not None:
            self._part.expect(awaited(COUNTERS, "counters", "closing"))
            self._log.prepare()

    def open(self) -> None:
        """Create the file."""
        if self._log is not None:
            self._log.open()

    def start(self, anchor: ClockAnchor) -> None:
        """Begin at `anchor`, on a thread of their own. Waits for no disk."""
        if self._log is not None:
            self._log.start(anchor)

    def end(self) -> None:
        """Have the sampling end, without a wait. `close` follows."""
        if self._log is not None:
            self._log.sampler.end()

    def close(self, ended: ClockAnchor, discard: str | None) -> None:
        """End the file, and enter its outcome into this process' part of the manifest."""
        if self._log is not None:
            self._log.close(ended)
            self._part.expect(_outcome_of_counters(self._log, discard))
            self._part.spend(counters_ns=self._log.sampler.cpu_ns)


def _outcome_of_counters(log: CounterLog, discard: str | None) -> Expectation:
    """Return the entry. A counter that this machine lacks is a note on it, and no problem."""
    notes = tuple(
        f"no counters of {source}: {reason}" for source, reason in sorted(log.sampler.absent.items())
    )
    if log.failed is not None:
        state: State = "partial" if log.samples else "failed"
        return Expectation(name=COUNTERS, kind="counters", state=state, reason=log.failed, notes=notes)
    if not log.began:
        reason = discard or "the capture was ended before it began"
        return Expectation(name=COUNTERS, kind="counters", state="skipped", reason=reason, notes=notes)
    if log.dropped:
        reason = f"{log.dropped} samples were dropped: a file holds {log.samples}"
        return Expectation(name=COUNTERS, kind="counters", state="partial", reason=reason, notes=notes)
    return Expectation(name=COUNTERS, kind="counters", state="ok", notes=notes)


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
        part.fail(SPANS, log.failed, kind="spans")
    else:
        part.expect(_outcome_of_spans(log, part, limit, discard))
    part.spend(spans_ns=log.written * span_cost_ns())


def _outcome_of_spans(log: SpanLog, part: ManifestPart, limit: int, discard: str | None) -> Expectation:
    truncated = next((item.truncated for item in part.record.expected if item.kind == "spans"), None)
    if not log.began:  # rolled back, or ended by a signal, before there was a file
        reason = discard or "the capture was ended before it began"
        return Expectation(name=SPANS, kind="spans", state="skipped", reason=reason)
    if log.dropped or truncated:
        reason = truncated or f"{log.dropped} spans were dropped: budget.spans is {limit}"
        return Expectation(name=SPANS, kind="spans", state="partial", reason=reason, truncated=truncated)
    return Expectation(name=SPANS, kind="spans", state="ok")
