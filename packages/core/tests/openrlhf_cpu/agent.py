"""An agent of three turns, with a tool after each. OpenRLHF reads this file by its path.

It notes each call of the tool in the file of the variable `TOOL_CALLS`, by its own clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 3
LOG = Path(os.environ["TOOL_CALLS"])


class Sums(AgentInstanceBase):  # type: ignore[misc]  # OpenRLHF has no types
    """The environment of one response."""

    def __init__(self) -> None:
        self.turn = 0

    def note(self, begun_ns: int) -> None:
        """Write a call of the tool down, which has ended."""
        with LOG.open("a") as file:
            file.write(json.dumps({"begun_ns": begun_ns, "ended_ns": time.time_ns()}) + "\n")

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        """Answer one turn, with a search that takes a fifth of a second."""
        self.turn += 1
        begun_ns = time.time_ns()
        await asyncio.sleep(0.2)
        self.note(begun_ns)
        reward = torch.tensor(float(states["action_text"].count("1")))
        answer = {"environment_feedback": "7", "done": self.turn == TURNS, "extra_logs": {}}
        return {"rewards": reward, "scores": reward.clamp(max=1.0), **answer}


class AgentExecutor(MultiTurnAgentExecutor):  # type: ignore[misc]  # as above
    """The class that OpenRLHF looks for in the file."""

    def __init__(self) -> None:
        super().__init__(Sums)
