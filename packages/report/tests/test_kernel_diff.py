"""Operators and kernels that changed between two captured steps, from their traces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.steps import MS
from packages.report.tests.traces import add_trace, event, kernel, op
from stepscope import ProfileConfig, capture, span
from stepscope.testing.steps import StepFolder
from stepscope_report.timeline import load_step, load_traces
from stepscope_report.timeline.activity.content_reader import read_trace
from stepscope_report.timeline.activity.nesting import KEPT, OTHERS
from stepscope_report.timeline.activity.split import by_stage


def step(path: Path, number: int, *ranks: list[Any], stage: str | None = None) -> Path:
    """Write a step whose actors have these events in a trace each, and return its folder."""
    folder = StepFolder(path, step=number)
    folder.process("trainer", owner=True).span("train", 0, 20 * MS)
    folder.processes[0].close(20 * MS)
    for rank, events in enumerate(ranks):
        actor = folder.process("actor", rank=rank)
        actor.span("update", 0, 10 * MS)
        actor.close(20 * MS)
        add_trace(folder, actor, events, stage=stage)
    return folder.write()


def kernels_of(a: Path, b: Path, command: Command) -> Any:
    return command("diff", a, b, "--kernels", "--json").json["kernels"]


def test_operators_and_kernels_that_grew_appeared_or_vanished_are_listed_by_size(
    tmp_path: Path, command: Command
) -> None:
    mark = event("update", "user_annotation", 0, 9000)
    before = [mark, op("aten::linear", 0, 100), op("aten::mm", 10, 50), kernel("gemm", 100, 400)]
    products = [op("aten::mm", 10, 80), op("aten::mm", 200, 20)]
    after = [op("aten::linear", 0, 100), *products, kernel("attn", 100, 700)]
    a, b = step(tmp_path, 2, before), step(tmp_path, 3, after)
    rows = kernels_of(a, b, command)["changes"]
    told = [
        (row["kind"], row["name"], row["a_ns"], row["b_ns"], row["a_calls"], row["b_calls"]) for row in rows
    ]
    assert told == [
        ("kernel", "attn", 0, 700_000, 0, 1),
        ("kernel", "gemm", 400_000, 0, 1, 0),
        ("operator", "aten::mm", 50_000, 100_000, 1, 2),
        ("operator", "aten::linear", 50_000, 20_000, 1, 1),
    ]
    assert {(row["role"], row["stage"]) for row in rows} == {("actor", "update")}
    assert all(row["delta_ns"] == row["b_ns"] - row["a_ns"] for row in rows)


def test_another_number_of_profiled_ranks_or_steps_is_no_change(tmp_path: Path, command: Command) -> None:
    a = step(tmp_path / "a", 2, [op("aten::mm", 0, 50)]).parent
    step(tmp_path / "b", 2, *([op("aten::mm", 0, 50)] for _ in range(2)))
    b = step(tmp_path / "b", 3, *([op("aten::mm", 0, 50)] for _ in range(2))).parent
    assert kernels_of(a, b, command)["changes"] == []
    assert "traces changed." in " ".join(command("diff", a, b, "--kernels").out.split())


def test_a_stage_that_one_side_has_no_trace_of_is_named_and_not_compared(
    tmp_path: Path, command: Command
) -> None:
    a = step(tmp_path, 2, [op("aten::mm", 0, 50)], stage="update")
    b = step(tmp_path, 3)
    kernels = kernels_of(a, b, command)
    assert (kernels["changes"], kernels["only_a"], kernels["only_b"]) == ([], [["actor", "update"]], [])
    shown = command("diff", a, b, "--kernels", "--markdown")
    assert re.search("Not compared.* A .*: actor", shown.out)


def test_a_damaged_trace_is_named_and_the_exit_code_says_so(tmp_path: Path, command: Command) -> None:
    a, b = (step(tmp_path, number, [op("aten::mm", 0, 50)]) for number in (2, 3))
    (trace,) = b.glob("traces/actor/*.json.gz")
    trace.write_bytes(trace.read_bytes()[:60])
    command("diff", a, b)
    assert trace.name in command("diff", a, b, "--kernels", code=3).err


def test_without_the_option_no_trace_is_read(tmp_path: Path, command: Command) -> None:
    a, b = (step(tmp_path, number, [op("aten::mm", 0, 50)]) for number in (2, 3))
    assert command("diff", a, b, "--json").json["kernels"] is None


@pytest.mark.needs("torch")
def test_of_torch_the_operator_that_a_step_has_more_of_is_first(tmp_path: Path, command: Command) -> None:
    import torch

    config = ProfileConfig(
        save_path=str(tmp_path),
        steps=["every:1"],
        roles={"*": {"ranks": "all"}},
        torch={"activities": ["cpu"], "record_shapes": True},
    )
    left, right = torch.ones(256, 256), torch.ones(256, 128)
    torch.mm(left, right)  # the first one loads a library
    for number, products in ((2, 1), (3, 60)):
        with capture(number, config=config) as recorded, span("train"):
            torch.relu(left)
            for _ in range(products):
                torch.mm(left, right)
        assert recorded.result is not None
        assert recorded.result.wait(60)
    (first, *_) = kernels_of(tmp_path / "step_000002", tmp_path / "step_000003", command)["changes"]
    assert (first["name"], first["a_calls"], first["b_calls"]) == ("aten::mm", 1, 60)
    assert first["delta_ns"] > 0
    assert [part["shapes"] for part in first["shapes"]] == ["[[256, 256], [256, 128]]"]


def shaped(start: int, dur: int, rows: int) -> Any:
    """Return a matrix product of a trace with shapes."""
    return {**op("aten::mm", start, dur), "args": {"Input Dims": [[rows, 64], [64, 32]]}}


def test_an_operator_s_shapes_that_changed_most_stand_below_it(tmp_path: Path, command: Command) -> None:
    no_shapes = {**op("aten::rand", 400, 10), "args": {}}
    a = step(tmp_path, 2, [shaped(0, 100, 8), shaped(200, 100, 16), no_shapes])
    b = step(
        tmp_path, 3, [shaped(0, 100, 8), shaped(200, 100, 16), shaped(400, 150, 16), shaped(600, 40, 32)]
    )
    (product, other) = kernels_of(a, b, command)["changes"]
    assert (product["name"], product["a_ns"], product["b_ns"]) == ("aten::mm", 200_000, 390_000)
    parts = [(part["shapes"], part["delta_ns"], part["b_calls"]) for part in product["shapes"]]
    assert parts == [("[[16, 64], [64, 32]]", 150_000, 2), ("[[32, 64], [64, 32]]", 40_000, 1)]
    assert (other["name"], other["shapes"]) == ("aten::rand", [])
    assert "[[32, 64], [64, 32]]" in command("diff", a, b, "--kernels", "--markdown").out


def test_shapes_of_one_side_alone_are_no_change(tmp_path: Path, command: Command) -> None:
    a = step(tmp_path, 2, [shaped(0, 100, 8)])
    b = step(tmp_path, 3, [{**op("aten::mm", 0, 130), "args": {}}])
    (product,) = kernels_of(a, b, command)["changes"]
    assert (product["delta_ns"], product["shapes"]) == (30_000, [])


@pytest.mark.slow
def test_many_and_long_shapes_keep_the_operator_s_own_time(tmp_path: Path, command: Command) -> None:
    a = step(tmp_path, 2, [shaped(2 * number, 1, number) for number in range(KEPT + 50)])
    many = {**op("aten::stack", 9_000, 5), "args": {"Input Dims": [[[4, 4]] * 500]}}
    b = step(tmp_path, 3, [shaped(2 * number, 1, number) for number in range(KEPT + 50)] + [many])
    (stack,) = kernels_of(a, b, command)["changes"]
    assert (stack["name"], stack["delta_ns"]) == ("aten::stack", 5_000)
    assert [part["shapes"] for part in stack["shapes"]] == [OTHERS]
    content = read_trace(next(a.glob("traces/actor/*.json.gz")))
    assert sum(operator.count for operator in content.operators) == KEPT + 50
    assert len(content.operators) == KEPT + 1


def test_steps_without_traces_are_named(tmp_path: Path, command: Command) -> None:
    a, b = step(tmp_path, 2), step(tmp_path, 3)
    assert "Neither side" in " ".join(command("diff", a, b, "--kernels").out.split())


def in_stages(path: Path, number: int, forward: float, backward: float) -> Path:
    """Write a step of one actor with nested stages, of which the trace is of the whole step."""
    folder = StepFolder(path, step=number)
    folder.process("trainer", owner=True).span("train", 0, 20 * MS)
    folder.processes[0].close(20 * MS)
    actor = folder.process("actor", rank=0)
    actor.span("update", 1 * MS, 18 * MS)
    actor.span("backward", 10 * MS, 15 * MS, parent=1)
    actor.close(20 * MS)
    events = [
        op("aten::mm", 100, 40),  # before any stage
        op("aten::mm", 2_000, forward),
        kernel("gemm", 4_000, 100),
        op("aten::mm", 11_000, backward, tid=2),
        kernel("gemm", 12_000, backward),
        op("aten::mm", 16_000, 10),
    ]
    add_trace(folder, actor, events)
    return folder.write()


def test_a_trace_of_the_whole_step_is_split_by_the_innermost_stage(tmp_path: Path, command: Command) -> None:
    a, b = in_stages(tmp_path, 2, 300, 500), in_stages(tmp_path, 3, 320, 900)
    told = [
        (row["stage"], row["name"], row["a_ns"], row["b_ns"], row["a_calls"])
        for row in kernels_of(a, b, command)["changes"]
    ]
    assert told == [
        ("backward", "aten::mm", 500_000, 900_000, 1),
        ("backward", "gemm", 500_000, 900_000, 1),
        ("update", "aten::mm", 310_000, 330_000, 2),
    ]


def test_iterations_of_an_engine_are_stages(tmp_path: Path, command: Command) -> None:
    def engine(number: int, prefill: float, decode: float) -> Path:
        mark = "user_annotation"
        folder = StepFolder(tmp_path, step=number)
        folder.process("trainer", owner=True).span("train", 0, 20 * MS)
        folder.processes[0].close(20 * MS)
        replica = folder.process("rollout", replica=0)
        replica.span("generate", MS // 2, 3 * MS)
        replica.span("generate", MS + MS // 20, 3 * MS)  # it arrives in the middle of an iteration
        replica.span("queue", MS + MS // 20, 2 * MS, attrs={"wait": True})
        replica.close(20 * MS)
        events = [
            event("execute_context_1(64)_generation_0(0)", mark, 0, 900),
            op("aten::mm", 100, prefill),
            event("execute_context_0(0)_generation_3(3)", mark, 1000, 900),
            op("aten::mm", 1100, decode),
            op("aten::sample", 1950, 10),
            event("execute_context_0(0)_generation_3(3)", mark, 2000, 900),
            op("aten::mm", 2100, decode),
        ]
        add_trace(folder, replica, events)
        return folder.write()

    a, b = engine(2, 300, 50), engine(3, 310, 80)
    rows = kernels_of(a, b, command)["changes"]
    assert [(row["stage"], row["delta_ns"], row["a_calls"]) for row in rows] == [
        ("decode", 60_000, 2),
        ("prefill", 10_000, 1),
    ]
    timeline = load_step(a)
    split = by_stage(a, timeline, load_traces(a, timeline).activities)
    assert {part.stage: [row.name for row in part.content.operators] for part in split} == {
        "prefill": ["aten::mm"], "decode": ["aten::mm"], "generate": ["aten::sample"],
    }  # fmt: skip
