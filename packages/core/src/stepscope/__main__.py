"""`python -m stepscope`: the command line, for environments whose scripts are elsewhere."""

from __future__ import annotations

from stepscope_report.cli import main

main()
