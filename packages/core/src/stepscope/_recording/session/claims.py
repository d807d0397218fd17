"""The claim on this process: one capture, or one worker's session, at a time."""

from __future__ import annotations

from typing import Protocol

from stepscope.files.manifest.records import Ending

_held: dict[str, Claim] = {}
"""Under one key. `dict.setdefault` is atomic, and no lock that an interrupted thread would leave taken."""
_KEY = "this process"


class Taker(Protocol):
    """The capture, or the worker's session, that a claim is for."""

    @property
    def state(self) -> str | None:
        """The state of a capture; None for a worker's session."""
        ...

    def end_with_process(self, ending: Ending, deadline_s: float) -> None:
        """Close it because the process ends. The deadline is for each worker and engine."""
        ...

    def disown(self) -> None:
        """Leave it to the parent, in the child of a fork: its files and engines are the parent's."""
        ...


class Claim:
    """One attempt of a capture, or of a worker's session, to take the process."""

    def __init__(self, step: int, taker: Taker | None = None) -> None:
        """Args: taker: None until there is one."""
        self.step = step
        self.taker = taker

    def take(self) -> Claim | None:
        """Take the process. Return the claim that holds it already, or None when this one does now."""
        holder = _held.setdefault(_KEY, self)
        return None if holder is self else holder

    def free(self) -> None:
        """Give the process back, if this claim holds it."""
        if _held.get(_KEY) is self:
            _held.pop(_KEY, None)  # a signal's handler, or another thread, may have freed it just now


def holder() -> Taker | None:
    """Return the capture that is opening, open or closing here, or the worker's session that records."""
    claim = _held.get(_KEY)
    return None if claim is None else claim.taker


def forget() -> None:
    """Drop the claim in a forked child: the claim is its parent's."""
    taker = holder()
    _held.clear()
    if taker is not None:
        taker.disown()
