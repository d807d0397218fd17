"""Worker extensions of other packages, each joined with stepscope's in one class, because vLLM takes one
name.

`stepscope_vllm._arming.joined_extension.their:module:Class` is the class of both. It is made when a worker
asks this module for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stepscope_vllm._engine_side.extension import WorkerExtension


def name_of(extension: str) -> str:
    """Return the `worker_extension_cls` that joins the extension `their.module.Class` with stepscope's."""
    if extension.startswith("stepscope_vllm."):
        return extension
    return f"{__name__}.{extension.replace('.', ':')}"


def __getattr__(name: str) -> Any:
    module, colon, kind = name.rpartition(":")
    if not colon:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs = getattr(import_module(module.replace(":", ".")), kind)
    both = theirs if issubclass(theirs, WorkerExtension) else type(kind, (WorkerExtension, theirs), {})
    globals()[name] = both  # vLLM must get the same class when it asks again
    return both
