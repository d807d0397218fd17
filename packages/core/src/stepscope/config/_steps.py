"""Steps that are captured: numbers and ranges, open ends included."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex, TypeAlias

import msgspec

from stepscope.config._fields import items_of
from stepscope.config._ranges import SPELLINGS, check_range, parse_range
from stepscope.errors import ConfigError

_ALLOWED = f"steps from 0: {SPELLINGS}"


class StepRange(msgspec.Struct, frozen=True):
    """Steps start, start+stride, ... below stop. `stop=None` is open-ended."""

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

    def __str__(self) -> str:
        return str(self.spelled)

    @property
    def spelled(self) -> int | str:
        """Return the range as it is written and read back: 7, "3-7", "10:50:10", "every:50"."""
        if self.stop is None and self.start == 0:
            return f"every:{self.stride}"
        if self.stop is None:
            return f"{self.start}-" if self.stride == 1 else f"{self.start}::{self.stride}"
        if self.stride == 1:
            return self.start if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        return f"{self.start}:{self.stop}:{self.stride}"


StepSpec: TypeAlias = SupportsIndex | str | StepRange
"""One step (7), a range ("3-7", "10:50:10"), or "every:50"; a text may hold several, with commas."""


def parse_steps(value: object, field: str) -> tuple[StepRange, ...]:
    """Return steps in any of their spellings as ranges, in written order. A step may be in several ranges."""
    return tuple(dict.fromkeys(_parse(item, field) for item in _items(value, field)))


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
