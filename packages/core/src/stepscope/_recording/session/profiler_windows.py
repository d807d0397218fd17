"""The windows of a session's backend: one for the whole capture (continuous), or one for each stage
(discrete).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepscope._recording.process import exports, failures
from stepscope._recording.process.identity import in_event_loop
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.session import selection
from stepscope._recording.spans import scopes
from stepscope._recording.spans.maker import SpanMaker
from stepscope._recording.spans.span import Span, record
from stepscope.backends import Backend, PendingArtifact, SpanInfo, Window
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.undisturbed import undisturbed
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ours
from stepscope.files import clock
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import Expectation, awaited
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.files.spans import PROFILING
from stepscope.files.values import AttrValue, bounded

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from stepscope._recording.spans.wrapping import Declared

OnArtifact: TypeAlias = Callable[[Path, Sidecar | None, ManifestPart], None]
"""Called for each complete file with its path, its sidecar (None if the sidecar must be read from disk), and
the manifest part."""


class Windows:
    """Owner of the backend of one session. Errors of the backend are recorded in the manifest and not
    raised.
    """

    def __init__(
        self,
        backend: Backend,
        config: ProfileConfig,
        layout: StepLayout,
        manifest_part: ManifestPart,
        on_artifact: OnArtifact | None,
    ) -> None:
        part = manifest_part.record
        self.discrete = config.mode == "discrete"
        self.running: str | None = None
        """Name of the open window in the manifest, or None."""
        self._backend = backend
        self._config = config
        self._layout = layout
        self._process = part.process
        self._step = part.step
        self._run_id = part.run_id
        self._manifest_part = manifest_part
        self._on_artifact = on_artifact
        self._off: str | None = None
        """Reason why no further window may open, or None."""
        self._warned = False
        self._opened: ClockAnchor | None = None
        self._stage: str | None = None
        self._role = part.process.role
        self._indices: Counter[str | None] = Counter()
        self._lock = threading.RLock()

    def open(self, stage: str | None, role: str) -> bool:
        """Start the backend for a window. Return False if it did not start; the manifest has the reason.

        Args:
            stage: The stage to record, or None to record the whole capture.
        """
        return undisturbed(partial(self._open, stage, role))

    def _open(self, stage: str | None, role: str) -> bool:
        name = self._name(stage)
        with self._lock:
            reason = self._refusal(stage, role)
            if reason is not None:
                self._manifest_part.skip(name, reason, kind="trace")
                return False
            reason = self._used_up()
            if reason is not None:
                self._manifest_part.cut(name, reason, kind="trace")
                self._warn_once(f"is truncated: {reason}; no further window opens")
                return False
            return self._start(name, stage, role)

    def _start(self, name: str, stage: str | None, role: str) -> bool:
        began = time.monotonic_ns()
        window = Window(step=self._step, process=self._process, stage=stage, index=self._indices[stage])
        # Set first, so that an interrupted start is stopped.
        self.running, self._stage, self._role = name, stage, role
        try:
            self._backend.start(window)
        except BackendError as error:
            # The next window is tried, because the cause, such as the user's own profiler, may end.
            self.running = None
            self._manifest_part.fail(name, failures.describe(error), kind="trace")
            self._warn_once(f"lacks the {name}: {failures.describe(error)}")
            return False
        except ours() as error:
            self.running, self._off = None, failures.describe(error)
            self._manifest_part.fail(name, self._off, kind="trace")
            failures.note(f"starting the {self._backend.name} profiler", error)
            return False
        except BaseException:  # a Ctrl-C: the backend may have started
            self.close(discard="it was interrupted while it started")
            raise
        self._indices[stage] += 1
        self._manifest_part.update(profiled=True)
        if self._indices[stage] == 1 and self._manifest_part.state(name) != "failed":
            self._manifest_part.expect(awaited(name, "trace", "closing"))
        self._opened = clock.read_anchor()
        if stage is not None:
            self._manifest_part.spend(inside_ns=time.monotonic_ns() - began)
        return True

    def close(self, *, truncated: str | None = None, discard: str | None = None) -> None:
        """Stop the backend and pass its recordings to the exporter. Do nothing if no window is open."""
        undisturbed(partial(self._close, truncated, discard))

    def _close(self, truncated: str | None, discard: str | None) -> None:
        with self._lock:
            if self.running is None:
                return
            began = time.monotonic_ns()
            closed = clock.read_anchor()
            name, self.running = self.running, None
            try:
                pending = self._backend.stop()
            except BackendError as error:
                # Nothing was recorded, for this reason. The next window is tried.
                self._enter_none(name, failures.describe(error), discard)
                return
            except ours() as error:
                self._off = failures.describe(error)
                self._manifest_part.fail(name, self._off, kind="trace")
                failures.note(f"stopping the {self._backend.name} profiler", error)
                return
            except BaseException:  # after a Ctrl-C, the next close stops the backend
                self.running = name
                raise
            finally:
                if self.discrete and self._off is None:
                    self._manifest_part.spend(inside_ns=time.monotonic_ns() - began)
            if discard is not None or not pending:
                self._enter_none(name, "the profiler recorded nothing", discard)
            for artifact in pending:
                if discard is None:
                    self._submit(name, artifact, closed, truncated or artifact.truncated)
                else:
                    artifact.discard()

    def _enter_none(self, name: str, reason: str, discard: str | None) -> None:
        """Record a window without a recording in the manifest: as failed, or as skipped if `discard` is
        given.
        """
        if discard is None:
            self._manifest_part.fail(name, reason, kind="trace")
        else:
            item = Expectation(name=name, kind="trace", state="skipped", reason=discard)
            self._manifest_part.expect(item)

    def finish(self, *, truncated: str | None = None, discard: str | None = None) -> None:
        """Close the open window. No further windows open."""
        with self._lock:
            self._off = truncated or "the capture is closed"
            self.close(truncated=truncated, discard=discard)
            for item in self._manifest_part.record.expected:  # after a Ctrl-C between a stop and its export
                if (item.kind, item.pending) == ("trace", "closing"):
                    self._manifest_part.fail(
                        item.name, "interrupted while it was closed: the recording is lost", kind="trace"
                    )

    def advance(self) -> None:
        try:
            undisturbed(self._backend.advance)
        except ours() as error:
            failures.note(f"advancing the {self._backend.name} profiler", error)

    def new(
        self,
        log: SpanMaker,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        **place: Unpack[scopes.Placing],
    ) -> MarkedSpan:
        """See `SpanMaker.new`."""
        return MarkedSpan(log, stage, role, attrs, windows=self, is_async=in_event_loop(), **place)

    def begin(
        self, log: SpanMaker, declared: Declared, attrs: Mapping[str, AttrValue] | None, first: bool
    ) -> MarkedSpan:
        """See `SpanMaker.begin`."""
        # Only a generator's first resumption in the capture opens a window, because a stream of tokens has
        # thousands of resumptions.
        opens = self.discrete and first
        is_async = declared.is_async
        span = MarkedSpan(
            log, declared.stage, declared.role, attrs, windows=self, is_async=is_async, opens=opens
        )
        return span.__enter__()

    def mark(self, span: Span, is_async: bool) -> AbstractContextManager[None] | None:
        """Open the backend's marker for a span, and return it, or None if no marker was opened."""
        if self.running is None:
            return None
        try:  # after an interrupt, the marker ends with the window
            role = bounded(span.role or scopes.role_at(span.parent) or self._role)
            info = SpanInfo(stage=bounded(span.stage), role=role, span=span.id, is_async=is_async)
            marker = self._backend.range(info)
            marker.__enter__()
        except RecursionError:
            return None  # not noted, because that would exceed the recursion limit too
        except ours() as error:
            failures.note(f"a {self._backend.name} marker", error)
            return None
        return marker

    def unmark(self, marker: AbstractContextManager[None]) -> None:
        try:
            marker.__exit__(None, None, None)
        except ours() as error:
            failures.note(f"a {self._backend.name} marker", error)

    def _name(self, stage: str | None) -> str:
        return f"{self._backend.name} trace" if stage is None else f"{self._backend.name} trace of {stage}"

    def _refusal(self, stage: str | None, role: str) -> str | None:
        if self._off is not None:
            return self._off
        if self.running is not None:
            return f"it ran inside the window of `{self.running}`: one profiler window per process"
        if PROCESS_LOCK.holder is not None:
            # The holder of the lock may be, for example, an engine in this process.
            return f"{PROCESS_LOCK.holder} records this process already"
        if stage is not None:
            decision = selection.decide(self._config, role=role, rank=self._process.rank)
            return None if decision.record else decision.reason
        return None

    def _used_up(self) -> str | None:
        allowed_mb = self._config.budget.trace_mb
        written_mb = exports.exporter().bytes_written(self._step) >> 20
        if written_mb < allowed_mb:
            return None
        return f"budget.trace_mb: {written_mb} MB of traces are written, {allowed_mb} allowed"

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            failures.warn("stepscope: step %d %s", self._step, what)

    def _tell_late(self, name: str) -> None:
        """Log a problem with a file, if the summary of the capture was already logged."""
        if not self._manifest_part.told:
            return
        for item in self._manifest_part.record.expected:
            if item.name == name and item.state in ("partial", "failed"):
                failures.warn("stepscope: step %d: %s: %s: %s", self._step, name, item.state, item.reason)

    def _submit(
        self, name: str, pending: PendingArtifact, closed: ClockAnchor, truncated: str | None
    ) -> None:
        process, stage, opened, role = self._process, self._stage, self._opened, self._role
        index = self._indices[f"{stage}/files"]
        self._indices[f"{stage}/files"] += 1
        target = self._layout.trace_of(
            process,
            self._run_id,
            role=role,
            stage=stage,
            index=index,
            kind=pending.kind,
            suffix=pending.suffix,
        )

        def describe_file(size_bytes: int, path: Path) -> Sidecar:
            artifact = Artifact(
                path=str(path.relative_to(self._layout.root)),
                kind=pending.kind,
                tool=self._backend.name,
                role=role,
                stage=stage,
                rank=process.rank,
                world_size=process.world_size,
                replica=process.replica,
                host=process.host,
                pid=process.pid,
                size_bytes=size_bytes,
                truncated=truncated,
                ignored=pending.ignored,
                note=pending.note,
            )
            return Sidecar(
                step=self._step,
                run_id=self._run_id,
                artifact=artifact,
                process=process.key,
                opened=opened,
                closed=closed,
                versions=pending.versions,
                options=pending.options,
            )

        def done(result: exports.ExportResult) -> None:
            lacking = pending.lacking() if callable(pending.lacking) else pending.lacking
            trouble = result.error or lacking
            self._manifest_part.export_ends(name, result.artifact, trouble, result.cost_ns)
            self._tell_late(name)
            if result.sidecar is not None and self._on_artifact is not None:
                path = self._layout.root / result.sidecar.artifact.path
                self._on_artifact(path, result.sidecar, self._manifest_part)

        self._manifest_part.export_begins(name, truncated, pending.ignored)
        exports.exporter().submit(
            pending,
            target=target,
            describe=describe_file,
            on_done=done,
            deferred=self._config.export.when == "deferred",
        )


class MarkedSpan(Span, gc=False, eq=False, kw_only=True):
    """A span that the profiler's trace shows too."""

    windows: Windows
    is_async: bool
    opens: bool = False
    """True if the span is a stage that opens its own window (discrete mode)."""
    marker: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        if self.start_ns:
            return self.refuse_entry()
        if self.opens:
            # The window opens before the span begins, so that the start of the profiler is not part of the
            # stage's time.
            began_ns = time.monotonic_ns()
            role = self.role or scopes.role_at(scopes.current.get())
            self.opens = self.windows.open(self.stage, role or self.log.process.role)
            if self.opens:
                self._say_profiling(began_ns)
        try:
            super().__enter__()
            self.marker = self.windows.mark(self, self.is_async)
            return self
        except BaseException as error:  # of a signal handler: then `with` does not call `__exit__`
            if self.end_ns is None:
                self.not_entered(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        except ours() as failure:
            failures.note(f"closing the span {self.role}/{self.stage}", failure)
        except BaseException as thrown:  # raised by a signal handler
            self._leave(error or thrown)
            if self.opens:
                self._ended(error or thrown)
            raise

    def hand_on(self) -> None:
        self._unmark()  # a marker must end on the thread on which it began
        super().hand_on()

    def _unmark(self) -> None:
        marker, self.marker = self.marker, None
        if marker is not None:
            self.windows.unmark(marker)

    def _say_profiling(self, began_ns: int) -> None:
        """Record a child span from `began_ns` to now, for a start or stop of the profiler."""
        record(self.log, PROFILING, {"window": self.stage}, began_ns, time.monotonic_ns())

    def _ended(self, error: BaseException | None) -> None:
        self._unmark()
        if self.end_ns is None:
            super()._ended(error)
        if self.opens:
            began_ns = time.monotonic_ns()
            self.windows.close()
            self.opens = False
            self._say_profiling(began_ns)
