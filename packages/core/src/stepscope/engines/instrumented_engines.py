"""Engines of this process that `instrument` entries of the kind `engine` have found."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import NamedTuple


class Registered(NamedTuple):
    """An engine of this process."""

    adapter: str
    engine: object
    replica: int | None
    """The framework's number of it; None where no entry says one."""


class _Entry(NamedTuple):
    adapter: str
    engine: Callable[[], object | None]
    replica: int | None
    pid: int
    """Engines of a parent process are no engines of its forks."""


_entries: list[_Entry] = []
"""In the order of registration. One writer: `register`."""


def register(adapter: str, engine: object, replica: int | None) -> None:
    """Keep a weak reference to `engine` for captures of this process. A later call replaces an earlier one.

    Raises:
        TypeError: it cannot be referred to weakly.
    """
    entry = _Entry(adapter, weakref.ref(engine), replica, os.getpid())
    _entries[:] = [known for known in _entries if all(known.engine() is not gone for gone in (None, engine))]
    _entries.append(entry)


def registered(adapter: str | None = None) -> list[Registered]:
    """Return the living engines of one adapter, or of all, in the order of registration."""
    pairs = [(entry, entry.engine()) for entry in list(_entries) if entry.pid == os.getpid()]
    return [
        Registered(entry.adapter, engine, entry.replica)
        for entry, engine in pairs
        if engine is not None and adapter in (None, entry.adapter)
    ]


def replica_of(adapter: str, replica: int) -> object | None:
    """Return the only engine of an adapter, or of several the one with this number. None if none is."""
    engines = registered(adapter)
    if len(engines) > 1:
        engines = [engine for engine in engines if engine.replica == replica]
    return engines[0].engine if len(engines) == 1 else None
