"""Plain traces of real ranks: bare torch.profiler and gloo, without stepscope in the processes."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packages.report.tests.steps import MS
from packages.report.tests.test_plain_traces import kernel, trace
from stepscope_report.timeline.activity.traces import place_traces
from stepscope_report.timeline.plain import read_plain

_BASE = re.compile(rb'("baseTimeNanoseconds": )(\d+)')


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return the traces of two ranks that reduced a hundred times, on the one clock of this machine."""
    assert torch.distributed.is_gloo_available()
    folder = tmp_path_factory.mktemp("gloo")
    main = Path(__file__).with_name("gloo_main.py")
    subprocess.run([sys.executable, str(main), str(folder), "2", "100"], check=True, timeout=300)
    return [(folder / f"rank{rank}.json").read_bytes() for rank in range(2)]


def write(folder: Path, traces: list[bytes], hosts: list[str]) -> None:
    """Write the traces as an older torch does, which names the host in the file's name alone."""
    for text, host in zip(traces, hosts, strict=True):
        text = text.replace(b'"host_name"', b'"unused"')
        pid = next(event["pid"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X")
        (folder / f"{host}_{pid}.1700000000000.pt.trace.json").write_bytes(text)


def test_ranks_of_bare_torch_are_processes_of_one_step(recorded: list[bytes], tmp_path: Path) -> None:
    write(tmp_path, recorded, ["node-a", "node-a"])
    step = read_plain([tmp_path])
    names = [(process.name, process.clock.alignment) for process in step.timeline.processes]
    assert names == [("rank 0", "same host"), ("rank 1", "same host")]
    traces = place_traces(step.files, step.contents, step.timeline)
    assert [activity.name for activity in traces.activities] == ["rank 0", "rank 1"]
    assert all(activity.unaligned is None for activity in traces.activities)
    operators = {operator.name for activity in traces.activities for operator in activity.content.operators}
    assert "aten::mm" in operators


def test_the_times_of_ranges_are_those_of_torchs_own_table(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("forward"):
                loss = layer(torch.ones(8)).sum()
            loss.backward()
            optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    ((held,),) = read_plain([tmp_path]).contents
    marks = {operator.name: operator for operator in held.content.operators if operator.outer}
    said = {row.key: row for row in profiler.key_averages() if row.key in marks}
    assert said.keys() == marks.keys() == {"forward", "Optimizer.step#SGD.step"}
    for name, mark in marks.items():
        assert mark.count == said[name].count == 3
        assert mark.total_us == pytest.approx(said[name].cpu_time_total, rel=0.01)
        assert mark.self_us == pytest.approx(said[name].self_cpu_time_total, rel=0.01)


def test_collectives_align_the_clocks_of_two_hosts(recorded: list[bytes], tmp_path: Path) -> None:
    skew_ns = 70 * MS
    ahead = _BASE.sub(lambda match: match[1] + b"%d" % (int(match[2]) + skew_ns), recorded[1])
    write(tmp_path, [recorded[0], ahead], ["node-a", "node-b"])
    first, second = read_plain([tmp_path]).timeline.processes
    assert (first.clock.alignment, second.clock.alignment) == ("same host", "collectives")
    assert abs(second.clock.offset_ns - skew_ns) <= (second.clock.uncertainty_ns or 0) < 50 * MS


def test_a_host_without_common_collectives_is_unaligned(recorded: list[bytes], tmp_path: Path) -> None:
    write(tmp_path, [recorded[0]], ["node-a"])
    trace(tmp_path / "node-b_100.1.pt.trace.json", [], rank=1)
    step = read_plain([tmp_path])
    assert [process.clock.alignment for process in step.timeline.processes] == ["same host", "unaligned"]
    traces = place_traces(step.files, step.contents, step.timeline)
    reasons = {activity.info.host: activity.unaligned for activity in traces.activities}
    assert reasons["node-a"] is None
    assert "node-b" in (reasons["node-b"] or "")


def length_us(stretches: list[tuple[int, int]]) -> int:
    """Return the number of microseconds in which any of the stretches goes on, counted one by one."""
    return len({us for start, end in stretches for us in range(start, end)})


@pytest.mark.parametrize("seed", range(5))
def test_busy_and_exposed_time_are_those_counted_by_the_microsecond(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    names = ("gemm", "ncclDevKernel_AllReduce_Sum_f32")
    kernels = sorted(
        (chance.randrange(5000), chance.randrange(1, 200), chance.choice(names), chance.randrange(3))
        for _ in range(200)
    )
    trace(tmp_path / "rank0.json", [kernel(name, start, dur, stream) for start, dur, name, stream in kernels])
    ((device,),) = (one.content.devices for (one,) in read_plain([tmp_path]).contents)
    compute, communication = (
        [(start, start + dur) for start, dur, name, _ in kernels if name == wanted] for wanted in names
    )
    both, alone = length_us([*compute, *communication]), length_us(compute)
    assert (device.busy_us, device.compute_us) == (both, alone)
    assert (device.communication_us, device.exposed_us) == (length_us(communication), both - alone)
