"""Reward of responses. AReaL calls it in processes of its own."""

from __future__ import annotations

import time

TURNS = 2
SECONDS = 0.02


def ones(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: object
) -> float:
    """Return 1.0 for a response that has the digit 1, which ends the turns."""
    time.sleep(SECONDS)
    return float("1" in completions)
