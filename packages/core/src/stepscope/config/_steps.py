"""Steps that are captured: numbers and ranges, open ends included."""

from __future__ import annotations

import re
from operator import index
from typing import SupportsIndex, TypeAlias

import msgspec

from stepscope.config._fields import items_of
from stepscope.errors import ConfigError

_ALLOWED = 'step numbers from 0, ranges "start:stop:stride" (stop itself is not captured), or "every:50"'
# Eighteen digits fit into 64 bits.
_EVERY = re.compile(r"every:([0-9]{1,18})")
_SLICE = re.compile(r"([0-9]{1,18})(?:(:)([0-9]{0,18})(?::([0-9]{0,18}))?)?")


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
        """Return the range as it is written and read back: 7, "10:50:10", "every:50"."""
        if self.stop is None:
            return f"every:{self.stride}" if self.start == 0 else f"{self.start}::{self.stride}"
        if self.stride == 1:
            return self.start if self.stop == self.start + 1 else f"{self.start}:{self.stop}"
        return f"{self.start}:{self.stop}:{self.stride}"


StepSpec: TypeAlias = SupportsIndex | str | StepRange
"""One step (7), a range ("10:50:10"), or "every:50"; a text may hold several, with commas."""


def parse_steps(value: object, field: str) -> tuple[StepRange, ...]:
    """Return steps in any of their spellings as ranges, in written order; a step may be in several.

    Raises:
        ConfigError: a spelling is wrong.
    """
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
    if every := _EVERY.fullmatch(text):
        start, stop, stride = 0, None, int(every[1])
    elif part := _SLICE.fullmatch(text):
        start, stride = int(part[1]), int(part[4] or 1)
        stop = (int(part[3]) if part[3] else None) if part[2] else start + 1
    elif text in ("all", "*"):
        raise ConfigError(field, text, _ALLOWED, 'write "every:1" to capture all steps')
    else:
        raise ConfigError(field, text, _ALLOWED, 'write it like 7, "10:50:10" or "every:50"')
    _check(start, stop, stride, text, field)
    return StepRange(start, stop, stride)


def _check(start: int, stop: int | None, stride: int, shown: object, field: str) -> None:
    if start < 0:
        raise ConfigError(field, shown, _ALLOWED, "steps count up from 0; write the number of the step")
    if stop is not None and stop <= start:
        fix = f"write {start} for that step alone, or a higher stop"
        raise ConfigError(field, shown, "ranges whose stop is above their start", fix)
    if stride < 1:
        fix = f"write {start} for that step alone, or a stride"
        raise ConfigError(field, shown, "strides of 1 or more", fix)
