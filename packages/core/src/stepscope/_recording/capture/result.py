"""The outcome of a capture, for the process that opened the capture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stepscope._recording.process import exports, failures
from stepscope._recording.session import hooks, pipeline
from stepscope.errors import MissingArtifactsError
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.sidecar import ProcessInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope._recording.capture.files import CapturedFiles
    from stepscope.files.manifest import Manifest

    CaptureHook = TypeVar("CaptureHook", bound=Callable[["CaptureResult"], object])


_IN_FULL = 3
"""Largest number of problems that `shortfall` lists in full."""


def is_open_elsewhere(parts: Iterable[ProcessPart], process: ProcessInfo) -> bool:
    """Return whether a rank that opened its own capture of this step has not closed it yet."""
    peers = [part for part in parts if is_peer(part, process)]
    return any(item.pending == "closing" for part in peers for item in part.expected)


def is_peer(part: ProcessPart, process: ProcessInfo) -> bool:
    """Return whether the part belongs to another rank that opened its own capture of this step."""
    return part.owner and part.process != process


def problems_to_tell(manifest: Manifest, process: ProcessInfo) -> list[str]:
    """Return the problems that this process logs: its own problems, and problems of its workers and engines,
    including stops after their deadline.

    Ranks that open their own captures log their own problems. The last rank to close also logs the problems
    of dead ranks. Problems that `warn_once` has logged are left out.
    """
    is_last = not is_open_elsewhere(manifest.processes, process)
    own = [
        msgspec.structs.replace(
            part, expected=tuple(item for item in part.expected if not failures.has_warned(item.reason))
        )
        for part in manifest.processes
        if not is_peer(part, process) or (is_last and part.closed is None)
    ]
    return _troubles(msgspec.structs.replace(manifest, processes=tuple(own)))


def _troubles(manifest: Manifest) -> list[str]:
    return manifest.problems() + manifest.awaited(only="late")


def shortfall(manifest: Manifest, no_profiler: str | None) -> str | None:
    """Return the problems of a capture in one line, or if there are none, `no_profiler`.

    Args:
        no_profiler: Reason why no profiler recorded anything, or None.
    """
    problems = _troubles(manifest)
    if not problems:
        return no_profiler
    more = f" (and {len(problems) - _IN_FULL} more)" if len(problems) > _IN_FULL else ""
    return "; ".join(problems[:_IN_FULL]) + more


def summary(manifest: Manifest, folder: Path, save_path: str, apart: Sequence[str]) -> str:
    """Return one line for the log: number of processes, number of traces (also pending ones), and the step's
    folder.

    A process whose spans could not be written is not counted.
    """
    items = [item for part in manifest.processes for item in part.expected]
    traces = sum(len(item.artifacts) + (item.pending == "exporting") for item in items)
    lost = [item for item in items if item.kind == "spans" and item.state == "failed"]
    processes = len(manifest.processes) - len(lost)
    if not processes and (lost or not traces):  # the disk has no room for a pending trace either
        return f"step {manifest.step} was not captured: {lost[0].reason if lost else 'no process took part'}"
    elsewhere = f" and {len(apart)} on other hosts, whose files are fetched" if apart else ""
    return (
        f"step {manifest.step} captured: {processes} process{'es' * (processes != 1)}{elsewhere}, "
        f"{traces} trace{'s' * (traces != 1)}, in {folder}; "
        f"`stepscope report {save_path} --step {manifest.step}`"
    )


_POLL_S = 0.2


class CaptureResult:
    """The outcome of a capture. `captured` is False for a step that was not selected, which has no files and
    no problems.
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
        """Return the current manifest, combined from the parts of all processes, or None for a step that was
        not captured.
        """
        return None if self._files is None else self._files.manifest()

    def problems(self) -> list[str]:
        """Return a line for each expected item that is missing, partial or failed. Pending items are not
        listed.
        """
        manifest = self.manifest()
        return [] if manifest is None else manifest.problems()

    def summary(self) -> str:
        """Return one line for the log: number of processes, number of traces (also pending ones), and the
        step's folder.
        """
        if self._files is None:
            return f"step {self.step}: not selected, nothing recorded"
        session = self._files.session
        return summary(
            self._files.manifest(), session.layout.root, session.config.save_path, self._files.apart
        )

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """Wait until the files of all processes are written, at most `timeout_s` seconds (by default
        `budget.export_seconds`).

        Deferred exports begin now. The call blocks; in a coroutine use `await
        asyncio.to_thread(result.wait)`.

        Returns:
            The manifest after the wait, in which unfinished items are pending; None for a step that was not
                captured.
        """
        files = self._files
        if files is None:
            return None
        if timeout_s is None:
            timeout_s = files.session.config.budget.export_seconds
        until = time.monotonic() + timeout_s
        exports.exporter().drain(timeout_s)
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
            MissingArtifactsError: lists every item that is missing, partial, failed or still pending, with
                the reason. A `finish.command` that has not run yet is not listed.
        """
        manifest = self.wait(timeout_s)
        problems = [] if manifest is None else manifest.problems() + manifest.awaited(but="running")
        if problems:
            raise MissingArtifactsError(self.step, problems)


def on_capture(hook: CaptureHook) -> CaptureHook:
    """Call `hook(result)` with the `CaptureResult` of each capture that this process opened.

    The call is made once the files of this process are written or have failed. Workers may still be writing
    their files; `result.wait()` waits for them. The hook runs on the same thread as `on_artifact` hooks.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return hooks.registered(hook, "on_capture", pipeline.capture_hooks)
