"""Collectives as NCCL's example profiler writes them: pairs of asynchronous events, not slices.

Format: `ext-profiler/example/print_event.cc` of NCCL. An id is unique among the events of one category and
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

COLLECTIVES = frozenset({"COLL", "P2P"})
NEVER_ENDED = "collectives that never ended"
_Key: TypeAlias = tuple[int | str, str, int | str]


class Begin(msgspec.Struct, tag_field="ph", tag="b", gc=False):
    name: str = ""
    cat: str = ""
    id: int | str = 0
    pid: int | str = 0
    ts: float = 0.0


class End(msgspec.Struct, tag_field="ph", tag="e", gc=False):
    cat: str = ""
    id: int | str = 0
    pid: int | str = 0
    ts: float = 0.0


class AsyncCalls:
    """The collectives of one file that have begun and not ended."""

    def __init__(self) -> None:
        self._open: dict[_Key, tuple[str, float]] = {}

    def ended(self, event: Begin | End) -> Iterator[tuple[str, float, float]]:
        """Yield (name, start, duration) of the collective that ends with this event, if one does."""
        key = event.pid, event.cat, event.id
        if event.cat not in COLLECTIVES:
            return
        if isinstance(event, Begin):
            self._open[key] = event.name, event.ts
        elif key in self._open:
            name, start = self._open.pop(key)
            if event.ts >= start:
                yield name, start, event.ts - start

    @property
    def never_ended(self) -> int:
        return len(self._open)
