"""mstx ranges around spans, opened and closed by id on any thread, and closed on every path.

`stream` is always None: with a stream, torch_npu issues the range later, from its task-queue thread. Its
decorator `mstx_range` is not used, because it leaves the range open if the function raises.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Ranges:
    """The ranges of one window."""

    def __init__(self, mstx: Any) -> None:
        self._mstx = mstx
        self._open: dict[int, None] = {}

    def range(self, message: str) -> Range:
        return Range(self, message)

    def start(self, message: str) -> int:
        """Open a range and return its number, or 0 if no profiler records it."""
        number = self._mstx.range_start(message) or 0
        if number:
            self._open[number] = None
        return int(number)

    def end(self, number: int) -> None:
        """Close a range. Do nothing if it was closed already, for example by the end of the window."""
        if self._open.pop(number, 0) is None:
            self._mstx.range_end(number)

    def end_all(self) -> None:
        """Close all ranges before the recording stops, because it loses open ones. The newest is closed
        first, since ranges nest.
        """
        for number in reversed(list(self._open)):
            self.end(number)


class Range:
    """The range of one span."""

    __slots__ = ("_message", "_number", "_ranges")

    def __init__(self, ranges: Ranges, message: str) -> None:
        self._ranges = ranges
        self._message = message
        self._number = 0

    def __enter__(self) -> None:
        self._number = self._ranges.start(self._message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranges.end(self._number)
