"""A client of the official package starts `stepscope mcp` and calls its tools."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from packages.report.tests.simulated import Rollout

TOOLS = {
    "list_runs", "brief", "explain_stage", "slowest_trajectories", "query_spans", "diff", "what_if",
    "trigger",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    slow = Rollout(slots=2, tool_ms=lambda number, turn: 1500 if (number, turn) == (2, 1) else 30)
    slow.report(tmp_path / "slow")
    return tmp_path


def ask(root: Path, questions: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Start the server and let the questions speak to it."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "stepscope", "mcp", str(root)], env=dict(os.environ)
    )

    async def talk() -> None:
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
            await questions(session)

    asyncio.run(asyncio.wait_for(talk(), 60))


async def text_of(session: ClientSession, tool: str, **arguments: Any) -> str:
    result = await session.call_tool(tool, arguments)
    (content,) = result.content
    assert content.type == "text"
    text: str = content.text
    return text


def test_the_tools_are_described_and_only_one_writes(root: Path) -> None:
    async def questions(session: ClientSession) -> None:
        tools = {tool.name: tool.model_dump(by_alias=True) for tool in (await session.list_tools()).tools}
        assert tools.keys() == TOOLS
        assert {name for name in tools if not tools[name]["annotations"]["readOnlyHint"]} == {"trigger"}
        assert all(tool["description"] for tool in tools.values())
        assert tools["explain_stage"]["inputSchema"]["required"] == ["path", "stage"]

    ask(root, questions)


def test_an_agent_finds_the_cause(root: Path) -> None:
    async def questions(session: ClientSession) -> None:
        (run,) = json.loads(await text_of(session, "list_runs"))
        assert "env tool" in await text_of(session, "brief", path=run)
        slowest = json.loads(await text_of(session, "slowest_trajectories", path=run))["slowest"][0]
        assert (slowest["trajectory"], slowest["waits"][0]["stage"]) == ("t2", "tool")
        spans = json.loads(await text_of(session, "query_spans", path=run, trajectory="t2", stage="tool"))
        assert spans["spans"][0]["dur_ns"] == 1_500_000_000

    ask(root, questions)


def test_an_error_reaches_the_agent(root: Path) -> None:
    async def questions(session: ClientSession) -> None:
        assert "it has: " in await text_of(session, "explain_stage", path="slow", stage="tol")
        assert "is not below" in await text_of(session, "brief", path="/etc")
        assert "nobody listens" in await text_of(session, "trigger", run="slow")

    ask(root, questions)
