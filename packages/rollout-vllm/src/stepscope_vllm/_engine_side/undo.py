"""Attributes of vLLM's objects that are changed for a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """Attributes that were set, with their earlier values."""

    def __init__(self) -> None:
        self._was: list[tuple[Any, str, Any]] = []
        self._shadows: list[tuple[Any, str]] = []

    def set(self, target: Any, name: str, value: Any, *, back_only: bool = False) -> None:
        """Set an attribute until `run`.

        Args:
            back_only: Leave it for now, and set it to `value` in `run`.
        """
        self._was.append((target, name, value if back_only else getattr(target, name, None)))
        if not back_only:
            setattr(target, name, value)

    def shadow(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """Put a method before that of the object's class."""
        setattr(target, name, method)
        self._shadows.append((target, name))

    def run(self) -> None:
        for target, name in self._shadows:
            vars(target).pop(name, None)
        for target, name, value in reversed(self._was):
            setattr(target, name, value)
