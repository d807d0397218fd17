"""What SGLang loads into its own processes: its schedulers then show how many forward passes they have begun,
and survive captures by stage.

SGLang (0.5.11 and later) calls the entry points `sglang.srt.plugins` of what is installed beside it, in each
of its processes, and has hooks for what they change (`sglang/srt/plugins/hook_registry.py`). Two are used:
the making of a scheduler, and its answer to a question for the internal state. Nothing is added to a forward
pass that is not recorded.

By stage, SGLang stops one profile and starts the next inside of `run_batch`, which is a `record_function`
since 0.5.14: what `stepscope.backends.open_scopes` is for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

RPD_LIBRARY = "rpdTracerControl"
"""The module that the activity RPD takes."""
COUNT = "forward_ct"
"""In the internal state; SGLang's own name for it."""
SCOPES_END = "stepscope_scopes_end"
"""In the internal state: scopes end with the profile in which they began."""
SENDS_QUIET = "stepscope_sends_quiet"
"""In the internal state: what one pipeline rank sends to the next opens no scope."""
VERSION = "stepscope_version"
"""In the internal state: of this package, there."""
PROFILE_V2 = "stepscope_profile_v2"
"""In the internal state: SGLang runs its second profiler there, whose stop kills the scheduler."""
RPD = "stepscope_rpd"
"""In the internal state: the library that the activity RPD takes is there."""
_SCHEDULER = "sglang.srt.managers.scheduler"
_quiet = False
"""What is shown as `SENDS_QUIET`. One writer: `_hide_sends`."""


def load() -> None:
    """Called by SGLang, in the processes that have imported the scheduler alone: schedulers, and the one that
    makes the engine. A hook imports what it is set on, which would cost the others seconds.
    """
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from stepscope.backends import open_scopes

    open_scopes.watch()  # first: the hook says that it is done
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", begin, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.get_internal_state", show, HookType.AFTER)


def begin(*_: object, **__: object) -> None:
    """Before a scheduler is made. The process that makes the engine makes none: what its trainer sends stays
    in its recordings.
    """
    with suppress(Exception):  # of a torch that has it elsewhere: the scheduler would die of it
        _hide_sends()


def _hide_sends() -> None:
    """From now on no session has what gloo sends: pipeline ranks wait for it in their next pass, which may be
    another session's.
    """
    global _quiet
    from torch.distributed import ProcessGroup

    from stepscope.backends.open_scopes import unrecorded

    ProcessGroup.send = unrecorded(ProcessGroup.send, _is_over_gloo)  # type: ignore[method-assign]
    _quiet = True


def _is_over_gloo(group: object, *args: Any, **kwargs: Any) -> bool:
    tensors = args[0] if args else kwargs.get("tensors", ())
    return any(tensor.device.type == "cpu" for tensor in tensors)


def show(answer: Any, scheduler: Any, *_: object) -> None:
    """Puts the scheduler's count into its answer, where SGLang has not done so itself, and that this is
    loaded.
    """
    with suppress(Exception):  # of a version that keeps it elsewhere: the scheduler would die of it
        answer.internal_state.update(_of_this_process())
        answer.internal_state.setdefault(COUNT, scheduler.forward_ct)


def own_version() -> str:
    """Of this package, where it is asked."""
    return metadata.version("stepscope-rollout-sglang")


def profile_v2() -> bool:
    """Whether SGLANG_PROFILE_V2 is set in this process."""
    return os.environ.get("SGLANG_PROFILE_V2", "").lower() in ("1", "true", "yes", "y")


@cache
def _of_this_process() -> dict[str, object]:
    rpd = find_spec(RPD_LIBRARY) is not None
    return {SCOPES_END: True, SENDS_QUIET: _quiet, VERSION: own_version(), PROFILE_V2: profile_v2(), RPD: rpd}


def counts_in(states: Sequence[object]) -> tuple[int, ...]:
    """Of each data-parallel scheduler. Empty where one does not show it."""
    found = _shown(states, COUNT)
    return tuple(count for count in found if isinstance(count, int)) if None not in found else ()


def scopes_end_in(states: Sequence[object]) -> bool:
    """Whether they do in every data-parallel scheduler."""
    return _all_show(states, SCOPES_END)


def sends_quiet_in(states: Sequence[object]) -> bool:
    """Whether they are in every data-parallel scheduler."""
    return _all_show(states, SENDS_QUIET)


def v2_in(states: Sequence[object]) -> bool:
    """Whether a scheduler is known to run SGLang's second profiler."""
    return True in _shown(states, PROFILE_V2)


def rpd_in(states: Sequence[object]) -> bool | None:
    """Whether every scheduler has the library of RPD. None: one does not say."""
    found = _shown(states, RPD)
    return all(found) if found and None not in found else None


def why_not_shown(states: Sequence[object]) -> str:
    """What to say where a scheduler does not show what our plugin would."""
    found = zip(_shown(states, COUNT), _shown(states, VERSION), strict=True)
    older = [version or "of an older version" for count, version in found if count is not None]
    if not older:
        return (
            "our plugin, and its schedulers have not loaded it. Fix: stepscope-rollout-sglang where the "
            "engine runs (`stepscope` in SGLANG_PLUGINS, where that is set)"
        )
    return (
        f"our plugin, and its schedulers have loaded stepscope-rollout-sglang {older[0]}, which cannot; this "
        f"one is {own_version()}. Fix: the same version where the engine runs"
    )


def _all_show(states: Sequence[object], name: str) -> bool:
    found = _shown(states, name)
    return bool(found) and all(found)


def _shown(states: Sequence[object], name: str) -> list[object]:
    return [state.get(name) if isinstance(state, dict) else None for state in states]
