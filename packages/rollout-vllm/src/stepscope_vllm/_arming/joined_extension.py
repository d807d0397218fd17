"""Classes that join a worker extension of another package with stepscope's, because vLLM accepts one class.

`stepscope_vllm._arming.joined_extension.their:module:Class` inherits from both extensions. The class is made
when a worker imports the name from this module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stepscope_vllm._engine_side.extension import WorkerExtension


def name_of(extension: str) -> str:
    """Return the name of the class that joins the extension `their.module.Class` with stepscope's."""
    if extension.startswith("stepscope_vllm."):
        return extension
    return f"{__name__}.{extension.replace('.', ':')}"


def __getattr__(name: str) -> Any:
    module, colon, kind = name.rpartition(":")
    if not colon:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs = getattr(import_module(module.replace(":", ".")), kind)
    both = theirs if issubclass(theirs, WorkerExtension) else type(kind, (WorkerExtension, theirs), {})
    globals()[name] = both  # vLLM must get the same class the next time
    return both
