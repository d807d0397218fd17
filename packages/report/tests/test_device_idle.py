"""Causes of idle devices, and time by label, against culprits that were planted."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.test_plain_traces import trace

HOST = 100
Json = dict[str, Any]


def on_host(cat: str, name: str, start: float, end: float, *, thread: int = HOST, **args: object) -> Json:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": thread, "ts": start, "dur": end - start,
        "args": args,
    }  # fmt: skip


def launched(start: float, end: float, number: int, call: float | None, *, thread: int = HOST) -> list[Json]:
    """Return a kernel and the call that launched it."""
    args = {"device": 0, "stream": 7, "correlation": number}
    ran = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start, "dur": end - start}
    launch = () if call is None else [
        on_host("cuda_runtime", "cudaLaunchKernel", call, call + 2, thread=thread, correlation=number)
    ]  # fmt: skip
    return [ran | {"args": args}, *launch]


FRAME = "train.py(41): step"
CULPRITS: dict[str, list[Json]] = {
    "synchronisation": [
        on_host("cpu_op", "aten::item", 20, 112),
        on_host("cuda_runtime", "cudaStreamSynchronize", 30, 111),
        on_host("cpu_op", "aten::mm", 112, 190),
    ],
    "data loader": [
        on_host("cuda_runtime", "cudaStreamSynchronize", 30, 111),
        on_host("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 115, 185),
    ],
    "garbage collection": [on_host("python_function", "Python GC", 105, 190)],
    "compilation": [on_host("cpu_op", "_compile.compile_inner (dynamo_timed)", 105, 190)],
    "memory allocation": [on_host("cuda_runtime", "cudaMalloc", 105, 190)],
    "copies": [on_host("cuda_runtime", "cudaMemcpyAsync", 105, 190)],
    "collective": [on_host("user_annotation", "gloo:all_reduce", 105, 190)],
    "slow launches": [on_host("cpu_op", "aten::mm", 105, 190)],
    "no operator": [],
}


@pytest.mark.parametrize("kind", CULPRITS)
def test_a_planted_culprit_is_the_cause_of_the_gap(tmp_path: Path, command: Command, kind: str) -> None:
    frames = [
        on_host("python_function", "train.py(3): <module>", 0, 400),
        on_host("python_function", FRAME, 5, 200),
        on_host("python_function", "torch/_tensor.py(9): wrapped", 10, 195),
        on_host("python_function", "<built-in method item of Tensor object at 0x7f>", 15, 192),
    ]
    kernels = [*launched(10, 100, 1, 2), *launched(200, 300, 2, 195), *launched(310, 320, 3, 250)]
    trace(tmp_path / "rank0.json", [*frames, *kernels, *CULPRITS[kind]])
    rows = {row["kind"]: row for row in command("report", tmp_path, "--json").json["gaps"]}
    assert {name: row["total_ns"] for name, row in rows.items() if name != "edges"} == {
        kind: 100_000,
        "queued": 10_000,
    }
    assert rows[kind]["place"] == FRAME
    if kind == "synchronisation":
        assert rows[kind]["call"] == "cudaStreamSynchronize in aten::item"


@pytest.mark.parametrize(("loads", "kind"), [((5, 90), "data loader"), ((5, 20), "edges")])
def test_a_first_batch_that_is_slow_has_a_cause(
    tmp_path: Path, command: Command, loads: tuple[float, float], kind: str
) -> None:
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    events = [
        on_host("user_annotation", "ProfilerStep#1", 0, 300),
        on_host("user_annotation", loader, *loads),
        on_host("python_function", FRAME, 0, 300),
        *launched(100, 200, 1, 95),
    ]
    trace(tmp_path / "rank0.json", events)
    printed = command("report", tmp_path, "--json").json
    (before,) = (row for row in printed["gaps"] if row["kind"] == kind)
    assert before["longest_ns"] == 100_000
    assert before["place"] == (FRAME if kind == "data loader" else "")
    (step,) = printed["traces"]["steps"]
    assert step["gaps"][kind] == (100_000 if kind == "data loader" else 200_000)


@pytest.mark.parametrize("kind", ["garbage collection", "data loader"])
def test_a_gap_behind_the_last_kernel_has_a_cause(tmp_path: Path, command: Command, kind: str) -> None:
    step = on_host("user_annotation", "ProfilerStep#1", 0, 200)
    trace(tmp_path / "rank0.json", [step, *launched(1, 100, 1, 0), *CULPRITS[kind]])
    rows = {row["kind"]: row["total_ns"] for row in command("report", tmp_path, "--json").json["gaps"]}
    assert rows[kind] == 100_000


@pytest.mark.parametrize(
    ("runtime", "call", "kind"),
    [
        ("mtia_runtime", "synchronizeStream", "synchronisation"),
        ("xpu_runtime", "urQueueFinish", "synchronisation"),
        ("xpu_runtime", "urEventWait", "synchronisation"),
        ("xpu_runtime", "urEnqueueUSMMemcpy", "copies"),
        ("xpu_runtime", "urUSMDeviceAlloc", "memory allocation"),
        ("xpu_runtime", "urUSMFree", "memory allocation"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "no operator"),
    ],
)
def test_calls_of_other_devices_are_causes_too(
    tmp_path: Path, command: Command, runtime: str, call: str, kind: str
) -> None:
    held = on_host(runtime, call, 30 if kind == "synchronisation" else 105, 190)
    trace(tmp_path / "rank0.json", [*launched(10, 100, 1, 2), *launched(200, 300, 2, 195), held])
    rows = {row["kind"]: row["total_ns"] for row in command("report", tmp_path, "--json").json["gaps"]}
    assert rows[kind] == 100_000


def test_gaps_of_a_step_add_up_to_its_idle_time(tmp_path: Path, command: Command) -> None:
    chance, at, events = random.Random(3), 40.0, list[Json]()
    for number in range(300):
        start = at + chance.choice((0, 1, 30))
        events += launched(start, at := start + chance.randrange(1, 50), number, start - chance.randrange(40))
    for number in range(3):
        bounds = (at * number / 3, at * (number + 1) / 3)
        events.append(on_host("user_annotation", f"ProfilerStep#{number}", *bounds))
    trace(tmp_path / "rank0.json", events)
    steps = command("report", tmp_path, "--json").json["traces"]["steps"]
    assert len(steps) == 3
    for step in steps:
        assert sum(step["gaps"].values()) == pytest.approx(step["idle_ns"], abs=10)


def test_arguments_of_other_types_do_not_hide_those_of_the_right_type(
    tmp_path: Path, command: Command
) -> None:
    late, *_ = launched(200, 300, 2, None)
    late["args"] |= {"device": "cuda:0", "Collective name": 7, "Input Dims": "none"}
    call = on_host("cuda_runtime", "cudaLaunchKernel", 50, 52, correlation=2, device=[0])
    trace(tmp_path / "rank0.json", [*launched(10, 100, 1, 2), late, call])
    rows = command("report", tmp_path, "--json").json["gaps"]
    assert [row["total_ns"] for row in rows if row["kind"] == "queued"] == [100_000]


def test_a_kernel_belongs_to_the_label_of_its_launch(tmp_path: Path, command: Command) -> None:
    marks = [
        on_host("user_annotation", "ProfilerStep#4", 0, 300),
        on_host("user_annotation", "forward", 10, 60),
        on_host("user_annotation", "attention", 12, 40),
        on_host("user_annotation", "backward", 60, 290),
    ]
    kernels = [
        *launched(30, 80, 1, 15),
        *launched(80, 100, 2, 50),
        *launched(150, 250, 3, 140, thread=HOST + 1),  # of autograd, whose thread has no labels
    ]
    trace(tmp_path / "rank0.json", [*marks, *kernels])
    rows = command("report", tmp_path, "--json").json["labels"]
    times = {tuple(row["path"]): (row["cpu_ns"], row["busy_ns"], row["idle_ns"]) for row in rows}
    assert list(times) == [
        ("ProfilerStep*",),
        ("ProfilerStep*", "backward"),
        ("ProfilerStep*", "forward"),
        ("ProfilerStep*", "forward", "attention"),
    ]
    assert list(times.values()) == [
        (300_000, 170_000, 130_000),
        (230_000, 100_000, 90_000),
        (50_000, 70_000, 20_000),
        (28_000, 50_000, 18_000),
    ]


def test_labels_of_the_cpu_alone_have_no_device_time(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [on_host("user_annotation", "rollout", 0, 90)])
    report = command("report", tmp_path, "--json").json
    assert [(row["path"], row["busy_ns"]) for row in report["labels"]] == [(["rollout"], None)]
    assert report["gaps"] == []


def recorded_steps(folder: Path, kernel_us: float, steps: range, mark: str = "ProfilerStep#{}") -> Path:
    """Write steps of 100 us each, with an optimizer's step and a kernel that was launched late."""
    events = list[Json]()
    for step in steps:
        at = step * 100.0
        events += launched(at + 20, at + 20 + kernel_us + step % 3, step + 1, at + 19)
        events += [
            on_host("user_annotation", mark.format(step), at, at + 100),
            on_host("user_annotation", "Optimizer.step#AdamW.step", at + 80, at + 90),
            on_host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 40, at + 60),
        ]
    return trace(folder / "rank0.json", events).parent


def test_steps_are_those_that_the_user_names_else_of_the_optimizer(tmp_path: Path, command: Command) -> None:
    folder = recorded_steps(tmp_path, 30, range(6), mark="train batch")
    steps = command("report", folder, "--json").json["traces"]["steps"]
    assert [(step["step"], step["dur_ns"]) for step in steps] == [(n, 100_000) for n in range(1, 6)]
    steps = command("report", folder, "--json", "--step-mark", "train*").json["traces"]["steps"]
    assert [(step["step"], step["dur_ns"]) for step in steps] == [(n, 100_000) for n in range(6)]
    assert {(step["backward_ns"], step["optimizer_ns"], step["forward_ns"]) for step in steps} == {
        (20_000, 10_000, None)
    }
    refused = command("report", folder, "--step-mark", "epoch", code=2)
    assert "train batch" in refused.err  # the names that there are
    assert "Optimizer.step#AdamW.step" in refused.err


def test_a_report_of_some_steps_is_that_of_a_recording_of_these_alone(
    tmp_path: Path, command: Command
) -> None:
    """Beside the steps lie a range that holds all of them, and a trace that tells no step."""
    parts = recorded_steps(tmp_path / "a", 30, range(8)), recorded_steps(tmp_path / "b", 30, range(2, 4))
    around = on_host("user_annotation", "epoch", 0, 800), on_host("user_annotation", "epoch", 200, 400)
    for folder, whole in zip(parts, around, strict=True):
        file = folder / "rank0.json"
        document = json.loads(file.read_bytes())
        document["traceEvents"] = [whole, *document["traceEvents"][1:]]  # without `trace`'s own operator
        file.write_text(json.dumps(document))
    trace(parts[0] / "other.json", [on_host("cpu_op", "aten::mm", 0, 5)])
    some, alone = (
        command("report", folder, *options, "--json").json
        for folder, options in ((parts[0], ("--step", "2-3")), (parts[1], ()))
    )
    assert [step["step"] for step in some["traces"]["steps"]] == [2, 3]
    assert some["window_ns"] == alone["window_ns"]
    labels = ([row | {"gaps": None} for row in report["labels"]] for report in (some, alone))
    assert next(labels) == next(labels)
    for key in ("operators", "devices"):
        assert some["traces"][key] == alone["traces"][key], key
    idle = sum(step["idle_ns"] for step in alone["traces"]["steps"])
    assert sum(row["total_ns"] for row in some["gaps"]) == idle
    # What came before and after is known, so that no gap is at the edge of the recording.
    assert {row["kind"] for row in some["gaps"]} == {"no operator"} != {row["kind"] for row in alone["gaps"]}
    assert [step["gaps"] for step in some["traces"]["steps"]] == [
        {"no operator": 68_000},
        {"no operator": 70_000},
    ]
    assert any("other.json" in file for file in some["traces"]["unread"])
    command("report", parts[0], "--step", "2-3", "--json", "--jobs", "2")
    assert f"{parts[0]} --step 2-3 -o" in command("report", parts[0], "--step", "2-3", "--brief").out
    assert "0, 1, 2, 3" in command("report", parts[0], "--step", "9", code=1).err


def test_steps_of_two_recordings_are_compared_and_gated(tmp_path: Path, command: Command) -> None:
    slow = recorded_steps(tmp_path / "a", 20, range(8)), recorded_steps(tmp_path / "b", 40, range(8))
    change = command("diff", *slow, "--json").json
    assert change["a"]["step_ns"] == change["b"]["step_ns"] == 100_000
    deltas = {row["stage"]: (row["delta_ns"], row["apart"]) for row in change["changes"]}
    assert deltas["computation and copies"] == (20_000, True)
    assert sum(delta for delta, _ in deltas.values()) == 0
    limit = ("--stage", "computation and copies", "--fail-above", "10%")
    assert command("diff", *slow, "--json", *limit, code=1).json["gate"]["failed"] is True
    command("diff", *slow, "--stage", "backward", "--fail-above", "10%")


def test_labels_within_steps_are_compared(tmp_path: Path, command: Command) -> None:
    def recorded(name: str, long: float) -> Path:
        events = [on_host("user_annotation", "warm up", 0, 90 + long)]
        for number, at in enumerate((200, 500, 800)):
            events += [
                on_host("user_annotation", f"ProfilerStep#{number}", at, at + 300),
                on_host("user_annotation", "encoder", at + 10, at + 20 + long),
                on_host("user_annotation", "vision", at + 11, at + 12 + long * number),
            ]
        return trace(tmp_path / name / "rank0.json", events).parent

    sides = recorded("a", 10), recorded("b", 70)
    rows = command("diff", *sides, "--json").json["labels"]
    assert [(row["stage"], row["a"]["wall_ns"], row["b"]["wall_ns"], row["apart"]) for row in rows] == [
        ("encoder", 20_000, 80_000, True),
        ("encoder / vision", 11_000, 71_000, False),
    ]
    rows = command("diff", *sides, "--json", "--steps-a", "1", "--steps-b", "2").json["labels"]
    assert [row["delta_ns"] for row in rows] == [130_000, 60_000]
    for option in ((), ("--markdown",)):
        assert "encoder / vision" in command("diff", *sides, *option).out
        assert "encoder" not in command("diff", sides[0], sides[0], *option).out


def test_phases_of_steps_on_the_cpu_are_compared(tmp_path: Path, command: Command) -> None:
    for name, backward_us in (("a", 300), ("b", 450)):
        events = []
        for number in range(5):
            at = 1000.0 * number
            events += [
                on_host("user_annotation", f"ProfilerStep#{number}", at, at + 1000),
                on_host("user_annotation", "forward", at, at + 200),
                on_host("user_annotation", "backward", at + 200, at + 200 + backward_us),
            ]
        trace(tmp_path / name / "rank0.json", events)
    sides = tmp_path / "a", tmp_path / "b"
    phases = {row["stage"]: row["delta_ns"] for row in command("diff", *sides, "--json").json["phases"]}
    assert phases == {"forward": 0, "backward": 150_000}
    assert "backward 300 us 450 us +150 us * +15.0" in " ".join(command("diff", *sides).out.split())


def test_steps_of_the_slowest_of_many_ranks_are_printed(tmp_path: Path, command: Command) -> None:
    for rank in range(9):
        steps = [on_host("user_annotation", "ProfilerStep#1", 0, 100 + 10 * rank)]
        trace(tmp_path / f"rank{rank}.json", steps, rank=rank, pid=100 + rank)
    printed = command("report", tmp_path).out
    assert re.findall(r"Steps of (rank \d)", printed) == ["rank 5", "rank 6", "rank 7", "rank 8"]
    assert "4 of 9 processes, with the longest steps." in printed


@pytest.mark.parametrize("name", ["cudaMemcpy", "hipMemcpyWithStream", "aclrtSynchronizeStream"])
def test_a_copy_that_blocks_drains_the_queue(tmp_path: Path, command: Command, name: str) -> None:
    """Torch on ROCm reads a number by hipMemcpyWithStream."""
    item = on_host("cpu_op", "aten::item", 20, 112), on_host("cuda_runtime", name, 30, 111)
    trace(tmp_path / "rank0.json", [*launched(10, 100, 1, 2), *launched(200, 300, 2, 195), *item])
    rows = {row["kind"]: row for row in command("report", tmp_path, "--json").json["gaps"]}
    assert rows["synchronisation"]["call"] == f"{name} in aten::item"


@pytest.mark.parametrize(("call_us", "kind"), [(2, "queued"), (4000, "no operator")])
def test_a_kernel_that_waits_on_the_device_after_its_launch_is_queued(
    tmp_path: Path, command: Command, call_us: float, kind: str
) -> None:
    """As behind an event of a stream whose work was not recorded; but not while the call itself goes on."""
    last, call = launched(5000, 5010, 2, 140)
    call["dur"] = call_us
    trace(tmp_path / "rank0.json", [*launched(10, 100, 1, 2), last, call])
    report = command("report", tmp_path, "--json").json
    assert {row["kind"]: row["total_ns"] for row in report["gaps"]}[kind] == 4_900_000
    assert [advice["rule"] for advice in report["advice"]] == [kind.replace(" ", "-")]
