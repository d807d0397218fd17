"""The `cuda_memory` backend: the history of the CUDA caching allocator.

It takes one snapshot per window, and one at the first out-of-memory error. Open the files at
https://pytorch.org/memory_viz.

No GPU has run it so far. Its tests check the signatures of a real torch, and the refusal on a machine without
CUDA. The conformance suite is skipped on such a machine.
"""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from stepscope.backends.cuda_memory import oom
from stepscope.backends.cuda_memory.summary import summarise
from stepscope.backends.process_lock import ProcessLock
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.config import CudaMemoryConfig, ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours
from stepscope.files.cuda_memory import OOM_SUMMARY, SUMMARY

_HISTORY = ProcessLock()
"""Lock of the allocator's history, of which a process has one. The history may run beside torch.profiler."""
os.register_at_fork(after_in_child=_HISTORY.forget)

_NOTHING = nullcontext()


class CudaMemoryBackend:
    """Recorder of the allocations on all CUDA devices of this process."""

    name = "cuda_memory"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config.cuda_memory
        self._window: Window | None = None
        self._has_begun = False
        """True if the history of the window is on, or was about to start."""
        self._ignored: dict[str, str] = {}
        self._at_oom: object | None = None
        self._ooms = 0

    def check(self) -> None:
        """Raise `BackendError` if torch has no CUDA here, or no allocator history."""
        try:
            import torch
        except ImportError as error:
            raise BackendError(
                f"the cuda_memory backend needs torch: {error}. Fix: pip install torch"
            ) from error
        if not torch.cuda.is_available():
            state = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
            raise BackendError(
                f"tool is cuda_memory, but torch {torch.__version__} {state}. Fix: tool: torch, or install a "
                "CUDA build of torch on a machine with a GPU"
            )
        if not hasattr(torch.cuda.memory, "_record_memory_history"):
            raise BackendError(f"torch {torch.__version__} has no memory history. Fix: torch >= 2.1")

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        self.check()
        import torch

        self._window, self._has_begun = window, False  # first: if an interrupt follows, stop() undoes it
        try:
            _HISTORY.acquire(f"the CUDA memory history of step {window.step}", by=self)
            oom.suspend()
            if torch._C._cuda_isHistoryEnabled():
                raise ProfilerBusyError(
                    "the CUDA memory history is recorded by other code. Fix: end it with "
                    "torch.cuda.memory._record_memory_history(None) before the capture"
                )
            options: Any = history_options(self._config)
            self._at_oom, self._ooms, self._ignored, self._has_begun = None, 0, {}, True
            torch.cuda.memory._record_memory_history(**options)
        except ours() as error:
            self._give_back()
            if not isinstance(error, BackendError):
                raise BackendError(f"the CUDA memory history did not start: {error}") from error
            raise
        if self._config.on_oom:
            oom.in_window(self.on_oom)
            reason = oom.attach()
            self._ignored = {} if reason is None else {"cuda_memory.on_oom": reason}

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        return _NOTHING

    def stop(self) -> list[PendingArtifact]:
        """End the window and take its snapshot first, because ending the history drops it. Files are written
        later.
        """
        if self._window is None or _HISTORY.holder is None:
            self._window = None
            return []  # not started, or the child of a fork: the history belongs to the parent
        oom.in_window(None)
        if not self._has_begun:
            self._give_back()
            return []
        import torch

        try:
            snapshots: list[tuple[str | None, object]] = [(None, torch.cuda.memory._snapshot())]
        except ours() as error:
            raise BackendError(f"the CUDA memory snapshot failed: {error}") from error
        finally:
            torch.cuda.memory._record_memory_history(None)
            self._has_begun = False
            self._give_back()
        at_oom, self._at_oom = self._at_oom, None
        if at_oom is not None:
            snapshots.append((f"taken at the first of {self._ooms} out-of-memory error(s)", at_oom))
        artifacts = []
        for truncated, snapshot in snapshots:
            if isinstance(snapshot, dict) and "segments" in snapshot:
                artifacts.append(self._summary(snapshot, truncated))
            artifacts.append(self._artifact(snapshot, truncated))
        return artifacts

    def _give_back(self) -> None:
        oom.resume()
        _HISTORY.release(by=self)
        self._window = None  # last: after an earlier interrupt, a second stop() repeats everything

    def on_oom(self, snapshot: object) -> None:
        """Keep the snapshot of the first out-of-memory error of the window; count the later ones."""
        self._ooms += 1
        if self._at_oom is None:
            self._at_oom = snapshot

    def _summary(self, snapshot: dict[str, Any], truncated: str | None) -> PendingArtifact:
        """Return the summary of a snapshot for the report, which reads no pickles."""
        import torch

        kept = [snapshot]

        def write(path: Path) -> None:
            path.write_bytes(msgspec.json.encode(summarise(kept.pop(), self._config.max_entries)))

        return PendingArtifact(
            kind=SUMMARY if truncated is None else OOM_SUMMARY,
            suffix=".json",
            write=write,
            compress=True,
            discard=kept.clear,
            truncated=truncated,
            versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        )

    def _artifact(self, snapshot: object, truncated: str | None) -> PendingArtifact:
        import torch

        kept = [snapshot]

        def write(path: Path) -> None:
            import pickle  # slow to import

            with path.open("wb") as file:
                pickle.dump(kept.pop(), file)

        return PendingArtifact(
            kind="cuda_memory_snapshot" if truncated is None else "cuda_memory_oom_snapshot",
            suffix=".pickle",
            write=write,
            compress=False,  # memory_viz opens it as it is
            discard=kept.clear,
            truncated=truncated,
            ignored=self._ignored,
            options={
                "max_entries": self._config.max_entries,
                "stacks": self._config.stacks,
                "on_oom": self._config.on_oom,
                "ooms": self._ooms,
            },
            versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        )


def history_options(config: CudaMemoryConfig) -> dict[str, object]:
    """Return the arguments for `torch.cuda.memory._record_memory_history`."""
    import torch

    options: dict[str, object] = {
        "enabled": "all",
        "context": None if config.stacks == "none" else "all",
        "stacks": "all" if config.stacks == "all" else "python",
        "max_entries": config.max_entries,
        "clear_history": True,  # windows must not mix
    }
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    if "clear_history" not in known:
        del options["clear_history"]
    return options
