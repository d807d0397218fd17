"""The nodes of a Ray cluster: their clocks, and what is installed on them, against this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from stepscope.files.clock import Exchange, estimate_offset
from stepscope_report.doctor.machine import installed
from stepscope_report.doctor.rows import Row, amber, green, red

ANSWER_S = 30.0
EXCHANGES = 20
TOLERABLE_NS = 50_000_000
"""Largest tolerable offset of a clock. Beyond it, the logs of two nodes visibly disagree."""


def nodes(address: str) -> Iterator[Row]:
    """Yield a row for each node of the cluster at `address` (`auto`, `host:port`).

    Joins the cluster and leaves it afterwards, unless this process has joined it before.
    """
    if installed("ray") is None:
        yield red("cluster", "ray is not installed here", "pip install 'stepscope[ray]'")
        return
    ray: Any = import_module("ray")
    joined = not ray.is_initialized()
    try:
        if joined:
            ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield green("cluster", f"{len(alive)} node(s) at {address}")
        probes = [_start(node) for node in alive]
        for node, probe in zip(alive, probes, strict=True):
            yield _row(node, probe)
    except ConnectionError as error:
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
    return _clock(name, None if estimate is None else (estimate.offset_ns, estimate.within_ns))


def _clock(name: str, offset: tuple[int, int] | None) -> Row:
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
    """Actor that answers from the node."""

    def now(self) -> tuple[int, int]:
        heard_ns = time.time_ns()
        return heard_ns, time.time_ns()

    def versions(self) -> str:
        return f"Python {sys.version.split()[0]}, stepscope {installed('stepscope')}"
