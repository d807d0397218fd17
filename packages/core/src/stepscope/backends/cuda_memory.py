"""The `cuda_memory` backend: the history of the CUDA caching allocator.

The backend takes a snapshot at the end of each window, and at the window's first out-of-memory error. Open
these snapshots at https://pytorch.org/memory_viz.

The backend has not run on a GPU yet. On a machine without CUDA, tests check the signatures of a real torch
and that the backend refuses to start; the conformance suite is skipped.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.backends import cuda_oom
from stepscope.backends.process_lock import ProcessLock
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.config import CudaMemoryConfig, ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours
from stepscope.files.cuda_memory import OOM_SUMMARY, SUMMARY, Block, DeviceMemory, MemorySummary

LISTED = 2000
"""The largest number of blocks per device that a summary lists one by one."""
_CHANGES = {"alloc": 1, "free_requested": -1}
_HELD = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _Peak(NamedTuple):
    bytes: int
    events: int
    """Number of events up to and including the event that reached the peak; 0 if the peak is before all
    events."""


def summarise(snapshot: Mapping[str, Any], max_entries: int) -> MemorySummary:
    """Summarise a snapshot, for each device that has segments or events. This needs no torch.

    The docstring of `torch.cuda.memory._snapshot` defines the format. Memory counts as allocated from `alloc`
    to `free_requested`, as in `torch.cuda.memory_allocated`.

    Args:
        snapshot: As `torch.cuda.memory._snapshot()` returns it.
        max_entries: The capacity of the history, in events.

    Raises:
        KeyError, TypeError: `snapshot` does not have that format.
    """
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    segments: Sequence[Mapping[str, Any]] = snapshot["segments"]
    with_segments = {segment.get("device", 0) for segment in segments}
    devices = sorted({*with_segments, *(device for device, trace in enumerate(traces) if trace)})
    return MemorySummary(
        devices=tuple(
            _device(
                device,
                [segment for segment in segments if segment.get("device", 0) == device],
                traces[device] if device < len(traces) else [],
                max_entries,
            )
            for device in devices
        )
    )


def _device(
    device: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], max_entries: int
) -> DeviceMemory:
    end_bytes = sum(block["size"] for block in _blocks(segments) if block["state"] == "active_allocated")
    end_reserved = sum(segment["total_size"] for segment in segments)
    peak = _highest(trace, end_bytes, _CHANGES)
    alive = _alive(trace[: peak.events])
    listed = sorted(alive, key=lambda event: -event["size"])[:LISTED]
    frames: dict[str, int] = {}
    blocks = tuple(
        Block(event["size"], event.get("time_us"), _place(event.get("frames"), frames)) for event in listed
    )
    known = sum(event["size"] for event in alive)
    ooms = [event for event in trace if event["action"] == "oom"]
    return DeviceMemory(
        device=device,
        events=len(trace),
        since_us=trace[0].get("time_us") if trace else None,
        cut=len(trace) >= max_entries,
        peak_bytes=peak.bytes,
        peak_us=trace[peak.events - 1].get("time_us") if peak.events else None,
        peak_reserved_bytes=_highest(trace, end_reserved, _HELD).bytes,
        end_bytes=end_bytes,
        end_reserved_bytes=end_reserved,
        before_bytes=max(0, peak.bytes - known),
        blocks=blocks,
        other_blocks=len(alive) - len(listed),
        other_bytes=known - sum(block.bytes for block in blocks),
        frames=tuple(frames),
        ooms=len(ooms),
        oom_bytes=ooms[0]["size"] if ooms else None,
    )


def _blocks(segments: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for segment in segments:
        yield from segment["blocks"]


def _highest(trace: Sequence[Mapping[str, Any]], end: int, changes: Mapping[str, int]) -> _Peak:
    """Return the highest number of bytes in a history, and when it was first reached.

    Before the first event, the number of bytes is `end` minus all changes.

    Args:
        end: Number of bytes after the last event.
        changes: {action of an event: 1 if it adds the event's bytes, -1 if it subtracts them}. Other events
            change nothing.
    """
    now = end - sum(changes.get(event["action"], 0) * event["size"] for event in trace)
    peak = _Peak(now, 0)
    for count, event in enumerate(trace, 1):
        now += changes.get(event["action"], 0) * event["size"]
        if now > peak.bytes:
            peak = _Peak(now, count)
    return peak


def _alive(trace: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the allocations that are not freed by a later event of `trace`."""
    alive: dict[int, Mapping[str, Any]] = {}
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return list(alive.values())


def _place(frames: Sequence[Mapping[str, Any]] | None, known: dict[str, int]) -> int:
    if not frames:
        return -1
    own = (frame for frame in frames if "/torch/" not in frame["filename"] and frame["filename"] != "??")
    frame = next(own, frames[0])
    name = f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}"
    return known.setdefault(name, len(known))


_HISTORY = ProcessLock()
"""Lock of the allocator's history. A process has one history, which may run beside torch.profiler."""
os.register_at_fork(after_in_child=_HISTORY.forget)

_NOTHING = nullcontext()


class CudaMemoryBackend:
    """Backend that records the allocations on all CUDA devices of this process."""

    name = "cuda_memory"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config.cuda_memory
        self._window: Window | None = None
        self._has_begun = False
        """True once the window's history has started or is about to start."""
        self._ignored: dict[str, str] = {}
        self._at_oom: object | None = None
        self._ooms = 0

    def check(self) -> None:
        """Raise `BackendError` if torch has no CUDA on this machine, or has no allocator history."""
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

        self._window, self._has_begun = window, False  # set first, so that stop() cleans up
        try:
            _HISTORY.acquire(f"the CUDA memory history of step {window.step}", by=self)
            cuda_oom.suspend()
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
            cuda_oom.in_window(self.on_oom)
            reason = cuda_oom.attach()
            self._ignored = {} if reason is None else {"cuda_memory.on_oom": reason}

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        return _NOTHING

    def stop(self) -> list[PendingArtifact]:
        """End the window. The snapshot is taken first, because torch drops the events when the history ends.
        Files are written later.
        """
        if self._window is None or _HISTORY.holder is None:
            self._window = None
            return []  # not started, or a forked child: the history belongs to the parent
        cuda_oom.in_window(None)
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
        cuda_oom.resume()
        _HISTORY.release(by=self)
        self._window = None  # cleared last, so that a second stop() after an interrupt repeats everything

    def on_oom(self, snapshot: object) -> None:
        """Keep the snapshot of the window's first out-of-memory error, and count all errors."""
        self._ooms += 1
        if self._at_oom is None:
            self._at_oom = snapshot

    def _summary(self, snapshot: dict[str, Any], truncated: str | None) -> PendingArtifact:
        """Return a summary of the snapshot for the report, which does not read pickles."""
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
            compress=False,  # memory_viz does not open compressed files
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
        "clear_history": True,  # else a window would contain events of the previous window
    }
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    if "clear_history" not in known:
        del options["clear_history"]
    return options
