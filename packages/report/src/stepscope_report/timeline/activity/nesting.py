"""Nesting of operators and of the user's ranges on each thread, with totals by name and shapes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from heapq import merge

from stepscope_report.timeline.activity.content import Operator
from stepscope_report.timeline.activity.event_names import is_range
from stepscope_report.timeline.activity.intervals import Covered, Pair, Slices, Stretches

KEPT = 4096
"""Largest number of keys (operator and shapes, or range) of one trace. Beyond this number, new shapes are
counted together under `OTHERS`, and new ranges under `OTHER_MARKS`."""
OTHERS, OTHER_MARKS = "other shapes", "other marks"
NONE = b"[]"
"""Shapes of an operator without inputs."""
_TEXT = 160
"""Largest number of characters of shapes that are kept. An operator on a list of tensors has thousands."""
_SEPARATOR = "\0"
_MARK = "\1"
BESIDE = 0.002
"""Largest overlap in us of two operators that ran one after the other. `ts` and `dur` are both rounded."""
_NO_THREAD = -1
_STEP, STEP_LABEL = re.compile(r"ProfilerStep#\d+"), "ProfilerStep*"
"""Names of the steps of torch's profiler, which are counted under one name, as in torch's own tables."""
_SEQ, _OP_ID = ", seq = ", ", op_id = "
"""Text after the name of an operator in a range of `torch.autograd.profiler.emit_nvtx`."""


def operator_key(name: str, dims: bytes, known: Container[str], number: int) -> str:
    """Return the key of an operator with inputs of these shapes.

    Args:
        dims: The shapes as JSON, as in the trace.
        known: The keys so far.
        number: Number of the keys so far.
    """
    shapes = bytes(dims)
    if shapes == NONE:
        return name
    text = shapes.decode(errors="replace")
    key = f"{name}{_SEPARATOR}{text if len(text) <= _TEXT else f'{text[:_TEXT]} ...'}"
    return key if number < KEPT or key in known else f"{name}{_SEPARATOR}{OTHERS}"


def mark_name(name: str) -> str | None:
    """Return the name under which a range of the user is counted, or None for an operator from
    `emit_nvtx`.
    """
    operator = _operator_of(name)
    return _STEP.sub(STEP_LABEL, name) if operator is None else None


def _operator_of(name: str) -> str | None:
    operator, id_, _ = name.partition(_OP_ID)
    operator, seq, _ = operator.partition(_SEQ)
    return operator if id_ or seq else None


def mark_key(name: str, known: Container[str], number: int) -> str:
    """Return the key of a range of the user, which differs from the key of an operator with the same name. A
    range from `emit_nvtx` has the key of its operator.

    Args:
        known: The keys so far.
        number: Number of the keys so far.
    """
    named = mark_name(name)
    if named is None:
        return _operator_of(name) or name
    key = f"{_MARK}{named}"
    return key if number < KEPT or key in known else f"{_MARK}{OTHER_MARKS}"


def new_operator(key: str) -> Operator:
    """Return an empty total for the operator or range with a key."""
    name, _, shapes = key.removeprefix(_MARK).partition(_SEPARATOR)
    return Operator(name, shapes, outer=key.startswith(_MARK) or is_range(name))


class Nested:
    """Operators and ranges of the user by thread. An operator or a range takes 20 bytes."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        """{`operator_key` or `mark_key`: index in `operators`}."""
        self.operators: list[Operator] = []
        self.threads: dict[int, Slices] = defaultdict(Slices)
        self.beyond: dict[int, Slices] = defaultdict(Slices)
        """{thread: operators outside of the times that are read}, which only explain gaps."""
        self.ran: dict[int, Stretches] = {}
        """{thread: times in which the thread ran operators}; empty until `nest` is called."""
        self._overrun: set[int] = set()
        """Threads with operators that end after the operator around them."""
        self.main = _NO_THREAD
        """The thread with the most operators, or -1 without operators. Set by `nest`."""

    def number(self, key: str) -> int:
        number = self.keys.get(key)
        if number is None:
            number = self.keys[key] = len(self.operators)
            self.operators.append(new_operator(key))
        return number

    def add(self, key: str, start: float, dur: float, thread: int) -> int:
        """Add an operator or a range, and return its number."""
        number = self.number(key)
        self.threads[thread].add(start, dur, number)
        return number

    def outermost(self, around: Iterable[tuple[float, int]]) -> str:
        """Return the name of the outermost open operator of torch, such as `aten::item`; empty if only ranges
        are open.
        """
        open_ones = [self.operators[number] for _, number in around]
        names = [operator.name for operator in open_ones if not operator.outer]
        return next((name for name in names if "::" in name), names[-1] if names else "")

    def times_of(self, numbers: Container[int]) -> Iterator[Pair]:
        """Yield the starts and ends of the operators with these numbers, thread by thread."""
        for slices in self.threads.values():
            yield from ((start, end) for start, end, number in slices if number in numbers)

    def covered(self) -> Iterator[Covered]:
        """Yield, for each thread, the times in which the thread ran operators."""
        inner = {number for number, operator in enumerate(self.operators) if not operator.outer}
        has_ranges = len(inner) < len(self.operators)
        for thread in {**self.threads, **self.beyond}:
            own, beyond = self.threads.get(thread, Slices()), self.beyond.get(thread)
            pairs: Iterator[Pair] = iter(self.ran.get(thread, ()))
            if thread in self._overrun:
                pairs = own.pairs()
                if has_ranges:
                    pairs = ((start, end) for start, end, number in own if number in inner)
            yield Covered(pairs if beyond is None else merge(pairs, beyond.pairs()))

    def nest(self) -> None:
        """Add up the calls of each operator, with the time in operators that this operator called."""
        most = 0
        for thread, slices in self.threads.items():
            before = self._inner()
            self.ran[thread] = Stretches(self._nest(thread, slices))
            own = self._inner() - before + len(self.beyond.get(thread, ()))
            if own > most:
                most, self.main = own, thread

    def _inner(self) -> int:
        return sum(operator.count for operator in self.operators if not operator.outer)

    def _nest(self, thread: int, slices: Slices) -> Iterator[Pair]:
        """Yield the times of the outermost operators of one thread."""
        outer = [operator.outer for operator in self.operators]
        counts, totals = [0] * len(outer), [0.0] * len(outer)
        longest, below = totals.copy(), totals.copy()
        still: list[tuple[float, int]] = []
        overruns = False
        for start, dur, number in slices.as_added():
            counts[number] += 1
            totals[number] += dur
            if dur > longest[number]:
                longest[number] = dur
            begun, end = start + BESIDE, start + dur
            while still and still[-1][0] < begun:
                still.pop()
            if still:
                above_end, above = still[-1]
                if end <= above_end:
                    below[above] += dur
                else:
                    below[above] += above_end - start
                    overruns = True
                if outer[above] and not outer[number]:
                    yield start, end
            elif not outer[number]:
                yield start, end
            still.append((end, number))
        if overruns:
            self._overrun.add(thread)
        columns = zip(self.operators, counts, totals, longest, below, strict=True)
        for operator, count, total_us, max_us, below_us in columns:
            operator.count += count
            operator.total_us += total_us
            operator.max_us = max(operator.max_us, max_us)
            operator.below_us += below_us
