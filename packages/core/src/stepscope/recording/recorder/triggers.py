"""Triggers of the flight recorder, each with a limit per run."""

from __future__ import annotations

from collections import Counter

from stepscope.config import RecorderConfig


class Triggers:
    """Counts what each trigger has written."""

    def __init__(self, config: RecorderConfig) -> None:
        self._config = config
        self._fired: Counter[str] = Counter()

    def fire(self, trigger: str) -> bool:
        """Return whether a trigger may write now. If so, it counts."""
        if trigger not in self._config.triggers or self._fired[trigger] >= self._config.per_trigger:
            return False
        self._fired[trigger] += 1
        return True
