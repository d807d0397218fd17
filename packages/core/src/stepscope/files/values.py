"""Values of span attributes. Separate from the records, so that decorating does not load these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from stepscope.errors import ours

AttrValue: TypeAlias = str | int | float | bool | None

MAX_TEXT = 500
"""The longest text attribute and name (stage, role, trajectory), in characters."""
_PLAIN = {int, float, bool, type(None)}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def attr_values(attrs: Mapping[str, object]) -> dict[str, AttrValue]:
    """Return a copy of `attrs`, which does not change if the caller later changes `attrs`."""
    return {str(key): attr_value(value) for key, value in attrs.items()}


def attr_value(value: object) -> AttrValue:
    """Return `value` if it is a JSON scalar, a numpy or torch scalar as a number, any other value as text up
    to MAX_TEXT.

    A list becomes its text, and an object without a `__str__` of its own becomes the name of its type.
    """
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]  # by the line above
    try:
        return _number(value) if not isinstance(value, str) else _cut(value)
    except ours():  # the __str__ or __float__ of a user's class
        return f"<{type(value).__name__}>"


def bounded(name: str) -> str:
    """Return a name of at most MAX_TEXT characters. Different names stay different even if they are cut."""
    if len(name) <= MAX_TEXT:
        return name
    from zlib import crc32

    return f"{name[: MAX_TEXT - 9]}~{crc32(name.encode(errors='surrogatepass')):08x}"


def whole(value: object) -> int | None:
    """Return `value` as an int (numpy's and torch's too), or None if it is no integer."""
    if value is None or type(value) is int:
        return value
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]  # any object of the user's
    except ours():
        return None


def _number(value: object) -> AttrValue:
    if isinstance(value, int):
        return int(value)  # an IntEnum, say
    if isinstance(value, float):
        return float(value)  # numpy.float64
    device = str(getattr(value, "device", "cpu"))
    if device != "cpu":  # reading it would wait for the device, and break the capture of a CUDA graph
        return f"<{type(value).__name__} on {device}>"
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        item = value.item()
        return item if type(item) in _PLAIN else _cut(str(item))
    # An address says nothing, and is another one in each run.
    return _cut(_ADDRESS.sub("", str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
