"""`stepscope doctor`: tests of this machine and of a Ray cluster's nodes, with a fix for each failed test."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from stepscope.config import INSTALL_TORCH_NPU, ProfileConfig, check_finish, check_tool, folder_of, resolve
from stepscope.engines.protocol import EngineFactory
from stepscope.engines.supported import Supported, numbers, stated_in
from stepscope.errors import ConfigError
from stepscope.files.clock import Exchange, estimate_offset
from stepscope_report import doctor as machine
from stepscope_report.cli import screen
from stepscope_report.cli.command import Exit
from stepscope_report.doctor import (
    DAMAGED,
    OURS,
    Row,
    absent,
    amber,
    entry_points,
    green,
    installed,
    libraries,
    red,
)

GROUP = "stepscope.doctor"
LOOKS = {
    "green": ("ok", "green"),
    "amber": ("note", "yellow"),
    "red": ("FAILS", "bold red"),
    "absent": ("-", "dim"),
}
"""Word and colour of each state. The word is shown without colours too."""


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope doctor --json`."""

    format: int = 1
    rows: list[Row]


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's configuration file.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Examine the nodes of this Ray cluster too: auto.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what is installed, what will not work here, and the fix. Exit code 1 if something fails."""
    with screen.waiting("looking"):
        rows = list(examine(config, ray))
    if json:
        screen.show_json(Examined(rows=rows))
    else:
        screen.show(_table(rows), _summary(rows))
    if any(row.state == "red" for row in rows):
        raise typer.Exit(Exit.ERROR)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        word, colour = LOOKS[row.state]
        description = Text(row.found)
        if row.fix:
            description.append(f"\nfix: {row.fix}", style=colour)
        table.add_row(Text(word, style=colour), row.subject, description)
    return table


def _summary(rows: list[Row]) -> Text:
    counted = Counter(row.state for row in rows)
    return Text(
        f"\n{counted['green']} ok, {counted['amber']} to note, {counted['red']} failing, "
        f"{counted['absent']} not installed"
    )


def examine(config_file: Path | None = None, ray_address: str | None = None) -> Iterator[Row]:
    """Yield the rows of this machine one by one, because some take seconds.

    Args:
        config_file: Configuration of the run. None for what STEPSCOPE_CONFIG and the environment say.
        ray_address: Address of a Ray cluster whose nodes are examined too. None for no cluster.
    """
    yield from _check("python", machine.python)
    yield from _check("stepscope", machine.own_packages)
    yield from _check("packages", machine.damaged_packages)
    config = _configuration(config_file)
    yield from _check("configuration", partial(machine.configuration, config))
    usable = config if isinstance(config, ProfileConfig) else folder_of(config_file, os.environ)
    yield from _check("save_path", partial(machine.save_path, usable))
    usable = usable or ProfileConfig()
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
    yield from _check("plug-ins", machine.plug_ins)
    for point in sorted(machine.entry_points(GROUP), key=lambda point: point.name):
        yield from _check(point.name, partial(_rows_of, point, usable.tool))
    if ray_address is not None:
        yield from _check("cluster", partial(nodes, ray_address))


def _rows_of(point: EntryPoint, tool: str) -> Iterator[Row]:
    """Yield the rows that one package adds. A row on a missing part is red if the configured `tool` needs the
    part.
    """
    for row in point.load()():
        if (tool, row.subject, row.state) == ("npu", "torch_npu", "absent"):
            yield red(row.subject, "not installed, and `tool` is npu", INSTALL_TORCH_NPU)
        else:
            yield row


def _configuration(file: Path | None) -> ProfileConfig | ConfigError:
    try:
        config = resolve(file)
        if config.tool not in {point.name for point in machine.entry_points("stepscope.backends")}:
            check_tool(config)  # raises an error that names the existing tools
        check_finish(config)
    except ConfigError as error:
        return error
    except Exception as error:
        fix = "`stepscope --traceback validate` shows where; please report it"
        return ConfigError("configuration", str(file or "the environment"), f"readable ({error!r})", fix)
    return config


def _check(subject: str, rows: Callable[[], Row | Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows. An error becomes a red row, so that one broken library does not hide the other rows."""
    try:
        outcome = rows()
        yield from (outcome,) if isinstance(outcome, Row) else outcome
    except Exception as error:
        failure = f"the check failed: {type(error).__name__}: {error}"
        yield red(subject, failure, "please report it, with this line")


def engines() -> Iterator[Row]:
    """Yield a row for each adapter of an engine, and for each adapter of this project that is not
    installed.
    """
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
    except (ImportError, ValueError):  # a module that someone put into sys.modules by hand
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
    except Exception:  # damaged metadata has a row of its own
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


ANSWER_S = 30.0
EXCHANGES = 20
TOLERABLE_NS = 50_000_000
"""Largest acceptable offset of a node's clock, in ns. With a larger offset, the logs of two nodes visibly
disagree."""


def nodes(address: str) -> Iterator[Row]:
    """Yield a row for each node of the Ray cluster at `address` (`auto`, `host:port`).

    Joins the cluster and leaves it afterwards, unless this process had joined it before.
    """
    if installed("ray") is None:
        yield red("cluster", "ray is not installed here", "pip install 'stepscope[ray]'")
        return
    ray: Any = import_module("ray")
    joined = not ray.is_initialized()
    try:
        if joined:
            import_module("stepscope_report.cli.ray_nodes").check_reachable(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield green("cluster", f"{len(alive)} node(s) at {address}")
        probes = [_start(node) for node in alive]
        for node, probe in zip(alive, probes, strict=True):
            yield _row(node, probe)
    except (OSError, ValueError) as error:
        fix = "ray start --head on one node, and --ray auto on that node or --ray HOST:6379"
        yield red("cluster", f"no cluster answers at {address}: {error}", fix)
    finally:
        if joined:
            ray.shutdown()


def _start(node: Mapping[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    return ray.remote(_Probe).options(num_cpus=0, scheduling_strategy=here).remote()


def _row(node: Mapping[str, Any], probe: Any) -> Row:
    import ray

    name = f"node {node['NodeManagerHostname']} {node['NodeManagerAddress']}"
    try:
        versions = ray.get(probe.versions.remote(), timeout=ANSWER_S)
        estimate = estimate_offset([_exchange(probe) for _ in range(EXCHANGES)])
    except Exception as error:
        reason = str(error).strip().splitlines()
        fix = "`ray status` and the node's logs say more; a worker there could not start"
        return red(name, f"no answer: {reason[-1] if reason else error!r}", fix)
    finally:
        ray.kill(probe)
    ours = _Probe().versions()
    if versions != ours:
        fix = "the same versions on all nodes: captures are sent there by pickle"
        return red(name, f"{versions}, and {ours} here", fix)
    return clock_row(name, None if estimate is None else (estimate.offset_ns, estimate.within_ns))


def clock_row(name: str, offset: tuple[int, int] | None) -> Row:
    if offset is None:
        fix = "run it again; if the row stays, check the node's NTP or chrony"
        return amber(name, "its clock was set while it was measured", fix)
    offset_ms, uncertainty_ms = offset[0] / 1e6, offset[1] / 1e6
    text = f"clock {offset_ms:+.3f} ms against this one, within {uncertainty_ms:.3f} ms"
    if abs(offset[0]) > TOLERABLE_NS:
        fix = "chronyc tracking (or timedatectl) on that node; timelines are corrected by this all the same"
        return amber(name, text, fix)
    return green(name, text)


def _exchange(probe: Any) -> Exchange:
    import ray

    sent_ns = time.time_ns()
    heard_ns, answered_ns = ray.get(probe.now.remote(), timeout=ANSWER_S)
    return Exchange(sent_ns, heard_ns, answered_ns, time.time_ns())


class _Probe:
    """Actor that answers questions about its node."""

    def now(self) -> tuple[int, int]:
        heard_ns = time.time_ns()
        return heard_ns, time.time_ns()

    def versions(self) -> str:
        return f"Python {sys.version.split()[0]}, stepscope {installed('stepscope')}"
