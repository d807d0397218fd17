"""The `stepscope` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main() -> None:
    """Run the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    from stepscope_report.cli import asking  # here: most modules of `cli` are used without the command

    with asking.asked_early(arguments) as question:
        from stepscope_report.cli import app

        return app.run(arguments, question)
