"""Versions of Python and of the installed packages that a reader of traces needs to know."""

from __future__ import annotations

import sys

from stepscope.engines.protocol import distributions

_NAMED = ("stepscope", "torch", "ray", "torch_npu")


def versions() -> dict[str, str]:
    """Return the versions by name: Python's, and those of the packages that are installed."""
    found = {name: installed_version(name) for name in dict.fromkeys((*_NAMED, *distributions()))}
    known = {name: version for name, version in found.items() if version is not None}
    return {"python": sys.version.split()[0], **known}


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # import time: 15 ms

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
