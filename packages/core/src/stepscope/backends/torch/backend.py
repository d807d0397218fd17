"""The `torch` backend: torch.profiler, made safe.

torch.profiler segfaults when it is nested, stopped twice, stopped by another thread, or left open at exit.
Here each of these is an error or a safe no-op: a window belongs to one thread (`window_thread`), a process
has one (`process_lock`), sessions of other code are seen (`foreign_sessions`), and what is open at exit is
ended.

A session that other code opens while a window is recording ends the window: it is kept up to there, marked as
truncated, and the other session runs as if alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.backends.threaded.threaded_window import (
    HeldWindow,
    Late,
    about,
    begin_on_thread,
    end_on_thread,
    title,
)
from stepscope.backends.threaded.window_thread import in_backward, thread_for_window
from stepscope.backends.torch import process
from stepscope.backends.torch import window as torch_window
from stepscope.backends.torch.options import Options, resolve
from stepscope.backends.torch.window import Recorded, TorchWindow
from stepscope.config import ProfileConfig, ScheduleConfig
from stepscope.errors import BackendError, ProfilerBusyError

_LITTLE_MB = 256
"""A disk with less room than this is called full once torch could not write: traces are seldom larger."""
_NOTHING = nullcontext()


class TorchBackend:
    """Records this process with torch.profiler.

    A window started on the main thread records the main thread, or all threads with `torch.all_threads`.
    Started on any other thread (a pool's, an event loop's) it records all threads.
    """

    name = "torch"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._held: HeldWindow[TorchWindow] = HeldWindow("a TorchBackend")
        self._resolved: dict[bool, Options] = {}

    def check(self) -> None:
        """Raises `BackendError`: torch is absent, or too old, or records none of the activities asked for."""
        self._options(self._config.torch.all_threads)

    def prepare(self) -> None:
        """Pays for Kineto's first start (1.2 to 2.5 s) with an empty window, unless somebody profiles
        already.
        """
        if torch_window.kineto_has_started:
            return
        window = self._make("the first start of torch.profiler", all_threads=False)
        try:
            begin_on_thread(window)
        except ProfilerBusyError:
            pass  # Kineto has started, or is about to, on somebody else's account
        finally:
            end_on_thread(window)

    def start(self, window: Window) -> None:
        """Begins recording. Once `prepare` has run: 0.3 ms on the main thread, 0.5 ms on another, where it
        waits up to 0.1 s if a window of all threads has just ended.
        """
        self._held.refuse_second()
        made = self._make(
            title("torch trace", window),
            all_threads=self._config.torch.all_threads,
            schedule=self._config.torch.schedule,
            trace_id=_trace_id(window),
            about=about(window),
        )
        self._held.begin(made)

    def advance(self) -> None:
        window = self._held.window
        if self._config.torch.schedule is None or window is None:
            return
        if in_backward():
            window.advance_unheeded()
        else:
            self._held.advance()

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """A marker `<role>.<stage>`. None inside `async def`, where interleaved tasks share a thread."""
        window = self._held.window
        if window is None or span.is_async or not window.records_here():
            return _NOTHING
        return window.options.marker(f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        """Ends the window: one artifact; with a schedule, one for each cycle.

        On a thread that is not the window's it waits up to 1 s for the main thread to come out of C code.
        Where it does not, the artifact is one whose `write` waits on, up to `budget.export_seconds`.

        Raises:
            BackendError: nothing was recorded, and why; or this is a signal handler that interrupted the
                start or stop of this very window, which completes once the handler returns.
        """
        ended = self._held.end()
        if ended is None:
            return []
        window, late = ended
        artifacts = [self._artifact(window, one, partial(_write, one)) for one in window.take()]
        return artifacts if late is None else [*artifacts, self._late_artifact(window, late)]

    def _options(self, all_threads: bool) -> Options:
        # Kept, since asking CUDA what it has takes time, and in discrete mode every stage has a window.
        if all_threads not in self._resolved:
            self._resolved[all_threads] = resolve(self._config.torch, all_threads=all_threads)
        return self._resolved[all_threads]

    def _make(
        self,
        name: str,
        *,
        all_threads: bool,
        schedule: ScheduleConfig | None = None,
        trace_id: str = "stepscope",
        about: Mapping[str, object] = MappingProxyType({}),
    ) -> TorchWindow:
        thread = thread_for_window(all_threads)
        options = self._options(thread.all_threads)
        process.hook()
        return TorchWindow(name, thread, options, schedule=schedule, trace_id=trace_id, about=about)

    def _artifact(
        self, window: TorchWindow, recorded: Recorded, write: Callable[[Path], None]
    ) -> PendingArtifact:
        return PendingArtifact(
            kind="torch_trace",
            suffix=".json",
            write=write,
            compress=self._config.export.compress,
            discard=recorded.drop,
            truncated=recorded.truncated,
            ignored=dict(window.options.ignored),
            options={**window.options.recorded, "cycle": recorded.cycle},
            versions=dict(window.options.versions),
        )

    def _late_artifact(self, window: TorchWindow, late: Late) -> PendingArtifact:
        """Of a window whose thread has not ended it yet."""

        def write(path: Path) -> None:
            late.wait(self._config.budget.export_seconds, ". Fix: torch.all_threads: true")
            for recorded in window.take():
                _write(recorded, path)

        return self._artifact(window, Recorded(None, 0, late.truncated), write)


def _write(recorded: Recorded, path: Path) -> None:
    """Writes the trace as JSON and frees what it was made from. Holds the GIL, for some 3 us an event."""
    profile = recorded.profile
    if profile is None:
        raise BackendError("this torch trace is written or discarded already")
    try:
        profile.export_chrome_trace(str(path))
        _verify(path)
    finally:
        del profile
        recorded.drop()


def _verify(path: Path) -> None:
    """torch prints, and raises nothing, when it cannot write; what a full disk took of a trace it removes."""
    size = path.stat().st_size if path.exists() else None
    if size is None:
        raise BackendError(f"torch wrote no trace{_full(path.parent)}. Its message is on stderr")
    with path.open("rb") as file:
        file.seek(max(0, size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise BackendError(f"torch's trace ends early, after {size} bytes{_full(path.parent)}")


def _full(folder: Path) -> str:
    """Return what is to be said of the room in `folder`, in which torch could not write."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return f" to {folder}: {error.strerror}"
    free_mb = disk.f_bavail * disk.f_frsize / (1 << 20)
    if free_mb < _LITTLE_MB:
        return f": no space left on device ({free_mb:.1f} MB are free, and the trace is larger)"
    return f" ({free_mb:.0f} MB are free on its disk; a quota may be smaller)"


def _trace_id(window: Window) -> str:
    rank = "" if window.process.rank is None else f"_rank{window.process.rank}"
    return f"step_{window.step}_{window.process.role}{rank}_{window.stage or 'capture'}_{window.index}"
