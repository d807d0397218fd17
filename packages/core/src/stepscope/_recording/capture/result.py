"""Outcome of a capture, as its owner sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from stepscope._recording.after import hooks, outcome, pipeline
from stepscope._recording.output import exporter
from stepscope.errors import MissingArtifactsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope._recording.capture.files import CapturedFiles
    from stepscope.files.manifest.records import Manifest

    CaptureHook = TypeVar("CaptureHook", bound=Callable[["CaptureResult"], object])

_POLL_S = 0.2


class CaptureResult:
    """The outcome of a capture. `captured` is False for a step that was not selected; nothing is then awaited
    or missing.
    """

    def __init__(self, step: int, files: CapturedFiles | None = None) -> None:
        self.step = step
        self.captured = files is not None
        self._files = files

    def __repr__(self) -> str:
        if not self.captured:
            return f"<CaptureResult of step {self.step}: not selected, nothing recorded>"
        return f"<CaptureResult of step {self.step} in {self.path}>"

    @property
    def path(self) -> Path | None:
        """The step's folder, or None for a step that was not captured."""
        return None if self._files is None else self._files.session.layout.root

    def manifest(self) -> Manifest | None:
        """Return the current manifest, folded from the processes' parts, or None for a step that was not
        captured.
        """
        return None if self._files is None else self._files.manifest()

    def problems(self) -> list[str]:
        """Return a line for each expected item that is missing, partial or failed. Pending items do not
        count.
        """
        manifest = self.manifest()
        return [] if manifest is None else manifest.problems()

    def summary(self) -> str:
        """Return one line for the log: participants, traces (pending ones too), and the folder."""
        if self._files is None:
            return f"step {self.step}: not selected, nothing recorded"
        session = self._files.session
        return outcome.summary(
            self._files.manifest(), session.layout.root, session.config.save_path, self._files.apart
        )

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """Wait until all files of all processes are written, at most `timeout_s` (default
        `budget.export_seconds`).

        Deferred exports begin now. Blocks: from a coroutine, `await asyncio.to_thread(result.wait)`.

        Returns:
            The manifest at the end of the wait. Unfinished items are pending in it.
        """
        files = self._files
        if files is None:
            return None
        if timeout_s is None:
            timeout_s = files.session.config.budget.export_seconds
        until = time.monotonic() + timeout_s
        exporter.exporter().drain(timeout_s)
        files.await_others(
            lambda: until - time.monotonic(),
            lambda: time.sleep(max(0.0, min(until - time.monotonic(), _POLL_S))),
            drain=True,
        )
        files.fold()
        return files.manifest()

    def raise_for_missing(self, timeout_s: float | None = None) -> None:
        """Wait as `wait` does, then raise if any expected item is not there.

        Raises:
            MissingArtifactsError: lists every expectation that is missing, partial, failed or still pending,
                with its reason. A `finish.command` that has not run yet does not count.
        """
        manifest = self.wait(timeout_s)
        problems = [] if manifest is None else manifest.problems() + manifest.awaited(but="running")
        if problems:
            raise MissingArtifactsError(self.step, problems)


def on_capture(hook: CaptureHook) -> CaptureHook:
    """Call `hook(cap.result)` after each capture that this process opened, once its own files are written
    or given up.

    Workers may still be writing their files then: `result.wait()` waits for these. Otherwise as
    `on_artifact`.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return hooks.registered(hook, "on_capture", pipeline.capture_hooks)
