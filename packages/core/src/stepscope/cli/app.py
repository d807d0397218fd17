"""The `stepscope` command: its subcommands, and how every one of them ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.analyse import analyse
from stepscope.cli.demo import demo
from stepscope.cli.diff import diff
from stepscope.cli.doctor import doctor
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.ls import ls
from stepscope.cli.mcp.server import mcp
from stepscope.cli.merge import merge
from stepscope.cli.mirror import mirror
from stepscope.cli.publish import publish
from stepscope.cli.report import report
from stepscope.cli.run_program import run as run_command
from stepscope.cli.running.trigger import trigger
from stepscope.cli.running.watch import watch
from stepscope.cli.running.why import why
from stepscope.cli.validate import validate
from stepscope.errors import ConfigError, StepscopeError

app = typer.Typer(
    name="stepscope",
    help="See where every step of an RL post-training run goes.",
    epilog="Exit codes: 0 success; 1 an error; 2 the command line or the configuration is wrong; "
    "3 it worked, and something that should be there is missing, broken or left out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)
app.command()(report)
app.command()(merge)
app.command()(analyse)
app.command()(diff)
app.command()(ls)
app.command()(trigger)
app.command()(watch)
app.command()(why)
app.command()(validate)
app.command()(publish)
app.command()(mirror)
app.command()(mcp)
app.command()(doctor)

_with_traceback = False
"""True if errors end the command with a traceback. One writer: `options`."""


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.show(f"stepscope {version('stepscope')}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    global _with_traceback
    _with_traceback = traceback or os.environ.get("STEPSCOPE_RAISE") == "1"


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Output that nobody reads (`| head`) ends it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the encoding lacks
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.ERROR
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        app(args=list(arguments), prog_name="stepscope")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else Exit.OK
    except BrokenPipeError:
        raise
    except Exception as error:
        if _with_traceback:
            raise
        return _explain(error)
    return Exit.OK


def _explain(error: Exception) -> int:
    """Print what is wrong and return the exit code for it."""
    if isinstance(error, CommandError):
        screen.say(f"error: {error}")
        return error.code
    if isinstance(error, (StepscopeError, OSError)):
        screen.say(f"error: {error}")
        return Exit.USAGE if isinstance(error, ConfigError) else Exit.ERROR
    screen.say(
        f"error: {type(error).__name__}: {error}\nThis is a bug in stepscope. "
        "Run again with `--traceback` and report it."
    )
    return Exit.ERROR
