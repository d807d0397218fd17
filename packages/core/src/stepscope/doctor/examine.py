"""All rows, in the order in which one would look."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from stepscope.config import ProfileConfig, check_tool, resolve
from stepscope.doctor import cluster, libraries, machine
from stepscope.doctor.rows import Row
from stepscope.errors import ConfigError

GROUP = "stepscope.doctor"


def examine(config_file: Path | None = None, ray_address: str | None = None) -> Iterator[Row]:
    """Looks at this machine, one row at a time: some take seconds.

    Args:
        config_file: The configuration of the run; None: what STEPSCOPE_CONFIG and the environment say.
        ray_address: Of a cluster whose nodes are to be looked at too; None for none.
    """
    yield machine.python()
    yield machine.own_packages()
    config = _configuration(config_file)
    yield machine.configuration(config)
    usable = config if isinstance(config, ProfileConfig) else ProfileConfig()
    yield machine.save_path(usable)
    yield machine.shared_memory()
    yield from _said("torch", partial(libraries.torch, os.environ))
    yield from libraries.recorded_from_outside(os.environ)
    yield libraries.nsys(usable.tool)
    yield libraries.nvtx()
    yield libraries.ray()
    yield from libraries.engines()
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        yield from _said(point.name, partial(_rows_of, point))
    if ray_address is not None:
        yield from _said("cluster", partial(cluster.nodes, ray_address))


def _rows_of(point: EntryPoint) -> Iterable[Row]:
    rows: Iterable[Row] = point.load()()
    return rows


def _configuration(file: Path | None) -> ProfileConfig | ConfigError:
    try:
        config = resolve(file)
        check_tool(config)
    except ConfigError as error:
        return error
    return config


def _said(subject: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """What `rows` says; a red row for what it raises: one broken library must not hide the others."""
    try:
        yield from rows()
    except Exception as error:
        found = f"looking at it failed: {type(error).__name__}: {error}"
        yield Row(subject=subject, state="red", found=found, fix="please report it, with this line")
