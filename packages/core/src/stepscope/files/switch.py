"""The switch that turns all of stepscope off: STEPSCOPE_DISABLE=1."""

from __future__ import annotations

import os

VARIABLE = "STEPSCOPE_DISABLE"
DISABLED = os.environ.get(VARIABLE, "") not in ("", "0")
"""True if stepscope is off: public functions do nothing, so nothing is timed, patched, started or written.
Set at import."""
