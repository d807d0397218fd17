"""All rows, in a useful order of reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from stepscope.config import INSTALL_TORCH_NPU, ProfileConfig, check_finish, check_tool, resolve
from stepscope.engines.protocol import EngineFactory
from stepscope.engines.supported import Supported, numbers, stated_in
from stepscope.errors import ConfigError
from stepscope_report.doctor import cluster, libraries, machine
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


GROUP = "stepscope.doctor"


def examine(config_file: Path | None = None, ray_address: str | None = None) -> Iterator[Row]:
    """Yield the rows of this machine one by one, because some take seconds.

    Args:
        config_file: The configuration of the run, or None for what STEPSCOPE_CONFIG and the environment say.
        ray_address: Address of a cluster whose nodes are examined too, or None for no cluster.
    """
    yield from _check("python", machine.python)
    yield from _check("stepscope", machine.own_packages)
    yield from _check("packages", machine.damaged_packages)
    config = _configuration(config_file)
    yield from _check("configuration", partial(machine.configuration, config))
    usable = config if isinstance(config, ProfileConfig) else ProfileConfig()
    yield from _check("save_path", partial(machine.save_path, usable))
    yield from _check(machine.SHARED_MEMORY, machine.shared_memory)
    yield from _check("torch", partial(libraries.torch, os.environ))
    yield from _check("variables", partial(libraries.recorded_from_outside, os.environ))
    yield from _check("nsys", partial(libraries.nsys, usable.tool))
    yield from _check("nsys", libraries.nsys_permissions)
    yield from _check("nsys", partial(libraries.nsys_report, usable.tool))
    yield from _check("nvtx", libraries.nvtx)
    yield from _check("nvidia-ml-py", libraries.nvml)
    yield from _check("ray", libraries.ray)
    yield from _check("engines", engines)
    for point in sorted(machine.entry_points(GROUP), key=lambda point: point.name):
        yield from _check(point.name, partial(_rows_of, point, usable.tool))
    if ray_address is not None:
        yield from _check("cluster", partial(cluster.nodes, ray_address))


def _rows_of(point: EntryPoint, tool: str) -> Iterator[Row]:
    """Yield a package's rows. What the configured `tool` needs and nobody installed is red."""
    for row in point.load()():
        if (tool, row.subject, row.state) == ("npu", "torch_npu", "absent"):
            yield red(row.subject, "not installed, and `tool` is npu", INSTALL_TORCH_NPU)
        else:
            yield row


def _configuration(file: Path | None) -> ProfileConfig | ConfigError:
    try:
        config = resolve(file)
        if config.tool not in {point.name for point in machine.entry_points("stepscope.backends")}:
            check_tool(config)  # says which there are
        check_finish(config)
    except ConfigError as error:
        return error
    except Exception as error:
        fix = "`stepscope --traceback validate` shows where; please report it"
        return ConfigError("configuration", str(file or "the environment"), f"readable ({error!r})", fix)
    return config


def _check(subject: str, rows: Callable[[], Row | Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows, and a red row for an error: one broken library must not hide the others."""
    try:
        outcome = rows()
        yield from (outcome,) if isinstance(outcome, Row) else outcome
    except Exception as error:
        failure = f"the check failed: {type(error).__name__}: {error}"
        yield red(subject, failure, "please report it, with this line")
