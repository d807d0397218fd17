"""`python -m stepscope`: the command `stepscope` of stepscope-report, for environments whose scripts are not
on PATH.
"""

from __future__ import annotations

import sys

from stepscope import _report

if _report.is_absent():
    sys.stderr.write(f"error: there is no command: {_report.ABSENT}\n")
    sys.exit(2)

from stepscope_report.cli import main

main()
