"""Commands of child processes: this interpreter, with this import path."""

from __future__ import annotations

import sys


def command_of(code: str) -> list[str] | None:
    """Return the command of a child that runs `code`. None: no interpreter can be started.

    An embedded interpreter may have no executable. The executable of a frozen application is the application,
    which would start again.
    """
    if not sys.executable or hasattr(sys, "frozen"):
        return None
    # Imports ignore entries that are no text, such as a `Path`. ASCII works in any locale.
    path = ascii(list(filter(_is_text, sys.path)))
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def _is_text(entry: object) -> bool:
    return isinstance(entry, str)
