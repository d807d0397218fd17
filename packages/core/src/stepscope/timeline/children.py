"""Commands of child processes: this interpreter, with this import path."""

from __future__ import annotations

import sys


def command_of(code: str) -> list[str] | None:
    """The command of a child that runs `code`. None: there is no interpreter that could be started.

    An embedded one may have no executable. That of a frozen application is the application, which would start
    anew.
    """
    if not sys.executable or hasattr(sys, "frozen"):
        return None
    # Without what is no text, as a `Path`, which imports ignore. ASCII, for any locale.
    path = ascii(list(filter(_is_text, sys.path)))
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def _is_text(entry: object) -> bool:
    return isinstance(entry, str)
