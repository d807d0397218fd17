"""Terminal output of the commands: tables and JSON on stdout, everything else on stderr.

Names come from files and folders. Their control characters never reach the terminal, whether the name stands
in a table, in a title or in a message.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from stepscope_report.formatting import visible

WIDTH = 100
"""Width in columns if the output has none, as for a pipe or a file."""
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_EXACT = (1 << 53) - 1
"""Largest whole number that JavaScript, whose numbers are all floats, reads without loss."""
log = logging.getLogger("stepscope")
_quiet = False
"""True if the command that runs prints only its answer, errors, and what is missing. `be_quiet`, `be_verbose`
and `one_command` write this flag."""


class _Handler(logging.Handler):
    """Records of the log, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(f"{record.levelname.lower()}: {record.getMessage()}")


_HANDLER = _Handler()


def be_quiet() -> None:
    """Print only the answer, errors, and what is missing, until the end of `one_command`."""
    global _quiet
    _quiet = True
    log.setLevel(logging.WARNING)


def be_verbose() -> None:
    """Print the package's log as well, at debug, until the end of `one_command`."""
    global _quiet
    _quiet = False
    log.setLevel(logging.DEBUG)
    log.addHandler(_HANDLER)


@contextmanager
def one_command() -> Iterator[None]:
    """Undo at the end what `be_quiet` and `be_verbose` did."""
    global _quiet
    level = log.level
    try:
        yield
    finally:
        _quiet = False
        log.removeHandler(_HANDLER)
        log.setLevel(level)


def show(*parts: RenderableType) -> None:
    """Print tables and text on stdout, as wide as the terminal."""
    console = _console(stderr=False)
    for part in parts:
        console.print(part)


def show_unwrapped(text: str) -> None:
    """Print text on stdout, each line as long as it is."""
    _console(stderr=False).print(text, soft_wrap=True)


def show_json(data: object) -> None:
    """Print one JSON document on stdout, with the control characters of its strings as `\\u` escapes.

    A whole number that JavaScript would round (a unix time in ns) stands beside it as text as well:
    `opened_ns`, `opened_ns_text`.
    """
    document = msgspec.json.format(msgspec.json.encode(exact(data))).decode()
    sys.stdout.write(_BEYOND_ASCII.sub(_escaped_in_json, document) + "\n")


def exact(data: object) -> object:
    """Return data for JSON with a text beside each whole number that JavaScript would round."""
    return _exact(msgspec.to_builtins(data))


def _exact(data: object) -> object:
    if isinstance(data, list | tuple):
        return [_exact(item) for item in data]
    if not isinstance(data, dict):
        return data
    whole: dict[object, object] = {}
    for key, value in data.items():
        whole[key] = _exact(value)
        numbers = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(number, int) and abs(number) > _EXACT for number in numbers):
            whole[f"{key}_text"] = [*map(str, value)] if isinstance(value, list | tuple) else str(value)
    return whole


def _escaped_in_json(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def say(message: str) -> None:
    """Print a line on stderr, unless the command is to be quiet."""
    if not _quiet:
        warn(message)


def warn(message: str) -> None:
    """Print an error, or a line on what is missing, on stderr."""
    _console(stderr=True).print(message, soft_wrap=True)


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal. Call the yielded function with each number of bytes
    done.
    """
    if _quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda done: bars.advance(task, done)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show on stderr, if that is a terminal, that work is under way that may take seconds."""
    if _quiet or not sys.stderr.isatty():
        yield
        return
    with _console(stderr=True).status(title):
        yield


class _SafeConsole(Console):
    """A console that shows control characters of the text as escapes, except rich's own codes for colours."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # `app.run` ends the command

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    # Nothing in a name is markup, an emoji code, or to be coloured by its looks.
    return _SafeConsole(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
