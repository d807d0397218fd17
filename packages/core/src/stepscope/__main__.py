"""`python -m stepscope`: the command `stepscope` of stepscope-report, for environments whose scripts are not
on PATH.
"""

from __future__ import annotations

import sys

from stepscope._recording.session.programs import REPORT_ABSENT, is_report_absent

if is_report_absent():
    sys.stderr.write(f"error: there is no command: {REPORT_ABSENT}\n")
    sys.exit(2)

from stepscope_report.cli import main

main()
