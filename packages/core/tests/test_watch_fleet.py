"""Devices and engines in `stepscope watch`, against values that are chosen here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from packages.core.tests.runs import standing_recorder
from stepscope import ProfileConfig, capture
from stepscope.backends.counters import CounterSource
from stepscope.files.layout import RunLayout
from stepscope.files.steps import StepLine
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run
from stepscope_report.cli.watch import look

S = 1_000_000_000
GPUS = 8
"""Number of GPUs of each host."""


def utilisation(gpu: int) -> float:
    return float(gpu * 37 % 101)


def write_run(folder: Path, hosts: int, replicas: int) -> None:
    """Write a run whose last step has counters of many GPUs and engines, and 20 s of older samples."""
    lines = [StepLine(step=step, start_ns=step * S, dur_ns=S) for step in range(6)]
    folder.joinpath("steps_run1.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    )
    step = StepFolder(folder, step=5)
    owner = step.process("trainer", owner=True, host="node-000")
    for host in range(hosts):
        process = step.process("actor", host, host=f"node-{host:03}")
        for number in range(GPUS):
            gpu, old = host * GPUS + number, {at * S: 100.0 for at in range(20)}
            late = {
                at * S: utilisation(gpu) + (at - 25) for at in range(21, 30)
            }  # their mean is that of 25 s
            process.counter("GPU utilisation", {**old, **late}, of=f"GPU {number}", unit="%", scope="host")
            process.counter("GPU memory", {28 * S: 1e9 * gpu}, of=f"GPU {number}", unit="B", scope="host")
        process.close(30 * S)
    for replica in range(replicas):
        owner.counter("running requests", {29 * S: 5.0}, of=f"replica {replica}")
        owner.counter("waiting requests", {29 * S: float(replica * 7 % 13)}, of=f"replica {replica}")
        owner.counter("KV cache", {29 * S: float(replica)}, of=f"replica {replica}", unit="%")
        owner.counter("generation tokens", {29 * S: 1e6}, of=f"replica {replica}", kind="total")
    owner.close(30 * S)
    step.write()


def test_of_128_gpus_the_spread_and_the_worst_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, hosts=16, replicas=32)
    assert run(["watch", str(tmp_path), "--json", "--every", "0.3"]) == 0
    devices, engines = json.loads(capsys.readouterr().out)["fleets"]
    assert (devices["number"], devices["step"], devices["rows"]) == (128, 5, [])
    spreads = {spread["column"]: spread for spread in devices["spreads"]}
    values = sorted(map(utilisation, range(128)))
    busy = spreads["utilisation"]
    # Nearest rank: the 13th, 64th and 116th of 128.
    assert (busy["p10"], busy["median"], busy["p90"]) == (values[12], values[63], values[115])
    assert busy["worst"] == 0
    assert busy["whose"] in {f"GPU {gpu % 8} of node-{gpu // 8:03}" for gpu in (0, 101)}
    assert (spreads["memory"]["worst"], spreads["memory"]["whose"]) == (127e9, "GPU 7 of node-015")
    assert "torch reserved" not in spreads
    queue = {spread["column"]: spread for spread in engines["spreads"]}
    assert engines["number"] == 32
    assert (queue["waiting"]["worst"], queue["KV cache"]["whose"]) == (12, "replica 31")
    assert queue["running"]["p10"] == queue["running"]["p90"] == 5
    assert queue["running"]["whose"] == "replica 0"


def test_the_view_of_many_gpus_has_a_line_for_each_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, hosts=16, replicas=32)
    assert run(["watch", str(tmp_path), "--once", "--every", "0.3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "128 devices, over 10 s, " in text
    assert "32 engines, over 10 s, " in text
    assert "GPU 7 of node-015" in text
    assert "GPU 3 of node-004" not in text
    assert "127 GB" in text


def test_few_gpus_have_a_row_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, hosts=2, replicas=11)
    assert run(["watch", str(tmp_path), "--json", "--every", "0.3"]) == 0
    devices, engines = json.loads(capsys.readouterr().out)["fleets"]
    assert devices["spreads"] == []
    names = [row["name"] for row in devices["rows"]]
    assert names == [f"GPU {gpu} of node-{host:03}" for host in range(2) for gpu in range(8)]
    assert [row["values"]["utilisation"] for row in devices["rows"]] == [
        utilisation(gpu) for gpu in range(16)
    ]
    assert [row["name"] for row in engines["rows"]] == [f"replica {number}" for number in range(11)]
    assert run(["watch", str(tmp_path), "--once", "--every", "0.3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "16 devices" in text
    assert "GPU 3 of node-001" in text


class Gpus(CounterSource):
    """GPUs of a host, as NVML's source gives them."""

    scope = "host"

    def __init__(self, name: str, unit: str, values: Sequence[float]) -> None:
        self.name, self.unit = name, unit
        self._values = values

    def sample(self) -> dict[str, float]:
        return {f"GPU {number}": value for number, value in enumerate(self._values)}


@pytest.mark.slow
@pytest.mark.usefixtures("one_recorder")
def test_a_run_that_goes_on_answers_with_its_counters(tmp_path: Path) -> None:
    write_run(tmp_path, hosts=2, replicas=3)
    settings = {"save_path": str(tmp_path), "record": "spans", "control": {"poll_seconds": 0.05}}
    config = ProfileConfig.from_mapping(settings)
    with capture(7, config=config):
        recorder = standing_recorder()
        assert recorder.sampler is not None
        recorder.sampler.add("GPUs", lambda: [Gpus("GPU utilisation", "%", [93.0, 41.0])])
        view = look(RunLayout(tmp_path), 10)
        for _ in range(20):
            if view.fleets and view.fleets[0].step is None:
                break
            view = look(RunLayout(tmp_path), 10)
    devices, engines = view.fleets
    assert (devices.group, devices.step) == ("devices", None)
    assert [row.values for row in devices.rows] == [{"utilisation": 93}, {"utilisation": 41}]
    # engines are sampled in captures
    assert (engines.group, engines.number, engines.step) == ("engines", 3, 5)
