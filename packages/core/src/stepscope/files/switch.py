"""The switch that turns all of stepscope off: STEPSCOPE_DISABLE=1."""

from __future__ import annotations

import os

VARIABLE = "STEPSCOPE_DISABLE"
DISABLED = os.environ.get(VARIABLE, "") not in ("", "0")
"""True if every public function does nothing: none times, patches, starts or writes anything. Set at
import."""
