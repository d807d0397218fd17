"""The active session of this process: the claim on the process, recording on and off, and the close at exit.

This module is the only writer of `slot.active`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from stepscope._recording.process import fork, shutdown
from stepscope._recording.session.session import Session
from stepscope._recording.spans import collective_calls, compiled, scopes, slot
from stepscope._recording.spans.carrier import keep_places
from stepscope._recording.spans.scopes import Scope
from stepscope._recording.spans.slot import FlightRecorder
from stepscope._recording.spans.span import Span
from stepscope.files.manifest import Ending

_held: dict[str, Claim] = {}
"""{"this process": the claim}, or empty. The atomic `dict.setdefault` replaces a lock, because an interrupted
thread might never release a lock."""
_KEY = "this process"


class Taker(Protocol):
    """The holder of a claim: a capture, or a worker's session."""

    @property
    def state(self) -> str | None:
        """The state of a capture, or None for a worker's session."""
        ...

    def end_with_process(self, ending: Ending, deadline_s: float) -> None:
        """Close the capture or session at the end of the process.

        Args:
            deadline_s: Time limit in s for each worker and engine.
        """
        ...

    def disown(self) -> None:
        """In a forked child, drop the capture, whose files and engines belong to the parent."""
        ...


class Claim:
    """A claim of a capture, or of a worker's session, on this process."""

    def __init__(self, step: int, taker: Taker | None = None) -> None:
        """
        Args:
            taker: The capture or session, or None if it does not exist yet.
        """
        self.step = step
        self.taker = taker

    def take(self) -> Claim | None:
        """Claim the process. Return None on success, else the claim that holds the process."""
        holder = _held.setdefault(_KEY, self)
        return None if holder is self else holder

    def free(self) -> None:
        """Free the process, if this claim holds it."""
        if _held.get(_KEY) is self:
            _held.pop(_KEY, None)  # a signal handler or another thread may have freed it


def holder() -> Taker | None:
    """Return the capture of this process that is opening, open or closing, or the worker's session; else
    None.
    """
    claim = _held.get(_KEY)
    return None if claim is None else claim.taker


def claimed_step() -> int | None:
    """Return the step that this process is capturing, or None."""
    claim = _held.get(_KEY)
    return None if claim is None else claim.step


def forget() -> None:
    """Drop the claim in a forked child, because it belongs to the parent."""
    taker = holder()
    _held.clear()
    if taker is not None:
        taker.disown()


activations = 0
"""Number of sessions that have recorded this process. One writer: `activate`."""


def activate(session: Session) -> None:
    """Switch recording on in this process. This is the last part of an opening."""
    global activations
    shutdown.install()
    keep_places()
    compiled.leave_to_python()
    collective_calls.watch(session.config.collectives)
    collective_calls.begin_issued()
    activations += 1
    session.switch_off = deactivate
    running = () if slot.recorder is None else slot.recorder.log.open_spans()
    if running:
        session.log.take(_beside(running))
    slot.active = session
    session.begin()
    if session.ended:  # ended meanwhile, for example by its watchdog
        deactivate(session)


def _beside(running: Sequence[Span]) -> Iterator[Span]:
    """Yield the running spans, without spans that enclose the opening of the capture."""
    around, scope = set[Scope](), scopes.current.get()
    while scope is not None:
        around.add(scope)
        scope = scope.parent
    for span in running:
        if span not in around:
            yield span


def deactivate(session: Session) -> None:
    """Switch recording off, if `session` is active."""
    if slot.active is session:
        collective_calls.sweep()
        collective_calls.record_issued(session.log, session.manifest_part.record.opened.mono_ns)
        slot.active = recorder = slot.recorder
        if recorder is not None and (running := session.log.open_spans()):
            recorder.log.take(running)


def keep(recorder: FlightRecorder | None) -> None:
    """Set the flight recorder that is active between captures, or None to disable it."""
    keep_places()
    compiled.leave_to_python()
    resting = slot.session() is None
    slot.recorder = recorder
    if resting:
        slot.active = recorder


def hand_to_worker(claim: Claim, session: Session) -> None:
    """Pass the claim to a worker's session, which frees the claim when its files are closed."""
    session.on_closed = claim.free
    claim.taker = session


def _end(ending: Ending, deadline_s: float) -> None:
    taker = holder()
    if taker is not None:
        taker.end_with_process(ending, deadline_s)


def _is_in_call() -> bool:
    return any(kept is not None and kept.log.open_spans() for kept in (slot.active, slot.recorder))


def _forget() -> None:
    """In a forked child, forget the parent's session, flight recorder and capture."""
    slot.active = slot.recorder = None
    forget()


def _in_parent() -> None:
    session = slot.active
    if isinstance(session, Session):
        session.forks += 1


shutdown.on_exit("the capture", _end, order=0)
shutdown.is_in_call = _is_in_call
fork.forgets("capture", _forget)
os.register_at_fork(after_in_parent=_in_parent)
