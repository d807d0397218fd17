"""Settings that advice names: of each rule a step, what it changes there, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from packages.report.tests.cases import Case, prompts, queue, slow_rank, tools
from packages.report.tests.steps import MS
from packages.report.tests.traces import add_trace, event, kernel, memory, op
from stepscope.files.counters import (
    EVENT_LOOP,
    GPU,
    KV_CACHE,
    PREEMPTIONS,
    RUNNING_REQUESTS,
    WAITING_REQUESTS,
)
from stepscope.files.manifest import FrameworkSettings, Setting
from stepscope_report import Advice, SettingChange
from stepscope_report.advice.remedies import REMEDIES
from stepscope_report.sections.advice import say_change

PRESENT: dict[str, tuple[Any, ...]] = {
    "agent_workers": ("agents", 8),
    "async_rollout": ("beside", False, True),
    "balance_batch": ("even batches", False, True),
    "balance_requests": ("router", "round_robin", "power_of_two"),
    "checkpointing": ("recompute", False, True),
    "cuda_graphs": ("eager", True, False),
    "kv_memory": ("kv memory", 0.6),
    "max_requests": ("slots", 64),
    "micro_batch": ("micro batch", 4),
    "mixed_prefill": ("chunks", False, True),
    "overlap_gradients": ("overlap", False, True),
    "partial_rollout": ("mode", "sync", "async"),
    "prefix_caching": ("no prefixes", True, False),
    "replicas": ("engines", 2),
    "response_length": ("answer tokens", 512),
    "reward_workers": ("judges", 2),
    "tensor_parallel": ("tp", 4),
    "tool_pool": ("tools", 8),
    "trajectories": ("episodes", 16),
    "weight_bucket": ("bucket MB", 512),
    "fast_weights": ("backend", "gloo", "nccl"),
}


def named(framework: str = "mine", /, **settings: tuple[Any, ...]) -> FrameworkSettings:
    return FrameworkSettings(
        framework=framework,
        version="1.2",
        settings=tuple(
            Setting(knob=knob, name=name, value=value, better=rest[0] if rest else None)
            for knob, (name, value, *rest) in settings.items()
        ),
    )


def replica_counters(case: Case, *, used: float, running: float = 40, waiting: float = 0) -> None:
    for name, values in (
        (KV_CACHE, (10, used, used)),
        (RUNNING_REQUESTS, (8, running, running)),
        (WAITING_REQUESTS, (0, waiting, 0)),
    ):
        case.replica.counter(name, dict(zip((0, 100 * MS, 200 * MS), values, strict=True)), of="replica 0")


def full_cache(case: Case) -> None:
    replica_counters(case, used=99, running=42)
    case.replica.counter(PREEMPTIONS, {0: 3, 900 * MS: 8}, of="replica 0", kind="total")


def queues(case: Case) -> None:
    queue(case)
    replica_counters(case, used=50, running=64, waiting=30)


def idle_gpu(case: Case) -> None:
    tools(case)
    case.driver.counter(GPU, {0: 0.0, 900 * MS: 0.0}, of="GPU 0", unit="%", kind="interval", scope="host")


def late_loop(case: Case) -> None:
    loop = case.folder.process("agent_loop", 0)
    loop.counter(EVENT_LOOP, {0: 0, 500 * MS: 300}, of="MainThread", unit="ms", kind="interval")


def late_judge(case: Case) -> None:
    judge = case.folder.process("reward", 0)
    judge.counter(EVENT_LOOP, {0: 0, 500 * MS: 300}, of="MainThread", unit="ms", kind="interval")


def slow_replica(case: Case) -> None:
    other = case.folder.process("rollout", 1)
    case.replica.span("decode", 0, 450 * MS)
    other.span("decode", 0, 100 * MS)


def tail_of(stage: str, role: str, *, wait: bool = False) -> Callable[[Case], None]:
    """Return a step whose last trajectories had 200 ms more of a stage than the others."""

    def change(case: Case) -> None:
        for index in range(20):
            is_last, name = index >= 18, f"t{index}"
            end_ms = 500 if is_last else 300
            above = case.driver.span("trajectory", 0, end_ms * MS, role="agent_loop", trajectory=name)
            for part, of, start, end in (("decode", "rollout", 0, 290), (stage, role, 290, end_ms)):
                case.replica.span(
                    part, start * MS, end * MS, role=of, trajectory=name, link=case.driver.link(above),
                    attrs={"wait": True} if wait and part == stage else None,
                )  # fmt: skip

    return change


def begun_later(case: Case) -> None:
    for index in range(20):
        start_ns, name = (200 * MS if index >= 18 else 0), f"t{index}"
        times = start_ns, start_ns + 300 * MS
        above = case.driver.span("trajectory", *times, role="agent_loop", trajectory=name)
        case.replica.span("decode", *times, role="rollout", trajectory=name, link=case.driver.link(above))


def in_collectives(process: str, late_ms: int = 0) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        ranks = case.actors if process == "actor" else [case.replica, case.folder.process("rollout", 1)]
        for rank, actor in enumerate(ranks):
            enters = 520_000 + late_ms * 1000 * (rank == len(ranks) - 1)
            reduce = event("gloo:all_reduce", "user_annotation", enters, 800_000 - enters, tid=2)
            add_trace(case.folder, actor, [op("aten::mm", 500_000, enters - 500_000), reduce])

    return change


def waiting_device(process: str, reserved: int = 30) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        properties = [{"id": 0, "name": "H100", "totalGlobalMem": 100}]
        recorded = case.actors[0] if process == "actor" else case.replica
        events = [kernel("gemm", 100_000, 9000), memory(200_000, 28, reserved), kernel("gemm", 900_000, 10)]
        add_trace(case.folder, recorded, events, deviceProperties=properties)

    return change


def full_memory(process: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        properties = [{"id": 0, "name": "H100", "totalGlobalMem": 100}]
        recorded = case.actors[0] if process == "actor" else case.replica
        events = [kernel("gemm", 500_000, 400_000), memory(600_000, 96, 97)]
        add_trace(case.folder, recorded, events, deviceProperties=properties)

    return change


def weights_to_replicas(case: Case) -> None:
    case.actors[0].span("sync_weights", 880 * MS, 1000 * MS)


class Expected(NamedTuple):
    change: Callable[[Case], None]
    lines: tuple[str, ...]
    """Lines of the advice that the rule gives."""


CASES: dict[str, Expected] = {
    "collectives: late": Expected(in_collectives("actor", 200), ("even batches: False -> True",)),
    "collectives: rollout": Expected(in_collectives("rollout"), ("tp: 4 -> lower",)),
    "collectives: training": Expected(in_collectives("actor"), ("overlap: False -> True",)),
    "full-kv-cache": Expected(full_cache, ("slots: 64 -> 40", "kv memory: 0.6 -> higher")),
    "idle-device: rollout": Expected(waiting_device("rollout"), ("eager: True -> False",)),
    "idle-device: training": Expected(waiting_device("actor"), ("micro batch: 4 -> 8",)),
    "idle-while-tools-run": Expected(idle_gpu, ("tools: 8 -> 10", "episodes: 16 -> higher")),
    "late-event-loop: agent_loop": Expected(late_loop, ("agents: 8 -> higher",)),
    "late-event-loop: reward": Expected(late_judge, ("judges: 2 -> higher",)),
    "long-tail: generation": Expected(
        tail_of("decode", "rollout"),
        ("mode: sync -> async", "beside: False -> True", "answer tokens: 512 -> lower"),
    ),
    "long-tail: later": Expected(begun_later, ("episodes: 16 -> higher",)),
    "long-tail: queue": Expected(tail_of("queue", "rollout"), ("slots: 64 -> higher", "engines: 2 -> 3")),
    "long-tail: reward": Expected(tail_of("score", "reward"), ("judges: 2 -> higher",)),
    "long-tail: tool": Expected(tail_of("tool", "env"), ("tools: 8 -> 20",)),
    "memory-nearly-full: rollout": Expected(full_memory("rollout"), ("kv memory: 0.6 -> lower",)),
    "memory-nearly-full: training": Expected(
        full_memory("actor"), ("micro batch: 4 -> 2", "recompute: False -> True")
    ),
    "prefill-alone": Expected(prompts, ("no prefixes: True -> False", "chunks: False -> True")),
    "queueing": Expected(queues, ("slots: 64 -> 96", "engines: 2 -> 3")),
    "slow-tools": Expected(tools, ("tools: 8 -> 10",)),
    "straggler: rollout": Expected(slow_replica, ("router: round_robin -> power_of_two",)),
    "straggler: training": Expected(slow_rank, ("even batches: False -> True",)),
    "weight-sync": Expected(weights_to_replicas, ("backend: gloo -> nccl", "bucket MB: 512 -> higher")),
}


def advice_of(case: Case, rule: str, *settings: FrameworkSettings) -> Advice:
    case.driver.settings = settings
    return case.advice(traces=True)[rule]


def lines_of(changes: Iterable[SettingChange]) -> tuple[str, ...]:
    return tuple(say_change(change) for change in changes)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_rule_names_the_settings_that_it_turns(case: Case, remedy: str) -> None:
    expected = CASES[remedy]
    expected.change(case)
    advice = advice_of(case, remedy.partition(":")[0], named(**PRESENT))
    assert lines_of(advice.settings) == tuple(f"mine: {line}" for line in expected.lines)


def test_without_a_framework_advice_is_what_it_was(case: Case) -> None:
    queues(case)
    assert case.advice()["queueing"].settings == ()


def crowded(used: float) -> Callable[[Case], None]:
    """Return a step whose requests wait beside a cache that is used so far."""

    def change(case: Case) -> None:
        queue(case)
        replica_counters(case, used=used, running=64, waiting=30)

    return change


def weights_without_a_device(case: Case) -> None:
    weights_to_replicas(case)
    add_trace(case.folder, case.actors[0], [op("aten::mm", 500_000, 400_000)])


class Fitting(NamedTuple):
    """Settings of a run, and lines of the advice that a rule gives there."""

    rule: str
    change: Callable[[Case], None]
    settings: dict[str, tuple[Any, ...]]
    lines: tuple[str, ...]


SLOTS = {"max_requests": ("slots", 64)}
FITTING: dict[str, Fitting] = {
    "a wait for a judge is a matter of judges": Fitting(
        "long-tail", tail_of("wait_for_reward", "agent_loop", wait=True), PRESENT, ("judges: 2 -> higher",)
    ),
    "40 fit": Fitting("full-kv-cache", full_cache, {"max_requests": ("slots", 32)}, ()),
    "unknown": Fitting("full-kv-cache", full_cache, {"max_requests": ("slots", None)}, ("slots: 40",)),
    "of several": Fitting(
        "full-kv-cache", full_cache, {**SLOTS, "data_parallel": ("dp", 2)}, ("slots: 64 -> lower",)
    ),
    "a full device": Fitting("full-kv-cache", full_cache, {"kv_memory": ("kv memory", 0.95)}, ()),
    # More requests are suggested as far as the cache holds them.
    "half a cache": Fitting("queueing", crowded(50.0), SLOTS, ("slots: 64 -> 96",)),
    "a fuller cache": Fitting("queueing", crowded(80.0), SLOTS, ("slots: 64 -> 76",)),
    "a full cache": Fitting("queueing", crowded(99.0), SLOTS, ()),
    "replicas are not added where training has the same devices": Fitting(
        "queueing", queue, {"replicas": ("engines", 2), "colocated": ("together", True)}, ()
    ),
    "replicas may be counted in devices": Fitting(
        "queueing", queue, {"rollout_devices": ("num-gpus", 8), "tensor_parallel": ("tp", 2)},
        ("num-gpus: 8 -> 10",),
    ),
    "a micro batch is doubled if the memory is there": Fitting(
        "idle-device", waiting_device("actor", 47), PRESENT, ("micro batch: 4 -> 8",)
    ),
    "and is higher if it is not": Fitting(
        "idle-device", waiting_device("actor", 48), PRESENT, ("micro batch: 4 -> higher",)
    ),
    "dynamic batches have no micro batch": Fitting(
        "idle-device", waiting_device("actor"),
        {"micro_batch": ("micro", 4), "micro_tokens": ("tokens", 8192), "dynamic_batch": ("dynamic", True)},
        ("tokens: 8192 -> 16384",),
    ),
    "weights do not go from device to device where there is none": Fitting(
        "weight-sync", weights_without_a_device, PRESENT, ("bucket MB: 512 -> higher",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_settings_are_named_as_they_fit_the_step(case: Case, name: str) -> None:
    fitting = FITTING[name]
    fitting.change(case)
    advice = advice_of(case, fitting.rule, named(**fitting.settings))
    assert lines_of(advice.settings) == tuple(f"mine: {line}" for line in fitting.lines)


def test_a_framework_is_named_rather_than_its_engine_and_differing_processes_have_no_value(
    case: Case,
) -> None:
    full_cache(case)
    requests = Setting(knob="max_requests", name="max_num_seqs", value=64)
    low, high = (
        Setting(knob="kv_memory", name="gpu_memory_utilization", value=value) for value in (0.5, 0.7)
    )
    engine = FrameworkSettings(framework="vllm", engine=True, settings=(requests, low))
    other = FrameworkSettings(framework="vllm", engine=True, settings=(high,))
    case.replica.settings, case.actors[0].settings = (engine,), (other,)
    advice = advice_of(case, "full-kv-cache", named(max_requests=("rollout.max_num_seqs", 64)))
    assert lines_of(advice.settings) == (
        "mine: rollout.max_num_seqs: 64 -> 40",
        "vllm: gpu_memory_utilization: higher",
    )
