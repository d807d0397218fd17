"""FLOPs that traces hold, against torch's own counter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from stepscope import ProfileConfig, capture, flush, span
from stepscope.files.layout import RunLayout
from stepscope_report import step_report
from stepscope_report.timeline import load_step, load_traces
from stepscope_report.timeline.activity.content_reader import read_trace


class Block(torch.nn.Module):
    """A block of a transformer whose heads share keys and values."""

    def __init__(self, width: int, heads: int, attends: bool) -> None:
        super().__init__()
        self.heads, self.attends = heads, attends
        self.query = torch.nn.Linear(width, width)
        self.key, self.value = torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.attends:
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = torch.softmax(query @ key.transpose(-1, -2), -1) @ value
        x = x + mixed.transpose(1, 2).reshape(batch, length, width)
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def train(block: Block) -> None:
    block(torch.randn(3, 16, 32)).square().mean().backward()


def traced(path: Path, block: Block, option: str = "") -> float:
    flops, shapes = option == "with_flops", option == "record_shapes"
    with profile(activities=[ProfilerActivity.CPU], with_flops=flops, record_shapes=shapes) as profiler:
        train(block)
    profiler.export_chrome_trace(str(path))
    return sum(read_trace(path).flops.counts)


@pytest.mark.parametrize("option", ["with_flops", "record_shapes"])
def test_products_of_a_real_step_are_those_that_torch_counts(tmp_path: Path, option: str) -> None:
    block = Block(32, 4, attends=False)
    with FlopCounterMode(display=False) as counter:
        train(block)
    assert traced(tmp_path / "trace.json", block, option) == counter.get_total_flops() > 0


def test_fused_attention_counts_as_its_products_do(tmp_path: Path) -> None:
    apart = traced(tmp_path / "apart.json", Block(32, 4, attends=False), "with_flops")
    fused = traced(tmp_path / "fused.json", Block(32, 4, attends=True), "with_flops")
    # The gradient of the fused one computes the scores again: batch 3, heads 4, length 16, width 8.
    assert fused - apart == 2 * 3 * 4 * 16 * 16 * 8


def test_a_trace_without_shapes_has_no_flops(tmp_path: Path) -> None:
    assert traced(tmp_path / "trace.json", Block(32, 4, attends=True)) == 0


def test_times_bound_what_counts_and_odd_shapes_count_nothing(tmp_path: Path) -> None:
    dims: tuple[object, ...] = ([[4, 8], [8, 2]], [[4, 8], [8, 16]], "odd", [[4, 8]], [["a"], []], [[], []])
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0 * at, "dur": 5.0,
         "args": {"Input Dims": shapes}}
        for at, shapes in enumerate(dims)
    ]  # fmt: skip
    events.append(
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 90.0, "dur": 5.0}
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    content = read_trace(path)
    assert list(content.flops.counts) == [2 * 4 * 8 * 2, 2 * 4 * 8 * 16]
    assert content.flops.between(0, 10) == 128
    assert content.flops.between(0, 10.001) == 1152
    assert content.problems == {}
    assert sum(operator.count for operator in content.operators) == 7


def test_a_captured_steps_stages_have_the_flops_that_ran_in_them(tmp_path: Path) -> None:
    block = Block(32, 4, attends=False)
    config = ProfileConfig.from_mapping(
        {
            "save_path": str(tmp_path),
            "steps": [1],
            "torch": {"activities": ["cpu"], "with_flops": True},
            "throughput": {"device_peak_tflops": 1e-3},
        }
    )
    with FlopCounterMode(display=False) as counter:
        train(block)
    whole = counter.get_total_flops()
    with capture(1, config=config, role="actor"):
        for _ in range(3):
            with span("update", role="actor"):
                train(block)
        with span("compute_log_prob", role="actor"), torch.no_grad():
            block(torch.randn(3, 16, 32))
    assert flush(60) == []
    timeline = load_step(RunLayout(tmp_path).step(1).root)
    report = step_report(timeline, load_traces(RunLayout(tmp_path).step(1).root, timeline))
    assert report.throughput is not None
    uses = {use.stage: use for use in report.throughput.uses}
    assert uses["update"].flops == 3 * whole
    # Of the first layers' inputs torch computes no gradient, here: forward is more than a third.
    assert whole / 3 < uses["compute_log_prob"].flops < whole / 2
    (stage,) = [stage for stage in report.stages if stage.stage == "update"]
    assert uses["update"].source == "operators"
    assert uses["update"].mfu == pytest.approx(3 * whole / (stage.total_ns / 1e9) / 1e9, rel=0.02)
