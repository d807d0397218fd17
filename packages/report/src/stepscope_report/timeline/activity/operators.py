"""Operators of a trace while it is read: their keys, and which of a thread are open."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from heapq import merge

from stepscope_report.timeline.activity.content import Operator
from stepscope_report.timeline.activity.intervals import CHUNK

KEPT = 4096
"""Operators by shapes that one trace keeps. Shapes beyond these count together."""
OTHERS = "other shapes"
NONE = b"[]"
"""Shapes of an operator without inputs."""
_TEXT = 160
"""Characters of shapes that are kept: an operator on a list of tensors has thousands."""
_SEPARATOR = "\0"


def operator_key(name: str, dims: bytes, known: Container[str], number: int) -> str:
    """Return the key of an operator with inputs of these shapes.

    Args:
        dims: The shapes as the trace has them, in JSON.
        known: The keys so far, of which there are `number`.
    """
    shapes = bytes(dims)
    if shapes == NONE:
        return name
    text = shapes.decode(errors="replace")
    key = f"{name}{_SEPARATOR}{text if len(text) <= _TEXT else f'{text[:_TEXT]} ...'}"
    return key if number < KEPT or key in known else f"{name}{_SEPARATOR}{OTHERS}"


def name_and_shapes(key: str) -> tuple[str, str]:
    """Return the two parts of a key. Shapes are empty where the trace has none."""
    name, _, shapes = key.partition(_SEPARATOR)
    return name, shapes


class Unordered:
    """Operators that are added in any order and returned by their starts, in 20 bytes each."""

    def __init__(self) -> None:
        self._latest: list[tuple[float, float, str]] = []
        self._chunks: list[tuple[array[float], array[float], array[int]]] = []
        self._numbers: dict[str, int] = {}

    def add(self, start: float, dur: float, key: str) -> None:
        self._latest.append((start, -dur, key))
        if len(self._latest) >= CHUNK:
            self._pack()

    def __iter__(self) -> Iterator[tuple[float, float, str]]:
        """Yield (start, -duration, key). Of two with the same start, the longer one comes first."""
        self._pack()
        keys = list(self._numbers)
        return merge(
            *(
                zip(starts, durs, map(keys.__getitem__, numbers), strict=True)
                for starts, durs, numbers in self._chunks
            )
        )

    def _pack(self) -> None:
        starts, durs, numbers = array("d"), array("d"), array("I")
        for start, minus_dur, key in sorted(self._latest):
            starts.append(start)
            durs.append(minus_dur)
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))
        self._chunks.append((starts, durs, numbers))
        self._latest.clear()


class Nesting:
    """Operators of one thread that have begun and are not known to have ended."""

    __slots__ = ("last", "later", "open")

    def __init__(self) -> None:
        self.last = float("-inf")
        self.open: list[tuple[float, Operator]] = []
        self.later: Unordered | None = None
        """All operators of the thread, if they must be sorted first."""
