"""What became of a capture, as its owner sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stepscope.errors import MissingArtifactsError
from stepscope.files.manifest.parts import read_parts
from stepscope.files.manifest.records import Manifest, ProcessPart
from stepscope.recording.after import hooks, pipeline
from stepscope.recording.capture import omissions
from stepscope.recording.output import exporter
from stepscope.recording.process import failures

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.recording.fanout.participants import Others
    from stepscope.recording.session.session import Session

    CaptureHook = TypeVar("CaptureHook", bound=Callable[["CaptureResult"], object])

_POLL_S = 0.2
_TOLD = 3
"""Problems that `shortfall` says in full."""


class CaptureResult:
    """`captured` is False for a step that was not selected; then there is nothing to wait for and nothing
    missing.
    """

    def __init__(self, *, step: int, session: Session | None = None, others: Others | None = None) -> None:
        self.step = step
        self.captured = session is not None
        self._session = session
        self._others = others
        self._gathering = threading.Lock()

    def __repr__(self) -> str:
        if not self.captured:
            return f"<CaptureResult of step {self.step}: not selected, nothing recorded>"
        return f"<CaptureResult of step {self.step} in {self.path}>"

    @property
    def path(self) -> Path | None:
        """The step's folder; None for a step that was not captured."""
        return None if self._session is None else self._session.layout.root

    def manifest(self) -> Manifest | None:
        """What is there at this moment, folded from the processes' parts; None for a step that was not
        captured.
        """
        if self._session is None:
            return None
        return self._session.ledger.manifest(self._session.layout)

    def fold(self) -> None:
        """Writes `manifest.json` anew. A disk that refuses is noted by the guard."""
        if self._session is None:
            return
        try:
            self._session.ledger.fold(self._session.layout)
        except OSError as error:
            failures.note("writing the manifest", error)

    def problems(self) -> list[str]:
        """Return a line for each thing that is missing, partial or failed. What is pending does not count."""
        manifest = self.manifest()
        return [] if manifest is None else manifest.problems()

    def problems_to_tell(self) -> list[str]:
        """Return the problems that this process tells of: its own, and those of processes that it started.

        Ranks that open captures of their own tell of themselves. The last one to close tells of those that
        are gone.
        """
        manifest = self.manifest()
        if manifest is None:
            return []
        parts = manifest.processes
        is_last = not self.is_open_elsewhere(manifest)
        told = [part for part in parts if not self._is_peer(part) or (is_last and part.closed is None)]
        return msgspec.structs.replace(manifest, processes=tuple(told)).problems()

    def _is_peer(self, part: ProcessPart) -> bool:
        mine = None if self._session is None else self._session.process
        return part.owner and part.process != mine

    def is_open_elsewhere(self, manifest: Manifest) -> bool:
        """Return whether another rank, which opened this capture by itself, has not closed it yet."""
        peers = filter(self._is_peer, manifest.processes)
        return any(item.pending == "closing" for part in peers for item in part.expected)

    def shortfall(self) -> str | None:
        """What failed, or why nothing recorded though a profiler was to run; None when all is well so far."""
        problems = self.problems()
        if problems:
            more = f" (and {len(problems) - _TOLD} more)" if len(problems) > _TOLD else ""
            return "; ".join(problems[:_TOLD]) + more
        manifest = self.manifest()
        if manifest is None or self._session is None or self.apart:
            return None
        return omissions.no_profiler(self._session.config, manifest)

    def summary(self) -> str:
        """One line for the log: who took part, how many traces there are or are on their way, where."""
        return self._summary_of(self.manifest())

    def summary_to_tell(self) -> str | None:
        """Return the summary; None while another rank, which opened this capture by itself, records: the last
        one to close tells it for all.
        """
        manifest = self.manifest()
        if manifest is not None and self.is_open_elsewhere(manifest):
            return None
        return self._summary_of(manifest)

    def _summary_of(self, manifest: Manifest | None) -> str:
        if manifest is None or self._session is None:
            return f"step {self.step}: not selected, nothing recorded"
        items = [item for part in manifest.processes for item in part.expected]
        traces = sum(len(item.artifacts) + (item.pending == "exporting") for item in items)
        processes, save_path = len(manifest.processes), self._session.config.save_path
        apart = f" and {len(self.apart)} on other hosts, whose files are fetched" if self.apart else ""
        return (
            f"step {self.step} captured: {processes} process{'es' * (processes != 1)}{apart}, "
            f"{traces} trace{'s' * (traces != 1)}, in {self.path}; "
            f"`stepscope report {save_path} --step {self.step}`"
        )

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """Waits until all files of all processes are written, at most `timeout_s` (default
        `budget.export_seconds`).

        Deferred exports begin now. Blocks: from a coroutine, `await asyncio.to_thread(result.wait)`.

        Returns:
            The manifest as it then is: what is unfinished stands in it as pending.
        """
        if self._session is None:
            return None
        if timeout_s is None:
            timeout_s = self._session.config.budget.export_seconds
        until = time.monotonic() + timeout_s
        exporter.exporter().drain(timeout_s)
        self.drain_workers(until - time.monotonic())
        self.gather(lambda: until - time.monotonic())
        while self.unfinished() and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
        self.fold()
        return self.manifest()

    def unfinished(self) -> bool:
        """Whether another process, a worker or a peer of torchrun's, still records or writes. Read off the
        disk, because a call would hold up a busy one.
        """
        if self._session is None:
            return False
        mine = self._session.ledger.part
        lost = {absent.process for absent in mine.absent}
        return any(
            item.pending in ("exporting", "closing")
            for part in read_parts(self._session.layout)[0]
            if part.run_id == mine.run_id and part.process != mine.process and part.process.key not in lost
            for item in part.expected
        )

    def drain_workers(self, timeout_s: float) -> None:
        """Waits until the workers have written their files, deferred ones too."""
        if self._others is not None and self._others.fleet is not None:
            from stepscope.recording.process import private_loop

            private_loop.run(self._others.fleet.drain(max(0.0, timeout_s)))

    @property
    def apart(self) -> list[str]:
        """Workers whose files are fetched once the capture is closed: their hosts share no folder with this
        one.
        """
        return [] if self._others is None else self._others.apart

    def gather(self, left_s: Callable[[], float]) -> None:
        """Fetches the files of workers that are apart; a second call, beside the first or after it, fetches
        what that left.
        """
        session, others = self._session, self._others
        if session is None or others is None or others.fleet is None or not others.apart:
            return
        from stepscope.recording.process import private_loop

        if not self._gathering.acquire(timeout=max(0.0, left_s())):
            return  # the other one is at it, and enters what it fetched
        try:
            private_loop.run(others.gather(left_s))
            self.fold()
        finally:
            self._gathering.release()

    def raise_for_missing(self, timeout_s: float | None = None) -> None:
        """Waits as `wait` does, then raises if anything that was promised is not there.

        Raises:
            MissingArtifactsError: lists every expectation that is missing, partial, failed or still pending,
                with its reason. A `finish.command` that has not run yet is none of them.
        """
        manifest = self.wait(timeout_s)
        problems = [] if manifest is None else manifest.problems() + manifest.awaited(but="running")
        if problems:
            raise MissingArtifactsError(self.step, problems)


def on_capture(hook: CaptureHook) -> CaptureHook:
    """Calls `hook(cap.result)` after each capture that this process opened, once its own files are written
    or given up.

    Its workers may still be writing theirs then: `result.wait()` waits for them. Otherwise as `on_artifact`.

    Raises:
        ConfigError: it cannot be called, or is an `async def`, which nobody would await.
    """
    return hooks.registered(hook, "on_capture", pipeline.capture_hooks)
