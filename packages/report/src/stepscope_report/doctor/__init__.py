"""Rows of `stepscope doctor`: parts of this machine that work, parts that do not, and the fix.

Packages add rows through the entry-point group `stepscope.doctor`. An entry is a function without arguments
that returns a list of `Row`. If the function raises an error, `stepscope doctor` shows it as a red row.
"""

from __future__ import annotations

from stepscope_report.doctor.machine import Row, State

__all__ = ["Row", "State"]
