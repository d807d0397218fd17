"""Code that torch.compile compiles, of which recorded functions may be part.

A user's function stays in one graph with what surrounds it: the wrapper around it asks `recording` or
`is_idle` first, for which torch compiles constants, and so nothing of ours is left. A capture neither
recompiles such code nor stops it. Where the user's function breaks the graph, torch calls the wrapper as
Python does, and then compiles each function that is called with a tensor: all but those that are
`uncompiled`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from stepscope._recording.process import failures
from stepscope._recording.spans import slot
from stepscope.errors import ours

INLINED = "_torchdynamo_inline"
"""The attribute of a function that names another one, for torch.compile to compile in its place.

Not for methods: torch up to 2.14 then takes closure and defaults from the function in the class, and drops
`self` where the graph breaks.
"""
_uncompiled: set[CodeType] = set()
"""Code that torch.compile leaves to Python. One writer: `uncompiled`."""
F = TypeVar("F", bound=Callable[..., object])


def compiled_as(value: object) -> Callable[[F], F]:
    """Decorate a function without arguments, in place of which torch.compile compiles `value`."""

    def constant() -> object:
        return value

    def decorate(fn: F) -> F:
        setattr(fn, INLINED, constant)
        return fn

    return decorate


@compiled_as(None)
def recording() -> slot.ActiveSession | None:
    """Return what records this process: `slot.active`, but None in compiled code."""
    return slot.active


@compiled_as(True)
def is_idle() -> bool:
    """Return whether nothing records this process, or the code that asks is compiled."""
    return slot.active is None


@compiled_as(True)
def is_compiled() -> bool:
    """Return whether the code that asks is compiled by torch.compile."""
    return False


def uncompiled(fn: F) -> F:
    """Have torch.compile leave a function of ours, and all that it calls, to Python."""
    _uncompiled.add(cast(FunctionType, fn).__code__)
    return fn


def leave_to_python() -> None:
    """Tell torch, if it is imported, which code it does not compile. `torch._dynamo.reset()` forgets it."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if frames is None:
        return
    try:
        skip = frames._FrameAction.SKIP
        for code in _uncompiled:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except ours() as failure:  # an older torch compiles it, which takes time and changes nothing else
        failures.note("telling torch.compile what not to compile", failure)
