"""Where commands write: tables and JSON on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

WIDTH = 100
"""Columns where nothing says how many there are: a pipe, a file."""


def show(*parts: RenderableType) -> None:
    """Prints tables and text on stdout, as wide as the terminal is."""
    console = _console(stderr=False)
    for part in parts:
        console.print(part)


def show_json(data: object) -> None:
    """Prints one JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")


def say(message: str) -> None:
    """Prints a line on stderr."""
    _console(stderr=True).print(message, soft_wrap=True)


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; call what it gives with every number of bytes done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda done: bars.advance(task, done)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Says on stderr, if that is a terminal, that something is being done that may take seconds."""
    if not sys.stderr.isatty():
        yield
        return
    with _console(stderr=True).status(title):
        yield


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    # Names come from files: nothing in them is markup, an emoji code, or to be coloured by its looks.
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
