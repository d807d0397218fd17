"""The switch that turns all of stepscope off: STEPSCOPE_DISABLE=1."""

from __future__ import annotations

import os

VARIABLE = "STEPSCOPE_DISABLE"
DISABLED = os.environ.get(VARIABLE, "") not in ("", "0")
"""True if every public function is a no-op that times, starts, patches and writes nothing. Read at import."""
