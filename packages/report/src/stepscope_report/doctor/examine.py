"""All rows, in a useful order of reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

from stepscope.config import INSTALL_TORCH_NPU, ProfileConfig, check_finish, check_tool, resolve
from stepscope.errors import ConfigError
from stepscope_report.doctor import cluster, engines, libraries, machine
from stepscope_report.doctor.rows import Row, red

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
    yield from _check("engines", engines.engines)
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
