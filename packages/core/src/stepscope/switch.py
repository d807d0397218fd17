"""The switch that turns all of stepscope off: STEPSCOPE_DISABLE=1."""

from __future__ import annotations

import os

VARIABLE = "STEPSCOPE_DISABLE"
DISABLED = os.environ.get(VARIABLE, "") not in ("", "0")
"""Whether every public function is a no-op: nothing is timed, started, patched or written. Read at import."""
