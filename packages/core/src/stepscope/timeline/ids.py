"""New pids, tids and ids for events of many files, so that nothing collides in one.

Pids count from 1, one for each row; tids from `FIRST_TID`, one for each thread, unique in the whole timeline;
both far below 2^32, which is as much as Perfetto takes. Flow and async ids keep their value inside the 2^33
numbers that each file has to itself: all stay below 2^53, exact in a double, for a million files.
"""

from __future__ import annotations

import msgspec

FIRST_TID = 1_000_000
"""Above every pid: Perfetto takes a thread whose tid is its pid for the main thread."""
_SLOT_BITS = 33
_DIRECT = 1 << 32


class FlowIds:
    """The flow, async and object ids of one file."""

    def __init__(self, file: int) -> None:
        """`file`: its number; 0 is for our own arrows."""
        self.first = file << _SLOT_BITS
        self._others: dict[tuple[bytes, object], int] = {}

    def number(self, found: bytes, scope: object = None) -> int:
        """The new id for one as it stands in JSON. Injective: different ids stay different."""
        if scope is None and found.isdigit() and int(found) < _DIRECT:
            return self.first + int(found)
        # Strings, and numbers that are too large to be moved.
        return self.first + _DIRECT + self._others.setdefault((found, scope), len(self._others))

    def renamed(self, found: msgspec.Raw, scope: object) -> msgspec.Raw:
        """As JSON of the same type: a number, or a string with a hexadecimal number.

        Args:
            scope: Whose the id is where it is local: the event's pid. Only `id2` says that.
        """
        text = bytes(found)
        if text.startswith(b"{"):  # `id2`: {"local": id} or {"global": id}
            ids = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            moved = {kind: hex(self.number(bytes(each), (kind, scope))) for kind, each in ids.items()}
            return msgspec.Raw(msgspec.json.encode(moved))
        number = self.number(text)
        return msgspec.Raw(b'"%#x"' % number if text.startswith(b'"') else b"%d" % number)
