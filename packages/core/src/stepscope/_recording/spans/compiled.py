"""Support for torch.compile, whose compiled code may contain recorded functions.

A recorded function stays in one graph with the surrounding code. Its wrapper first calls `recording` or
`is_idle`, which torch replaces by constants. The remaining code of the wrapper is then compiled away. A
capture does not cause a recompilation. If the user's function breaks the graph, the wrapper runs as ordinary
Python. torch then compiles each function that is called with a tensor, except functions marked as
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
"""Attribute of a function. Its value is the function that torch.compile compiles instead.

Do not set it on methods: torch up to 2.14 uses the closure and the defaults of the original method, and
drops `self` at graph breaks."""
_uncompiled: set[CodeType] = set()
"""Code objects that torch.compile does not compile. One writer: `uncompiled`."""
F = TypeVar("F", bound=Callable[..., object])


def compiled_as(value: object) -> Callable[[F], F]:
    """Return a decorator for a function without arguments. In compiled code, calls of the function return the
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
    """Return `slot.active`, or None in compiled code."""
    return slot.active


@compiled_as(True)
def is_idle() -> bool:
    """Return True if recording is off in this process, or if the calling code is compiled."""
    return slot.active is None


@compiled_as(True)
def is_compiled() -> bool:
    """Return whether the calling code is compiled by torch.compile."""
    return False


def uncompiled(fn: F) -> F:
    """Exclude a function of stepscope, and all functions that it calls, from torch.compile."""
    _uncompiled.add(cast(FunctionType, fn).__code__)
    return fn


def leave_to_python() -> None:
    """Make torch, if it is imported, exclude the `uncompiled` functions. Call this again after
    `torch._dynamo.reset()`.
    """
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if frames is None:
        return
    try:
        skip = frames._FrameAction.SKIP
        for code in _uncompiled:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except ours() as failure:  # an older torch compiles the code, which only takes time
        failures.note("telling torch.compile what not to compile", failure)
