"""One window of torch.profiler: its options for the installed torch, its start, its stop and its recordings.

`begin`, `advance` and `end` run on the window's thread (`window_thread`), one at a time, so no lock is
needed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, ClassVar

from stepscope.backends.scheduled_window import Phase, Place, ScheduledWindow
from stepscope.backends.torch import foreign_sessions
from stepscope.backends.window_thread import WindowThread
from stepscope.config import ScheduleConfig, TorchConfig
from stepscope.errors import BackendError, ProfilerBusyError, is_users, ours

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile as Profile

_COMPILER = "_inductor"
_SWITCH = "TORCHINDUCTOR_CUDAGRAPHS"
"""Environment variable of the compiler switch, which torch reads in `prepare_trace`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The configuration, resolved for the installed torch."""

    make_profile: Callable[[str], Profile]
    """Makes a profile with the given trace id, without starting it."""
    marker: Callable[[str], AbstractContextManager[None]]
    """Makes a range with the given name, in 1 us, or 5 us if torch has no fast range."""
    ignored: dict[str, str]
    recorded: dict[str, str | int | float | bool | None]
    versions: dict[str, str]


def resolve(config: TorchConfig, *, all_threads: bool) -> Options:
    """Resolve `config` for the installed torch.

    Raises:
        BackendError: torch is not installed, or too old, or records none of the activities on this machine.
    """
    try:
        import torch
        from torch._C import _profiler
        from torch.profiler.profiler import _KinetoProfile
    except ImportError as error:
        raise BackendError(f"the torch backend needs torch: {error}. Fix: pip install torch") from error
    activities, ignored = _activities(config)
    memory = config.profile_memory
    if memory and all_threads:
        memory = False
        ignored["torch.profile_memory"] = (
            "torch has no memory events if it records all threads. Fix: torch.all_threads: false, and "
            "start the capture on the main thread"
        )
    switches = _switches(all_threads=all_threads, with_stack=config.with_stack)

    def make_profile(trace_id: str) -> Profile:
        experimental = _profiler._ExperimentalConfig(**switches)  # type: ignore[arg-type]  # torch: an old stub
        return _KinetoProfile(
            activities=activities.values(),
            record_shapes=config.record_shapes,
            profile_memory=memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
            experimental_config=experimental,
            custom_trace_id_callback=lambda: trace_id,
        )

    return Options(
        make_profile=make_profile,
        marker=_marker(),
        ignored=ignored,
        recorded={
            "activities": ",".join(activities),
            "with_stack": config.with_stack,
            "record_shapes": config.record_shapes,
            "profile_memory": memory,
            "with_flops": config.with_flops,
            "all_threads": all_threads,
        },
        versions={"torch": str(torch.__version__)},
    )


def _marker() -> Callable[[str], AbstractContextManager[None]]:
    from torch._C import _profiler
    from torch.profiler import record_function

    if not hasattr(_profiler, "_RecordFunctionFast"):
        return record_function
    return lambda name: _profiler._RecordFunctionFast(name)  # the first window patches `_RecordFunctionFast`


def _activities(config: TorchConfig) -> tuple[dict[str, ProfilerActivity], dict[str, str]]:
    """Return {name: activity} of this machine, and {name: reason} for each activity that is ignored."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    # SGLang replaces `ProfilerActivity.CPU` with torch_npu's activity.
    if kinds.__members__["CPU"] != kinds.CPU:
        raise BackendError(
            "other code has replaced torch.profiler.ProfilerActivity.CPU (SGLang does so on NPUs), and torch "
            "does not know the new value. Fix: tool: npu"
        )
    supported: set[ProfilerActivity] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch
    # `__members__` has torch's names, while `name` of a kind may be renamed by torch_npu.
    here = {name.lower(): kind for name, kind in kinds.__members__.items() if kind in supported}
    if not torch.cuda.is_available():
        here.pop("cuda", None)  # a CUDA build lists `cuda` also without a GPU
    asked = dict.fromkeys(config.activities)
    known = ", ".join(sorted(here))
    ignored = {
        f"torch.activities.{name}": f"torch {torch.__version__} records {known} on this machine"
        for name in asked
        if name not in here
    }
    if len(ignored) == len(asked):
        raise BackendError(
            f"torch.activities is {list(asked)}, but torch {torch.__version__} on this machine records "
            f"{known}. Fix: torch.activities: [{known}]"
        )
    return {name: here[name] for name in asked if name in here}, ignored


def _switches(*, all_threads: bool, with_stack: bool) -> dict[str, bool]:
    """Return the experimental options of torch.profiler to switch on: {name: True}."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    known = _ExperimentalConfig.__init__.__doc__ or ""  # pybind writes the signature into the docstring
    if all_threads and "profile_all_threads" not in known:
        raise BackendError(
            f"torch {torch.__version__} cannot record all threads, which a capture outside of the main "
            "thread needs. Fix: torch >= 2.7, or start the capture on the main thread"
        )
    # With trace_only, torch makes no Python objects for events, which stepscope does not need: stop() takes
    # 0.65 as long.
    wanted = {"profile_all_threads": all_threads, "trace_only": not with_stack}
    return {name: True for name, want in wanted.items() if want and name in known}


class _WithoutCompiler:
    """Replacement for the module `torch` that appears to have no compiler."""

    def __getattr__(self, name: str) -> object:
        if name == _COMPILER:
            raise AttributeError(name)
        return getattr(sys.modules["torch"], name)


def prepare_trace(profile: Profile) -> None:
    """Call `prepare_trace` of a profile without importing the compiler.

    torch 2.13 evaluates `hasattr(torch, "_inductor")` there, which imports the compiler (2 s of CPU in each
    process) to read one switch. The switch is off if the compiler was not imported before.
    """
    method = type(profile).prepare_trace
    if f"torch.{_COMPILER}" in sys.modules or _SWITCH in os.environ or not isinstance(method, FunctionType):
        profile.prepare_trace()
        return
    names = {**method.__globals__, "torch": _WithoutCompiler()}
    FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)(profile)


def give_memory_back() -> None:
    """Return freed memory to the system, because glibc would keep most of it: 1.5 GB after a trace of 400k
    events.
    """
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_without_destructors() -> None:
    """Make exit() end the process with its status, but without the destructors that are registered so far.

    exit() runs after Python has finalised and flushed its output.
    """
    library = _library()
    if hasattr(library, "on_exit"):
        # `exit` calls `_exit` with its status, before the functions that were registered earlier.
        library.on_exit(library._exit, None)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


kineto_has_started = False
"""True once the slow first start of Kineto has happened in this process. One writer: this module."""
_OPERATORS_END_S = 0.1
"""Pause in seconds between the stop of a session of all threads and the next start. Before the stop, the
pause is a tenth as long."""
_all_threads_stopped = 0.0
"""Monotonic time in seconds of the last stop of a session of all threads. One writer: this module."""
_INTERRUPTED = "interrupted while it was being stopped"
_parents: list[object] = []
"""Profiles of the parent, kept alive in a forked child, because their destruction would touch the parent's
session."""


@dataclass
class Recorded:
    """A recording of one active phase."""

    profile: Profile | None
    """The profile, or None after it was written or discarded."""
    cycle: int
    truncated: str | None

    def drop(self) -> None:
        """Free the profile, which takes about 0.1 s for 200k events."""
        self.profile = None
        give_memory_back()


class TorchWindow(ScheduledWindow[Recorded]):
    """A window of torch.profiler. Its trace contains `about` under the key `stepscope`."""

    current: ClassVar[TorchWindow | None] = None

    def __init__(
        self,
        name: str,
        thread: WindowThread,
        options: Options,
        *,
        schedule: ScheduleConfig | None,
        trace_id: str,
        about: Mapping[str, object],
    ) -> None:
        super().__init__(name, thread, schedule=schedule, key="torch.schedule", about=about)
        self.options = options
        self.only_thread = None if thread.all_threads else threading.main_thread().ident
        """Id of the only recorded thread, or None for all threads."""
        self._trace_id = trace_id
        self._profile: Profile | None = None
        self._backward_call: str | None = None

    def records_here(self) -> bool:
        """Return whether the window records the calling thread now."""
        if self.phase != "active":
            return False
        return self.only_thread is None or self.only_thread == threading.get_ident()

    def advance_in_backward(self) -> None:
        """Count a mini-batch that ends within a backward pass. May be called from any thread.

        A session cannot stop in a backward pass (docs/torch-traps.md), so the phase changes at the next
        `advance` outside of a backward pass.
        """
        self._mini_batch += 1
        self._backward_call = (
            "advance() was called inside of a backward pass, where no session can stop. Fix: call it in the "
            "loop, after backward()"
        )

    def end(self, truncated: str | None = None) -> None:
        """End the window and keep the recording so far. Call this again if a Ctrl-C interrupted it."""
        try:
            if self.phase == "active":
                self._record(truncated or self._backward_call or self._cut_short())
            elif not self.over:
                self._lost = self._lost or truncated or self._backward_call or self._never_active()
                self._enter("off")
        finally:
            self.over = self.phase == "off"
            if self.over:
                self._give_back()

    def _go_to(self, to: Place) -> None:
        if to.cycle != self._cycle:
            self._enter("off")
            self._cycle = to.cycle
        self._enter(to.phase)

    def _enter(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        if phase != "off":
            self._open(start=phase == "active")
        elif self.phase == "active":
            self._record(None)
        else:
            self._cancel_warmup()
        self.phase = phase

    def _open(self, *, start: bool) -> None:
        if self._profile is None:
            self._profile = self._prepare()
        if not start:
            return
        global kineto_has_started
        try:
            self._start(self._profile)
            kineto_has_started = True
            self._profile.add_metadata_json("stepscope", json.dumps({**self._about, "cycle": self._cycle}))
        except BaseException as error:
            self._abandon(interrupted=is_users(error))
            raise

    def _start(self, profile: Profile) -> None:
        if self.only_thread is None:
            time.sleep(max(0.0, _all_threads_stopped + _OPERATORS_END_S - time.monotonic()))
        with foreign_sessions.ours():
            profile.start_trace()

    def _stop(self, profile: Profile) -> str | None:
        return _stop_all_threads(profile) if self.only_thread is None else _stop(profile)

    def _prepare(self) -> Profile:
        foreign = foreign_sessions.busy()
        if foreign is not None:
            raise ProfilerBusyError(
                f"{self.name} cannot start: {foreign}; a second one would crash this process. "
                "Fix: end that session before the capture, or capture other steps"
            )
        profile = self.options.make_profile(f"{self._trace_id}_{self._cycle}")
        with foreign_sessions.ours():
            prepare_trace(profile)
        return profile

    def _record(self, truncated: str | None) -> None:
        """Stop the profile and keep its recording. After a Ctrl-C, the profile is still active and a second
        call stops it.
        """
        profile = self._profile
        try:
            if profile is not None and foreign_sessions.running(self.only_thread is not None):
                self._lost = _INTERRUPTED
                trouble = self._stop(profile)
                self._recorded.append(
                    Recorded(profile, self._cycle, truncated or trouble or self._backward_call)
                )
                self._lost = None
            elif self._lost == _INTERRUPTED:
                foreign_sessions.clear_flag()  # because the interrupt came before torch cleared the flag
            else:
                self._lost = "its torch.profiler session was ended from outside stepscope"
        except ours() as error:
            self._lost = f"torch.profiler did not stop: {error}"
        self.phase, self._profile = "off", None

    def _cancel_warmup(self) -> None:
        try:
            if self._profile is not None:
                self._start(self._profile)  # because torch ends a warm-up only after a start
        finally:
            self._abandon()

    def _abandon(self, interrupted: bool = False) -> None:
        """Drop the profile after its start has succeeded, failed, or was interrupted by a Ctrl-C."""
        self.phase = "off"
        profile, self._profile = self._profile, None
        runs = interrupted and foreign_sessions.running(
            self.only_thread is not None
        )  # an interrupted start may run although `_started` is False
        if profile is not None and (runs or _started(profile)):
            self._stop(profile)
        else:
            foreign_sessions.clear_flag()


def forget() -> TorchWindow | None:
    """Drop the parent's window in a forked child. Return the window, or None if there is none."""
    window, TorchWindow.current = TorchWindow.current, None
    if window is not None:
        _parents.append(window._profile)
        window._profile = None
        window.phase, window.over = "off", True
        window._recorded.clear()
    return window


def _started(profile: Profile) -> bool:
    """Return whether torch has enabled the profile. If so, the session must be stopped even if the start has
    failed.
    """
    session = profile.profiler
    return session is not None and session.profiling_start_time_ns != 0


def _stop_all_threads(profile: Profile) -> str | None:
    """Stop a session of all threads, with pauses for operators that run on other threads. Return as `_stop`
    does.

    An operator writes into freed memory if it begins while torch ends the session, or ends in the next
    session (docs/torch-traps.md).
    """
    global _all_threads_stopped
    from torch.profiler import ProfilerActivity

    try:
        profile.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
        time.sleep(_OPERATORS_END_S / 10)
    except ours():  # some versions of torch lack or refuse this call; the session is stopped anyway
        pass
    try:
        return _stop(profile)
    finally:
        _all_threads_stopped = time.monotonic()


def _stop(profile: Profile) -> str | None:
    """Stop the profile. Return the problem if the device no longer answers, else None."""
    try:
        profile.stop_trace()
    except ours() as error:
        session = profile.profiler
        if session is None or session.kineto_results is not None:
            raise
        # torch synchronises the device before it stops, which always raises if the device is broken. A
        # profiler that is left running would crash the process at exit.
        session.use_device = None
        profile.stop_trace()
        return f"the device did not synchronize: {error}"
    return None
