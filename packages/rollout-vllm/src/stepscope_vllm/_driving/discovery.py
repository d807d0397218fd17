"""Engines of this process, recognised by the names of their classes and found in the process' memory.

This module never imports vLLM: an engine exists only if the user's code has imported vLLM.
"""

from __future__ import annotations

import gc
import sys
import traceback
from types import ModuleType
from weakref import WeakKeyDictionary

_KINDS = {"AsyncLLM", "LLM"}


_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""{engine: its position in the order of discovery, which never changes}. One writer: `owned`."""


def is_engine(value: object) -> bool:
    """Return whether `value` is an instance of `AsyncLLM`, of `LLM`, or of a subclass."""
    return any(
        kind.__name__ in _KINDS and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(value).__mro__
    )


def owned() -> list[object]:
    """Return the engines that live in this process, in the order in which they were first seen."""
    kinds = _kinds()
    for value in _instances(kinds) if kinds else ():
        _numbers.setdefault(value, len(_numbers))
    return sorted(_numbers, key=_numbers.__getitem__)


def _kinds() -> set[type]:
    """Return the imported engine classes and their subclasses."""
    homes = (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm.entrypoints.llm", "LLM"))
    loaded = [getattr(sys.modules.get(module), name, None) for module, name in homes]
    kinds = [kind for kind in loaded if isinstance(kind, type)]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return set(kinds)


def _instances(kinds: set[type]) -> list[object]:
    engines = [value for value in gc.get_objects() if type(value) in kinds]
    if not engines and gc.get_freeze_count():
        # An LLM whose core is in this process calls `gc.freeze` while it is built, and `gc.get_objects` omits
        # frozen objects. `gc.unfreeze` would also unfreeze the user's objects.
        engines = [value for value in _reachable() if type(value) in kinds]
    return engines


def _reachable() -> list[object]:
    """Return the variables of all frames and of the main script, the attributes of these variables, and the
    attributes of these attributes.
    """
    frames = [frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top)]
    names = [frame.f_locals for frame in frames] + [vars(sys.modules["__main__"])]
    level = [value for variables in names for value in list(variables.values())]
    reached = list(level)
    for _ in range(2):
        level = [value for holder in level for value in _held(holder)]
        reached += level
    return reached


def _held(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())
