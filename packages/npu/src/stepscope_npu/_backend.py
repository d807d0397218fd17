"""The `npu` backend: torch_npu.profiler and mstx, made safe.

The backend has not run on an NPU so far. docs/npu.md lists its runs over stand-ins for CANN, and how to check
it on an NPU.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from stepscope.backends import PendingArtifact, SpanInfo, Window
from stepscope.backends.torch import foreign_sessions
from stepscope.backends.window_thread import (
    HeldWindow,
    Late,
    about,
    run_on,
    thread_for_window,
    title,
)
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours
from stepscope.files.layout import RunLayout
from stepscope_npu import _analysis, _disk, _operators, _recordings, _versions, _window
from stepscope_npu._options import Options, resolve
from stepscope_npu._versions import TorchNpu
from stepscope_npu._window import NpuWindow, Recorded

_hooking = threading.RLock()
_hooked = False


def hook(torch_npu: TorchNpu) -> None:
    """Install the hooks before the first recording of this process."""
    global _hooked
    with _hooking:
        if _hooked:
            return
        _hooked = True
        foreign_sessions.watch(partial(_before_another_of_torch, torch_npu))
        _recordings.watch(torch_npu, partial(_before_another_of_torch_npu, torch_npu))
        os.register_at_fork(after_in_child=_in_child)
        # A recording that is not stopped is lost. Handlers run in reverse order: this one before torch_npu's.
        atexit.register(_at_exit)


def _before_another_of_torch(torch_npu: TorchNpu) -> None:
    _before_another(torch_npu, "torch.profiler")


def _before_another_of_torch_npu(torch_npu: TorchNpu) -> None:
    if _before_another(torch_npu, "torch_npu.profiler"):
        _recordings.keep_open_for_theirs(torch_npu)


def _before_another(torch_npu: TorchNpu, profiler: str) -> bool:
    """End the open window before other code starts a profiler. Return whether a window was open."""
    window = _window.NpuWindow.current
    if window is not None:
        _end(window, profiler)
    _operators.leave(torch_npu)
    return window is not None


def _end(window: _window.NpuWindow, profiler: str) -> None:
    thread = threading.current_thread().name
    task = run_on(window.thread, partial(window.end, f"other code started {profiler} on thread {thread}"))
    if not task.done:
        task.cancel()
        raise ProfilerBusyError(
            f"{profiler} cannot start on thread {thread}: {window.name} is being recorded on "
            f"{window.thread.name}, which does not answer. Fix: profile outside of captures"
        )


def _at_exit() -> None:
    """End an open window. A later `stop` still returns the recording."""
    window = _window.NpuWindow.current
    if window is not None:
        run_on(window.thread, window.end)


def _in_child() -> None:
    _window.forget()
    _operators.forget()


_NOTHING = nullcontext()


class NpuBackend:
    """Recorder of this process and its NPU with torch_npu.profiler.

    A window records device data and span markers of the whole process, but operators only of the thread that
    opens the window.
    """

    name = "npu"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._held: HeldWindow[NpuWindow] = HeldWindow("an NpuBackend")
        self._resolved: Options | None = None

    def check(self) -> None:
        """Raise `BackendError` if torch_npu is absent or broken, finds no NPU, or lacks a feature."""
        self._options()

    def prepare(self) -> None:
        """Inspect the installed torch_npu, and hook it once."""
        hook(self._options().torch_npu)

    def start(self, window: Window) -> None:
        self._held.refuse_second()
        npu_window = self._make(window)
        # Another thread may have stopped this thread's window: stop recording operators here.
        _operators.leave(npu_window.options.torch_npu)
        self._held.begin(npu_window)
        if npu_window.options.records_operators:
            self._join_operators(npu_window)

    def advance(self) -> None:
        if self._config.npu.schedule is not None:
            self._held.advance()

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return an mstx range named `<role>.<stage>`. Ranges may overlap: each closes by its number."""
        window = self._held.window
        if window is None or not window.options.markers or window.phase != "active":
            return _NOTHING
        return window.ranges.range(f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        """End the window and return its recording, or with a schedule one recording for each cycle.

        A call from another thread than the window's waits up to 1 s for the window's thread to leave C code.
        After 1 s `stop` returns an artifact whose `write` waits up to `budget.export_seconds`.

        Raises:
            BackendError: nothing was recorded. The message has the reason.
        """
        ended = self._held.end()
        if ended is None:
            return []
        window, late = ended
        _operators.leave(window.options.torch_npu)
        artifacts = [self._artifact(window, recorded) for recorded in window.take()]
        return artifacts if late is None else [*artifacts, self._late_artifact(window, late)]

    def _options(self) -> Options:
        if self._resolved is None:
            self._resolved = resolve(self._config.npu, _versions.load())
        return self._resolved

    def _make(self, window: Window) -> NpuWindow:
        thread = thread_for_window(all_threads=False)
        options = self._options()
        hook(options.torch_npu)
        return NpuWindow(
            title("NPU recording", window),
            thread,
            options,
            folder=RunLayout(self._config.save_path).step(window.step).recordings_of(window.process),
            schedule=self._config.npu.schedule,
            about=about(window),
        )

    def _join_operators(self, window: NpuWindow) -> None:
        """Record the operators of this thread, even if the window was opened on another thread."""
        why = None
        if not window.thread.is_current():
            why = _operators.join(window.options.torch_npu, window.options.flags)
        if why is None:
            window.operators_of = threading.current_thread().name
        else:
            window.ignored["npu.contents.cpu"] = why

    def _artifact(self, window: NpuWindow, recorded: Recorded) -> PendingArtifact:
        cann = _disk.cann_version(recorded.folder)
        ignored = dict(window.ignored)
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
                "operators_of": window.operators_of,
                "sglang_profiler": sglang_profiler(),
            },
            versions={**window.options.torch_npu.versions, **({} if cann is None else {"cann": cann})},
        )

    def _write(self, recorded: Recorded, ignored: dict[str, str], path: Path) -> None:
        if not recorded.folder.is_dir():
            raise BackendError("this recording of the NPU was written or discarded already")
        _disk.place(recorded.folder, path)
        if self._config.npu.analysis:
            try:  # in a separate process; the recording is kept if the analysis fails
                _analysis.analyse(path, timeout_s=self._config.budget.export_seconds)
            except ours() as error:
                ignored["npu.analysis"] = str(error)  # the sidecar is written later, from this dict

    def _late_artifact(self, window: NpuWindow, late: Late) -> PendingArtifact:
        """Return the artifact of a window whose thread has not ended it yet."""

        def write(path: Path) -> None:
            late.wait(self._config.budget.export_seconds)
            first, *others = window.take()
            reasons = (one.truncated or one.lacking for one in (first, *others))
            late.cut = next(filter(None, reasons), None)
            _disk.place(first.folder, path)
            for recorded in others:  # the number of cycles is known only now
                _disk.place(recorded.folder, path / f"cycle{recorded.cycle}{_disk.SUFFIX}")

        return PendingArtifact(
            kind="npu_recording",
            suffix=_disk.SUFFIX,
            write=write,
            compress=False,
            note=late.note,
            lacking=lambda: late.cut,
            ignored=dict(window.ignored),
            options=dict(window.options.recorded),
            versions=dict(window.options.torch_npu.versions),
        )


def sglang_profiler() -> str | None:
    """Return how SGLang has replaced torch's profiler, or why SGLang's profiler will fail in this process.
    Return None if neither is true.

    On an NPU, the import of SGLang replaces `torch.profiler.profile` by torch_npu's, and
    `ProfilerActivity.CPU` and `.CUDA` by torch_npu's activities. That breaks torch's own profiler, so
    `tool: torch` is refused there. The npu backend does not use `torch.profiler` and works either way.
    """
    torch, torch_npu = sys.modules.get("torch"), sys.modules.get("torch_npu")
    if torch is None or torch_npu is None:
        return None
    if str(getattr(torch.profiler.profile, "__module__", "")).startswith("torch_npu"):
        return "torch.profiler.profile is torch_npu's (SGLang replaces it on NPUs)"
    if "sglang" in sys.modules and not hasattr(torch_npu, "_apply_patches"):
        return (
            "this torch_npu has no _apply_patches, with which SGLang replaces torch.profiler.profile: "
            "SGLang's profiler runs torch's, and fails at its stop with AttributeError: prof_if. Fix: "
            "record with tool: npu"
        )
    return None
