"""New pids, tids and ids for events of many files, so that nothing collides in one.

A row keeps the pid of its process unless another row has it. A thread keeps its tid unless another thread of
the row has it. So most events need no change. Others get free numbers, far below 2^32, which is as much as
Perfetto takes. Flow and async ids get digits of their file in front. The merge moves them by replacing what
stands before. All stay below 10^15, exact in a double.
"""

from __future__ import annotations

import msgspec

FIRST_TID = 10_000_000
"""Above all pids of Linux (2^22): Perfetto takes a thread whose tid is its pid for the main thread."""
_DIGITS = 15
"""The number of digits of the largest ids, which are those of `FlowIds._others`."""


class FlowIds:
    """The flow, async and object ids of one file."""

    def __init__(self, file: int, files: int) -> None:
        """`file`: number of the file, up to `files`. 0 is for stepscope's own arrows."""
        lowest = 10 ** len(str(files))  # so that all prefixes have as many digits, the first of them a 1
        self.prefix = b"%d" % (lowest + file)
        """Prefix of an id that is less than `below`."""
        self._free = _DIGITS - len(self.prefix)
        self.below = 10 ** (self._free - 1)
        self._others: dict[tuple[bytes, object], int] = {}

    def number(self, written: bytes, scope: object = None) -> int:
        """Return the new id for one as written in JSON. Different ids stay different."""
        if scope is None and written.isdigit() and int(written) < self.below:
            return int(b"%b%d" % (self.prefix, int(written)))
        # Strings, and numbers that are too large: behind the prefix one digit more than all others have.
        other = self._others.setdefault((written, scope), len(self._others))
        return int(b"%b%0*d" % (self.prefix, self._free, other))

    def renamed(self, written: msgspec.Raw, scope: object) -> msgspec.Raw:
        """Return the new id as JSON of the same type: a number, or a string with a hexadecimal number.

        Args:
            scope: Pid of the event, which owns a local id. Only `id2` has local ids.
        """
        text = bytes(written)
        if text.startswith(b"{"):  # `id2`: {"local": id} or {"global": id}
            ids = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            moved = {
                kind: hex(self.number(bytes(written_id), (kind, scope))) for kind, written_id in ids.items()
            }
            return msgspec.Raw(msgspec.json.encode(moved))
        number = self.number(text)
        return msgspec.Raw(b'"%#x"' % number if text.startswith(b'"') else b"%d" % number)
