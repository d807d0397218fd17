"""Advice fits the step that it is given for: of each piece a step that gets it, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.cases import Case, other_host, queue, slow_rank, weights
from packages.report.tests.steps import MS
from packages.report.tests.traces import add_trace, event, kernel, memory, op
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Absent, Expectation, OwnCost
from stepscope.files.sidecar import Artifact
from stepscope.files.steps import UncapturedStep
from stepscope.testing.steps import OPENED_NS, FakeProcess
from stepscope_report import Advice, StepReport, phaseless_engines, step_report
from stepscope_report.sections.engines import say_phaseless
from stepscope_report.timeline import load_step

Change = Callable[[Case], None]


def trace_of(process: FakeProcess, tool: str = "torch") -> Artifact:
    info = process.info
    return Artifact(
        path=f"{info.key}.json", kind="torch_trace", tool=tool, role=info.role, stage=None, rank=info.rank,
        world_size=None, host=info.host, pid=info.pid, size_bytes=1,
    )  # fmt: skip


def slower_than_usual(case: Case) -> None:
    usually(case, 700)


def faster_than_usual(case: Case) -> None:
    usually(case, 1150)


def opened_slowly(case: Case) -> None:
    case.driver.cost = OwnCost(start_ns=200 * MS)


def usually(case: Case, wall_ms: int) -> None:
    """Add uncaptured steps of this duration near the step."""
    file = RunLayout(case.folder.layout.root.parent).uncaptured(case.driver.info, "run1")
    file.parent.mkdir(parents=True, exist_ok=True)
    steps = [
        UncapturedStep(step=10 + number, start_ns=OPENED_NS + (2 + number) * 1200 * MS, dur_ns=wall_ms * MS)
        for number in range(8)
    ]
    file.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))


def profiled(*ranks: int, tool: str = "torch") -> Change:
    def change(case: Case) -> None:
        for rank in ranks:
            actor = case.actors[rank]
            actor.profiled = True
            actor.expected.append(
                Expectation(
                    name=f"{tool} trace", kind="trace", state="ok", artifacts=(trace_of(actor, tool),)
                )
            )

    return change


def engine_recorded(case: Case) -> None:
    made = trace_of(case.replica, "vllm")
    case.driver.expected.append(Expectation(name="replica 0", kind="engine", state="ok", artifacts=(made,)))


def dear(case: Case) -> None:
    case.driver.cost = OwnCost(start_ns=100 * MS, stop_ns=300 * MS)


def with_stacks(case: Case) -> None:
    options = {"activities": "cpu", "with_stack": True, "record_shapes": False}
    add_trace(case.folder, case.actors[0], [op("aten::mm", 500_000, 1000)], options=options)


def on_a_gpu(case: Case) -> None:
    add_trace(case.folder, case.actors[0], [kernel("gemm", 500_000, 400_000)])


def on_a_cpu(case: Case) -> None:
    add_trace(case.folder, case.actors[0], [op("aten::mm", 500_000, 400_000)])


def fragmented(case: Case) -> None:
    properties = [{"id": 0, "name": "H100", "totalGlobalMem": 100}]
    events = [kernel("gemm", 500_000, 400_000), memory(600_000, 50, 97)]
    add_trace(case.folder, case.actors[0], events, deviceProperties=properties)


def unhidden(role: str) -> Change:
    """Collectives of two processes, in which all are from the beginning on."""

    def change(case: Case) -> None:
        workers = case.actors[:2]
        if role == "rollout":
            workers = [case.replica, case.folder.process("rollout", 1)]
            for worker in workers:
                worker.span("decode", 500 * MS, 950 * MS)
        for worker in workers:
            reduce = event("gloo:all_reduce", "user_annotation", 520_000, 300_000, tid=2)
            add_trace(case.folder, worker, [op("aten::mm", 500_000, 20_000), reduce])

    return change


def in_collectives_alone(case: Case) -> None:
    """Collectives of the one rank that a profiler recorded."""
    reduce = event("gloo:all_reduce", "user_annotation", 520_000, 300_000, tid=2)
    add_trace(case.folder, case.actors[0], [op("aten::mm", 500_000, 20_000), reduce])


def slow_judge(case: Case) -> None:
    for rank in (0, 1, 2):
        case.folder.process("reward", rank).span("score", 0, (100 + 300 * (rank == 0)) * MS)


def slow_loader(case: Case) -> None:
    for rank, actor in enumerate(case.actors):
        actor.span("load_batch", 952 * MS, (998 if rank == 2 else 962) * MS)


def slow_replica(case: Case) -> None:
    case.replica.span("decode", 0, 400 * MS)
    for rank in (1, 2):
        case.folder.process("rollout", rank).span("decode", 0, 100 * MS)


def weights_in_one_process(case: Case) -> None:
    case.driver.span("generate", 0, 400 * MS, role="rollout")
    case.driver.span("sync_weights", 500 * MS, 700 * MS, role="actor")


def met(case: Case) -> None:
    other_host(case)
    lost = case.folder.processes[-1]
    case.driver.began[lost.info.key] = "critic 0"


def a_death(case: Case) -> None:
    died = Absent(name="actor 9", state="missing", reason="it died", died=True, process="actor_rank9_h_pid9")
    case.driver.absent.append(died)


def lost_a_part(case: Case) -> None:
    case.driver.absent.append(Absent(name="actor 9", state="missing", reason="no part", process="actor_9"))


def an_error(case: Case) -> None:
    case.driver.error = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("rule", "changes", "fits", "not_fits"),
    [
        ("not-typical", [faster_than_usual], "had less to do", "profiler"),
        ("not-typical", [slower_than_usual], "no profiler ran in it", "it is the profiler"),
        ("not-typical", [slower_than_usual, profiled(0)], "it is the profiler", "fewer ranks"),
        ("not-typical", [slower_than_usual, profiled(0, 1)], "profiler: record fewer ranks", "stacks"),
        ("not-typical", [slower_than_usual, profiled(0), with_stacks], "without stacks", "shapes"),
        ("not-typical", [slower_than_usual, profiled(0, tool="nsys")], "it is the profiler", "schedule"),
        ("profiler-cost", [dear], "look at `Processes`", "record less"),
        ("profiler-cost", [dear, profiled(0)], "torch.schedule", "fewer ranks"),
        ("profiler-cost", [dear, profiled(0, 1)], "fewer ranks", "engine"),
        ("profiler-cost", [dear, engine_recorded], "fewer iterations of an engine", "torch.schedule"),
        ("memory-nearly-full", [fragmented], "PYTORCH_CUDA_ALLOC_CONF", "NPU"),
        ("straggler", [slow_rank], "balance the batch by tokens", "requests"),
        ("straggler", [slow_loader], "data loader prefetch", "tokens"),
        ("straggler", [slow_replica], "balance requests", "tokens"),
        ("straggler", [slow_judge], "spread its calls", "balance"),
        ("collectives", [unhidden("actor")], "gradient reduction", "replica"),
        ("collectives", [unhidden("rollout")], "fewer ranks to a replica", "gradient"),
        ("collectives", [in_collectives_alone], "a profiler on all ranks", "buckets"),
        ("uneven-profiling", [slow_rank, profiled(2)], "ranks: all, or profiler: off", "engines"),
        ("uneven-profiling", [slow_replica, engine_recorded], "ranks: all, or no engines", "profiler: off"),
        ("profiler-cost", [dear, engine_recorded, on_a_cpu], "iterations of an engine", "torch.schedule"),
        ("queueing", [queue], "vLLM: max_num_seqs", "slow-tools"),
        ("weight-sync", [weights, on_a_gpu], "NCCL", "HCCL"),
        ("weight-sync", [weights, on_a_cpu], "shared memory", "NCCL"),
        ("weight-sync", [weights], "shared memory", "NCCL"),
        ("weight-sync", [weights_in_one_process, on_a_gpu], "in one call", "NCCL"),
        ("weight-sync", [weights_in_one_process, engine_recorded], "in buckets", "in one call"),
        ("unaligned", [other_host], "give these processes to capture", "exchange"),
        ("unaligned", [met], "the exchange of clocks with them failed", "give these"),
        # The rule stays silent where its cause is not there.
        ("not-typical", [profiled(0)], None, ""),
        ("not-typical", [faster_than_usual, opened_slowly], None, ""),
        ("profiler-cost", [profiled(0, 1)], None, ""),
        ("memory-nearly-full", [on_a_gpu], None, ""),
        ("collectives", [on_a_cpu], None, ""),
        ("collectives", [unhidden("actor"), a_death], None, ""),
        ("collectives", [unhidden("actor"), lost_a_part], None, ""),
        ("not-typical", [slower_than_usual, a_death], None, ""),
        ("straggler", [slow_rank, a_death], "balance the batch by tokens", "requests"),
        ("straggler", [slow_rank, a_death, an_error], None, ""),
        ("memory-nearly-full", [fragmented, a_death, an_error], "PYTORCH_CUDA_ALLOC_CONF", "NPU"),
        ("queueing", [weights], None, ""),
        ("weight-sync", [queue], None, ""),
        ("unaligned", [weights], None, ""),
        ("uneven-profiling", [slow_rank, profiled(0, 1, 2, 3)], None, ""),
        ("uneven-profiling", [slow_rank], None, ""),
        ("straggler", [slow_rank, profiled(2)], None, ""),
        ("no-rollout", [slow_rank], None, ""),
        ("vain-wait", [queue], None, ""),
    ],
)  # fmt: skip
def test_advice_names_what_fits_the_step_and_nothing_else(
    case: Case, rule: str, changes: list[Change], fits: str | None, not_fits: str
) -> None:
    for change in changes:
        change(case)
    advice = case.advice(traces=True)
    assert (rule in advice) is (fits is not None)
    if fits is not None:
        assert fits in advice[rule].do
        assert not_fits not in advice[rule].do


def test_the_cost_of_the_capture_is_no_alarm_and_stands_behind_the_steps_own_story(case: Case) -> None:
    for change in (dear, slow_rank, queue, profiled(0)):
        change(case)
    advice: list[Advice] = list(case.advice().values())
    assert advice[-1].rule == "profiler-cost"
    assert advice[-1].kind == "hint"
    assert len(advice) > 2


@pytest.mark.parametrize("given", [False, True])
def test_an_engine_that_was_given_is_not_asked_for(case: Case, given: bool) -> None:
    case.replica.span("request", 0, 100 * MS)
    if given:
        engine_recorded(case)
    for process in case.folder.processes:
        process.close(1000 * MS)
    timeline = load_step(case.folder.write())
    text = say_phaseless(phaseless_engines(timeline, ()))
    assert ("capture(engines=" in text) is not given
    assert ("engines given" in text) is given


# Advice about a step that an `instrument` entry captured: its reader can change no code.


IN_CODE = ("prepare()", "capture(", "span(", "profile_step", "decorate", "trajectory(")


def unedited(case: Case) -> StepReport:
    case.driver.opened_by = "instrument"
    for process in case.folder.processes:
        process.close(1000 * MS)
    return step_report(load_step(case.folder.write()))


def costly(folder: Path) -> Case:
    return Case(folder, cost_ms=400)


def blind(folder: Path) -> Case:
    return Case(folder, update=False)


def apart(folder: Path) -> Case:
    case = Case(folder)
    other_host(case)
    return case


def supervised(folder: Path) -> Case:
    case = Case(folder, update=False)
    case.driver.span("update", 0, 900 * MS, role="critic")
    case.driver.span("never", 900 * MS, None)
    return case


@pytest.mark.parametrize("make", [costly, blind, apart, supervised])
def test_no_advice_asks_for_a_line_of_code(tmp_path: Path, make: Callable[[Path], Case]) -> None:
    advice = unedited(make(tmp_path)).advice
    assert advice
    assert not [line.do for line in advice for word in IN_CODE if word in line.do]


def test_phases_are_not_asked_for(case: Case) -> None:
    """Its framework calls `generate`, and no entry of the reader's could take that apart."""
    case.replica.span("answer", 0, 400 * MS)
    assert unedited(case).phaseless == ()


def slow_actor(case: Case) -> None:
    case.driver.cost = OwnCost(start_ns=10 * MS, stop_ns=390 * MS)
    case.actors[0].cost = OwnCost(start_ns=MS, stop_ns=380 * MS)


@pytest.mark.parametrize(
    ("recorded", "remedy"),
    [
        ([engine_recorded, profiled(0)], "spans alone cost next to nothing: roles: {actor: {profiler: off}}"),
        ([engine_recorded, profiled(0, 1)], "record less for actor 0: fewer ranks; or export.when: deferred"),
        ([engine_recorded], "look at `Processes`: a busy worker, or a slow folder, makes all others wait"),
        ([], "look at `Processes`: a busy worker, or a slow folder, makes all others wait"),
    ],
)
def test_a_slow_process_is_advised_on_by_what_recorded_it(
    case: Case, recorded: list[Callable[[Case], None]], remedy: str
) -> None:
    for change in (slow_actor, *recorded):
        change(case)
    advice = {advice.rule: advice for advice in unedited(case).advice}["profiler-cost"]
    assert advice.because[1].startswith("actor 0 took longest")
    assert advice.do == remedy
