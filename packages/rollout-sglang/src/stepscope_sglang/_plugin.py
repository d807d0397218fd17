"""What SGLang loads into its own processes: its schedulers then show how many forward passes they have begun,
and survive captures by stage.

SGLang (0.5.11 and later) calls the entry points `sglang.srt.plugins` of what is installed beside it, in each
of its processes, and has hooks for what they change (`sglang/srt/plugins/hook_registry.py`). One is used: the
answer to a question for the internal state. Nothing is added to a forward pass that is not recorded.

By stage, SGLang stops one profile and starts the next inside of `run_batch`, which is a `record_function`
since 0.5.14: what `stepscope.backends.open_scopes` is for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

COUNT = "forward_ct"
"""In the internal state; SGLang's own name for it."""
SCOPES_END = "stepscope_scopes_end"
"""In the internal state: scopes end with the profile in which they began."""
_SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Called by SGLang, in the processes that have imported the scheduler alone: schedulers, and the one that
    makes the engine. A hook imports what it is set on, which would cost the others seconds.
    """
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from stepscope.backends import open_scopes

    open_scopes.watch()  # first: the hook says that it is done
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.get_internal_state", show, HookType.AFTER)


def show(answer: Any, scheduler: Any, *_: object) -> None:
    """Puts the scheduler's count into its answer, where SGLang has not done so itself, and that this is
    loaded.
    """
    with suppress(Exception):  # of a version that keeps it elsewhere: the scheduler would die of it
        answer.internal_state[SCOPES_END] = True
        answer.internal_state.setdefault(COUNT, scheduler.forward_ct)


def counts_in(states: Sequence[object]) -> tuple[int, ...]:
    """Of each data-parallel scheduler. Empty where one does not show it."""
    found = _shown(states, COUNT)
    return tuple(count for count in found if isinstance(count, int)) if None not in found else ()


def scopes_end_in(states: Sequence[object]) -> bool:
    """Whether they do in every data-parallel scheduler."""
    found = _shown(states, SCOPES_END)
    return bool(found) and all(found)


def _shown(states: Sequence[object], name: str) -> list[object]:
    return [state.get(name) if isinstance(state, dict) else None for state in states]
