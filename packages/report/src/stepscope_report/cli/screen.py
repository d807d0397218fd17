"""Terminal output of the commands: tables and JSON on stdout, everything else on stderr.

Control characters in names of files and folders never reach the terminal, whether a name is in a table, a
title or a message.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from stepscope_report.formatting import visible

WIDTH = 100
"""Width in columns of output to a pipe or file, which has no width of its own."""
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_EXACT = (1 << 53) - 1
"""Largest whole number that JavaScript reads exactly, because its numbers are floats."""
log = logging.getLogger("stepscope")
_quiet = False
"""True if the current command prints only its answer, errors, and lines on what is missing. Writers:
`be_quiet`, `be_verbose` and `one_command`."""


_ASCII = {"→": "->", "±": "+-", "·": ".", **dict.fromkeys("▁▂▃▄", "-"), **dict.fromkeys("▅▆▇█", "#")}
"""{character in this package's texts: its replacement if the output's encoding lacks the character}."""


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that the encoding of the output lacks. Characters of names become escapes."""
    if isinstance(error, UnicodeEncodeError) and error.object[error.start] in _ASCII:
        return _ASCII[error.object[error.start]], error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error("stepscope", _in_ascii)


class _Handler(logging.Handler):
    """A log handler that prints records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(f"{record.levelname.lower()}: {record.getMessage()}")


_HANDLER = _Handler()


def be_quiet() -> None:
    """Print only the answer, errors, and lines on what is missing, until the end of `one_command`."""
    global _quiet
    _quiet = True
    log.setLevel(logging.WARNING)


def be_verbose() -> None:
    """Also print the package's log, at level debug, until the end of `one_command`."""
    global _quiet
    _quiet = False
    log.setLevel(logging.DEBUG)
    log.addHandler(_HANDLER)


@contextmanager
def one_command() -> Iterator[None]:
    """Context of one command. Its end undoes `be_quiet` and `be_verbose`."""
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
    """Print text on stdout without wrapping its lines."""
    _console(stderr=False).print(text, soft_wrap=True)


def show_json(data: object) -> None:
    """Print one JSON document on stdout, with control characters in strings as `\\u` escapes.

    A whole number that JavaScript would round, such as a unix time in ns, is followed by the same number as
    text: `opened_ns` and `opened_ns_text`.
    """
    document = msgspec.json.format(msgspec.json.encode(exact(data))).decode()
    sys.stdout.write(_BEYOND_ASCII.sub(_escaped_in_json, document) + "\n")


def exact(data: object) -> object:
    """Return data for JSON. Beside each whole number that JavaScript would round, the data contain the number
    as text.
    """
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
    """Print a line on stderr, unless the command is quiet."""
    if not _quiet:
        warn(message)


def warn(message: str) -> None:
    """Print an error, or a line on what is missing, on stderr."""
    _console(stderr=True).print(message, soft_wrap=True)


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if stderr is a terminal. Call the yielded function with each number of
    bytes that was read.
    """
    if _quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda done: bars.advance(task, done)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show on stderr, if stderr is a terminal, that the command is working."""
    if _quiet or not sys.stderr.isatty():
        yield
        return
    with _console(stderr=True).status(title):
        yield


class _SafeConsole(Console):
    """A console that prints control characters in text as escapes, except for the codes of rich's colours."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # `app.run` ends the command

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    if "COLUMNS" in os.environ:  # rich prints nothing if it is 0
        width = shutil.get_terminal_size((WIDTH, 24)).columns
    # Names contain no markup, no emoji codes, and nothing to highlight.
    return _SafeConsole(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
