"""The `npu` backend: torch_npu.profiler and mstx, made safe.

Not run on an NPU so far: docs/npu.md says what was run, over which stand-ins, and how to close the gap.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from stepscope.backends import PendingArtifact, SpanInfo, Window
from stepscope.backends.window_thread import ANSWER_S, Task, run_on, thread_for_window
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.files.layout import RunLayout
from stepscope_npu import _analysis, _disk, _process, _versions
from stepscope_npu._engines import patched_torch_profiler
from stepscope_npu._options import Options, resolve
from stepscope_npu._window import NpuWindow, Recorded

_NOTHING = nullcontext()


class NpuBackend:
    """Records this process and its NPU with torch_npu.profiler.

    A window started on the main thread records the operators of that thread; one started on any other thread
    (a pool's, an event loop's) none. Device data and the markers of spans are recorded in both.
    """

    name = "npu"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._window: NpuWindow | None = None
        self._when_dropped: weakref.finalize[[NpuWindow], NpuBackend] | None = None
        self._resolved: dict[bool, Options] = {}

    def check(self) -> None:
        """Raises `BackendError`: torch_npu is absent or broken, finds no NPU, or lacks what is asked for."""
        self._options(own_thread=False)

    def prepare(self) -> None:
        """Looks at the installed torch_npu, once."""
        _process.hook(self._options(own_thread=False).torch_npu)

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"{self._window.name} was not stopped. Fix: stop() before start()")
        made = self._make(window)
        self._window = made
        try:
            task = run_on(made.thread, made.begin)
            if not task.done:
                task.cancel()
                raise BackendError(f"{made.name} cannot start beneath a signal handler")
        except BaseException:
            self._window = None
            raise
        self._when_dropped = weakref.finalize(self, _dropped, made)
        self._when_dropped.atexit = False  # at exit the window is ended, and a stop() after that gets it

    def advance(self) -> None:
        window = self._window
        if window is not None and self._config.npu.schedule is not None:
            run_on(window.thread, window.advance)

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """An mstx range `<role>.<stage>` on the calling thread. By id, so interleaved tasks may have one."""
        window = self._window
        if window is None or not window.options.markers or window.phase != "active":
            return _NOTHING
        return window.ranges.range(f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        """Ends the window: one artifact, a folder; with a schedule, one for each cycle.

        On a thread that is not the window's it waits up to 1 s for that to come out of C code. Where it does
        not, the artifact is one whose `write` waits on, up to `budget.export_seconds`.

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
        artifacts = [self._artifact(window, one) for one in window.take()]
        return artifacts if ended else [*artifacts, self._late_artifact(window, task)]

    def _options(self, *, own_thread: bool) -> Options:
        if own_thread not in self._resolved:
            self._resolved[own_thread] = resolve(self._config.npu, _versions.load(), own_thread=own_thread)
        return self._resolved[own_thread]

    def _make(self, window: Window) -> NpuWindow:
        thread = thread_for_window(all_threads=False)
        options = self._options(own_thread=thread.all_threads)
        _process.hook(options.torch_npu)
        return NpuWindow(
            _title(window),
            thread,
            options,
            folder=RunLayout(self._config.save_path).step(window.step).recordings_of(window.process),
            schedule=self._config.npu.schedule,
            about=_about(window),
        )

    def _artifact(self, window: NpuWindow, recorded: Recorded) -> PendingArtifact:
        cann = _disk.cann_version(recorded.folder)
        ignored = dict(window.options.ignored)
        return PendingArtifact(
            kind="npu_recording",
            suffix=_disk.SUFFIX,
            write=partial(self._write, recorded, ignored),
            compress=False,
            discard=recorded.drop,
            truncated=recorded.truncated,
            lacking=recorded.lacking,
            ignored=ignored,
            options={
                **window.options.recorded,
                "cycle": recorded.cycle,
                "replaced_torch_profiler": patched_torch_profiler(),
            },
            versions={**window.options.versions, **({} if cann is None else {"cann": cann})},
        )

    def _write(self, recorded: Recorded, ignored: dict[str, str], path: Path) -> None:
        if not recorded.folder.is_dir():
            raise BackendError("this recording of the NPU is written or discarded already")
        _disk.place(recorded.folder, path)
        if self._config.npu.analysis:
            self._analyse(path, ignored)

    def _analyse(self, path: Path, ignored: dict[str, str]) -> None:
        """Beside the training, in a process of its own. What fails costs the analysis and nothing else."""
        try:
            _analysis.analyse(path, timeout_s=self._config.budget.export_seconds)
        except Exception as error:
            ignored["npu.analysis"] = str(error)  # in time: the sidecar is written after this

    def _late_artifact(self, window: NpuWindow, task: Task) -> PendingArtifact:
        """Of a window whose thread has not ended it yet."""
        patience_s = self._config.budget.export_seconds
        caller = threading.current_thread().name

        def write(path: Path) -> None:
            if not task.wait(patience_s):
                raise BackendError(
                    f"stop() came from thread {caller}, but {window.name} belongs to {window.thread.name}, "
                    f"which was in C code for all of {patience_s:g} s"
                )
            first, *others = window.take()
            _disk.place(first.folder, path)
            for recorded in others:  # cycles of a schedule: how many there were is known only now
                _disk.place(recorded.folder, path / f"cycle{recorded.cycle}{_disk.SUFFIX}")

        return PendingArtifact(
            kind="npu_recording",
            suffix=_disk.SUFFIX,
            write=write,
            compress=False,
            truncated=f"stopped by thread {caller}, ended when {window.thread.name} came to it",
            ignored=dict(window.options.ignored),
            options=dict(window.options.recorded),
            versions=dict(window.options.versions),
        )


def _dropped(window: NpuWindow) -> None:
    """The backend was garbage-collected while it recorded. Any thread, at any moment: so nothing waits."""
    window.thread.submit(window.end)
    warnings.warn(
        f"an NpuBackend was dropped while recording: {window.name} is lost. Fix: call stop()",
        ResourceWarning,
        stacklevel=2,
    )


def _title(window: Window) -> str:
    stage = "" if window.stage is None else f" of {window.stage}"
    return f"the NPU recording{stage} in step {window.step}"


def _about(window: Window) -> dict[str, object]:
    """What the recording says about itself, under the key `stepscope` of its metadata."""
    process = window.process
    return {
        "step": window.step,
        "role": process.role,
        "rank": process.rank,
        "world_size": process.world_size,
        "stage": window.stage,
        "window": window.index,
        "process": process.key,
    }
