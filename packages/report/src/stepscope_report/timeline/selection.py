"""Selection of a part of a step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import msgspec


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a step that a timeline shows: everything by default."""

    roles: tuple[str, ...] | None = None
    """Names or globs. Processes of these roles are shown completely, others only with their spans of these
    roles."""
    ranks: Collection[int | range] | None = None
    """Selected ranks, and ranges of ranks (`sys.maxsize` for an open end). Processes without a rank (a
    driver) are always shown."""
    from_ms: float | None = None
    """Milliseconds after the step's opening. Events that end before are left out."""
    to_ms: float | None = None
    """Events that begin later are left out."""
    requests: Literal["all"] | None = None
    """`all` for arrows from every turn to its passes, or None for those of the slowest trajectories."""
    max_mb: float | None = None
    """Largest size of the written file, in 10^6 bytes. Spans come first; traces share the rest equally."""

    def role(self, *roles: str) -> bool:
        """Return whether one of these roles is selected."""
        wanted = self.roles
        return wanted is None or any(fnmatchcase(role, glob) for role in roles for glob in wanted)

    def rank(self, rank: int | None) -> bool:
        return self.ranks is None or rank is None or any(map(partial(_holds, rank), self.ranks))

    def limits_ns(self, opened_ns: int) -> tuple[int | None, int | None]:
        """Return `from_ms` and `to_ms` in unix ns."""
        return _at(self.from_ms, opened_ns), _at(self.to_ms, opened_ns)

    def words(self) -> dict[str, object]:
        """Return the fields that narrow the selection, as JSON values; a range as text: `8-15`."""
        return {
            name: _plain(value) for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


def _holds(rank: int, ranks: int | range) -> bool:
    return rank in ranks if isinstance(ranks, range) else rank == ranks


def _at(since_ms: float | None, opened_ns: int) -> int | None:
    return None if since_ms is None else opened_ns + round(since_ms * 1_000_000)


def _plain(value: object) -> object:
    if isinstance(value, range):
        return _spelled(value)
    if isinstance(value, Collection) and not isinstance(value, str):
        items = sorted(value, key=_start) if isinstance(value, Set) else value
        return [_plain(item) for item in items]
    return value


def _start(ranks: int | range) -> int:
    return ranks.start if isinstance(ranks, range) else ranks


def _spelled(ranks: range) -> str:
    if ranks.step > 1:
        return f"{ranks.start}:{ranks.stop}:{ranks.step}"
    if ranks.stop == ranks.start + 1:
        return str(ranks.start)
    return f"{ranks.start}-{'' if ranks.stop == sys.maxsize else ranks.stop - 1}"
