"""Stages that train a model, and those that generate."""

from __future__ import annotations

import re
from functools import lru_cache

from stepscope.report.stage_names import MOVES_WEIGHTS
from stepscope.timeline import Span

ROLLOUT = frozenset({"rollout", "agent_loop"})
_NO_TRAINERS = ROLLOUT | {"env", "reward"}
_NAMES = 4096
"""Names of stages whose meaning is kept: a step has many spans of few stages."""
_TRAINS = re.compile(r"update|train|learn|backward|optimi[sz]", re.IGNORECASE)


def trains(span: Span) -> bool:
    """Return whether a span trains: forward, backward and optimizer, or a part of these."""
    return not span.waits and span.role not in _NO_TRAINERS and _is_training(span.stage)


def generates(span: Span) -> bool:
    """Return whether a span is part of the rollout and more than a wait."""
    return span.role in ROLLOUT and not span.waits and not _moves_weights(span.stage)


@lru_cache(_NAMES)
def _is_training(stage: str) -> bool:
    return not _moves_weights(stage) and _TRAINS.search(stage) is not None


@lru_cache(_NAMES)
def _moves_weights(stage: str) -> bool:
    return MOVES_WEIGHTS.search(stage) is not None
