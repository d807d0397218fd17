"""Start of a profile that leaves torch's compiler alone.

`prepare_trace` of torch 2.13 asks `hasattr(torch, "_inductor")`, which imports the compiler: 2 s of CPU
in each process. It reads one switch there, which is off in a process that has not imported the compiler.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler.profiler import _KinetoProfile as Profile

_COMPILER = "_inductor"
_SWITCH = "TORCHINDUCTOR_CUDAGRAPHS"
"""Environment variable of the switch."""


class _WithoutCompiler:
    """The module `torch`, to code that asks whether it has a compiler."""

    def __getattr__(self, name: str) -> object:
        if name == _COMPILER:
            raise AttributeError(name)
        return getattr(sys.modules["torch"], name)


def prepare_trace(profile: Profile) -> None:
    """Prepare a profile, without an import of the compiler."""
    method = type(profile).prepare_trace
    if f"torch.{_COMPILER}" in sys.modules or _SWITCH in os.environ or not isinstance(method, FunctionType):
        profile.prepare_trace()
        return
    names = {**method.__globals__, "torch": _WithoutCompiler()}
    FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)(profile)
