"""The claim on this process, which one capture, or one worker's session, holds at a time."""

from __future__ import annotations

from typing import Protocol

from stepscope.files.manifest.records import Ending

_held: dict[str, Claim] = {}
"""The claim that holds this process, under one key. `dict.setdefault` is atomic, so that no lock is needed
that an interrupted thread would keep."""
_KEY = "this process"


class Taker(Protocol):
    """The capture, or the worker's session, that holds a claim."""

    @property
    def state(self) -> str | None:
        """The state of a capture, or None for a worker's session."""
        ...

    def end_with_process(self, ending: Ending, deadline_s: float) -> None:
        """Close the capture or session because the process ends. `deadline_s` is for each worker and
        engine.
        """
        ...

    def disown(self) -> None:
        """Give the capture up in a forked child: its files and engines belong to the parent."""
        ...


class Claim:
    """One attempt of a capture, or of a worker's session, to claim the process."""

    def __init__(self, step: int, taker: Taker | None = None) -> None:
        """Args: taker: The capture or session, or None if it does not exist yet."""
        self.step = step
        self.taker = taker

    def take(self) -> Claim | None:
        """Claim the process. Return None on success, else the claim that already holds it."""
        holder = _held.setdefault(_KEY, self)
        return None if holder is self else holder

    def free(self) -> None:
        """Free the process if this claim holds it."""
        if _held.get(_KEY) is self:
            _held.pop(_KEY, None)  # a signal's handler, or another thread, may have freed it just now


def holder() -> Taker | None:
    """Return the capture that is opening, open or closing here, or the worker's session that records; else
    None.
    """
    claim = _held.get(_KEY)
    return None if claim is None else claim.taker


def forget() -> None:
    """Drop the claim in a forked child, because it belongs to the parent."""
    taker = holder()
    _held.clear()
    if taker is not None:
        taker.disown()
