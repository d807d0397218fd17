"""The `stepscope` command: its subcommands, and the handling of errors that end them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated

import typer

from stepscope.config import unknown_variables
from stepscope.errors import ConfigError, StepscopeError
from stepscope_report.cli import screen
from stepscope_report.cli.analyse import analyse
from stepscope_report.cli.command import CONTEXT, Command, CommandError, Exit, Group
from stepscope_report.cli.demo import demo
from stepscope_report.cli.diff import diff
from stepscope_report.cli.doctor import doctor
from stepscope_report.cli.export import export, publish
from stepscope_report.cli.ls import ls
from stepscope_report.cli.mcp import mcp
from stepscope_report.cli.merge import merge
from stepscope_report.cli.report import report
from stepscope_report.cli.run_program import run as run_command
from stepscope_report.cli.run_program import validate
from stepscope_report.cli.trigger import trigger
from stepscope_report.cli.watch import watch
from stepscope_report.cli.what_if import what_if
from stepscope_report.cli.why import why

app = typer.Typer(
    name="stepscope",
    cls=Group,
    help="See where every step of an RL post-training run goes.",
    epilog="Exit codes: 0 success; 1 an error; 2 the command line or the configuration is wrong; "
    "3 it worked, and something that should be there is missing, broken or left out.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(demo)
app.command("run", cls=Command, context_settings={"allow_interspersed_args": False})(run_command)
app.command(cls=Command)(report)
app.command(cls=Command)(merge)
app.command(cls=Command)(analyse)
app.command(cls=Command)(diff)
app.command("what-if", cls=Command)(what_if)
app.command(cls=Command)(ls)
app.add_typer(trigger, name="trigger")
app.command(cls=Command)(watch)
app.command(cls=Command)(why)
app.command(cls=Command)(validate)
app.command(cls=Command)(export)
app.command(cls=Command)(publish)
app.command(cls=Command)(mcp)
app.command(cls=Command)(doctor)

BROKEN_PIPE = 141
"""Exit code if the reader of the output ended first, as in `| head`. Shells report the same code for a
command that SIGPIPE ends."""
_RESOLVE = frozenset(("run", "validate"))
"""Commands that resolve the configuration. An unknown `STEPSCOPE_*` variable is an error to them."""
_with_traceback = False
"""True if an error ends the command with a traceback. Only `options` writes this flag."""


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.show(f"stepscope {version('stepscope')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    global _with_traceback
    _with_traceback = traceback or os.environ.get("STEPSCOPE_RAISE") == "1"
    if context.invoked_subcommand not in _RESOLVE:
        for line in unknown_variables(os.environ):
            screen.warn(f"warning: {line}")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. If the reader of the output ends first, as in `| head`, the
    command ends too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold characters that the encoding lacks
    began = time.monotonic()
    with screen.one_command():
        try:
            code = _run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more at exit, which would print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        screen.log.debug("exit code %d after %.2f s", code, time.monotonic() - began)
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
    """Print an error, and return the exit code for its kind."""
    if isinstance(error, CommandError):
        screen.warn(f"error: {error}")
        return error.code
    if isinstance(error, (StepscopeError, OSError)):
        screen.warn(f"error: {error}")
        return Exit.USAGE if isinstance(error, ConfigError) else Exit.ERROR
    screen.warn(
        f"error: {type(error).__name__}: {error}\nThis is a bug in stepscope. "
        "Run again with `--traceback` and report it."
    )
    return Exit.ERROR
