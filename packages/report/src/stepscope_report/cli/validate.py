"""`stepscope validate`: what a configuration means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from stepscope.config import (
    RESERVED_VARIABLES,
    check_finish,
    check_program,
    check_recorder,
    check_tool,
    resolve,
)
from stepscope_report.cli import screen
from stepscope_report.terminal.layout import listing


class Validated(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `stepscope validate --json`."""

    format: int = 1
    config: dict[str, object]
    """The configuration as resolved: defaults, then the file, then the environment."""
    environment: list[str]
    """Variables that the environment set over the file."""
    steps: list[int]
    """The selected ones below `below`."""
    below: int


def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML or JSON file.")],
    program: Annotated[
        list[str] | None, typer.Argument(metavar="[PROGRAM]", help="As for `stepscope run`: train.py.")
    ] = None,
    below: Annotated[int, typer.Option(help="List the selected steps below this one.", min=1)] = 100,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show the configuration as a run here would resolve it and the steps it selects, or its errors."""
    resolved = resolve(config)
    check_tool(resolved)
    check_recorder(resolved)
    check_finish(resolved)
    check_program(resolved, program or ())
    validated = Validated(
        config=resolved.to_mapping(),
        environment=sorted(
            n for n in os.environ if n.startswith("STEPSCOPE_") and n not in RESERVED_VARIABLES
        ),
        steps=[step for step in range(below) if resolved.selects(step)],
        below=below,
    )
    if json:
        screen.show_json(validated)
    else:
        _show(validated)


def _show(validated: Validated) -> None:
    import yaml

    screen.show(Text(yaml.safe_dump(validated.config, sort_keys=False).rstrip()))
    if validated.environment:
        screen.show(listing("Set by the environment, over the file", validated.environment))
    steps, below = ", ".join(map(str, validated.steps)), validated.below
    line = f"{steps} (of those below {below})" if steps else f"none below {below}"
    screen.show(listing("Selected steps", [line]))
    if not validated.config["steps"]:
        screen.say("`steps` selects nothing: a run with this configuration records nothing.")
