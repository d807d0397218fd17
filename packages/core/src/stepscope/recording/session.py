"""One captured step in one process: its spans, its profiler windows, its part of the manifest.

States: new -> open -> (truncated ->) closed. Opening starts the profiler last, closing stops it first.
Nothing here raises for a profiler's or a disk's trouble: that becomes an expectation in the manifest, with
its reason.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.backends import load_backend
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import NOT_CLOSED, Absent, Expectation, ProcessPart
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import CONSUME
from stepscope.files.temporary import remove_abandoned
from stepscope.files.values import AttrValue, settled
from stepscope.recording import attributes, clock, control, export, guard, schedule, spans
from stepscope.recording.ledger import Ledger
from stepscope.recording.spans import PlacedSpan, Placing, Span, SpanLog, describe, span_cost_ns
from stepscope.recording.windows import Windows

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LIBRARY = {"torch": "torch", "cuda_memory": "torch", "npu": "torch_npu"}
"""What a process must have imported for a tool to find anything in it."""


def library_loaded(tool: str) -> bool:
    """Whether this process has imported what `tool` records. True as well with torch, where torch_npu is not
    there to import: the backend says so.
    """
    if tool not in _LIBRARY or _LIBRARY[tool] in sys.modules:
        return True
    if tool != "npu" or "torch" not in sys.modules:
        return False
    from importlib.util import find_spec

    return find_spec("torch_npu") is None


class Session:
    """Made by `capture` (in the owner) or by `worker` (in a process that the owner's fleet reached)."""

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
    ) -> None:
        """Args: spans_only: why no profiler of ours is to start here; None: the configuration decides."""
        self.config = config
        self.step = step
        self.process = process
        self.run_id = run_id
        self.capture_id = capture_id
        self.owner = owner
        self.layout = RunLayout(config.save_path).step(step)
        self.over_budget = cache(partial(control.over_budget, config))
        """`control.over_budget`, as it was when it was first asked: it may walk through all of the run."""
        self.decision = schedule.decide_process(
            config, step=step, roles=roles, rank=process.rank, world_size=process.world_size
        )
        if spans_only is not None:
            self.decision = schedule.Decision(record=False, reason=spans_only, spans=True)
        self._spans_only = spans_only
        part = ProcessPart(
            run_id=run_id,
            step=step,
            process=process,
            owner=owner,
            opened=clock.read_anchor(),
            recorded=self.decision.record,
            why=self.decision.reason,
            roles=roles,
        )
        numbers = itertools.count(1)
        number = next(n for n in numbers if not _exists(self.layout.part_of(process, run_id, n)))
        self.number = number
        """The how-manieth capture of this step here."""
        self.ledger = Ledger(self.layout.part_of(process, run_id, number), part)
        self.log = SpanLog(
            self.layout.spans_of(process, run_id, number),
            process=process,
            step=step,
            run_id=run_id,
            limit=config.budget.spans,
            redact=config.redact,
        )
        self.forks = 0
        """Children forked while open: they record nothing, and the manifest says so."""
        self.switch_off: Callable[[Session], None] | None = None
        """Takes this session out of the process' slot; set by the slot's writer."""
        self.when_closed: Callable[[Session, str | None], None] | None = None
        """Called once, at the end of closing, with why the recordings are unwanted."""
        self._windows: Windows | None = None
        self._watchdog: control.Watchdog | None = None
        self._ended: ClockAnchor | None = None
        """When recording ended: at close, or earlier when it was truncated."""
        self._closed = False
        self._lock = threading.RLock()  # a signal may close the session while it is being closed

    @property
    def part_name(self) -> str:
        """The file name of this process' part of the manifest."""
        return self.layout.part_of(self.process, self.run_id, self.number).name

    def open(self) -> None:
        """Creates the files and starts the profiler."""
        self.open_files()
        self.start_profiler()

    def open_files(self) -> None:
        """The part of opening that may run on any thread: folders, files, the profiler library's one-off
        costs.
        """
        if self.config.export.when == "deferred":
            # What nobody has flushed since the last capture must not be written inside this one.
            export.exporter().drain(self.config.budget.export_seconds)
        began = time.monotonic_ns()
        self.ledger.expect(Expectation(name="spans", state="missing", reason=NOT_CLOSED))
        self._say_unreachable_ranks()
        reason = self._no_profiler()
        if reason is not None:
            self.ledger.skip(f"{self.config.tool} trace", reason)
        elif full := self.over_budget():
            self.ledger.fail(f"{self.config.tool} trace", full)
            guard.warn("stepscope: step %d has spans alone: %s", self.step, full)
        else:
            self._windows = self.log.windows = self._make_windows()
        self.ledger.spend(start_ns=time.monotonic_ns() - began)
        self.ledger.write()

    def _no_profiler(self) -> str | None:
        """Why no profiler runs here; None when one does."""
        if self._spans_only is not None:
            return self._spans_only
        if not self.decision.record and self.config.mode == "continuous":
            return self.decision.reason  # in discrete mode each stage's own role decides
        if not library_loaded(self.config.tool):
            # A driver that only orchestrates: importing torch would cost it a second, for an empty trace.
            return f"{_LIBRARY[self.config.tool]} is not imported in this process: there is nothing to record"
        return None

    def _say_unreachable_ranks(self) -> None:
        """Ranks that the configuration asks for and that nobody has; rank 0 says it for all."""
        process = self.process
        if process.rank != 0 or process.world_size is None:
            return
        for rank in schedule.unreachable_ranks(self.config, process.role, process.world_size):
            reason = f"no such rank: world_size is {process.world_size}"
            self.ledger.skip(f"{process.role} rank {rank}", reason)

    def _make_windows(self) -> Windows | None:
        try:
            backend = load_backend(self.config.tool, self.config)
            backend.check()
            backend.prepare()
        except Exception as error:
            self.ledger.fail(f"{self.config.tool} trace", describe(error))
            if not isinstance(error, BackendError):
                guard.note(f"preparing the {self.config.tool} profiler", error)
            else:
                guard.warn("stepscope: %s", error)
            return None
        return Windows(
            backend,
            config=self.config,
            layout=self.layout,
            process=self.process,
            step=self.step,
            run_id=self.run_id,
            ledger=self.ledger,
        )

    def start_profiler(self) -> None:
        """The part of opening that belongs on the thread whose work is recorded. The session's time begins
        here.
        """
        if self._windows is not None and not self._windows.discrete:
            self._windows.open(None, self.process.role)
        anchor = clock.read_anchor()
        self.ledger.update(opened=anchor)
        try:
            self.log.open(anchor)
        except OSError as error:
            self.ledger.fail("spans", describe(error))
            guard.note("opening the span file", error)
        self.ledger.write()
        self._watchdog = control.Watchdog(self.config.budget, self.truncate)

    def close(self, *, error: str | None = None, discard: str | None = None) -> None:
        """Stops the profiler, hands its recordings to the exporter, ends the files. Idempotent; from any
        thread. Interrupted by a Ctrl-C, a second call goes on from there.

        Args:
            error: The user's exception that ended the capture, as text.
            discard: Why the recordings are unwanted; None to keep them.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._write_the_end(error, discard)
            except BaseException:
                self._closed = False
                raise
            if self.owner:  # a walk through the run's folder: neither the opening nor the step waits for it
                deferred = self.config.export.when == "deferred"
                export.exporter().then(partial(_tidy, self.config.save_path, self.layout), deferred=deferred)
            if self.when_closed is not None:
                self.when_closed(self, discard)

    def _write_the_end(self, error: str | None, discard: str | None) -> None:
        ended = self._end(discard=discard)
        self.ledger.update(closed=ended, error=attributes.error_of(error, self.config.redact))
        self._close_spans(ended, discard)
        self._say_instrumented()
        if self.forks:
            forks, self.forks = self.forks, 0
            self.ledger.add_absent((_forked(forks),))
        self.ledger.write()

    def _say_instrumented(self) -> None:
        instrumented = sys.modules.get("stepscope.recording.instrumented")
        if instrumented is not None and self.config.instrument:
            self.ledger.update(instrumented=instrumented.timed())

    def truncate(self, reason: str) -> None:
        """Ends the recording early; what is there is kept and marked. The owner's capture stays open for its
        owner.
        """
        with self._lock:
            if self._closed or self._ended is not None:
                return
            guard.warn("stepscope: step %d is truncated: %s", self.step, reason)
            self._end(truncated=reason)
            if self.owner:
                self.ledger.write()
            else:
                self.close()  # nobody may ever come to do it: the owner is perhaps gone

    def _end(self, *, truncated: str | None = None, discard: str | None = None) -> ClockAnchor:
        if self.switch_off is not None:
            self.switch_off(self)
        if self._ended is None:
            self._ended = clock.read_anchor()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._windows is not None:
            self._windows.finish(truncated=truncated, discard=discard)
        if truncated is not None:
            item = Expectation(name="spans", state="missing", reason=NOT_CLOSED, truncated=truncated)
            self.ledger.expect(item)
        return self._ended

    def _close_spans(self, ended: ClockAnchor, discard: str | None) -> None:
        began = time.monotonic_ns()
        log = self.log
        log.close(ended)
        # Before what became of them: an export that ends meanwhile writes the part as it is.
        self.ledger.update(spans=log.written, dropped=log.dropped)
        self.ledger.update(roles=tuple(dict.fromkeys((*self.ledger.part.roles, *sorted(log.roles)))))
        truncated = next((item.truncated for item in self.ledger.part.expected if item.name == "spans"), None)
        if log.failed is not None:
            self.ledger.fail("spans", log.failed)
        elif not log.began:  # rolled back, or ended by a signal, before there was a file
            reason = discard or "the capture was ended before it began"
            self.ledger.expect(Expectation(name="spans", state="skipped", reason=reason))
        elif log.dropped or truncated:
            reason = (
                truncated or f"{log.dropped} spans were dropped: budget.spans is {self.config.budget.spans}"
            )
            self.ledger.expect(Expectation(name="spans", state="partial", reason=reason, truncated=truncated))
        else:
            self.ledger.expect(Expectation(name="spans", state="ok"))
        self.ledger.spend(stop_ns=time.monotonic_ns() - began, spans_ns=log.written * span_cost_ns())

    @property
    def ended(self) -> bool:
        """Whether recording is over: closed, or truncated."""
        return self._ended is not None

    # What the recorded code calls, besides `log.new` and `log.begin`.

    def placed_span(
        self, stage: str, role: str | None, attrs: Mapping[str, AttrValue] | None, **place: Unpack[Placing]
    ) -> Span:
        """A span that says more of its place: step, policy_version, trajectory, turn."""
        attrs = settled(attrs) if attrs else None
        if self._windows is not None:
            return self._windows.new(self.log, stage, role, attrs, **place)
        return PlacedSpan(self.log, stage, role, attrs, **place)

    def consume(self, trajectory: str, begun: int | None, policy_version: int | None) -> None:
        """A trajectory is consumed by this step."""
        attrs = {"begun": begun, "begun_version": policy_version}
        known: dict[str, AttrValue] = {name: value for name, value in attrs.items() if value is not None}
        spans.mark(self.log, CONSUME, known, trajectory=trajectory)

    def advance(self) -> None:
        """One mini-batch is done: walks the profiler's schedule."""
        if self._windows is not None:
            self._windows.advance()


_tidied: dict[str, StepLayout] = {}
"""Output folder -> the step captured last. One writer: `_tidy`."""


def _tidy(save_path: str, step: StepLayout) -> None:
    """Removes what killed processes were writing: once in the whole folder, then in the last step."""
    last = _tidied.get(save_path)
    remove_abandoned(Path(save_path) if last is None else last.root)
    _tidied[save_path] = step


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that may not be read, or is gone from its server
        return False


def _forked(count: int) -> Absent:
    return Absent(
        name=f"{count} forked child process(es)",
        state="skipped",
        reason="forked while the capture was open: profilers and spans do not cross a fork",
    )
