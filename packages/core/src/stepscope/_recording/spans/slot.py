"""Process-wide variables for the object that records spans: the session of the open capture, or between
captures the flight recorder.

`_recording.session.activation` is the only writer of `active` and `recorder`. Read them through the module
(`slot.active`), and do not import the names, because cloudpickle copies globals by value, and a copy would
never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stepscope._recording.spans.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope._recording.spans.span import Span
    from stepscope.files.sidecar import ProcessInfo
    from stepscope.files.values import AttrValue


class SpanFactory(Protocol):
    """The part of a span log that is used to open spans. Wrappers also call the log's `begin`."""

    process: ProcessInfo
    run_id: str

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
        """Return a new span, which can be entered once. The last four parameters set its place."""
        ...

    def open_spans(self) -> Sequence[Span]:
        """Return the open spans, the oldest first."""
        ...

    def take(self, running: Iterable[Span]) -> None:
        """Also record `running`, spans of another log."""
        ...


class ActiveSession(Protocol):
    """A session or the flight recorder, with the methods that the recorded code needs."""

    calls_attrs: bool
    """True if `attrs` functions of `profile_step` are called: in a session, and not in the flight
    recorder."""

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
        """Advance the profiler's schedule by one mini-batch."""
        ...


class FlightRecorder(ActiveSession, Protocol):
    """The flight recorder, with the methods for code that requests its steps."""

    def write_last(self, number: int) -> list[int]:
        """Write the last `number` ended steps, and return the numbers of the steps that were not written
        before.
        """
        ...

    def note_tokens(self, counts: Mapping[str, int]) -> None:
        """Add tokens to the line of the running step while a capture records the step."""
        ...


class Visit(Protocol):
    """Spans of this process for a step that another process captures."""

    def left(self) -> None:
        """Queue a write of the spans. Called when code leaves an attached carrier of the step."""
        ...


class Visitor(Protocol):
    """A function that is called when a carrier is attached in a process without a capture."""

    def __call__(self, caller: str, run_id: str, step: int) -> Visit | None:
        """Return the visit for the carrier's step. None if the caller does not capture this step, or if this
        process takes part in the capture.

        Args:
            caller: `ProcessInfo.key` of the process that made the carrier.
            run_id: Run id of that process.
            step: Step of the carrier's span.
        """
        ...


active: ActiveSession | None = None
"""The session or flight recorder that is recording, or None."""
recorder: FlightRecorder | None = None
"""The flight recorder, which is active if no session is; None if it is off."""
visit: Visitor | None = None
"""Called when a carrier is attached in a process without a capture; None before `configure`. One writer:
`configure`."""


def session() -> ActiveSession | None:
    """Return the session of the open capture, or None without a capture."""
    return None if active is recorder else active
