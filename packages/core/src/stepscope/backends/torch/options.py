"""A `TorchConfig`, resolved for the installed torch and this machine, and the start of its profiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING

from stepscope.config import TorchConfig
from stepscope.errors import BackendError

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile as Profile

_COMPILER = "_inductor"
_SWITCH = "TORCHINDUCTOR_CUDAGRAPHS"
"""Environment variable that sets the switch of the compiler."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A resolved configuration."""

    make_profile: Callable[[str], Profile]
    """Returns a profile with the given trace id, not started."""
    marker: Callable[[str], AbstractContextManager[None]]
    """Returns a range of the given name: 1 us, or 5 us with a torch that has no fast range."""
    ignored: dict[str, str]
    recorded: dict[str, str | int | float | bool | None]
    versions: dict[str, str]


def resolve(config: TorchConfig, *, all_threads: bool) -> Options:
    """Resolve a configuration.

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
    return lambda name: _profiler._RecordFunctionFast(name)  # looked up late: the first window patches it


def _activities(config: TorchConfig) -> tuple[dict[str, ProfilerActivity], dict[str, str]]:
    """Return {name: activity} of this machine, and {name: reason} for each activity that is ignored."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    if kinds.__members__["CPU"] != kinds.CPU:  # the import of SGLang replaces it by torch_npu's
        raise BackendError(
            "other code has replaced torch.profiler.ProfilerActivity.CPU (SGLang does so on NPUs), and torch "
            "does not know the new value. Fix: tool: npu"
        )
    supported: set[ProfilerActivity] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch
    # By the names of torch: torch_npu renames its own activity.
    here = {name.lower(): kind for name, kind in kinds.__members__.items() if kind in supported}
    if not torch.cuda.is_available():
        here.pop("cuda", None)  # a CUDA build lists it on a machine without a GPU too
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
    """Return the switches of torch that are outside of its stable interface."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    known = _ExperimentalConfig.__init__.__doc__ or ""  # pybind puts the signature in the first line
    if all_threads and "profile_all_threads" not in known:
        raise BackendError(
            f"torch {torch.__version__} cannot record all threads, which a capture outside of the main "
            "thread needs. Fix: torch >= 2.7, or start the capture on the main thread"
        )
    # trace_only makes no Python objects for events, since no code here reads them: stop() takes 0.65 as long.
    wanted = {"profile_all_threads": all_threads, "trace_only": not with_stack}
    return {name: True for name, want in wanted.items() if want and name in known}


class _WithoutCompiler:
    """Replacement for the module `torch` that makes code believe that there is no compiler."""

    def __getattr__(self, name: str) -> object:
        if name == _COMPILER:
            raise AttributeError(name)
        return getattr(sys.modules["torch"], name)


def prepare_trace(profile: Profile) -> None:
    """Prepare a profile, without an import of the compiler.

    `prepare_trace` of torch 2.13 asks `hasattr(torch, "_inductor")`, which imports the compiler: 2 s of CPU
    in each process. It reads one switch there, which is off in a process that has not imported the compiler.
    """
    method = type(profile).prepare_trace
    if f"torch.{_COMPILER}" in sys.modules or _SWITCH in os.environ or not isinstance(method, FunctionType):
        profile.prepare_trace()
        return
    names = {**method.__globals__, "torch": _WithoutCompiler()}
    FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)(profile)
