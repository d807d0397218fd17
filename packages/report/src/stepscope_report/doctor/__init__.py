"""Rows of `stepscope doctor`: parts of this machine that work, parts that do not, and the fix.

Packages add rows of their own through the entry-point group `stepscope.doctor`: a function without arguments
that returns a list of `Row`. It says what it finds and raises nothing that it can foresee; what it does raise
becomes a red row.
"""

from __future__ import annotations

from stepscope_report.doctor.machine import Row, State

__all__ = ["Row", "State"]
