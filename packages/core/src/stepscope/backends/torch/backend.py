"""The `torch` backend: torch.profiler, with a guard for each of its traps (docs/torch-traps.md).

A window belongs to one thread (`window_thread`), a process has one window (`process_lock`), and sessions of
other code are watched (`foreign_sessions`). If other code opens a session during a window, the window ends:
its recording is kept and marked as truncated, and the other session runs undisturbed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.backends.torch import foreign_sessions, record_function_scopes
from stepscope.backends.torch import window as torch_window
from stepscope.backends.torch.window import Options, Recorded, TorchWindow, resolve
from stepscope.backends.window_thread import (
    HeldWindow,
    Late,
    about,
    begin_on_thread,
    end_on_thread,
    in_backward,
    run_on,
    thread_for_window,
    title,
)
from stepscope.config import ProfileConfig, ScheduleConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours

_hooking = threading.RLock()
_hooked = False


def hook() -> None:
    """Install the hooks before the first session of this process. Imports torch."""
    global _hooked
    with _hooking:
        if _hooked:
            return
        _hooked = True
        foreign_sessions.watch(_before_another_session)
        record_function_scopes.watch()
        os.register_at_fork(after_in_child=_in_child)
        atexit.register(_at_exit)


def _before_another_session() -> None:
    """End the open window, because other code is about to open a torch.profiler session on this thread."""
    window = torch_window.TorchWindow.current
    if window is None:
        return
    thread = threading.current_thread().name
    reason = f"other code started torch.profiler on thread {thread}"
    task = run_on(window.thread, partial(window.end, reason))
    if not task.done:
        task.cancel()
        raise ProfilerBusyError(
            f"torch.profiler cannot start on thread {thread}: {window.name} is being recorded on "
            f"{window.thread.name}, which does not answer, and two sessions would crash the process. "
            "Fix: torch.all_threads: true, or profile outside of captures"
        )


def _at_exit() -> None:
    """End an open window before the process exits, because torch would crash at exit. A later stop() still
    returns the recording.
    """
    window = torch_window.TorchWindow.current
    if window is not None:
        run_on(window.thread, window.end)


def _in_child() -> None:
    """Detach a forked child from its parent's session, so that the child can profile on its own."""
    import torch

    record_function_scopes.forget()
    window = torch_window.forget()
    if window is not None:
        foreign_sessions.forget()
        # The child inherits the session's callbacks (on every new thread too, if the session records all
        # threads), and they would record every operator for nothing.
        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]  # torch: not in its stub
        if window.options.recorded["with_stack"]:
            sys.setprofile(None)  # with_stack also records every Python call
    # exit() would hang in a destructor of Kineto, which waits for a thread that a fork does not copy.
    torch_window.leave_without_destructors()


_LITTLE_MB = 256
"""If torch cannot write a trace, and the disk has fewer free MB than this, the error calls the disk full."""
_NOTHING = nullcontext()


class TorchBackend:
    """Backend that records this process with torch.profiler.

    A window that the main thread starts records only the main thread, or all threads with
    `torch.all_threads`. A window that another thread starts (of a pool or an event loop) records all threads.
    """

    name = "torch"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._held: HeldWindow[TorchWindow] = HeldWindow("a TorchBackend")
        self._resolved: dict[bool, Options] = {}

    def check(self) -> None:
        """Raise `BackendError` if torch is absent or too old, or records none of the requested activities."""
        self._options(self._config.torch.all_threads)

    def prepare(self) -> None:
        """Start Kineto for the first time (1.2 to 2.5 s) with an empty window, unless a session runs
        already.
        """
        if torch_window.kineto_has_started:
            return
        window = self._make("the first start of torch.profiler", all_threads=False)
        try:
            begin_on_thread(window)
        except ProfilerBusyError:
            pass  # a session of other code has started Kineto, or is about to
        finally:
            end_on_thread(window)

    def start(self, window: Window) -> None:
        """Begin recording. After `prepare`, this takes 0.3 ms on the main thread and 0.5 ms on another
        thread.

        If two successive windows record all threads, at least 0.1 s pass between them.
        """
        self._held.refuse_second()
        recorder = self._make(
            title("torch trace", window),
            all_threads=self._config.torch.all_threads,
            schedule=self._config.torch.schedule,
            trace_id=_trace_id(window),
            about=about(window),
        )
        self._held.begin(recorder)

    def advance(self) -> None:
        window = self._held.window
        if self._config.torch.schedule is None or window is None:
            return
        if in_backward():
            window.advance_in_backward()
        else:
            self._held.advance()

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return a context that marks a span as `<role>.<stage>`.

        For a span in `async def` this is a null context, because interleaved tasks share a thread.
        """
        window = self._held.window
        if window is None or span.is_async or not window.records_here():
            return _NOTHING
        return window.options.marker(f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        """End the window. Return one artifact, or one for each cycle of a schedule.

        If the window belongs to the main thread, a call from another thread waits up to 1 s for the main
        thread, which may be in C code. After 1 s `stop` returns an artifact whose `write` continues to wait,
        up to `budget.export_seconds`.

        Raises:
            BackendError: nothing was recorded. The message has the reason.
        """
        ended = self._held.end()
        if ended is None:
            return []
        window, late = ended
        artifacts = [self._artifact(window, part, partial(_write, part)) for part in window.take()]
        return artifacts if late is None else [*artifacts, self._late_artifact(window, late)]

    def _options(self, all_threads: bool) -> Options:
        # Cached, because a query of CUDA takes time, and every stage has a window in discrete mode.
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
        hook()
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
        """Return the artifact of a window whose thread has not ended it yet."""

        def write(path: Path) -> None:
            late.wait(self._config.budget.export_seconds, ". Fix: torch.all_threads: true")
            for recorded in window.take():
                late.cut = late.cut or recorded.truncated
                _write(recorded, path)

        artifact = self._artifact(window, Recorded(None, 0, None), write)
        return msgspec.structs.replace(artifact, note=late.note, lacking=lambda: late.cut)


def _write(recorded: Recorded, path: Path) -> None:
    """Write the trace as JSON and free its profile. This holds the GIL for about 3 us per event."""
    profile = recorded.profile
    if profile is None:
        raise BackendError("this torch trace was written or discarded already")
    try:
        profile.export_chrome_trace(str(path))
        _verify(path)
    finally:
        del profile
        recorded.drop()


def _verify(path: Path) -> None:
    """Raise `BackendError` if the trace is absent or ends early, because torch prints errors and does not
    raise them.
    """
    size = path.stat().st_size if path.exists() else None
    if size is None:
        raise BackendError(f"torch wrote no trace{_full(path.parent)}. Its message is on stderr")
    with path.open("rb") as file:
        file.seek(max(0, size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise BackendError(f"torch's trace ends early, after {size} bytes{_full(path.parent)}")


def _full(folder: Path) -> str:
    """Return the end of an error message: the free space in `folder`, where torch could not write."""
    try:
        disk = os.statvfs(folder)
    except ours(OSError) as error:
        return f" to {folder}: {error.strerror}"
    free_mb = disk.f_bavail * disk.f_frsize / (1 << 20)
    if free_mb < _LITTLE_MB:
        return f": no space left on device ({free_mb:.1f} MB are free, and the trace is larger)"
    return f" ({free_mb:.0f} MB are free on its disk; a quota may be smaller)"


def _trace_id(window: Window) -> str:
    rank = "" if window.process.rank is None else f"_rank{window.process.rank}"
    return f"step_{window.step}_{window.process.role}{rank}_{window.stage or 'capture'}_{window.index}"
