"""Names that come again and again, written once and referred to by number."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.timeline.perfetto import wire

_MOST = 1 << 16
_MOST_BYTES = 8 << 20
"""Beyond these a name stands where it is used: what is remembered does not grow with the trace."""
_TOGETHER = 1000


class Strings:
    """One kind of interned strings."""

    def __init__(self, field: int, by_number: int, by_text: int) -> None:
        """`field`: of InternedData. The others are of who uses it: for a string's number, and for itself."""
        self._field = field
        self._by_number = by_number
        self._by_text = by_text
        self._known: dict[str, bytes] = {}
        self._bytes = 0

    def field(self, value: str) -> bytes:
        """What says this string in the message that uses it."""
        known = self._known.get(value)
        if known is not None:
            return known
        if len(self._known) >= _MOST or self._bytes >= _MOST_BYTES:
            return wire.text(self._by_text, value)
        self._bytes += len(value)
        number = wire.number(self._by_number, len(self._known) + 1)
        self._known[value] = number
        return number

    def interned(self) -> Iterator[bytes]:
        """What InternedData says of them, some at a time."""
        values = list(self._known)
        for at in range(0, len(values), _TOGETHER):
            yield b"".join(
                wire.block(self._field, wire.number(1, at + place + 1) + wire.text(2, value))
                for place, value in enumerate(values[at : at + _TOGETHER])
            )
