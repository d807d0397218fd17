"""Data read from torch traces: operators, kernels, devices, iterations, memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.traces import (
    BASE_NS,
    add_trace,
    event,
    kernel,
    memory,
    op,
    trace_text,
    write_trace,
)
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.timeline import Requests, load_step, load_traces
from stepscope_report.timeline.activity import event_names, nesting
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import read_trace
from stepscope_report.timeline.activity.event_names import iteration_of, work_of
from stepscope_report.timeline.activity.intervals import CHUNK, Cover, length
from stepscope_report.timeline.clocks import NOT_NEAR


def read(tmp_path: Path, events: list[Any], **fields: Any) -> TraceContent:
    return read_trace(write_trace(tmp_path / "trace.json", events, **fields))


def test_an_operators_own_time_is_without_those_below_it(tmp_path: Path) -> None:
    content = read(tmp_path, [op("aten::linear", 0, 100), op("aten::t", 10, 20), op("aten::mm", 40, 50),
                              op("aten::empty", 50, 5), op("aten::mm", 200, 10)])  # fmt: skip
    operators = {o.name: (o.count, o.total_us, o.self_us, o.max_us) for o in content.operators}
    assert operators == {
        "aten::linear": (1, 100, 30, 100),
        "aten::t": (1, 20, 20, 20),
        "aten::mm": (2, 60, 55, 50),
        "aten::empty": (1, 5, 5, 5),
    }
    assert [o.name for o in content.operators][:2] == ["aten::mm", "aten::linear"]
    assert content.operators_us == 110


def test_a_range_of_the_user_is_a_mark_whose_own_time_is_between_operators(tmp_path: Path) -> None:
    def mark(name: str, start: float, dur: float) -> Any:
        return event(name, "user_annotation", start, dur)

    events = [mark("ProfilerStep#3", 0, 1000), mark("aten::mm", 10, 400), op("aten::mm", 20, 300),
              op("ReluBackward0", 420, 30), op("detach_", 460, 5), mark("Optimizer.step#SGD.step", 500, 50),
              mark("aten::to, seq = 3, op_id = 7", 900, 20), mark("ProfilerStep#4", 1000, 100),
              event("layer", "gpu_user_annotation", 10, 500, pid=0)]  # fmt: skip
    content = read(tmp_path, events)
    assert {(o.name, o.outer): (o.count, o.total_us, o.self_us) for o in content.operators} == {
        ("ProfilerStep*", True): (2, 1100, 595),
        ("aten::mm", True): (1, 400, 100),
        ("aten::mm", False): (1, 300, 300),
        ("ReluBackward0", False): (1, 30, 30),
        ("detach_", False): (1, 5, 5),
        ("Optimizer.step#SGD.step", True): (1, 50, 50),
        ("aten::to", False): (1, 20, 20),
    }
    assert content.operators_us == 355


def test_marks_with_numbers_in_their_names_are_kept_together(tmp_path: Path) -> None:
    events = [event(f"sample {number}", "user_annotation", number, 1) for number in range(nesting.KEPT + 10)]
    content = read(tmp_path, events)
    assert len(content.operators) == nesting.KEPT + 1
    assert {o.name: o.count for o in content.operators}["other marks"] == 10


def test_threads_do_not_nest_in_each_other(tmp_path: Path) -> None:
    content = read(tmp_path, [op("aten::a", 0, 100, tid=1), op("aten::b", 10, 50, tid=2)])
    assert [(o.name, o.self_us) for o in content.operators] == [("aten::a", 100), ("aten::b", 50)]


@given(st.integers(0, 1000))
def test_a_thread_that_is_not_in_order_is_sorted_first(tmp_path_factory: Any, seed: int) -> None:
    events = [
        op(f"aten::{depth}", start + depth, 90 - 2 * depth) for start in (0, 100, 200) for depth in range(5)
    ]
    shuffled = random.Random(seed).sample(events, len(events))
    folder = tmp_path_factory.mktemp("traces")
    read_back = read(folder, shuffled)
    assert {o.name: o.self_us for o in read_back.operators} == {
        **{f"aten::{depth}": 6 for depth in range(4)},
        "aten::4": 3 * 82,
    }


def test_a_device_is_busy_once_however_many_streams_run(tmp_path: Path) -> None:
    content = read(tmp_path, [
        kernel("sgemm", 0, 100, stream=7), kernel("gelu", 50, 100, stream=13),
        kernel("ncclDevKernel_AllReduce_Sum", 140, 60, stream=20),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 300, 10, 0, 7),
        event("Memset (Device)", "gpu_memset", 305, 15, 0, 7),
        kernel("sgemm", 0, 40, device=1),
    ])  # fmt: skip
    first, second = content.devices
    assert (first.name, first.first_us, first.last_us) == ("GPU 0", 0, 320)
    assert (first.busy_us, first.compute_us, first.memory_us) == (220, 150, 20)
    assert (first.communication_us, first.exposed_us) == (60, 50)
    assert (second.name, second.busy_us) == ("GPU 1", 40)
    assert [(k.name, k.work, k.count, k.total_us) for k in content.kernels[:2]] == [
        ("sgemm", "compute", 2, 140),
        ("gelu", "compute", 1, 100),
    ]


def test_waiting_for_a_collective_is_its_time_without_operators(tmp_path: Path) -> None:
    content = read(tmp_path, [
        op("actor.update_actor", 0, 1000),  # a mark around everything is no operator at work
        op("aten::mm", 10, 90), op("aten::mm", 150, 50),
        event("gloo:all_reduce", "user_annotation", 80, 100, tid=2),
        event("gloo:send", "user_annotation", 300, 100, tid=2),
    ])  # fmt: skip
    assert content.waiting_us == 50
    assert [(c.name, list(c.calls())) for c in content.collectives] == [("gloo:all_reduce", [(80, 180)])]


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("execute_context_2(512)_generation_6(6)", (2, 6, 512, False)),
        ("execute_context_1(888_788544)_generation_0(0)", (1, 0, 888, False)),
        ("execute_518_context_2(sq512sk600sqsq9sqsk8)_generation_6(sq6sk90sqsq6sqsk7)", (2, 6, 512, False)),
        (
            "execute_8192_context_9(sq8155sk8430sqsq7sqsk8)_generation_37(sq37sk34489sqsq37)",
            (9, 37, 8155, False),
        ),
        ("step[EXTEND bs=4 toks=32]", (4, 0, 32, False)),
        ("step[DECODE bs=4]", (0, 4, 0, False)),
        ("step[VERIFY bs=3]", (0, 3, 0, False)),
        ("step[MIXED bs=5]", (5, 0, None, True)),
        # These serve no request.
        ("scheduler.run_batch", None),
        ("execute_context_0(0)_generation_0(0)", None),
        ("step[IDLE bs=0]", None),
        ("step[EXTEND bs=0 toks=0]", None),
        ("step[DRAFT bs=4]", None),
        ("step[PREBUILT bs=2]", None),
    ],
)
def test_an_engines_iterations_are_read_from_its_annotations(
    name: str, requests: tuple[int, int, int | None, bool] | None
) -> None:
    """A mixed batch is both prefill and decode."""
    made = iteration_of(name)
    assert (made and (made.prefills, made.decodes, made.prefill_tokens, made.mixed)) == requests


def test_iterations_on_the_device_are_preferred_to_their_launches(tmp_path: Path) -> None:
    name = "execute_context_0(0)_generation_8(8)"
    content = read(tmp_path, [event(name, "user_annotation", 0, 5),
                              event(name, "gpu_user_annotation", 3, 40, pid=0, tid=7)])  # fmt: skip
    assert [iteration.dur_us for iteration in content.iterations] == [40]


def test_the_memory_peak_of_each_device_is_found(tmp_path: Path) -> None:
    content = read(
        tmp_path,
        [memory(1, 100, 300), memory(2, 250, 400), memory(3, 50, 400), memory(2, 9, kind=0, device=-1)],
        deviceProperties=[{"id": 0, "name": "H100", "totalGlobalMem": 1000}],
    )
    cuda, cpu = content.memory
    assert (cuda.device, cuda.allocated_bytes, cuda.allocated_at_us) == ("cuda:0", 250, 2)
    assert (cuda.reserved_bytes, cuda.capacity_bytes) == (400, 1000)
    assert (cpu.device, cpu.allocated_bytes, cpu.capacity_bytes) == ("cpu", 9, None)
    assert content.device_names == ["H100"]


@pytest.mark.parametrize("layout", ["1.8", "array", "base last"])
def test_older_layouts_are_read(tmp_path: Path, layout: str) -> None:
    events = [
        event("aten::mm", "Operator", 0, 30, pid="CPU"), event("cudaLaunchKernel", "Runtime", 3, 2),
        event("sgemm", "Kernel", 5, 20, 0, "stream 7"), event("Memcpy HtoD", "Memcpy", 1, 2, 0, "stream 7"),
    ]  # fmt: skip
    text = {
        "1.8": json.dumps({"schemaVersion": 1, "traceEvents": events}),
        "array": json.dumps(events),
        "base last": json.dumps({"traceEvents": events, "baseTimeNanoseconds": BASE_NS}),
    }[layout]
    path = tmp_path / "trace.json"
    path.write_text(text)
    content = read_trace(path)
    assert [(o.name, o.self_us) for o in content.operators] == [("aten::mm", 30)]
    assert [(k.name, k.work) for k in content.kernels] == [("sgemm", "compute"), ("Memcpy HtoD", "memory")]
    assert content.runtime
    assert content.base_ns == (BASE_NS if layout == "base last" else None)


def test_what_is_broken_is_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 10), {**op("aten::mm", 20, 10), "ts": None}, op("aten::mm", 40, -5),
              {**op("aten::mm", 60, 10), "pid": [1]}]  # fmt: skip
    text = trace_text(events)[:-2] + b',{"ph": "X", "cat": "cpu_op", "name": "half'
    path = tmp_path / "trace.json"
    path.write_bytes(text)
    content = read_trace(path)
    assert content.operators[0].count == 1
    assert 1 in content.problems.values()
    assert 2 in content.problems.values()
    assert any("cut off" in problem for problem in content.problems)


def test_a_time_that_nobody_can_have_measured_is_counted_and_not_summed(tmp_path: Path) -> None:
    far: list[dict[str, Any]] = [{"ts": 1e306}, {"dur": 1e308}, {"ts": -1e300}, {"dur": 5e15}]
    events = [op("aten::mm", 1e9, 10), *({**op("aten::mm", 1e9 + 20, 10), **fields} for fields in far)]
    content = read(tmp_path, events)
    assert (content.operators[0].count, content.operators[0].total_us) == (1, 10)
    assert (content.first_us, content.last_us) == (1e9, 1e9 + 10)
    assert list(content.problems.values()) == [len(far)]


@pytest.mark.parametrize("wrong", [{"ts": 0}, {"dur": 1e15}, {"ts": 1_683_564_902_137_136}, {"ts": 1.2e10}])
def test_an_event_an_hour_from_all_others_is_left_out_and_counted(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    at = 1_615_207_264_504_915 - BASE_NS // 1000
    events = [kernel("gemm", at + 100 * number, 80) for number in range(50)]
    content = read(tmp_path, [*events[:20], {**kernel("gemm", at, 0), **wrong}, *events[20:]])
    (device,) = content.devices
    assert (content.kernels[0].count, device.busy_us) == (50, 4000)
    assert (content.first_us, content.last_us) == (at, at + 4980)
    assert content.problems == {NOT_NEAR: 1}


def test_a_recording_of_many_hours_is_believed(tmp_path: Path) -> None:
    content = read(tmp_path, [kernel("gemm", 1e9 * number, 80) for number in range(50)])
    assert (content.kernels[0].count, content.problems) == (50, {})


def step_with_traces(tmp_path: Path, ranks: int = 3) -> StepFolder:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).close(10**9)
    for rank in range(ranks):
        actor = folder.process("actor", rank)
        actor.close(10**9)
        add_trace(folder, actor, [op("aten::mm", 1000 * rank, 500)])
    return folder


def test_a_trace_belongs_to_its_process_and_stands_on_the_owners_clock(tmp_path: Path) -> None:
    path = step_with_traces(tmp_path).write()
    traces = load_traces(path, load_step(path))
    assert [(a.name, a.process, a.unaligned) for a in traces.activities] == [
        (f"actor {rank}", rank + 1, None) for rank in range(3)
    ]
    begins = [a.unix_ns(a.content.first_us or 0) - OPENED_NS for a in traces.activities]
    assert begins == [0, 1_000_000, 2_000_000]
    assert (traces.problems, traces.unread) == ((), ())


PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40)


@given(PAIRS, PAIRS, st.integers(1, 5))
def test_covers_are_as_long_as_the_instants_that_are_covered(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]], chunk: int
) -> None:
    cover, other = Cover(chunk=chunk), Cover(chunk=chunk)
    for start, dur in pairs:
        cover.add(start, start + dur)
    for start, dur in others:
        other.add(start, start + dur)
    covered, left = (
        {at for start, dur in some for at in range(start, start + dur)} for some in (pairs, others)
    )
    stretches = cover.stretches()
    assert stretches.length == length(stretches) == len(covered)
    assert length(stretches.leave(other.stretches())) == len(left - covered)


def test_the_work_of_a_kernel_is_known_by_its_name() -> None:
    names = {
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "communication",
        "void vllm::cross_device_reduce_1stage<c10::BFloat16, 2>": "communication",
        "flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>": "communication",
        "void deep_ep::intranode::dispatch<8,768>": "communication",
        "void deep_ep::internode_ll::combine<8>": "communication",
        "void deep_ep::layout::get_dispatch_layout<256>": "compute",
        "two_shot_all_reduce_kernel": "communication",
        "quickreduce::allreduce_prototype_twoshot": "communication",
        "mscclpp_allreduce": "communication",
        "mscclKernel_Sum_half_Simple": "communication",
        "nvshmemi_barrier": "communication",
        "multimem_all_reduce_kernel": "communication",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage)": "communication",
        "hcom_allReduce__331_0_1": "communication",
        "ampere_sgemm_128x64_nn": "compute",
        "void at::native::reduce_kernel<512, 1>": "compute",
        "void at::native::vectorized_elementwise_kernel<4>": "compute",
    }
    assert {name: work_of("kernel", name) for name in names} == names
    assert work_of("gpu_memset", "Memset (Device)") == "memory"


def test_operators_in_any_order_take_few_bytes_each_until_they_are_sorted() -> None:
    """A trace of 300 MB whose threads were out of order took 870 MB."""
    count = 4 * CHUNK
    tracemalloc.start()
    try:
        nested = nesting.Nested()
        for at in range(count):
            nested.threads[0].add(float(count - at), 0.5, nested.number(f"aten::op{at % 7}"))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < 30
    nested.nest()
    assert list(nested.ran[0]) == [(float(at), at + 0.5) for at in range(1, count + 1)]


def test_a_package_names_iterations_of_its_own_and_renames_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "pass<2>": Requests(2, 0, 512),
        "step[DECODE bs=4]": Requests(0, 1),
        "step[EXTEND bs=4]": Requests(0, 0),
    }
    broken = SimpleNamespace(name="broken", load=lambda: 1 / 0)
    points = [broken, SimpleNamespace(name="mine", load=lambda: known.get)]
    monkeypatch.setattr(event_names, "entry_points", lambda group: points)
    event_names._installed.cache_clear()
    event_names.requests_of.cache_clear()
    try:
        read = {name: iteration_of(name) for name in [*known, "step[DECODE bs=8]", "aten::mm"]}
    finally:
        event_names._installed.cache_clear()
        event_names.requests_of.cache_clear()
    counts = {name: iteration and (iteration.prefills, iteration.decodes) for name, iteration in read.items()}
    assert counts == {
        "pass<2>": (2, 0), "step[DECODE bs=4]": (0, 1), "step[EXTEND bs=4]": None,
        "step[DECODE bs=8]": (0, 8), "aten::mm": None,
    }  # fmt: skip
