"""One captured step in one process: its spans, profiler windows, counters and part of the manifest.

Methods are called in this order: `open_files`, `begin` (the step's time begins), `leave` (the step's time
ends), `end` (the profiler stops, on the recorded thread), `close` (the files are closed, on the private
loop), `hand_back` (the caller's code continues). `finish` calls `end` and `close`, for a worker and at the
end of the process. In the owner, `capture/` calls these methods; in a worker, `fanout/worker_side.py` does.

Errors of profilers and disks are recorded in the manifest and not raised.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from stepscope._recording.counters.catalogue import openers
from stepscope._recording.counters.log import CounterLog
from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.process import exports, failures, identity, shutdown
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import IMPORTED_NS, read_hardware
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.session import budget, selection
from stepscope._recording.session.profiler_windows import OnArtifact, Windows
from stepscope._recording.session.selection import LIBRARY, library_loaded
from stepscope._recording.spans import redaction
from stepscope._recording.spans.log import SpanLog, span_cost_ns
from stepscope._recording.spans.span import mark, mark_consumed
from stepscope.backends import load_backend
from stepscope.backends.undisturbed import postponed
from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler, settings
from stepscope.errors import BackendError, ours
from stepscope.files import clock
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import (
    Absent,
    Ending,
    Expectation,
    Hardware,
    OpenedBy,
    ProcessPart,
    State,
    awaited,
)
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import STEP_TOKENS

_ANSWER_S = 0.1
_HAND_BACK_S = 1.0  # longest wait of exports for the end of a close


class Session:
    """A captured step in this process."""

    calls_attrs = True

    def __init__(
        self,
        *,
        config: ProfileConfig,
        step: int,
        process: ProcessInfo,
        roles: tuple[str, ...],
        run_id: str,
        capture_id: str,
        owner: bool,
        spans_only: str | None = None,
        began_ns: int | None = None,
        opened_by: OpenedBy = "program",
        on_artifact: OnArtifact | None = None,
    ) -> None:
        """
        Args:
            spans_only: Reason why no profiler may start, or None if the configuration decides.
            began_ns: Monotonic time at which the opening began; now by default.
            on_artifact: Called for each complete file of the session's profiler.
        """
        self._began_ns = time.monotonic_ns() if began_ns is None else began_ns
        self.config = config
        self.step = step
        self.process = process
        self.run_id = run_id
        self.capture_id = capture_id
        self.owner = owner
        self.layout = RunLayout(config.save_path).step(step)
        self.over_budget = cache(partial(budget.over_budget, config))
        """`budget.over_budget` for this session, cached because the check may walk through the whole
        run's folder."""
        self._decision = selection.decide_process(
            config, roles=roles, rank=process.rank, world_size=process.world_size
        )
        if spans_only is not None:
            self._decision = selection.Decision(False, spans_only)
        self._spans_only = spans_only
        self._on_artifact = on_artifact
        numbers = itertools.count(1)
        number = next(n for n in numbers if not _exists(self.layout.part_of(process, run_id, n)))
        self.number = number
        """Number of this capture. A step that is retried has several captures in one process."""
        part = ProcessPart(
            run_id=run_id,
            step=step,
            process=process,
            owner=owner,
            capture=number,
            opened=clock.read_anchor(),
            imported_ns=IMPORTED_NS,
            recorded=self._decision.record,
            why=self._decision.reason,
            roles=roles,
            opened_by=opened_by,
            prepared=identity.is_prepared(),
        )
        path = self.layout.part_of(process, run_id, number)
        self.part_name = path.name
        """File name of this process' part of the manifest."""
        self.manifest_part = ManifestPart(path, part)
        self.log = SpanLog(
            self.layout.spans_of(process, run_id, number),
            process=process,
            step=step,
            run_id=run_id,
            limit=config.budget.spans,
            redact=config.redact,
        )
        self._counters = _counters_of(config, self.layout, self.log, self.manifest_part, number)
        self._replicas: set[str] = set()
        """Names of the replicas whose counters are sampled."""
        self.forks = 0
        """Number of children that were forked while the session was open. The manifest lists them as not
        recorded."""
        self.switch_off: Callable[[Session], None] | None = None
        """Function that switches recording off, or None. Set by `activation`."""
        self._is_profiled = False
        self._windows: Windows | None = None
        self._watchdog: budget.Watchdog | None = None
        self.on_closed: Callable[[], None] | None = None
        """Called when the files are closed."""
        self._ended: ClockAnchor | None = None
        """Clock reading at the end of the recording. A truncated recording ends before the close."""
        self._closing: ClockAnchor | None = None
        """Clock reading at which the close began."""
        self._hardware: Hardware | None = None
        self._is_awaited = False
        """True once the exporter was asked to wait until the caller's code continues."""
        self._handed_back = threading.Event()
        self._closed = False

    def open_files(self) -> None:
        """Decide what is recorded in this process, and prepare its files. May run on any thread."""
        if self.config.export.when == "deferred":
            # Deferred exports of the last capture must not run during this capture.
            exports.exporter().drain(self.config.budget.export_seconds)
        self.manifest_part.expect(awaited("spans", "spans", "closing"))
        if self._counters is not None:
            self.manifest_part.expect(awaited("counters", "counters", "closing"))
            self._counters.prepare()
        shared = selection.is_shared(self.config, self.process.role)
        for name, why in selection.missing_ranks(self.config, self.process).items():
            (self.manifest_part.skip if shared else self.manifest_part.lack)(name, why, kind="selection")
        reason = self._no_profiler()
        if reason is not None:
            self.manifest_part.skip(f"{self.config.tool} trace", reason, kind="trace")
        elif full := self.over_budget():
            self.manifest_part.fail(f"{self.config.tool} trace", full, kind="trace")
            failures.warn("stepscope: step %d has spans alone: %s", self.step, full)
        else:
            self._is_profiled = True
        if self.owner:  # workers look for this file to see whether they share the folder
            self.manifest_part.write()

    def prepare_profiler(self) -> None:
        """Load and prepare the profiler's backend, if a profiler will start."""
        if self._is_profiled:
            self._windows = self.log.observer = self._make_windows()

    def _no_profiler(self) -> str | None:
        """Return the reason why no profiler will run in this process, or None."""
        if self._spans_only is not None:
            return self._spans_only
        if not selection.may_record(self.config, self._decision):
            return self._decision.reason
        if not library_loaded(self.config.tool):
            # For example a driver that only coordinates. An import of torch would take a second, for an empty
            # trace.
            return f"{LIBRARY[self.config.tool]} is not imported in this process: there is nothing to record"
        return None

    def _make_windows(self) -> Windows | None:
        try:
            backend = load_backend(self.config.tool, self.config)
            backend.check()
            backend.prepare()
        except ours() as error:
            self.manifest_part.fail(f"{self.config.tool} trace", describe(error), kind="trace")
            if not isinstance(error, BackendError):
                failures.note(f"preparing the {self.config.tool} profiler", error)
            else:
                failures.warn("stepscope: %s", error)
            return None
        return Windows(backend, self.config, self.layout, self.manifest_part, self._on_artifact)

    def open_logs(self) -> None:
        """Create the span file and the counter file."""
        try:
            self.log.open()
        except ours(OSError) as error:
            self.manifest_part.fail("spans", describe(error), kind="spans")
            failures.note("opening the span file", error)
        if self._counters is not None:
            self._counters.open()

    def start_profiler(self) -> None:
        """Start the profiler and the watchdog, on the thread to record."""
        if self._windows is not None and not self._windows.discrete:
            self._windows.open(None, self.process.role)
        self.manifest_part.write()
        self._watchdog = budget.Watchdog(self.config.budget, self.truncate)
        self._watchdog.start()
        if self.ended:  # ended meanwhile by another thread
            self._watchdog.cancel()

    def sample_engine(self, profiler: EngineProfiler) -> None:
        """Sample the counters of an engine until this session ends. A second call for the same replica does
        nothing.
        """
        name = f"replica {profiler.replica or 0}"
        if self._counters is not None and name not in self._replicas:
            self._replicas.add(name)
            self._counters.sampler.add(name, profiler.counters)

    def begin(self) -> None:
        """End the opening: the step's time begins now. This does not wait for the disk."""
        if self._ended is not None:
            return
        anchor = clock.read_anchor()
        self.log.start(anchor)
        if self._counters is not None:
            self._counters.start(anchor)
        self.manifest_part.update(opened=anchor)
        self.manifest_part.spend(start_ns=anchor.mono_ns - self._began_ns)

    @property
    def state(self) -> None:
        """None, because a worker's session does not have the states of a capture. See `activation.Taker`."""

    def end_with_process(self, ending: Ending, deadline_s: float) -> None:
        """See `activation.Taker`."""
        self.finish(ending=ending, timeout_s=deadline_s + shutdown.GRACE_S)

    def disown(self) -> None:
        """See `activation.Taker`. Nothing to do, because a session without a claim is never closed."""

    def leave(self) -> None:
        """Begin the close: the step's time ends now, unless it has ended before. Idempotent."""
        if self._closing is None:
            self._closing = clock.read_anchor()

    def hand_back(self) -> None:
        """End the close: the caller's code continues now. Idempotent."""
        if self._closing is not None and not self._handed_back.is_set():
            self.manifest_part.spend(stop_ns=time.monotonic_ns() - self._closing.mono_ns)
            self._handed_back.set()

    def _await_caller(self) -> None:
        self._handed_back.wait(_HAND_BACK_S)
        if not self.owner:  # sending the answer needs the GIL too
            time.sleep(_ANSWER_S)

    def write_cost(self) -> None:
        """Queue a write of the manifest part after `hand_back`, when the cost of the close is known."""
        exports.exporter().then(self._write_cost, deferred=False)

    def _write_cost(self) -> None:
        # The folder may have been removed.
        if self._handed_back.wait(_HAND_BACK_S) and self.layout.root.is_dir():
            self.manifest_part.write()

    def open(self) -> None:
        """Call `open_files` and `open_logs`. For a worker's session; in the owner, they are called
        separately.
        """

        async def opened() -> None:
            self.open_files()
            self.open_logs()

        _loop_side().run(opened())

    def finish(
        self, *, ending: Ending | None = None, discard: str | None = None, timeout_s: float | None = None
    ) -> None:
        """End and close the session, from any thread, and wait until it is closed. Arguments: see `close`."""
        if postponed(partial(self.finish, ending=ending, discard=discard, timeout_s=timeout_s)):
            return

        async def close() -> None:
            self.close(ending=ending, discard=discard)
            self.manifest_part.write()

        _loop_side().close_and_wait(partial(self.end, discard=discard), close, timeout_s)

    def close(self, *, ending: Ending | None = None, discard: str | None = None) -> None:
        """Close the files. Call this on the private loop, after `end` on the recorded thread. Idempotent. The
        caller writes the part of the manifest.

        Args:
            ending: Cause of an early end, or None.
            discard: Reason to discard the recordings, or None to keep them.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.end(discard=discard)  # an opening may have started recording meanwhile
            self.leave()
            self._write(ending, discard)
        finally:
            if self.on_closed is not None:
                self.on_closed()

    def _write(self, ending: Ending | None, discard: str | None) -> None:
        part, ended = self.manifest_part, self._ended or clock.read_anchor()
        part.update(closed=ended, settings=settings.kept(), hardware=self._hardware)
        if ending is not None:
            error = redaction.error_of(ending.error, self.config.redact)
            self.manifest_part.update(ended_by=ending.by, error=error)
        _close_spans(self.log, self.manifest_part, ended, self.config.budget.spans, discard)
        if self._counters is not None:
            _close_counters(self._counters, self.manifest_part, ended, discard)
        listed = sys.modules.get("stepscope._recording.instrument.configured")
        if listed is not None and self.config.instrument:
            listed.enter(self.manifest_part)
        if self.forks:
            forks, self.forks = self.forks, 0
            self.manifest_part.add_absent((_forked(forks),))

    def truncate(self, reason: str) -> None:
        """End the recording early and mark it as truncated. The capture stays open until its owner closes
        it.
        """
        if self._ended is not None:
            return
        failures.warn("stepscope: step %d is truncated: %s", self.step, reason)
        began = time.monotonic_ns()
        self.end(truncated=reason)
        self.manifest_part.spend(stop_ns=time.monotonic_ns() - began)
        _loop_side().submit(self._mark_truncated(reason))
        if not self.owner:
            self.finish()  # the owner may have died, and would never stop this worker

    async def _mark_truncated(self, reason: str) -> None:
        if not self._closed:
            self.manifest_part.expect(awaited("spans", "spans", "closing", truncated=reason))
            self.manifest_part.write()

    def end(self, *, truncated: str | None = None, discard: str | None = None) -> None:
        """End the recording. Call this on the recorded thread if possible. Idempotent."""
        if self._ended is None:
            self._ended = self._closing or clock.read_anchor()
        if self._hardware is None:  # on this thread, because each thread has its own current device
            self._hardware = read_hardware(self.config.throughput)
        if self.switch_off is not None:
            self.switch_off(self)
        if self._counters is not None:
            self._counters.sampler.end()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._windows is not None and self._closing is not None and not self._is_awaited:
            self._is_awaited = True  # an export would take the GIL and delay the caller
            exports.exporter().then(self._await_caller, deferred=False)
        if self._windows is not None:
            self._windows.finish(truncated=truncated, discard=discard)

    @property
    def ended(self) -> bool:
        """True if the recording has ended, because it was closed or truncated."""
        return self._ended is not None

    # Methods that the recorded code calls, besides `log.new` and `log.begin`: see `ActiveSession`.

    def consume(self, trajectory: str, begun: int | None, policy_version: int | None) -> None:
        mark_consumed(self.log, trajectory, begun, policy_version)

    def count_tokens(self, counts: Mapping[str, int]) -> None:
        mark(self.log, STEP_TOKENS, dict(counts))

    def advance(self) -> None:
        if self._windows is not None:
            self._windows.advance()


def _counters_of(
    config: ProfileConfig, layout: StepLayout, spans: SpanLog, part: ManifestPart, number: int
) -> CounterLog | None:
    """Return the counter log of a session, or None if counters are off."""
    if not config.counters.hz:
        return None
    record = part.record
    return CounterLog(
        layout.counters_of(record.process, record.run_id, number),
        Sampler(openers(spans, str(layout.root.absolute()), owner=record.owner)),
        process=record.process,
        step=record.step,
        run_id=record.run_id,
        hz=config.counters.hz,
    )


def _close_counters(log: CounterLog, part: ManifestPart, ended: ClockAnchor, discard: str | None) -> None:
    """Close the counter file, and enter its outcome and cost into the part of the manifest."""
    log.close(ended)
    part.expect(_outcome_of_counters(log, discard))
    part.spend(counters_ns=log.sampler.cpu_ns)


def _outcome_of_counters(log: CounterLog, discard: str | None) -> Expectation:
    """Return the manifest item of the counters. A counter that this machine does not have is a note, not a
    problem.
    """
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


def _close_spans(
    log: SpanLog, part: ManifestPart, ended: ClockAnchor, limit: int, discard: str | None
) -> None:
    """Close the span file, and enter its outcome and cost into the part of the manifest.

    Args:
        limit: `budget.spans`, for the reason if spans were dropped.
        discard: Reason to discard the recordings, or None to keep them.
    """
    log.close(ended)
    # Set before the outcome, because an export that ends meanwhile writes the part too.
    part.update(spans=log.written, dropped=log.dropped)
    part.update(roles=tuple(dict.fromkeys((*part.record.roles, *sorted(log.roles)))))
    part.expect(_outcome_of_spans(log, part, limit, discard))
    part.spend(spans_ns=log.written * span_cost_ns())


def _outcome_of_spans(log: SpanLog, part: ManifestPart, limit: int, discard: str | None) -> Expectation:
    truncated = next((item.truncated for item in part.record.expected if item.kind == "spans"), None)
    if log.failed is not None:
        state: State = "partial" if log.began else "failed"
        kept = f"{log.written} spans are on disk" if log.began else "no span is on disk"
        lost = f", {log.dropped} are lost" if log.dropped else ""
        return Expectation(name="spans", kind="spans", state=state, reason=f"{log.failed}: {kept}{lost}")
    if not log.began:  # the opening failed, or a signal ended the session, before recording began
        reason = discard or "the capture was ended before it began"
        return Expectation(name="spans", kind="spans", state="skipped", reason=reason)
    if log.dropped or truncated:
        reason = truncated or f"{log.dropped} spans were dropped: budget.spans is {limit}"
        return Expectation(name="spans", kind="spans", state="partial", reason=reason, truncated=truncated)
    return Expectation(name="spans", kind="spans", state="ok")


def _loop_side() -> ModuleType:
    from stepscope._recording.process import private_loop  # imported here: asyncio

    return private_loop


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except ours(OSError):  # a folder without permission, or a stale mount
        return False


def _forked(count: int) -> Absent:
    return Absent(
        name=f"{count} forked child process(es)",
        state="skipped",
        reason="forked while the capture was open: only work under attach(carrier()) is recorded",
    )
