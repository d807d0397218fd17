"""An environment of several turns, with a tool after each but the last."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool


class Sums(ToolGroup):  # type: ignore[misc]  # skyrl_gym is not checked
    """A tool that notes each call by its own clock."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("Sums")

    @tool  # type: ignore[untyped-decorator]
    def search(self, text: str) -> str:
        """Wait, and answer."""
        begun_ns = time.time_ns()
        time.sleep(float(os.environ["TOOL_SLOW_S"]) / (1 if self.number % 7 == 0 else 20))
        call = {"number": self.number, "begun_ns": begun_ns, "ended_ns": time.time_ns()}
        with open(os.environ["TOOL_CALLS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(call) + "\n")
        return "7"


class SumsEnv(BaseTextEnv):  # type: ignore[misc]
    """A sum, for whose answer every digit 1 is rewarded."""

    def __init__(self, env_config: object, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]
        self.tools = Sums(int(extras["reward_spec"]["ground_truth"]) // 8)
        self.init_tool_groups([self.tools])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer with the tool's result; end after the last turn."""
        self.turns += 1
        reward = float(action.count("1"))
        if self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        found = self._execute_tool("Sums", "search", [action])
        said = [{"role": "user", "content": found}]
        return BaseTextEnvStepOutput(observations=said, reward=0.0, done=False, metadata={})
