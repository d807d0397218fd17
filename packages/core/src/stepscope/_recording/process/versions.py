"""Versions of Python and of the installed packages that a reader of traces needs to know."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from stepscope.engines.protocol import distributions

_NAMED = ("stepscope", "torch", "ray", "torch_npu")


def versions() -> dict[str, str]:
    """Return the versions by name: Python's, and those of the packages that are installed."""
    known = {"python": sys.version.split()[0]}
    for name in dict.fromkeys((*_NAMED, *distributions())):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known
