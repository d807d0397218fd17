"""Plugin in SGLang's own processes: schedulers count their forward passes and survive captures by stage.

SGLang (0.5.11 and later) calls the entry points `sglang.srt.plugins` of all installed packages, in each of
its processes. The plugin hooks two functions by `sglang/srt/plugins/hook_registry.py`: the construction of a
scheduler, and the scheduler's answer to a request for its internal state. A forward pass that is not recorded
is not changed. Starts and stops of the profiler are timed, because the scheduler serves nothing meanwhile.

In a capture by stage, SGLang stops one profile and starts the next inside `run_batch`, which is a
`record_function` since 0.5.14. `stepscope.backends.torch.record_function_scopes` makes that safe.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stepscope.engines import pass_socket
from stepscope.files import switch
from stepscope_sglang._engine_side import passes
from stepscope_sglang._engine_side.states import (
    ALONE,
    COUNT,
    PROFILE_V2,
    RECORDINGS,
    RPD,
    RPD_LIBRARY,
    SCOPES_END,
    SENDS_QUIET,
    STAGES,
    VERSION,
    Doing,
    Stamp,
    own_version,
    profile_v2,
)

T = TypeVar("T")
_SCHEDULER = "sglang.srt.managers.scheduler"
_PROFILERS = (
    ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager"),
    ("sglang.srt.managers.scheduler_profiler_mixin", "SchedulerProfilerMixin"),  # up to 0.5.12
)
"""The classes that start and stop the profiler of a scheduler."""
_UPDATERS = (
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"),
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"),  # up to 0.5.12
)
"""The classes that update the weights of a scheduler."""
_UPDATES = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
_METHODS: Mapping[str, Doing] = {
    "_start_profile": "starting",
    "start_profile": "starting",
    "_stop_profile": "writing",
    "stop_profile": "writing",
}
_stamps: deque[dict[str, object]] = deque(maxlen=64)
"""The `Stamp`s that are shown under the key `RECORDINGS`. One writer: `_timed`."""
_INITS = ("_init_profile", "init_profile")
"""Names of the methods that get a profile's folder."""
_scheduler: Any = None
"""The scheduler of this process, or None. One writer: `begin`."""
_profiler: weakref.ref[Any] | None = None
"""The object of the scheduler that last started or stopped a profiler, or None. One writer: `_timed`."""
_quiet = False
"""Value that is shown under the key `SENDS_QUIET`. One writer: `_hide_sends`."""


def load() -> None:
    """Register the hooks. SGLang calls this function in each of its processes.

    The hooks are registered only in processes that import the scheduler: schedulers, and the process that
    makes the engine. A hook imports its target, which would take seconds in the other processes.
    """
    if switch.DISABLED or _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from stepscope.backends.torch import record_function_scopes

    record_function_scopes.watch()  # before the hooks, because `show` reports `SCOPES_END`
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", begin, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.get_internal_state", show, HookType.AFTER)


def begin(scheduler: object, *_: object, **__: object) -> None:
    """Hide sends, time profilers, count updates and prepare notes of passes, before a scheduler is made.

    The process that makes the engine makes no scheduler, so the sends of a trainer in that process stay in
    its recordings.
    """
    global _scheduler
    _scheduler = scheduler
    with suppress(Exception):  # another torch may have other names; an error would kill the scheduler
        _hide_sends()
    with suppress(Exception):  # another SGLang may have other names
        _time_profilers()
    with suppress(Exception):
        _count_updates()
    keep, kept = partial(passes.keep, scheduler), partial(passes.kept, scheduler)
    pass_socket.listen({pass_socket.KEEP: keep, pass_socket.KEPT: kept})


def _hide_sends() -> None:
    """Leave sends over gloo out of all recordings.

    A pipeline rank waits for its send only in the next pass, which may be in another recording.
    """
    global _quiet
    from torch.distributed import ProcessGroup

    from stepscope.backends.torch.record_function_scopes import unrecorded

    ProcessGroup.send = unrecorded(ProcessGroup.send, _is_over_gloo)  # type: ignore[method-assign]
    _quiet = True


def _time_profilers() -> None:
    for module, name in _PROFILERS:
        profiler = getattr(sys.modules.get(module), name, None)
        for method, doing in _METHODS.items():
            original = vars(profiler).get(method) if profiler is not None else None
            if original is not None and not hasattr(original, "_stepscope_doing"):
                setattr(profiler, method, _timed(original, doing))
        for method in _INITS:
            original = vars(profiler).get(method) if profiler is not None else None
            if original is not None and not hasattr(original, "_stepscope_notes"):
                setattr(profiler, method, _with_notes(original))


def _count_updates() -> None:
    for module, name in _UPDATERS:
        updater = getattr(sys.modules.get(module), name, None)
        for method in _UPDATES:
            original = vars(updater).get(method) if updater is not None else None
            if original is not None and not hasattr(original, "_stepscope_counts"):
                setattr(updater, method, _counted(original))


def _counted(original: Callable[..., T]) -> Callable[..., T]:
    """Return a wrapper of a method that updates weights, which counts the updates.

    A failed update is counted too, because it may have changed some weights.
    """

    @wraps(original)
    def counted(updater: Any, request: Any, *args: Any, **kwargs: Any) -> T:
        result = original(updater, request, *args, **kwargs)
        with suppress(Exception):  # another version may have other names
            passes.update(_scheduler, request)
        return result

    counted._stepscope_counts = True  # type: ignore[attr-defined]  # so that it is wrapped once
    return counted


def _with_notes(original: Callable[..., T]) -> Callable[..., T]:
    """Return a wrapper of a method that gets a profile's folder. If a file in the folder asks for notes of
    passes, the wrapper begins the notes.
    """

    @wraps(original)
    def noted(profiler: Any, *args: Any, **kwargs: Any) -> T:
        result = original(profiler, *args, **kwargs)
        with suppress(Exception):  # another version may have other names
            if _scheduler is not None:
                folder = Path(profiler.torch_profiler_output_dir)
                passes.begin(_scheduler, folder)
                if passes.are_alone(folder):
                    profiler.profiler_start_forward_ct = None  # keeps the armed profile from beginning
        return result

    noted._stepscope_notes = True  # type: ignore[attr-defined]  # so that it is wrapped once
    return noted


def _timed(original: Callable[..., T], doing: Doing) -> Callable[..., T]:
    @wraps(original)
    def timed(profiler: Any, *args: Any, **kwargs: Any) -> T:
        global _profiler
        _profiler = weakref.ref(profiler)
        recorded = bool(getattr(profiler, "profile_in_progress", False))
        began_ns = time.time_ns()
        try:
            return original(profiler, *args, **kwargs)
        finally:
            with suppress(Exception):  # another version may have other names
                if recorded == (doing == "writing"):
                    _stamps.append(_stamp(profiler, doing, began_ns))

    timed._stepscope_doing = doing  # type: ignore[attr-defined]  # so that it is wrapped once
    return timed


def _stages() -> dict[str, int] | None:
    profiler = None if _profiler is None else _profiler()
    counts = {stage: getattr(profiler, f"profiler_{stage}_ct", None) for stage in ("prefill", "decode")}
    if not getattr(profiler, "profile_by_stage", False):
        return None
    return {stage: count for stage, count in counts.items() if isinstance(count, int)}


def _stamp(profiler: Any, doing: Doing, began_ns: int) -> dict[str, object]:
    count = getattr(profiler, "get_forward_ct", None)
    stamp = Stamp(
        folder=str(profiler.torch_profiler_output_dir),
        pid=os.getpid(),
        doing=doing,
        start_ns=began_ns,
        end_ns=time.time_ns(),
        passes=profiler.forward_ct if count is None else count(),
    )
    return msgspec.structs.asdict(stamp)


def _is_over_gloo(group: object, *args: Any, **kwargs: Any) -> bool:
    tensors = args[0] if args else kwargs.get("tensors", ())
    return any(tensor.device.type == "cpu" for tensor in tensors)


def show(answer: Any, scheduler: Any, *_: object) -> None:
    """Add the plugin's state to a scheduler's answer, and the number of passes if SGLang has not added it."""
    with suppress(Exception):  # the answer must be complete even if the notes cannot be written
        passes.end()
    with suppress(Exception):  # another version may have other names; an error would kill the scheduler
        answer.internal_state.update(_of_this_process())
        answer.internal_state[RECORDINGS] = list(_stamps)
        answer.internal_state[STAGES] = _stages()
        answer.internal_state.setdefault(COUNT, scheduler.forward_ct)


@cache
def _of_this_process() -> dict[str, object]:
    rpd = find_spec(RPD_LIBRARY) is not None
    return {
        SCOPES_END: True,
        SENDS_QUIET: _quiet,
        ALONE: True,
        VERSION: own_version(),
        PROFILE_V2: profile_v2(),
        RPD: rpd,
    }
