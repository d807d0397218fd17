"""Spans that a user opens: `span`, `trajectory` and `turn`."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope._recording.spans import slot
from stepscope._recording.spans.scopes import OFF, Scope, UncapturedTrajectory, UncapturedTurn
from stepscope.files.values import AttrValue, attr_values, whole


def trajectory(
    trajectory_id: str,
    /,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """Time one agent rollout: a span of stage `trajectory`. All spans inside carry its id.

    Use it with `with` or `async with`. Without a capture only the id is kept, so that a capture that opens
    meanwhile still names the spans it records.

    Args:
        trajectory_id: Unique within the run.
        step: The step that consumes the trajectory, if it is not the captured step (async RL).
        policy_version: Version of the weights with which the trajectory begins.
        attrs: Further attributes of the span.
    """
    session = slot.active
    if session is None:
        scope = UncapturedTrajectory()
        scope.step = None if step is None else whole(step)
        scope.policy_version = None if policy_version is None else whole(policy_version)
        scope.trajectory = str(trajectory_id)
        scope.entered, scope.turns = False, None
        return scope
    return session.log.new(
        "trajectory",
        "agent_loop",
        attr_values(attrs) if attrs else None,
        step=None if step is None else whole(step),
        policy_version=None if policy_version is None else whole(policy_version),
        trajectory=str(trajectory_id),
    )


def turn(index: int, *, attrs: Mapping[str, AttrValue] | None = None) -> Scope:
    """Time one model or tool call round inside a trajectory: a span of stage `turn`.

    Use it with `with` or `async with`.
    """
    session = slot.active
    if session is None:
        scope = UncapturedTurn()
        scope.turn = index if type(index) is int else whole(index)
        scope.policy_version, scope.entered = None, False
        return scope
    return session.log.new(
        "turn",
        "agent_loop",
        attr_values(attrs) if attrs else None,
        turn=index if type(index) is int else whole(index),
    )


def span(
    stage: str,
    role: str | None = None,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """Time a stretch of code while a capture is on.

    Use it with `with` or `async with`; `.set(key=value)` adds attributes.

    Args:
        stage: The work that is timed.
        role: Role that does the work; by default the enclosing span's role, or the process'.
        step: The step that owns the work, if it is not the captured step.
        policy_version: Version of the weights in use.
        attrs: Attributes: str, int, float, bool or None values. Other values are stored as text.
    """
    session = slot.active
    if session is None:
        return OFF
    return session.log.new(
        stage,
        role,
        attr_values(attrs) if attrs else None,
        step=None if step is None else whole(step),
        policy_version=None if policy_version is None else whole(policy_version),
    )
