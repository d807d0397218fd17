"""Installed inference engines, against the adapters that drive them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import cast

from stepscope.engines.protocol import EngineFactory
from stepscope.engines.supported import Supported, numbers, stated_in
from stepscope_report.doctor.machine import DAMAGED, OURS, entry_points, installed
from stepscope_report.doctor.rows import Row, absent, amber, green, red


def engines() -> Iterator[Row]:
    """Yield a row for each adapter of an engine, and for each adapter of ours that is not installed."""
    adapters = {point.name: point for point in entry_points("stepscope.engines")}
    for point in adapters.values():
        yield from _of_adapter(point)
    for package in OURS:
        name = package.removeprefix("stepscope-rollout-")
        if name != package and name not in adapters:
            yield _without_adapter(name)


def _without_adapter(name: str) -> Row:
    try:
        is_here = find_spec(name) is not None
    except (ImportError, ValueError):  # a module that was put into sys.modules by hand
        is_here = True
    if not is_here:
        return absent(name, "neither the engine nor its adapter is installed here")
    fix = f"pip install 'stepscope[{name}]', in the environment of the engine and of the driver"
    return amber(name, f"{name} is installed, without its adapter", fix)


def _of_adapter(point: metadata.EntryPoint) -> Iterator[Row]:
    try:
        factory = cast(EngineFactory, point.load())
    except Exception as error:
        finding = f"the adapter cannot be loaded: {type(error).__name__}: {error}"
        yield red(point.name, finding, f"install the package that brings {point.value} again")
        return
    if factory.distributions:
        versions = {
            name: version for name in factory.distributions if (version := installed(name)) is not None
        }
        yield _engine(point.name, versions, _range(point))


def _range(point: metadata.EntryPoint) -> Supported | None:
    try:
        return None if point.dist is None else stated_in(point.dist.requires or ())
    except Exception:  # damaged metadata, which has a row of its own
        return None


def _engine(name: str, versions: Mapping[str, str], supported: Supported | None) -> Row:
    known = f"the adapter supports {supported}" if supported else "the adapter states no range"
    if not versions:
        finding = f"not installed in this environment; {known}. Servers elsewhere can be driven from here"
        return absent(name, finding)
    package, version = next(iter(versions.items()))
    if version == DAMAGED or not numbers(version):
        fix = f"pip install --force-reinstall {package}"
        return red(name, f"the metadata of {package} names no version", fix)
    installed_ones = ", ".join(f"{package} {version}" for package, version in versions.items())
    if supported and supported.is_older(version):
        return red(name, f"{installed_ones}: too old; {known}", f"pip install '{supported.requirement}'")
    if supported and supported.is_newer(version):
        finding = f"{installed_ones}: newer than any that was tested; {known}"
        fix = "prepare() checks it before the run; if it refuses, install an engine of that range"
        return amber(name, finding, fix)
    return green(name, f"{installed_ones}; {known}")
