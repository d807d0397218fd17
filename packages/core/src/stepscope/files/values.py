"""Values of span attributes. A module without records, so that decorators import less."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from stepscope.errors import ours

AttrValue: TypeAlias = str | int | float | bool | None

MAX_TEXT = 500
"""Longest text of an attribute or a name (stage, role, trajectory), in characters."""
_PLAIN = {int, float, bool, type(None)}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def attr_values(attrs: Mapping[str, object]) -> dict[str, AttrValue]:
    """Return a copy of `attrs` with values that JSON can represent."""
    return {str(key): attr_value(value) for key, value in attrs.items()}


def attr_value(value: object) -> AttrValue:
    """Return `value` as a JSON scalar. A numpy or torch scalar becomes a number, any other object becomes
    text of at most MAX_TEXT characters.

    If `__str__` or `__float__` of the object raises, the text is the name of the object's type.
    """
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]  # by the line above
    try:
        return _number(value) if not isinstance(value, str) else _cut(value)
    except ours():  # raised by __str__ or __float__ of a user's class
        return f"<{type(value).__name__}>"


def bounded(name: str) -> str:
    """Return `name`, cut to MAX_TEXT characters. Different names stay different even if they are cut."""
    if len(name) <= MAX_TEXT:
        return name
    from zlib import crc32

    return f"{name[: MAX_TEXT - 9]}~{crc32(name.encode(errors='surrogatepass')):08x}"


def whole(value: object) -> int | None:
    """Return `int(value)`, or None if this fails. Scalars of numpy and torch are accepted."""
    if value is None or type(value) is int:
        return value
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]  # any object of the user's
    except ours():
        return None


def _number(value: object) -> AttrValue:
    if isinstance(value, int):
        return int(value)  # for example an IntEnum
    if isinstance(value, float):
        return float(value)  # for example a numpy.float64
    device = str(getattr(value, "device", "cpu"))
    if device != "cpu":  # a read would wait for the device, and break the capture of a CUDA graph
        return f"<{type(value).__name__} on {device}>"
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        item = value.item()
        return item if type(item) in _PLAIN else _cut(str(item))
    # Addresses are removed, because they differ in each run.
    return _cut(_ADDRESS.sub("", str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
