"""Times and ids of foreign events in the merged timeline.

A time is mapped exactly. A row keeps the pid of its process unless another row has it, and a thread keeps its
tid unless another thread of the row has it, so most events need no change. Other pids and tids get free
numbers far below 2^32, which is as much as Perfetto takes. Flow and async ids get digits of their file in
front; all stay below 10^15, exact in a double.
"""

from __future__ import annotations

import re
from decimal import ROUND_FLOOR, Context, Decimal
from typing import NamedTuple

import msgspec

from stepscope_report.timeline.step.rows import Axis, Row, offset_at, steady

_NUMBER = re.compile(r'"?(-?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?)"?')
_EXACT = Context(prec=200)


class Cut(NamedTuple):
    """The selected time, in ns since the axis' base, or None for no limit."""

    start: int | None
    end: int | None

    def holds(self, first: int, last: int) -> bool:
        """Return whether a part of the time from `first` to `last` is selected."""
        return (self.end is None or first <= self.end) and (self.start is None or last >= self.start)


class Place:
    """Time mapping of one file. Positions are ns since the axis' base; a `ts` is decimal text in us."""

    def __init__(self, row: Row, base_ns: int | None, axis: Axis) -> None:
        self._row = row
        self._clock = row.clock
        self._axis = axis
        self._base_ns = base_ns or 0

    @property
    def shift_ns(self) -> int | None:
        """Number that is added to `ts` * 1000, or None if it differs between events, or is not known yet."""
        if self._row.shift_ns is None or not (self._clock is None or steady(self._clock)):
            return None
        return self._shift_at(0)

    def positions(self, times_ns: list[int]) -> list[int]:
        """Return the positions of times in ns since the file's base, for an aligned row."""
        shift_ns = self.shift_ns
        if shift_ns is not None:
            return [ns + shift_ns for ns in times_ns]
        return [ns + self._shift_at(ns) for ns in times_ns]

    def at(self, ts_ns: int) -> int | None:
        """Return the position of a time in ns since the file's base, or None if it is no time of this
        step."""
        if self._row.shift_ns is None:
            self._row.shift_ns = self._axis.shift_of(ts_ns + self._base_ns - self._axis.base_ns)
        position = ts_ns + self._shift_at(ts_ns)
        first, last = self.believed
        return position if first <= position and (last is None or position <= last) else None

    def of(self, ts: str) -> tuple[int, str] | None:
        """Return (position, decimals below a ns), or None if `ts` is no time of this step."""
        number = _NUMBER.fullmatch(ts)
        if number is None:
            return None
        exact = _EXACT.multiply(Decimal(number[1]), Decimal(1000))
        whole = int(exact.to_integral_value(ROUND_FLOOR, _EXACT))
        position = self.at(whole)
        if position is None:
            return None
        below = _EXACT.subtract(exact, Decimal(whole))
        return position, "" if not below else format(below, "f").partition(".")[2]

    @property
    def believed(self) -> tuple[int, int | None]:
        """Return the first and the last position of this step; the last is None if any later position is
        plausible.
        """
        return (0, None) if self._row.unaligned is not None else (self._axis.first, self._axis.last)

    def _shift_at(self, ts_ns: int) -> int:
        offset_ns = 0 if self._clock is None else offset_at(self._clock, ts_ns + self._base_ns)
        return self._base_ns - self._axis.base_ns - offset_ns + (self._row.shift_ns or 0)


FIRST_TID = 10_000_000
"""Above all pids of Linux (2^22): Perfetto takes a thread whose tid is its pid for the main thread."""
_DIGITS = 15
"""Number of digits of the largest ids, which are those of `FlowIds._others`."""


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
