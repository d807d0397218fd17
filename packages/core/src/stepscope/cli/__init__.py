"""The `stepscope` command."""

from stepscope.cli.app import main, run

__all__ = ["main", "run"]
