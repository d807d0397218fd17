"""Advice from traces alone: each rule speaks of the fault that was planted, and no other does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.test_device_idle import launched, on_host
from packages.report.tests.test_plain_traces import BASE_NS, RECORDED, trace
from stepscope_report.advice.kernels import is_single

Json = dict[str, Any]
KERNELS = 400


def sound(
    gap_us: float = 0.0,
    dur_us: float = 50.0,
    name: str = "gemm_bf16",
    late: bool = False,
    every: int = 1,
    cause: Callable[[float, float], list[Json]] | None = None,
) -> list[Json]:
    """Return kernels one behind the other, launched long before.

    Args:
        gap_us: Time before each `every`-th kernel in which nothing runs.
        late: True if that kernel is launched at the end of the gap.
        cause: Makes the events of a gap, from its start and end.
    """
    events, at = list[Json](), 100.0
    for number in range(1, KERNELS + 1):
        held = gap_us if number % every == 0 else 0.0
        start = at + held
        call = start - 1 if late and held else max(0.0, at - 90)
        made = launched(start, start + dur_us, number, call)
        made[0]["name"] = name
        events += made + (cause(at, start) if cause is not None and held else [])
        at = start + dur_us
    return events


def slow(kind: str, name: str) -> list[Json]:
    """Return kernels before which the program is in something for 40 us."""
    return sound(40, late=True, every=4, cause=lambda start, end: [on_host(kind, name, start + 1, end - 2)])


def streams(share: int) -> list[Json]:
    """Return kernels of which each `share`-th runs on a stream of its own, alone."""
    events = sound()
    for number, kernel in enumerate(event for event in events if event["cat"] == "kernel"):
        if number % share == 0:
            kernel["tid"] = kernel["args"]["stream"] = 8
    return events


def optimizer(kernels: str) -> list[Json]:
    marks = [on_host("user_annotation", "Optimizer.step#AdamW.step", 10, 2000)]
    return [*sound(), *marks, on_host("cpu_op", kernels, 20, 30)]


def memory(reserved: int) -> list[Json]:
    args = {"Device Type": 1, "Device Id": 0, "Total Allocated": 60 << 30, "Total Reserved": reserved}
    return [*sound(), {"ph": "i", "name": "[memory]", "pid": 100, "tid": 100, "ts": 5.0, "args": args}]


def called(times: int) -> list[Json]:
    """Return short calls of one operator on the CPU."""
    return [on_host("cpu_op", "aten::mul", 10 * number, 10 * number + 3) for number in range(times)]


def renamed(old: str, new: str, every: int) -> list[Json]:
    events = sound()
    for number, event in enumerate(events):
        if event["name"] == old and number % every == 0:
            event["name"] = new
            event["cat"] = "gpu_memcpy" if new.startswith("Memcpy") else event["cat"]
    return events


def synchronised(start: float, end: float) -> list[Json]:
    return [on_host("cuda_runtime", "cudaStreamSynchronize", start - 30, start + 3)]


FAULTS: dict[str, list[Json]] = {
    "sync-in-loop": sound(40, late=True, every=4, cause=synchronised),
    "synchronisation": sound(900, late=True, every=200, cause=synchronised),
    "data-loader": slow("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    "garbage-collection": slow("python_function", "Python GC"),
    "recompilation": slow("user_annotation", "entire_frame_compile (dynamo_timed)"),
    "allocation": slow("cuda_runtime", "cudaFree"),
    "blocking-copies": slow("cuda_runtime", "cudaMemcpyAsync"),
    "host-collectives": slow("user_annotation", "gloo:all_reduce"),
    "slow-launches": slow("cpu_op", "aten::mm"),
    "no-operator": sound(40, late=True, every=4),
    "small-kernels": sound(2, dur_us=4),
    "unpinned-copies": renamed("gemm_bf16", "Memcpy HtoD (Pageable -> Device)", 40),
    "exposed-copies": renamed("gemm_bf16", "Memcpy HtoD (Pinned -> Device)", 8),
    "exposed-communication": renamed("gemm_bf16", "ncclDevKernel_AllReduce", 4),
    "unfused-optimizer": optimizer("aten::_foreach_add_"),
    "single-precision": sound(name="ampere_sgemm_128x64_tn"),
    "uneven-streams": streams(4),
    "memory-headroom": memory(79 << 30),
    "small-operators": called(1000),
}
SOUND = {
    "nothing": sound(),
    "few operators": called(900),
    "fused": optimizer("aten::_fused_adamw_"),
    "headroom": memory(61 << 30),
    "pinned": renamed("gemm_bf16", "Memcpy HtoD (Pinned -> Device)", 40),
}


def rules(folder: Path, command: Command) -> set[str]:
    return {advice["rule"] for advice in command("report", folder, "--json").json["advice"]}


@pytest.mark.parametrize("rule", [*FAULTS, *SOUND])
def test_the_rule_of_a_planted_fault_speaks_and_no_other(tmp_path: Path, command: Command, rule: str) -> None:
    path = trace(tmp_path / "rank0.json", FAULTS.get(rule, SOUND.get(rule, [])))
    if "memory" in rule or rule == "headroom":
        properties = json.dumps([{"id": 0, "name": "H100", "totalGlobalMem": 80 << 30}])
        path.write_text(f'{{"deviceProperties": {properties}, {path.read_text()[1:]}')
    assert rules(tmp_path, command) == {rule} & FAULTS.keys()


SUMMED = ["unpinned-copies", "exposed-copies", "unfused-optimizer", "single-precision"]


@pytest.mark.parametrize("rule", SUMMED)
def test_ranks_that_run_at_once_save_the_time_of_one(tmp_path: Path, command: Command, rule: str) -> None:
    def saves_ns(ranks: int) -> int:
        for rank in range(ranks):
            trace(tmp_path / f"{ranks}" / f"rank{rank}.json", FAULTS[rule], rank=rank, pid=100 + rank)
        (advice,) = command("report", tmp_path / f"{ranks}", "--json").json["advice"]
        return int(advice["saves_ns"])

    assert saves_ns(2) == saves_ns(1) > 0


@pytest.mark.parametrize("rule", ["single-precision", "uneven-streams"])
def test_what_takes_less_than_a_hundredth_of_the_time_is_no_advice(
    tmp_path: Path, command: Command, rule: str
) -> None:
    trace(tmp_path / "rank0.json", [*FAULTS[rule], on_host("cpu_op", "aten::mm", 4e6, 4e6 + 5)])
    assert rules(tmp_path, command) == set()


def test_the_label_of_most_idle_time_is_named(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", slow("user_annotation", "tokenize"))
    (advice,) = command("report", tmp_path, "--json").json["advice"]
    assert advice["rule"] == "no-operator"
    assert advice["because"][-1] == f"most in tokenize: {0.037 * KERNELS / 4:.2f} ms"


@pytest.mark.parametrize(("loading_us", "said"), [(30, {"data-loader"}), (3, set())])
def test_a_data_loader_is_told_without_a_device(
    tmp_path: Path, command: Command, loading_us: int, said: set[str]
) -> None:
    events = list[Json]()
    for step in range(4):
        at, end = step * 100, step * 100 + loading_us
        events += [
            on_host("user_annotation", f"ProfilerStep#{step}", at, at + 100),
            on_host(
                "user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, end
            ),
        ]
    trace(tmp_path / "rank0.json", events)
    advice = command("report", tmp_path, "--json").json["advice"]
    assert {one["rule"] for one in advice} == said
    assert all(one["do"].startswith("num_workers is 0") for one in advice)


def test_all_processes_that_wait_for_their_data_are_named(tmp_path: Path, command: Command) -> None:
    for rank, loading_us in enumerate((30, 40, 3)):
        events = [
            on_host("user_annotation", "ProfilerStep#1", 0, 100),
            on_host("user_annotation", "enumerate(DataLoader)#_MultiProcessing", 0, loading_us),
        ]
        trace(tmp_path / f"rank{rank}.json", events, rank=rank, pid=100 + rank)
    (advice,) = command("report", tmp_path, "--json").json["advice"]
    assert advice["what"] == "rank 1, rank 0 wait for their data loaders"
    assert advice["because"] == ["rank 1: 40.0 us of the 100 us of its steps"]


def write_late_rank(folder: Path, late_us: float, run: int = 0) -> None:
    """Write the traces of three ranks, of which one computes longer before each all-reduce.

    Args:
        run: Number of the run. Each begins 1,000 s after the one before.
    """
    for rank in range(3):
        events, at = list[Json](), 100.0
        for number in range(0, 40, 2):
            computed = 2 * late_us + (late_us if rank == 1 else 0.0)
            ended = at + 3.1 * late_us
            compute = launched(at, at + computed, number + 1, at - 80)
            reduce = launched(at + computed, ended, number + 2, at - 80)
            reduce[0]["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            prepared = on_host("user_annotation", "tokenize", at, at + computed - 1.5 * late_us)
            events += [*compute, *reduce, prepared]
            at = ended
        base_ns, pid = BASE_NS + run * 10**12, 100 + 10 * run + rank
        trace(folder / f"{run}rank{rank}.json", events, rank=rank, pid=pid, base_ns=base_ns)


def test_ranks_of_another_run_do_not_wait_for_a_late_one(tmp_path: Path, command: Command) -> None:
    def said(folder: Path) -> tuple[object, object]:
        report = command("report", folder, "--json").json
        (late,) = (advice for advice in report["advice"] if advice["rule"] == "stragglers")
        return late["saves_ns"], late["because"]

    write_late_rank(tmp_path / "both", 10_000.0)
    write_late_rank(tmp_path / "both", 8_000.0, run=1)
    write_late_rank(tmp_path / "one", 10_000.0)
    assert said(tmp_path / "both") == said(tmp_path / "one")


def test_ranks_that_wait_for_one_and_compute_less_are_told(tmp_path: Path, command: Command) -> None:
    write_late_rank(tmp_path, 10_000.0)
    advice = {one["rule"]: one for one in command("report", tmp_path, "--json").json["advice"]}
    assert advice.keys() == {"stragglers", "uneven-work", "exposed-communication"}
    assert "tokenize: 300 ms there, 100 ms on the others" in advice["stragglers"]["because"]


def test_no_rank_is_late_by_what_a_scheduler_takes(tmp_path: Path, command: Command) -> None:
    write_late_rank(tmp_path, 2_000.0)
    assert rules(tmp_path, command) == {"uneven-work", "exposed-communication"}


@pytest.mark.parametrize("engine", ["vllm-dp/step_000001", "vllm-tp/step_000005", "sglang-dp/step_000001"])
def test_all_rules_are_silent_on_traces_of_real_engines(
    engine: str, tmp_path: Path, command: Command
) -> None:
    for file in (RECORDED / engine / "traces" / "rollout" / "replica0").glob("*.json.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert rules(tmp_path, command) == set()


NAMES = {
    "volta_sgemm_64x64_nt": True,
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32": True,
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>": True,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>": False,
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8": False,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64": False,
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8": True,
    "Cijk_Ailk_Bljk_BBS_BH_Bias_AS": False,
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": False,
}


@pytest.mark.parametrize(("name", "single"), NAMES.items())
def test_names_of_real_kernels_tell_the_precision(name: str, single: bool) -> None:
    assert is_single(name) is single
