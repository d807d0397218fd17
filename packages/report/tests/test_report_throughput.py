"""Tokens per second and MFU of steps made by hand, against arithmetic that is written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.steps import printed
from packages.report.tests.traces import add_trace, kernel
from stepscope.files.manifest import Expectation, Hardware
from stepscope.files.sidecar import Artifact
from stepscope.files.values import AttrValue
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.model import to_scalars
from stepscope_report.sections.throughput import Rate, Throughput
from stepscope_report.timeline import load_step, load_traces

S = 1_000_000_000
H100 = "NVIDIA H100 80GB HBM3"


class Run:
    """A step of 20 s: 8 s of rollout on a replica, then 10 s of training on two ranks."""

    def __init__(
        self, folder: Path, *, device: str | None = H100, attrs: dict[str, AttrValue] | None = None
    ) -> None:
        self.folder = StepFolder(folder)
        self.driver = self.folder.process("trainer", owner=True)
        self.actors = [self.folder.process("actor", rank) for rank in range(2)]
        self.engine = self.folder.process("rollout", replica=0)
        calling = self.driver.span("generate_sequences", 0, 9 * S)
        self.turn = self.driver.span(
            "turn", 0, 8 * S, role="agent_loop", parent=calling, trajectory="t0", turn=0
        )
        updating = self.driver.span("update_actor", 9 * S, 20 * S)
        for rank, actor in enumerate(self.actors):
            actor.span("compute_log_prob", 9 * S, 10 * S)
            # The ranks overlap: from 10 to 20 s at least one of them trains.
            actor.span(
                "update_actor", (10 + rank) * S, (19 + rank) * S, link=self.driver.link(updating), attrs=attrs
            )
            actor.hardware = Hardware(device=device)

    def report(self, *, traced: bool = False, **hardware: Any) -> StepReport:
        self.driver.hardware = Hardware(**hardware)
        for process in self.folder.processes:
            process.close(20 * S)
        folder = self.folder.write()
        timeline = load_step(folder)
        return step_report(timeline, load_traces(folder, timeline) if traced else None)

    def tokens(self, process: FakeProcess, **counts: AttrValue) -> None:
        process.span("step_tokens", 12 * S, 12 * S, attrs=counts)

    def recorded(self, *, ranks: int, world_size: int | None) -> None:
        """Let the replica have a recording of some of its ranks."""
        artifacts = tuple(
            Artifact(
                path=f"traces/rollout/replica0/{rank}.json", kind="vllm_trace", tool="vllm", role="rollout",
                rank=rank, world_size=world_size, replica=0, topology={"tp": rank}, host="host-a",
                pid=5000 + rank, size_bytes=1,
            )
            for rank in range(ranks)
        )  # fmt: skip
        item = Expectation(name="replica 0", kind="engine", state="ok", artifacts=artifacts)
        self.driver.expected.append(item)


def throughput(report: StepReport) -> Throughput:
    assert report.throughput is not None
    return report.throughput


def rate(report: StepReport, phase: str) -> Rate:
    (only,) = [rate for rate in throughput(report).rates if rate.phase == phase]
    return only


def counted(run: Run, phase: str) -> tuple[int, str]:
    only = rate(run.report(), phase)
    return only.tokens, only.source


def test_a_step_without_tokens_has_no_section(tmp_path: Path) -> None:
    report = Run(tmp_path).report(flops_per_token=1e9)
    assert report.throughput is None
    assert "Throughput" not in printed(report, 150)


def test_what_the_loop_counts_is_per_second_of_the_step_and_of_the_phase(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tokens(run.driver, rollout=4000)
    run.tokens(run.actors[0], train=3000)
    run.tokens(run.actors[1], train=2000)
    report = run.report()
    trained, generated = rate(report, "train"), rate(report, "rollout")
    assert (trained.tokens, trained.source) == (5000, "step_tokens")
    assert trained.per_s == 5000 / 20
    assert trained.active_ns == 11 * S  # the driver's call is part of training
    assert trained.active_per_s == round(5000 / 11, 3)
    assert (trained.devices, trained.unit, trained.per_s_each) == (2, "GPU", 5000 / 20 / 2)
    assert (generated.tokens, generated.per_s, generated.active_ns) == (4000, 200, 8 * S)
    assert generated.active_per_s == 500
    assert (generated.devices, generated.unit) == (1, "replica")  # nothing says how many GPUs it has


def test_what_the_loop_counts_goes_before_attributes_of_spans(tmp_path: Path) -> None:
    run = Run(tmp_path, attrs={"tokens": 700})
    assert counted(run, "train") == (1400, "spans update_actor")
    run.tokens(run.driver, train=9)
    assert counted(run, "train") == (9, "step_tokens")


def test_of_nested_spans_the_outermost_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, attrs={"tokens": 700})
    actor = run.actors[0]
    update = actor.span("update_critic", 10 * S, 12 * S, role="critic", attrs={"tokens": 500})
    actor.span("backward", 11 * S, 12 * S, role="critic", parent=update, attrs={"tokens": 500})
    rates = {(rate.phase, rate.role): rate for rate in throughput(run.report()).rates}
    assert {key: rate.tokens for key, rate in rates.items()} == {
        ("train", "actor"): 1400,
        ("train", "critic"): 500,
    }
    assert rates["train", "critic"].devices == 1
    assert rates["train", "critic"].active_ns == 2 * S


def test_turns_count_before_requests_and_requests_before_the_engines_counters(tmp_path: Path) -> None:
    run = Run(tmp_path / "counters")
    run.engine.counter(
        "generation tokens", {0: 1000.0, 5 * S: 1500.0, 19 * S: 1900.0}, of="replica 0", kind="total"
    )
    assert counted(run, "rollout") == (900, "engines' counters")
    run.engine.span(
        "decode", 1 * S, 7 * S, attrs={"request_id": "a", "output_tokens": 850, "prompt_tokens": 5}
    )
    assert counted(run, "rollout") == (850, "requests")
    run.driver.span("turn", 1 * S, 2 * S, role="agent_loop", trajectory="t1", turn=0, attrs={"tokens": 800})
    assert counted(run, "rollout") == (800, "spans turn")


@pytest.mark.parametrize(("ranks", "world_size", "number"), [(2, 4, 4), (2, None, 2)])
def test_a_recorded_replica_is_counted_by_its_ranks(
    tmp_path: Path, ranks: int, world_size: int | None, number: int
) -> None:
    run = Run(tmp_path)
    run.recorded(ranks=ranks, world_size=world_size)
    run.tokens(run.driver, rollout=4000)
    generated = rate(run.report(), "rollout")
    # The trace of the engine was not read: nothing says that its ranks are GPUs.
    assert (generated.devices, generated.unit, generated.per_s_each) == (number, "rank", 4000 / 20 / number)


def test_mfu_by_hand(tmp_path: Path) -> None:
    run = Run(tmp_path, attrs={"tokens": 50_000})
    run.actors[0].span("compute_ref", 9 * S, 10 * S, role="ref", attrs={"tokens": 3_000})
    # A model of 7e9 parameters: 6 * 7e9 FLOPs per token.
    report = run.report(flops_per_token=42e9)
    uses = {(use.role, use.stage): use for use in throughput(report).uses}
    update, reference = uses["actor", "update_actor"], uses["ref", "compute_ref"]
    assert update.flops == 100_000 * 42e9
    assert (update.device_ns, update.devices, update.device) == (2 * 10 * S, 2, H100)
    # Two GPUs for 10 s have 2 * 10 * 989.5e12 FLOPs; 4.2e15 of them were used.
    assert update.mfu == pytest.approx(4.2e15 / (2 * 10 * 989.5e12), rel=1e-3)
    assert reference.mfu == pytest.approx(3_000 * 42e9 / 3 / (1 * 1 * 989.5e12), rel=1e-3), "forward alone"
    assert set(uses) == {("actor", "update_actor"), ("ref", "compute_ref")}
    scalars = to_scalars(report)
    assert scalars[f"mfu/actor/{update.stage}"] == update.mfu
    assert scalars["throughput/train/actor_tokens_per_second"] == 5000


def test_tokens_of_the_loop_are_those_of_the_outermost_stage_that_trains(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tokens(run.driver, train=90_000)
    (use,) = throughput(run.report(flops_per_token=1e9)).uses
    assert (use.role, use.stage, use.devices) == ("trainer", "update_actor", 2)
    assert use.mfu == pytest.approx(90_000 * 1e9 / (11 * 2 * 989.5e12), rel=1e-3)


def test_an_unknown_device_says_so_and_its_peak_can_be_configured(tmp_path: Path) -> None:
    run = Run(tmp_path, device="Frontier 9000", attrs={"tokens": 50_000})
    report = run.report(flops_per_token=42e9)
    (use,) = throughput(report).uses
    assert (use.device, use.peak_tflops, use.mfu) == ("Frontier 9000", None, None)
    assert use.tflops_each == 210
    text = " ".join(printed(report, 150).split())
    assert "Frontier 9000" in text
    assert "unknown" in text
    assert ".device_peak_tflops" in text
    (use,) = throughput(run.report(flops_per_token=42e9, peak_tflops=420)).uses
    assert use.mfu == 0.5


def test_traces_name_the_devices_of_ranks_and_engines(tmp_path: Path) -> None:
    run = Run(tmp_path, device=None, attrs={"tokens": 50_000})
    run.tokens(run.driver, rollout=4000)
    h200 = [{"id": number, "name": "NVIDIA H200"} for number in range(8)]
    for number, actor in enumerate(run.actors):
        add_trace(run.folder, actor, [kernel("gemm", 11e6, 5.0, device=number)], deviceProperties=h200)
    for rank in range(4):
        add_trace(
            run.folder, run.engine, [kernel("gemm", 1e6, 5.0, device=4 + rank)],
            name=f"rank{rank}", replica=0, topology={"tp": rank}, deviceProperties=h200,
        )  # fmt: skip
    report = run.report(traced=True, flops_per_token=42e9)
    generated, trained = rate(report, "rollout"), rate(report, "train")
    assert (generated.devices, generated.unit, generated.per_s_each) == (4, "GPU", 50)
    assert (trained.devices, trained.unit) == (2, "GPU")
    uses = {use.role: use for use in throughput(report).uses}
    assert uses["actor"].device == "NVIDIA H200"
    assert uses["actor"].mfu == pytest.approx(4.2e15 / (2 * 10 * 989.5e12), rel=1e-3)
    assert uses["rollout"].mfu == pytest.approx(4000 * 42e9 / 3 / (4 * 8 * 989.5e12), rel=1e-3)


def test_without_a_device_a_rate_is_per_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, device=None, attrs={"tokens": 50})
    trained = rate(run.report(), "train")
    assert (trained.devices, trained.unit) == (2, "rank")


def test_the_section_is_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    run = Run(tmp_path, attrs={"tokens": 50_000})
    report = run.report(flops_per_token=42e9)
    page = render_step(load_step(run.folder.layout.root), report)
    for text in (printed(report, 150), page):
        assert "100,000" in text
        assert "spans update_actor" in text
        assert "2 GPUs" in text
        assert "21.2 %" in text


def test_a_real_engines_tokens_are_the_growth_of_its_own_counters() -> None:
    folder = Path(__file__).parent / "recorded_engines" / "vllm-tp" / "step_000005"
    timeline = load_step(folder)
    report = step_report(timeline, load_traces(folder, timeline))
    (file, *_) = sorted(folder.glob("traces/rollout/replica0/*.meta.json"))
    options = json.loads(file.read_bytes())["options"]
    generated = rate(report, "rollout")
    before, after = (options[f"generation_tokens_at_{when}"] for when in ("start", "stop"))
    assert generated.tokens == after - before
    assert generated.source in ("requests", "engines' counters")
    assert (generated.devices, generated.unit) == (options["tensor_parallel_size"], "rank")  # it ran on CPUs
