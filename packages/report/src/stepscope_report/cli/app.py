"""The `stepscope` command: its subcommands, and the handling of errors that end them."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from stepscope.config import unknown_variables
from stepscope.errors import ConfigError, StepscopeError
from stepscope_report.cli import screen
from stepscope_report.cli.asking import Question
from stepscope_report.cli.command import CONTEXT, Command, CommandError, Exit, Group

_COMMANDS = {
    "demo": "demo:demo",
    "run": "run_program:run",
    "report": "report:report",
    "merge": "merge:merge",
    "analyse": "analyse:analyse",
    "diff": "diff:diff",
    "what-if": "what_if:what_if",
    "ls": "ls:ls",
    "trigger": "trigger:trigger",
    "watch": "watch:watch",
    "why": "why:why",
    "validate": "run_program:validate",
    "export": "export:export",
    "publish": "export:publish",
    "mcp": "mcp:mcp",
    "doctor": "doctor:doctor",
}
"""{command: `module:function`, or `module:group`, in this package}."""
_ENDS_AT_THE_PROGRAM = {"allow_interspersed_args": False}
"""Settings of `run`: all words after the program's name are the program's."""


class _Commands(Mapping[str, Any]):
    """The commands by name. A module is imported when its command is asked for, because the modules of all
    commands take half a second of CPU.
    """

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = _COMMANDS[name].partition(":")
        found = getattr(import_module(f"stepscope_report.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            group = typer.main.get_command(found)
            group.name = name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = _ENDS_AT_THE_PROGRAM if name == "run" else None
        alone.command(name, cls=Command, context_settings=settings)(found)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _AllCommands(Group):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()


app = typer.Typer(
    name="stepscope",
    cls=_AllCommands,
    help="See where every step of an RL post-training run goes.",
    epilog="Exit codes: 0 success; 1 an error; 2 the command line or the configuration is wrong; "
    "3 it worked, and something that should be there is missing, broken or left out.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
)

BROKEN_PIPE = 141
"""Exit code if the reader of the output ended first, as in `| head`. Shells report the same code for a
command that SIGPIPE ends."""
_RESOLVE = frozenset(("run", "validate"))
"""Commands that resolve the configuration. They treat an unknown `STEPSCOPE_*` variable as an error."""
_with_traceback = False
"""True if an error ends the command with a traceback. Only `options` writes this flag."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # here: it imports email

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


def run(arguments: Sequence[str], question: Question | None = None) -> int:
    """Run the command and return its exit code. If the reader of the output ends first, as in `| head`, the
    command ends too.

    Args:
        question: The question of `why` if the processes of the run were asked already, else None.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Names may contain characters that stdout's encoding lacks.
            stream.reconfigure(errors="stepscope")
    began = time.monotonic()
    with screen.one_command():
        try:
            code = _run(arguments, question)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more at exit, which would print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        screen.log.debug("exit code %d after %.2f s", code, time.monotonic() - began)
    return code


def _run(arguments: Sequence[str], question: Question | None) -> int:
    try:
        app(args=list(arguments), prog_name="stepscope", obj=question)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else Exit.OK
    except BrokenPipeError:
        raise
    except Exception as error:
        if _with_traceback:
            raise
        return _explain(error)
    return Exit.OK


_FIXES = {
    errno.EACCES: "run this as a user who may use it, or change its permissions",
    errno.EPERM: "run this as a user who may use it, or change its permissions",
    errno.EROFS: "name a folder that can be written, or give no option that writes",
    errno.ENOSPC: "make room on the disk",
    errno.EISDIR: "name a file in this folder",
}
"""{errno of an `OSError`: what to do}."""


def _explain(error: Exception) -> int:
    """Print an error, and return the exit code for its kind."""
    if isinstance(error, CommandError):
        screen.warn(f"error: {error}")
        return error.code
    if isinstance(error, OSError) and error.filename is not None:
        fix = _FIXES.get(error.errno or 0, "name another file or folder")
        screen.warn(f"error: {os.fsdecode(error.filename)}: {error.strerror}. Fix: {fix}")
        return Exit.ERROR
    if isinstance(error, (StepscopeError, OSError)):
        screen.warn(f"error: {error}")
        return Exit.USAGE if isinstance(error, ConfigError) else Exit.ERROR
    screen.warn(
        f"error: {type(error).__name__}: {error}\nThis is a bug in stepscope. "
        "Run again with `--traceback` and report it."
    )
    return Exit.ERROR
