"""A tool for verl's tool agent loop, and a parser that finds a call of it in every response.

verl reads this file by its path. A random model writes no call of a tool, so the parser reads none.
"""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool  # type: ignore[untyped-decorator]
def add(one: int, other: int) -> str:
    """Add two numbers.

    Args:
        one: The first number.
        other: The second number.
    """
    return str(one + other)


@ToolParser.register("always")
class CallInEveryResponse(ToolParser):  # type: ignore[misc]  # verl has no types
    """Parser that takes each response for a call of `add`."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
        """Return the response as text, and the call."""
        call = FunctionCall(name="add", arguments=json.dumps({"one": len(responses_ids), "other": 1}))
        return self.tokenizer.decode(responses_ids), [call]
