"""One window of the Ascend profiler, from its start to the recordings on disk, and the mstx ranges in it.

`begin`, `advance` and `end` run on the window's thread, one at a time, so this module needs no lock: a
recording of torch_npu belongs to the thread that starts it, like torch's. Each cycle of a schedule is a
separate profile. It is made when the cycle begins, together with the handler that owns the output folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from stepscope.backends.scheduled_window import Place, ScheduledWindow
from stepscope.backends.torch.foreign_sessions import busy as torch_busy
from stepscope.backends.window_thread import WindowThread
from stepscope.config import ScheduleConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours
from stepscope_npu import _disk, _recordings
from stepscope_npu._options import Options
from stepscope_npu._versions import refuse_msprof


class Ranges:
    """The mstx ranges of one window: opened and closed by id on any thread, and closed on every path.

    `stream` is always None: with a stream, torch_npu issues the range later, from its task-queue thread. Its
    decorator `mstx_range` is not used, because it leaves the range open if the function raises.
    """

    def __init__(self, mstx: Any) -> None:
        self._mstx = mstx
        self._open: dict[int, None] = {}

    def range(self, message: str) -> Range:
        return Range(self, message)

    def start(self, message: str) -> int:
        """Open a range and return its number, or 0 if no profiler records it."""
        number = self._mstx.range_start(message) or 0
        if number:
            self._open[number] = None
        return int(number)

    def end(self, number: int) -> None:
        """Close a range. Do nothing if it was closed already, for example by the end of the window."""
        if self._open.pop(number, 0) is None:
            self._mstx.range_end(number)

    def end_all(self) -> None:
        """Close all ranges, the newest first. A stop of the recording would lose open ranges."""
        for number in reversed(list(self._open)):
            self.end(number)


class Range:
    """The range of one span."""

    __slots__ = ("_message", "_number", "_ranges")

    def __init__(self, ranges: Ranges, message: str) -> None:
        self._ranges = ranges
        self._message = message
        self._number = 0

    def __enter__(self) -> None:
        self._number = self._ranges.start(self._message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranges.end(self._number)


_parents: list[object] = []
"""The parent's profile, kept in a forked child: its destruction would stop the parent's recording."""


@dataclass
class Recorded:
    """The recording of one cycle, on disk."""

    folder: Path
    cycle: int
    lacking: str | None
    truncated: str | None

    def drop(self) -> None:
        _disk.remove(self.folder.parent)


class Cycle:
    """The function that torch_npu asks what to do in each step. Unlike torch_npu's own, it prints nothing.

    The fields have the names of `torch_npu.profiler.schedule`, because torch_npu writes the `__dict__` of
    this object into `profiler_info.json`.
    """

    __slots__ = ("__dict__", "_actions")  # the actions are not JSON, so they stay out of `__dict__`

    def __init__(self, actions: Any, *, warmup: int = 0, active: int = 1) -> None:
        self.wait = self.skip_first = self.skip_first_wait = 0
        self.warmup, self.active, self.repeat = warmup, active, 1
        self._actions = actions

    def __call__(self, step: int) -> Any:
        if step < self.warmup:
            return self._actions.WARMUP
        last = self.warmup + self.active - 1
        if step > last:
            return self._actions.NONE
        return self._actions.RECORD_AND_SAVE if step == last else self._actions.RECORD


class NpuWindow(ScheduledWindow[Recorded]):
    """A window that records below `folder`. `about` goes into `profiler_metadata.json`."""

    current: ClassVar[NpuWindow | None] = None

    def __init__(
        self,
        name: str,
        thread: WindowThread,
        options: Options,
        *,
        folder: Path,
        schedule: ScheduleConfig | None,
        about: Mapping[str, object],
    ) -> None:
        super().__init__(name, thread, schedule=schedule, key="npu.schedule", about=about)
        self.options = options
        self.ranges = Ranges(options.torch_npu.mstx)
        self.ignored = dict(options.ignored)
        self.operators_of: str | None = None
        """Name of the thread whose operators are recorded, also operators that autograd's threads run for it.
        None if its operators cannot be recorded."""
        self._folder = folder
        self._device: int | None = None
        if thread.all_threads:  # a thread of stepscope, whose current device may be another
            self._device = options.torch_npu.module.npu.current_device()
        self._profile: Any = None
        self._output: _recordings.OutputFolder | None = None
        self._made_in = folder
        self._calls = _recordings.Calls()

    def begin(self) -> None:
        refuse_msprof()
        super().begin()

    def end(self, truncated: str | None = None) -> None:
        """End recording for good and keep the recording so far."""
        if self.over:
            return
        self.over = True
        try:
            if self.phase != "active":
                self._lost = self._lost or truncated or self._never_active()
            if self._profile is not None:
                self._drain()
                if self._schedule is None:
                    self._step()  # ends the only mini-batch; torch_npu would warn at the stop
                self._close(truncated or self._cut_short())
        except ours() as error:
            self._lost = f"torch_npu did not stop: {error}"
        finally:
            self._give_back()

    def _go_to(self, to: Place) -> None:
        if self._profile is not None:
            leaves = to.phase == "off" or to.cycle != self._cycle
            if leaves:
                self._drain()
            self._step()
            if leaves:
                self._close(None)
        self._cycle = to.cycle
        if to.phase != "off" and self._profile is None:
            self._open()
        self.phase = to.phase

    def _open(self) -> None:
        torch_npu = self.options.torch_npu
        foreign = _recordings.busy(torch_npu) or torch_busy()
        if foreign is not None:
            raise ProfilerBusyError(
                f"{self.name} cannot start: {foreign}, and together both would lose their data. "
                "Fix: end that one before the capture, or capture other steps"
            )
        if self._device is not None:
            torch_npu.module.npu.set_device(self._device)
        self._made_in = _disk.make_folder(self._folder)
        self._calls = _recordings.Calls()
        self._output = _recordings.OutputFolder(torch_npu)
        try:
            self._start(self._output)
        except BaseException:
            self._abandon()
            raise
        self._verify_start()

    def _start(self, output: _recordings.OutputFolder) -> None:
        profiler, schedule = self.options.torch_npu.profiler, self._schedule or ScheduleConfig()
        with _recordings.ours(self._calls):
            handler = profiler.tensorboard_trace_handler(str(self._made_in), analyse_flag=False)
            output.taken()
            self._profile = self.options.make_profile(
                on_trace_ready=handler,
                schedule=Cycle(profiler.ProfilerAction, warmup=schedule.warmup, active=schedule.active),
            )
            self._profile.start()
            about = json.dumps({**self._about, "cycle": self._cycle})
            self._profile.add_metadata_json("stepscope", about)

    def _verify_start(self) -> None:
        """Raise `BackendError` if the start failed, which `start` itself does not report."""
        errors = list(self._calls.errors)
        if not errors and self._calls.made & {"_start_profiler", "_warmup_profiler", "_init_profiler"}:
            return
        self._abandon()
        raise BackendError(
            f"{self.name} did not start: {'; '.join(errors) or 'torch_npu made no recording'}. "
            "Its messages are on stdout"
        )

    def _step(self) -> None:
        with _recordings.ours(self._calls):
            self._profile.step()

    def _drain(self) -> None:
        """Wait for the device, which torch_npu up to 2.10 omits before a stop, and close open ranges."""
        if self.options.records_device:
            try:
                self.options.torch_npu.module.npu.synchronize()
            except ours() as error:
                self._calls.errors.append(f"the device did not synchronize: {error}")
        self.ranges.end_all()

    def _close(self, truncated: str | None) -> None:
        """Stop the profile if it has not come to its end, and check its files."""
        profile, self._profile = self._profile, None
        was, self.phase = self.phase, "off"
        with _recordings.ours(self._calls):
            profile.stop()
            self._force(profile)
        profile.stopped = True  # otherwise its destructor stops it again
        self._give_output_back()
        if was == "warmup":
            _disk.remove(self._made_in)
            return
        outcome = _disk.look(
            self._made_in, records_device=self.options.records_device, errors=self._calls.errors
        )
        if outcome.folder is None or outcome.failed is not None:
            _disk.remove(self._made_in)
            self._lost = outcome.failed
            return
        self._recorded.append(Recorded(outcome.folder, self._cycle, outcome.lacking, truncated))

    def _force(self, profile: Any) -> None:
        """Stop the parts of a profile that torch_npu left running after an error in its stop."""
        made, interface = self._calls.made, self.options.torch_npu.interface
        if "_start_profiler" in made and "_stop_profiler" not in made:
            self._try(interface._stop_profiler)
        if "_init_profiler" in made and "_finalize_profiler" not in made:
            self._try(profile.prof_if.finalize_trace)

    def _try(self, call: Any) -> None:
        try:
            call()
        except ours() as error:
            self._calls.errors.append(str(error))

    def _abandon(self) -> None:
        """Drop a profile that did not start, and stop its running parts."""
        self.phase = "off"
        profile, self._profile = self._profile, None
        if profile is not None:
            with _recordings.ours(self._calls):
                self._force(profile)
            profile.stopped = True  # otherwise its destructor stops it, and writes into the working directory
        self._give_output_back()
        _disk.remove(self._made_in)

    def _give_output_back(self) -> None:
        if self._output is not None:
            self._output.give_back()
            self._output = None


def forget() -> None:
    """Drop the window in the child of a fork, because the window belongs to the parent."""
    window, NpuWindow.current = NpuWindow.current, None
    if window is None:
        return
    _parents.append(window._profile)
    if window._profile is not None:
        window._profile.stopped = True
    window._profile = window._output = None
    window.phase, window.over = "off", True
    window._recorded.clear()
