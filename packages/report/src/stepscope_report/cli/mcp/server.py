"""`stepscope mcp`: a server of the Model Context Protocol on stdin and stdout, for coding agents."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.errors import StepscopeError
from stepscope_report.cli.exits import CommandError, Exit
from stepscope_report.cli.mcp.tools import Tools

_INSTRUCTIONS = (
    "stepscope shows where captured steps of RL post-training runs went. Call list_runs, then brief; then "
    "explain_stage, slowest_trajectories, query_spans, diff and what_if for details."
)


def mcp(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with the runs; nothing outside is read.")
    ] = Path(),
) -> None:
    """Serve the runs of a folder to a coding agent, as tools of the Model Context Protocol over stdio."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder: give the one that holds the runs")
    server_of, tool_error, annotations_of = _package()
    tools = Tools(folder)
    server = server_of("stepscope", instructions=_INSTRUCTIONS)
    for tool in tools.readers():
        server.tool(annotations=annotations_of(readOnlyHint=True))(_told(tool, tool_error))
    server.tool(annotations=annotations_of(readOnlyHint=False))(_told(tools.trigger, tool_error))
    server.run()


def _package() -> tuple[Any, type[Exception], Any]:
    """Return the server, the error that clients are shown, and the annotations of a tool.

    mcp 2 renamed the server of mcp 1.
    """
    try:
        from mcp.types import ToolAnnotations

        try:
            from mcp.server.mcpserver import MCPServer
            from mcp.server.mcpserver.exceptions import ToolError
        except ModuleNotFoundError:
            from mcp.server.fastmcp import FastMCP as MCPServer
            from mcp.server.fastmcp.exceptions import ToolError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"stepscope mcp needs {error.name}, which is not installed. "
            "Fix: pip install 'stepscope[cli,mcp]'",
            Exit.USAGE,
        ) from error
    return MCPServer, ToolError, ToolAnnotations


def _told(tool: Callable[..., str], error_of: type[Exception]) -> Callable[..., str]:
    """Return the tool with errors that the client is shown: mcp 2 hides the text of all others."""

    @wraps(tool)
    def told(*args: Any, **kwargs: Any) -> str:
        try:
            return tool(*args, **kwargs)
        except (StepscopeError, CommandError, OSError) as error:
            raise error_of(str(error)) from error

    return told
