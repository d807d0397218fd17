"""Code that torch.compile compiles, of which recorded functions may be part.

A user's function stays in one graph with the surrounding code: its wrapper first calls `recording` or
`is_idle`, for which torch compiles constants, so that the rest of the wrapper is compiled away. A capture
neither recompiles such code nor stops it. If the user's function breaks the graph, torch calls the wrapper as
Python does, and then compiles each function that is called with a tensor, except `uncompiled` ones.
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
"""The attribute of a function that holds another function, which torch.compile compiles in its place.

Not for methods: torch up to 2.14 then takes closure and defaults from the function in the class, and drops
`self` where the graph breaks.
"""
_uncompiled: set[CodeType] = set()
"""Code objects that torch.compile leaves to Python. One writer: `uncompiled`."""
F = TypeVar("F", bound=Callable[..., object])


def compiled_as(value: object) -> Callable[[F], F]:
    """Return a decorator of a function without arguments, in place of which torch.compile compiles the
    constant `value`.
    """

    def constant() -> object:
        return value

    def decorate(fn: F) -> F:
        setattr(fn, INLINED, constant)
        return fn

    return decorate


@compiled_as(None)
def recording() -> slot.ActiveSession | None:
    """Return the session or recorder that records this process (`slot.active`), but None in compiled code."""
    return slot.active


@compiled_as(True)
def is_idle() -> bool:
    """Return True if nothing records this process, or if the calling code is compiled."""
    return slot.active is None


@compiled_as(True)
def is_compiled() -> bool:
    """Return whether the calling code is compiled by torch.compile."""
    return False


def uncompiled(fn: F) -> F:
    """Make torch.compile leave one of stepscope's functions, and all functions that it calls, to Python."""
    _uncompiled.add(cast(FunctionType, fn).__code__)
    return fn


def leave_to_python() -> None:
    """Tell torch, if it is imported, which code not to compile. Must be repeated after
    `torch._dynamo.reset()`.
    """
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if frames is None:
        return
    try:
        skip = frames._FrameAction.SKIP
        for code in _uncompiled:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except ours() as failure:  # an older torch compiles it, which takes time and changes nothing else
        failures.note("telling torch.compile what not to compile", failure)
