"""The `stepscope` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EXTRA = frozenset(("typer", "rich", "stringzilla", "click"))
"""Packages of the extra `cli`, and the one that typer imports."""


def main() -> None:
    """Run the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        from stepscope_report.cli import app  # the SDK comes without what the command imports
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(
            f"error: the stepscope command needs {error.name}, which is not installed. "
            "Fix: pip install 'stepscope[cli]'\n"
        )
        return 2
    return app.run(arguments)
