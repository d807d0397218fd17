"""Versions of an engine that its adapter supports.

The range is stated in one place: the `engine` extra of the adapter's distribution (`vllm>=0.8.5,<=0.33.0`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import NamedTuple

from stepscope.errors import EngineError

log = logging.getLogger("stepscope")


class Supported(NamedTuple):
    """A package and its supported versions, both bounds included."""

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"

    @property
    def requirement(self) -> str:
        return f"{self.package}>={self.oldest},<={self.newest}"

    def is_newer(self, version: str) -> bool:
        return numbers(version)[:3] > numbers(self.newest)

    def is_older(self, version: str) -> bool:
        """Return whether `version` is below the range. False for a version without numbers."""
        return bool(numbers(version)) and numbers(version)[:3] < numbers(self.oldest)


@cache
def supported_by(adapter: str) -> Supported | None:
    """Return the range of an installed adapter, or None for a checkout that is not installed.

    Args:
        adapter: Name of the adapter's distribution.
    """
    try:
        return stated_in(metadata.requires(adapter) or ())
    except metadata.PackageNotFoundError:
        return None


def stated_in(requirements: Iterable[str]) -> Supported | None:
    """Return the range of the `engine` extra among a distribution's requirements, or None if it has no such
    range.
    """
    for line in requirements:
        requirement, _, marker = line.partition(";")
        bounds = dict(re.findall(r"(>=|<=)\s*([\w.]+)", requirement))
        if re.search(r"extra\s*==\s*['\"]engine['\"]", marker) and {">=", "<="} <= bounds.keys():
            package = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0]
            return Supported(package, bounds[">="], bounds["<="])
    return None


def expect_supported(supported: Supported | None, version: str | None) -> None:
    """Warn once if `version` is above the range. The adapter then reads the engine's abilities from the
    engine's code.

    Raises:
        EngineError: the version is below the range.
    """
    if supported is None or version is None:
        return
    if supported.is_older(version):
        raise EngineError(
            f"{supported.package} {version} is too old; the adapter supports {supported}. "
            f"Fix: pip install '{supported.requirement}'"
        )
    if supported.is_newer(version):
        _warn(untried(supported, version))


def untried(supported: Supported, version: str) -> str:
    return f"{supported.package} {version} is newer than {supported}, the range that was tested"


@cache
def _warn(text: str) -> None:
    log.warning("stepscope: %s", text)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as a tuple that sorts as versions do: `0.31.0+cpu` -> (0, 31, 0).
    Return () for a text that does not begin with a number.
    """
    release = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in release[1].split(".")) if release else ()
