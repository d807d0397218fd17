"""Ranges of steps and of ranks, which are spelled in the same way everywhere."""

from __future__ import annotations

import re
import sys
from operator import index
from typing import SupportsIndex, TypeAlias

import msgspec

from stepscope.config._fields import Mistakes, items_of
from stepscope.errors import ConfigError

SPELLINGS = '3, "3-7" (7 too), "8-" (8 and all above), "10:50:10" (50 is not in it) or "every:50"'
# Eighteen digits fit into 64 bits.
_EVERY = re.compile(r"every:([0-9]{1,18})")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{0,18}))?")
_SLICE = re.compile(r"([0-9]{1,18}):([0-9]{0,18})(?::([0-9]{0,18}))?")


def parse_range(text: str) -> tuple[int, int | None, int] | None:
    """Return (start, stop, stride) as in `range`, or None if the text is not a range. `stop` is None if the
    range has no end.
    """
    if every := _EVERY.fullmatch(text):
        return 0, None, int(every[1])
    if span := _SPAN.fullmatch(text):
        start = int(span[1])
        return start, start + 1 if span[2] is None else int(span[2]) + 1 if span[2] else None, 1
    if part := _SLICE.fullmatch(text):
        return int(part[1]), int(part[2]) if part[2] else None, int(part[3] or 1)
    return None


def check_range(start: int, stop: int | None, stride: int, shown: object, field: str) -> None:
    """Check that a range is not empty.

    Raises:
        ConfigError: the range is empty, or its stride is not positive. The error quotes `shown`, the range as
            the user wrote it.
    """
    if stop is not None and stop <= start:
        fix = f"write {start} for that one alone, or a higher end"
        raise ConfigError(field, shown, "ranges whose end is above their start", fix)
    if stride < 1:
        raise ConfigError(
            field, shown, "strides of 1 or more", f"write {start} for that one alone, or a stride"
        )


def parse_ranges(text: str, field: str) -> tuple[range, ...]:
    """Return the ranges in a text with commas between them. The stop of a range without an end is
    `sys.maxsize`.

    Raises:
        ConfigError: a part of the text is not a range, or is an empty range.
    """
    return tuple(_range(part.strip(), field) for part in text.split(","))


def _range(text: str, field: str) -> range:
    parts = parse_range(text)
    if parts is None:
        raise ConfigError(field, text, SPELLINGS, "write it like 0,8-15")
    start, stop, stride = parts
    check_range(start, stop, stride, text, field)
    return range(start, sys.maxsize if stop is None else stop, stride)


_ALLOWED = f"steps from 0: {SPELLINGS}"


class StepRange(msgspec.Struct, frozen=True):
    """The steps `range(start, stop, stride)`, which have no end if `stop` is None."""

    start: int
    stop: int | None
    stride: int = 1

    def __post_init__(self) -> None:
        for number in (self.start, 0 if self.stop is None else self.stop, self.stride):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ConfigError(
                    "steps", number, "whole numbers", "write StepRange(10, 50, 10), for example"
                )
        _check(self.start, self.stop, self.stride, f"{self.start}:{self.stop}:{self.stride}", "steps")

    def __contains__(self, step: int) -> bool:
        below = self.stop is None or step < self.stop
        return below and step >= self.start and (step - self.start) % self.stride == 0

    def goes_beyond(self, step: int) -> bool:
        """Return True if a step after `step` is in the range."""
        return self.stop is None or range(self.start, self.stop, self.stride)[-1] > step

    def __str__(self) -> str:
        return str(self.spelled)

    @property
    def spelled(self) -> int | str:
        """Return the shortest spelling of the range: 7, "3-7", "10:50:10", "every:50"."""
        if self.stop is None and self.start == 0:
            return f"every:{self.stride}"
        if self.stop is None:
            return f"{self.start}-" if self.stride == 1 else f"{self.start}::{self.stride}"
        if self.stride == 1:
            return self.start if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        return f"{self.start}:{self.stop}:{self.stride}"


StepSpec: TypeAlias = SupportsIndex | str | StepRange
"""One step (7), a range ("3-7", "10:50:10"), or "every:50". A text may contain several of these, with
commas."""


def parse_steps(value: object, field: str) -> tuple[StepRange, ...]:
    """Return the ranges of steps in `value`, in the given order. A step may be in several ranges."""
    ranges, mistakes = list[StepRange](), Mistakes()
    for item in _items(value, field):
        with mistakes.noted():
            ranges.append(_parse(item, field))
    mistakes.raise_any()
    return tuple(dict.fromkeys(ranges))


def _items(value: object, field: str) -> list[object]:
    items = items_of(value)
    if items is not None:
        return items
    if isinstance(value, StepRange | SupportsIndex):
        return [value]
    raise ConfigError(field, value, _ALLOWED, 'write a list: [2, "10:50:10"]; [] captures no step')


def _parse(item: object, field: str) -> StepRange:
    if isinstance(item, StepRange):
        return item
    if isinstance(item, str):
        return _parse_text(item.strip(), field)
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        raise ConfigError(field, item, _ALLOWED, "write steps as whole numbers, ranges as text")
    step = index(item)
    _check(step, step + 1, 1, step, field)
    return StepRange(step, step + 1)


def _parse_text(text: str, field: str) -> StepRange:
    parts = parse_range(text)
    if parts is None:
        wants_all = text in ("all", "*")
        fix = 'write "every:1" to capture all steps' if wants_all else 'write it like 7, "3-7" or "every:50"'
        raise ConfigError(field, text, _ALLOWED, fix)
    _check(*parts, text, field)
    return StepRange(*parts)


def _check(start: int, stop: int | None, stride: int, shown: object, field: str) -> None:
    if start < 0:
        raise ConfigError(field, shown, _ALLOWED, "steps count up from 0; write the number of the step")
    check_range(start, stop, stride, shown, field)
