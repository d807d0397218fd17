"""The `torch` backend: torch.profiler, made safe.

torch.profiler segfaults when it is nested, stopped twice, stopped by another thread, or left open at exit.
Here each of these is an error or a safe no-op: a window belongs to one thread (`window_thread`), a process
has one (`process_lock`), sessions of other code are seen (`user_profilers`), and what is open at exit is
ended.

A session that other code opens while a window is recording ends the window: it is kept up to there, marked as
truncated, and the other session runs as if alone.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

from stepscope.backends import torch_process, torch_window
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.backends.torch_options import Options, resolve
from stepscope.backends.torch_window import Recorded, TorchWindow
from stepscope.backends.window_thread import ANSWER_S, Task, run_on, thread_for_window
from stepscope.config import ProfileConfig, ScheduleConfig
from stepscope.errors import BackendError, ProfilerBusyError

_NOTHING = nullcontext()


class TorchBackend:
    """Records this process with torch.profiler.

    A window started on the main thread records the main thread, or all threads with `torch.all_threads`.
    Started on any other thread (a pool's, an event loop's) it records all threads.
    """

    name = "torch"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._window: TorchWindow | None = None
        self._when_dropped: weakref.finalize[[TorchWindow], TorchBackend] | None = None
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
            _begin(window)
        except ProfilerBusyError:
            return  # Kineto has started, or is about to, on somebody else's account
        run_on(window.thread, window.end)

    def start(self, window: Window) -> None:
        """Begins recording. Once `prepare` has run: 0.3 ms on the main thread, 0.5 ms on another."""
        if self._window is not None:
            raise ProfilerBusyError(f"{self._window.name} was not stopped. Fix: stop() before start()")
        made = self._make(
            _title(window),
            all_threads=self._config.torch.all_threads,
            schedule=self._config.torch.schedule,
            trace_id=_trace_id(window),
            about=_about(window),
        )
        self._window = made
        try:
            _begin(made)
        except BaseException:
            self._window = None
            raise
        self._when_dropped = weakref.finalize(self, _dropped, made)
        self._when_dropped.atexit = False  # at exit the window is ended, and a stop() after that gets it

    def advance(self) -> None:
        window = self._window
        if window is not None and self._config.torch.schedule is not None:
            run_on(window.thread, window.advance)

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """A marker `<role>.<stage>`. None inside `async def`, where interleaved tasks share a thread."""
        window = self._window
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
        window = self._window
        if window is None:
            return []
        task = window.thread.submit(window.end)
        if not task.done and window.thread.is_current():
            raise BackendError(f"{window.name} is being started or stopped, beneath this signal handler")
        self._window = None
        if self._when_dropped is not None:
            self._when_dropped.detach()
        ended = task.wait(ANSWER_S)
        artifacts = [self._artifact(window, one, partial(_write, one)) for one in window.take()]
        return artifacts if ended else [*artifacts, self._late_artifact(window, task)]

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
        torch_process.hook()
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

    def _late_artifact(self, window: TorchWindow, task: Task) -> PendingArtifact:
        """Of a window whose thread has not ended it yet."""
        patience_s = self._config.budget.export_seconds
        caller = threading.current_thread().name

        def write(path: Path) -> None:
            if not task.wait(patience_s):
                raise BackendError(
                    f"stop() came from thread {caller}, but {window.name} belongs to {window.thread.name}, "
                    f"which was in C code for all of {patience_s:g} s. Fix: torch.all_threads: true"
                )
            for recorded in window.take():
                _write(recorded, path)

        late = Recorded(None, 0, f"stopped by thread {caller}, ended when {window.thread.name} came to it")
        return self._artifact(window, late, write)


def _begin(window: TorchWindow) -> None:
    task = run_on(window.thread, window.begin, begin_s=60)
    if not task.done:
        task.cancel()
        raise BackendError(f"{window.name} cannot start: {window.thread.name} is busy with another window")


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
    """torch prints, and raises nothing, when it cannot write."""
    size = path.stat().st_size if path.exists() else None
    if size is None:
        raise BackendError(f"torch wrote no trace to {path}: its message is on stderr")
    with path.open("rb") as file:
        file.seek(max(0, size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise BackendError(f"torch's trace {path} ends early, after {size} bytes. Is the disk full?")


def _dropped(window: TorchWindow) -> None:
    """The backend was garbage-collected while it recorded. Any thread, at any moment: so nothing waits."""
    window.thread.submit(window.end)
    warnings.warn(
        f"a TorchBackend was dropped while recording: {window.name} is lost. Fix: call stop()",
        ResourceWarning,
        stacklevel=2,
    )


def _title(window: Window) -> str:
    stage = "" if window.stage is None else f" of {window.stage}"
    return f"the torch trace{stage} in step {window.step}"


def _trace_id(window: Window) -> str:
    rank = "" if window.process.rank is None else f"_rank{window.process.rank}"
    return f"step_{window.step}_{window.process.role}{rank}_{window.stage or 'capture'}_{window.index}"


def _about(window: Window) -> dict[str, object]:
    """What the trace says about itself, under the key `stepscope`."""
    process = window.process
    return {
        "step": window.step,
        "role": process.role,
        "rank": process.rank,
        "world_size": process.world_size,
        "replica": process.replica,
        "stage": window.stage,
        "window": window.index,
        "process": process.key,
    }
