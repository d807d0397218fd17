"""Stages that train a model, and those that generate."""

from __future__ import annotations

import re

from stepscope.report.stage_names import MOVES_WEIGHTS
from stepscope.timeline import Span

ROLLOUT = frozenset({"rollout", "agent_loop"})
_NO_TRAINERS = ROLLOUT | {"env", "reward"}
_TRAINS = re.compile(r"update|train|learn|backward|optimi[sz]", re.IGNORECASE)


def trains(span: Span) -> bool:
    """Return whether a span trains: forward, backward and optimizer, or a part of these."""
    if span.waits or span.role in _NO_TRAINERS or MOVES_WEIGHTS.search(span.stage):
        return False
    return _TRAINS.search(span.stage) is not None


def generates(span: Span) -> bool:
    """Return whether a span is part of the rollout and more than a wait."""
    return span.role in ROLLOUT and not span.waits and not MOVES_WEIGHTS.search(span.stage)
