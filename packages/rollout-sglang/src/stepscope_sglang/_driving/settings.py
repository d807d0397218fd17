"""Settings with which an engine of this process was started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

_SWITCHES = ("SGLANG_PROFILE_WITH_STACK", "SGLANG_PROFILE_RECORD_SHAPES")


def _is_off(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("0", "false", "no", "n")


_settings_of: WeakKeyDictionary[object, Mapping[str, object]] = WeakKeyDictionary()
"""Cache of `of_manager`, its only writer."""


def of_manager(manager: Any) -> Mapping[str, object]:
    """Return the resolved arguments of a TokenizerManager.

    Newer versions keep them apart from the given ones. Resolving 500 of them takes 5 ms of CPU, so it is done
    once. Those that a capture needs never change.
    """
    known = _settings_of.get(manager)
    if known is None:
        resolved = getattr(manager.server_args, "resolved_dict", None)
        known = _settings_of[manager] = vars(manager.server_args) if resolved is None else resolved()
    return known


def switched_off() -> frozenset[str]:
    """Return the variables of this process's environment that switch an option of the profiler off."""
    return frozenset(name for name in _SWITCHES if _is_off(name))
