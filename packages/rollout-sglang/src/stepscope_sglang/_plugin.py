"""What SGLang loads into its own processes: its schedulers then show how many forward passes they have begun.

SGLang (0.5.11 and later) calls the entry points `sglang.srt.plugins` of what is installed beside it, in each
of its processes, and has hooks for what they change (`sglang/srt/plugins/hook_registry.py`). One is used: the
answer to a question for the internal state. Nothing is added to a forward pass.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

COUNT = "forward_ct"
"""In the internal state; SGLang's own name for it."""
_SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Called by SGLang. Only schedulers have what is hooked, and only they have imported it: a hook imports
    what it is set on, which would cost the other processes seconds.
    """
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.Scheduler.get_internal_state", show_count, HookType.AFTER)


def show_count(answer: Any, scheduler: Any, *_: object) -> None:
    """Puts the scheduler's count into its answer, where SGLang has not done so itself."""
    with suppress(Exception):  # of a version that keeps it elsewhere: the scheduler would die of it
        answer.internal_state.setdefault(COUNT, scheduler.forward_ct)


def counts_in(states: object) -> tuple[int, ...]:
    """Of each data-parallel scheduler. Empty where one does not show it."""
    each = states if isinstance(states, list) else []
    found = [state.get(COUNT) if isinstance(state, dict) else None for state in each]
    return tuple(count for count in found if isinstance(count, int)) if None not in found else ()
