"""Spelling of ranges of steps and of ranks: the same in the configuration and in every command."""

from __future__ import annotations

import re
import sys

from stepscope.errors import ConfigError

SPELLINGS = '3, "3-7" (7 too), "8-" (8 and all above), "10:50:10" (50 is not in it) or "every:50"'
# Eighteen digits fit into 64 bits.
_EVERY = re.compile(r"every:([0-9]{1,18})")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{0,18}))?")
_SLICE = re.compile(r"([0-9]{1,18}):([0-9]{0,18})(?::([0-9]{0,18}))?")


def parse_range(text: str) -> tuple[int, int | None, int] | None:
    """Return start, stop (not in the range, or None if there is no end) and stride, or None if the text
    spells no range."""
    if every := _EVERY.fullmatch(text):
        return 0, None, int(every[1])
    if span := _SPAN.fullmatch(text):
        start = int(span[1])
        return start, start + 1 if span[2] is None else int(span[2]) + 1 if span[2] else None, 1
    if part := _SLICE.fullmatch(text):
        return int(part[1]), int(part[2]) if part[2] else None, int(part[3] or 1)
    return None


def check_range(start: int, stop: int | None, stride: int, shown: object, field: str) -> None:
    """Check that a range holds something.

    Raises:
        ConfigError: the range is empty, or its stride is not positive. `shown` is the range as it was
            written.
    """
    if stop is not None and stop <= start:
        fix = f"write {start} for that one alone, or a higher end"
        raise ConfigError(field, shown, "ranges whose end is above their start", fix)
    if stride < 1:
        raise ConfigError(
            field, shown, "strides of 1 or more", f"write {start} for that one alone, or a stride"
        )


def parse_ranges(text: str, field: str) -> tuple[range, ...]:
    """Return the ranges of a text with commas between them. A range without an end gets Python's largest
    size.

    Raises:
        ConfigError: a part of the text is no range, or an empty one.
    """
    return tuple(_range(part.strip(), field) for part in text.split(","))


def _range(text: str, field: str) -> range:
    parts = parse_range(text)
    if parts is None:
        raise ConfigError(field, text, SPELLINGS, "write it like 0,8-15")
    start, stop, stride = parts
    check_range(start, stop, stride, text, field)
    return range(start, sys.maxsize if stop is None else stop, stride)
