"""A clock that moves on demand, so that the times of spans in tests are exact."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepscope._recording.process import clock
from stepscope._recording.spans import log, span

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

START_NS = 1_000_000_000
WALL_NS = 1_750_000_000_000_000_000
"""Time of the wall clock, in unix ns, at START_NS."""


class FakeClock:
    """A clock for this process' spans and clock anchors, inside of its `with` block.

    Budgets, deadlines and the costs in the manifest use the real clock, so that a test that hangs still ends.
    """

    CLOCK_MONOTONIC_RAW = 4  # as in the module `time`, in whose place it stands

    def __init__(self) -> None:
        self.now_ns = START_NS

    def advance(self, seconds: float) -> None:
        """Move the clock on, to the nanosecond.

        Raises:
            ValueError: `seconds` is negative: the clock of spans never goes back.
        """
        if seconds < 0:
            raise ValueError(f"advance(seconds) is {seconds}; allowed: 0 or more")
        self.now_ns += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return WALL_NS + self.now_ns - START_NS

    def clock_gettime_ns(self, which: int) -> int:
        return self.now_ns

    def __enter__(self) -> Self:
        vars(log)["monotonic_ns"] = vars(span)["monotonic_ns"] = self.monotonic_ns
        vars(clock)["time"] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        vars(log)["monotonic_ns"] = vars(span)["monotonic_ns"] = time.monotonic_ns
        vars(clock)["time"] = time
