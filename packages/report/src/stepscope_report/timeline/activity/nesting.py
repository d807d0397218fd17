"""Operators of one thread as they nest, by name and shapes, and ranges of the user among them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Container, Iterator
from heapq import merge

from stepscope_report.timeline.activity.content import Operator
from stepscope_report.timeline.activity.event_names import is_range
from stepscope_report.timeline.activity.intervals import CHUNK

KEPT = 4096
"""Largest number of operators with different shapes that are kept of one trace. Further shapes are counted
together, and so are further marks."""
OTHERS, OTHER_MARKS = "other shapes", "other marks"
NONE = b"[]"
"""Shapes of an operator without inputs."""
_TEXT = 160
"""Number of characters of shapes that are kept: an operator on a list of tensors has thousands."""
_SEPARATOR = "\0"
_MARK = "\1"
_STEP = re.compile(r"ProfilerStep#\d+")
"""Names of the steps of torch's profiler, which count under one name, as in torch's own tables."""
_SEQ, _OP_ID = ", seq = ", ", op_id = "
"""Text after the name of an operator in a range of `torch.autograd.profiler.emit_nvtx`."""


def operator_key(name: str, dims: bytes, known: Container[str], number: int) -> str:
    """Return the key of an operator with inputs of these shapes.

    Args:
        dims: The shapes as the trace has them, in JSON.
        known: The keys so far; `number` is how many there are.
    """
    shapes = bytes(dims)
    if shapes == NONE:
        return name
    text = shapes.decode(errors="replace")
    key = f"{name}{_SEPARATOR}{text if len(text) <= _TEXT else f'{text[:_TEXT]} ...'}"
    return key if number < KEPT or key in known else f"{name}{_SEPARATOR}{OTHERS}"


def mark_name(name: str) -> str | None:
    """Return the name under which a range of the user is counted, or None for an operator of `emit_nvtx`."""
    operator = _operator_of(name)
    return _STEP.sub("ProfilerStep*", name) if operator is None else None


def _operator_of(name: str) -> str | None:
    operator, id_, _ = name.partition(_OP_ID)
    operator, seq, _ = operator.partition(_SEQ)
    return operator if id_ or seq else None


def mark_key(name: str, known: Container[str], number: int) -> str:
    """Return the key of a range of the user, which differs from that of an operator with the same name. A
    range of `emit_nvtx` has the key of its operator.

    Args:
        known: The keys so far; `number` is how many there are.
    """
    named = mark_name(name)
    if named is None:
        return _operator_of(name) or name
    key = f"{_MARK}{named}"
    return key if number < KEPT or key in known else f"{_MARK}{OTHER_MARKS}"


def new_operator(key: str) -> Operator:
    """Return the operator, or the mark, that a key stands for."""
    name, _, shapes = key.removeprefix(_MARK).partition(_SEPARATOR)
    return Operator(name, shapes, outer=key.startswith(_MARK) or is_range(name))


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
    """Operators of one thread that have begun and may not have ended yet."""

    __slots__ = ("last", "later", "open")

    def __init__(self) -> None:
        self.last = float("-inf")
        self.open: list[tuple[float, Operator]] = []
        self.later: Unordered | None = None
        """All operators of the thread if they must be sorted first, else None."""
