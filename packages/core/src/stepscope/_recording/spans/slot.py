"""Process-wide slot that holds the recorder of this process: a capture's session, or the flight recorder
between captures.

Profilers are process-wide, so the slot is too. `_recording.session.activation` is its only writer. All others
read it through the module (`slot.active`) and never import the name: cloudpickle copies a global by value,
and a copy would never switch on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stepscope._recording.spans.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope._recording.spans.span import Span
    from stepscope.files.values import AttrValue


class SpanFactory(Protocol):
    """A span log, as code that opens spans needs it. Wrappers also call its `begin`."""

    def new(
        self,
        stage: str,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
    ) -> Scope:
        """Return a span to enter once. The last four parameters set the span's place."""
        ...

    def open_spans(self) -> Sequence[Span]:
        """Return the spans that have not ended, the oldest first."""
        ...

    def take(self, running: Iterable[Span]) -> None:
        """Also record these spans of another log, which are running."""
        ...


class ActiveSession(Protocol):
    """A session or the flight recorder, as the recorded code needs it."""

    calls_attrs: bool
    """True if the `attrs` functions of `profile_step` are called, which is during captures."""

    @property
    def log(self) -> SpanFactory: ...

    @property
    def step(self) -> int | None: ...

    def consume(self, trajectory: str, begun: int | None, policy_version: int | None) -> None:
        """Record that this step consumes a trajectory."""
        ...

    def count_tokens(self, counts: Mapping[str, int]) -> None:
        """Record tokens of this step: {`rollout` or `train`: number}."""
        ...

    def advance(self) -> None:
        """Move the profiler's schedule forward by one mini-batch."""
        ...


class FlightRecorder(ActiveSession, Protocol):
    """The flight recorder, as seen by code that requests its steps."""

    def write_last(self, number: int) -> list[int]:
        """Write the last steps that have ended, and return those that were not written before."""
        ...

    def note_tokens(self, counts: Mapping[str, int]) -> None:
        """Add tokens to the line of the step that runs, while a capture records that step."""
        ...


class Visit(Protocol):
    """The work that code of this process does for a step that another process captures."""

    def left(self) -> None:
        """Write the spans soon. Called when code leaves an attached carrier of the step."""
        ...


class Visitor(Protocol):
    """Finds the step that work under an attached carrier is for."""

    def __call__(self, caller: str, run_id: str, step: int) -> Visit | None:
        """Return the visit of a process that no capture records, or None if the step is not captured.

        Args:
            caller: `ProcessInfo.key` of the process that made the carrier.
            run_id: Run of that process.
            step: Step of the span that the carrier names.
        """
        ...


active: ActiveSession | None = None
"""The session or flight recorder that records now, or None."""
recorder: FlightRecorder | None = None
"""The flight recorder, which is active while no session is, or None if it is off."""
visit: Visitor | None = None
"""Called when a carrier is attached in a process without a capture. None before `configure`, its only
writer."""


def session() -> ActiveSession | None:
    """Return the session of the capture that records this process, or None without a capture."""
    return None if active is recorder else active
