"""Names of stages that mean something to the report."""

from __future__ import annotations

import re

_MOVES = "sync|load|update|broadcast|transfer|push|pull|send|recv|receiv|export|publish|fetch"
MOVES_WEIGHTS = re.compile(
    rf"(weight|param).*({_MOVES})|({_MOVES}).*(weight|param)|reshard",
    re.IGNORECASE,
)
TRANSFER = "sync_weights (between its ends)"
"""The stage of what passes, without a span, from the trainer's end of a weight sync to the engine's."""


def is_transfer(before: tuple[str, str] | None, after: tuple[str, str] | None) -> bool:
    """Return whether weights are on their way from (role, stage) `before` to `after` while nothing runs in
    between.

    Weights go from the trainer to the rollout. The other way round lies a step's training.
    """
    if before is None or after is None or before[0] == "rollout" or after[0] != "rollout":
        return False
    return all(MOVES_WEIGHTS.search(stage) for _, stage in (before, after))


def is_tool(role: str, stage: str) -> bool:
    """Return whether a stage is a tool or an environment that a trajectory calls."""
    return role == "env" or stage.lower().startswith("tool")
