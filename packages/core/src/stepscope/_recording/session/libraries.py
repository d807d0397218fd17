"""Libraries whose work the tools record, and whether this process has imported them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

LIBRARY = {"torch": "torch", "cuda_memory": "torch", "npu": "torch_npu"}
"""{tool: library that a process must have imported for the tool to record anything in it}."""


def library_loaded(tool: str) -> bool:
    """Return whether this process has imported the library whose work `tool` records. True for `npu` with
    torch but without an installed torch_npu, because the backend reports that error.
    """
    if tool not in LIBRARY or LIBRARY[tool] in sys.modules:
        return True
    if tool != "npu" or "torch" not in sys.modules:
        return False
    return find_spec("torch_npu") is None
