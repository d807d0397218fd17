"""Commands and groups of commands: the options that all commands share (`-h`, `-q`, `-v`), exit codes, and
errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.config import closest
from stepscope_report.cli import screen


class Exit(IntEnum):
    """Exit codes, with the same meaning for every command."""

    OK = 0
    ERROR = 1
    """Something went wrong while the command ran."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    INCOMPLETE = 3
    """The command worked, but a part of the data is missing, broken or was left out."""
    UNCAPTURED = 4
    """`run --require-capture`: the program succeeded, but no step was captured."""
    UNDECIDED = 5
    """`diff --require-verdict`: no limit was exceeded, but the steps are too few or too uneven for a
    verdict."""


class CommandError(Exception):
    """An error that ends the command with a message on stderr and without a traceback."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


T = TypeVar("T")

CONTEXT = {"help_option_names": ["-h", "--help"]}
"""Settings of the whole command line, which all commands inherit."""


def _be_quiet(wanted: bool) -> None:
    if wanted:
        screen.be_quiet()


def _be_verbose(wanted: bool) -> None:
    if wanted:
        screen.be_verbose()


_options = typer.Typer(add_completion=False)


@_options.command()
def _shared(
    _quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print only the answer and errors.", callback=_be_quiet, expose_value=False
        ),
    ] = False,
    _verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Log at debug, on stderr.", callback=_be_verbose, expose_value=False
        ),
    ] = False,
) -> None:
    """Declare the options that every command has."""


_SHARED = [option for option in typer.main.get_command(_options).params if option.name != "help"]


_AS_IT_IS: dict[object, Callable[[Any], Any]] = {
    str: str,
    Path: Path,
    list[str]: list,
    list[Path]: lambda values: list(map(Path, values)),
}


class _Values:
    """Conversion of the values of one parameter.

    Newer typer loads pydantic (9 MB, 0.2 s) to convert a value, so only values that may be wrong reach
    typer.
    """

    def __init__(self, param: Any, of_typer: Callable[[Any], Any]) -> None:
        self._param, self._of_typer = param, of_typer

    def coerce(self, value: Any, **context: Any) -> Any:
        described: Any = getattr(self._param, "type_descriptor", None)  # a later typer may have none
        kind, info = getattr(described, "annotation", None), getattr(described, "parameter_info", None)
        if value is None and described is not None:
            return () if self._param.multiple or self._param.nargs == -1 else None
        if kind in (int, float) and info is not None:
            return self._number(kind, value, info.min, info.max)
        if kind in _AS_IT_IS:
            return _AS_IT_IS[kind](value)
        return self._of_typer(self._param).coerce(value, **context)

    def _number(
        self, kind: type[int] | type[float], value: Any, least: float | None, most: float | None
    ) -> Any:
        """Return a number from the command line after a check that it is finite and within its bounds."""
        try:
            number = kind(value)
            if (
                math.isfinite(number)
                and (least is None or number >= least)
                and (most is None or number <= most)
            ):
                return number
        except (ValueError, OverflowError):
            pass
        allowed = "whole numbers" if kind is int else "numbers"
        allowed += "" if least is None else f" from {least:g}"
        allowed += "" if most is None else f" to {most:,}"
        raise typer.BadParameter(f"it is {value!r}; allowed: {allowed}", param=self._param)


class _Lean:
    """A command or a group whose parameters need no pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command of typer
        for param in params:
            of_typer = getattr(type(param), "get_runtime_param", None)
            if of_typer is not None:
                param.get_runtime_param = functools.partial(_Values, param, of_typer)
        return params


class Command(_Lean, TyperCommand):
    """A command with the options `--quiet` and `--verbose`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params += _SHARED


class Group(_Lean, TyperGroup):
    """A group of commands."""


class GroupWithDefault(Group):
    """A group of commands that runs its first command if the command line names no command: `trigger RUN` is
    `trigger ask RUN`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            near = closest(args[0], self.commands)
            if near and not Path(args[0]).exists():
                raise CommandError(f"there is no `{ctx.command_path} {args[0]}`: did you mean {near!r}?")
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Return a decorator for a command that takes all its parameters as one value.

    Args:
        options: A dataclass. Each field becomes a parameter of the command line, annotated as for typer.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(options)  # type: ignore[arg-type]  # no type says that a class is a dataclass
    ]

    def decorate(run: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**words: object) -> None:
            run(options(**words))

        command.__annotations__ = hints
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # read by `inspect`
        return command

    return decorate
