"""Tokens of the step that runs, as `step_tokens` counts them in this process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping


class StepTokens:
    """Sums of one step at a time. Any thread may add."""

    def __init__(self) -> None:
        self._counts: deque[Mapping[str, int]] = deque()

    def add(self, counts: Mapping[str, int]) -> None:
        self._counts.append(counts)

    def take(self) -> dict[str, int]:
        """Return the sums, and begin anew."""
        sums: Counter[str] = Counter()
        while self._counts:
            sums.update(self._counts.popleft())
        return dict(sums)
