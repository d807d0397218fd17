"""Each rule speaks when the figures carry it, and not when they do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.cases import (
    Case,
    late_trajectories,
    other_host,
    prompts,
    queue,
    slow_rank,
    tools,
    weights,
)
from packages.report.tests.steps import MS, some
from packages.report.tests.test_report_stalls import expect, recorded
from packages.report.tests.traces import add_trace, event, kernel, memory, op
from stepscope.files.manifest import Expectation, OwnCost
from stepscope.files.sidecar import Artifact
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import Advice, Table, step_health, step_report
from stepscope_report.advice import Evidence
from stepscope_report.sections.advice import step_advice
from stepscope_report.sections.health import say_other
from stepscope_report.sections.long_tail import Late
from stepscope_report.timeline import load_step


def test_a_sound_step_needs_no_advice(case: Case) -> None:
    case.trajectories([480 + index for index in range(20)], decode=(0, 480))
    assert case.advice() == {}


def hang(case: Case) -> None:
    case.driver.span("tool", 100 * MS, None, role="env")


def lost(case: Case) -> None:
    case.driver.dropped = 7


def test_work_for_a_later_step_may_go_on_when_the_capture_closes(case: Case) -> None:
    case.driver.span("trajectory", 600 * MS, None, role="agent_loop", trajectory="next", step=3)
    assert "never-ended" not in case.advice()
    health = step_health(load_step(case.folder.layout.root))
    (other,) = health.other_steps
    assert (health.open_spans, other.spans, other.under_way) == ((), 1, 1)
    assert "; 1 went on" in say_other(other)


@pytest.mark.parametrize("ahead", [True, False])
def test_trajectories_of_a_rollout_that_runs_ahead_may_go_on_too(case: Case, ahead: bool) -> None:
    began_ms = -300 if ahead else 300
    case.driver.span("trajectory", began_ms * MS, 700 * MS, role="agent_loop", trajectory="t1")
    case.driver.span("trajectory", 600 * MS, None, role="agent_loop", trajectory="t2")
    assert ("never-ended" in case.advice()) is not ahead
    health = step_health(load_step(case.folder.layout.root))
    assert (len(health.open_spans), len(health.notes)) == ((0, 1) if ahead else (1, 0))


def by_a_budget(process: FakeProcess) -> None:
    reason = "budget.seconds: open for more than 1 s"
    process.expected.append(
        Expectation(name="spans", kind="spans", state="partial", reason=reason, truncated=reason)
    )


def by_sigterm(process: FakeProcess) -> None:
    process.ended_by = "signal"


@pytest.mark.parametrize(("cut", "expected"), [(by_a_budget, set()), (by_sigterm, {"never-ended"})])
def test_calls_that_were_cut_off_are_no_straggler_and_a_hang_only_with_the_end_of_their_process(
    tmp_path: Path, cut: Callable[[FakeProcess], None], expected: set[str]
) -> None:
    case = Case(tmp_path, update=False)
    case.actors[0].span("update_actor", 900 * MS, None)
    case.actors[1].span("update_actor", 100 * MS, None)
    for process in case.folder.processes:
        cut(process)
    assert case.advice().keys() & {"never-ended", "straggler"} == expected


def test_one_whose_recording_was_cut_is_not_held_against_the_others(tmp_path: Path) -> None:
    case = Case(tmp_path, update=False)
    for actor in case.actors:
        actor.span("update_actor", 500 * MS, 550 * MS)
    for actor in case.actors[1:]:
        actor.span("update_actor", 550 * MS, 950 * MS)
    by_a_budget(case.actors[0])
    case.driver.span("tool", 100 * MS, None, role="env")  # in a process that nothing cut
    assert "straggler" not in case.advice()
    assert "never-ended" in case.advice()


@pytest.mark.parametrize("stage", ["queue", "wait"])
def test_who_waits_longest_is_no_straggler(tmp_path: Path, stage: str) -> None:
    case = Case(tmp_path, update=False)
    for rank, actor in enumerate(case.actors):
        actor.span(stage, 0, (900 if rank == 2 else 100) * MS)
    assert "straggler" not in case.advice()


def test_whole_calls_of_processes_that_were_cut_are_compared(tmp_path: Path) -> None:
    case = Case(tmp_path, update=False)
    for rank, actor in enumerate(case.actors):
        actor.span("save", 0, (900 if rank == 2 else 100) * MS)
        by_sigterm(actor)
    assert "straggler" in case.advice()


def test_the_calls_of_a_killed_process_are_named_and_not_those_that_it_kept_waiting(
    folder: StepFolder,
) -> None:
    driver, actor = folder.process("trainer", owner=True), folder.process("actor", 1)
    driver.span("update", 0, None)
    actor.span("update_actor", 300 * MS, None)
    driver.close(1000 * MS)
    report = step_report(load_step(folder.write()))
    assert [span.process for span in report.health.open_spans] == ["actor 1", "trainer"]
    (advice,) = (advice for advice in report.advice if advice.rule == "never-ended")
    assert advice.what.startswith("1 call ")
    assert re.search("actor 1, .* 300 ms, .* 0$", advice.because[0])


@pytest.mark.parametrize(
    ("rule", "change", "saves_ms"),
    [
        ("never-ended", hang, None),
        ("dropped", lost, None),
        ("unaligned", other_host, None),
        ("long-tail", late_trajectories, 200),
        ("straggler", slow_rank, 36),
        ("queueing", queue, 150),
        ("slow-tools", tools, 200),
        ("prefill-alone", prompts, 200),
        ("weight-sync", weights, 120),
    ],
)
def test_a_rule_speaks_and_names_its_numbers(
    case: Case, rule: str, change: Callable[[Case], None], saves_ms: int | None
) -> None:
    change(case)
    advice = case.advice()
    assert rule in advice
    assert any(char.isdigit() for char in "".join(advice[rule].because)) or rule == "unaligned"
    assert advice[rule].saves_ns == (None if saves_ms is None else pytest.approx(saves_ms * MS, rel=0.02))


def test_the_cost_of_the_capture_is_an_alarm_from_a_tenth_of_the_step_on(tmp_path: Path) -> None:
    assert "profiler-cost" in Case(tmp_path / "dear", cost_ms=200).advice()
    assert "profiler-cost" not in Case(tmp_path / "cheap", cost_ms=50).advice()


def test_who_took_longest_to_record_is_named_with_a_remedy_that_fits(tmp_path: Path) -> None:
    slow = Case(tmp_path / "closing", cost_ms=400)
    critic = slow.folder.process("critic", 0, cost=OwnCost(start_ns=MS, stop_ns=390 * MS))
    info = critic.info
    trace = Artifact(
        path="a", kind="torch_trace", tool="torch", role=info.role, host=info.host, pid=info.pid, size_bytes=1
    )
    critic.expected.append(Expectation(name="torch trace", kind="trace", state="ok", artifacts=(trace,)))
    closing = slow.advice()["profiler-cost"]
    assert re.search("critic 0 .* 1.00 ms .* 390 ms", "\n".join(closing.because))
    assert "for critic 0" in closing.do
    assert "prepare()" not in closing.do
    opening = Case(tmp_path / "opening", cost_ms=400)
    advice = opening.advice()["profiler-cost"]
    assert re.search("^trainer .* 400 ms .* 0 ", advice.because[1])
    assert advice.do.startswith("prepare() ")
    opening.driver.prepared = True  # who called it is not told to
    advice = opening.advice()["profiler-cost"]
    assert "prepare()" not in advice.do
    assert "`Processes`" in advice.do


def test_a_replica_whose_profiler_wrote_while_the_capture_closed_is_named_and_not_its_driver(
    case: Case,
) -> None:
    case.driver.cost = OwnCost(start_ns=10 * MS, stop_ns=950 * MS)
    for replica, end_ms in enumerate((1100, 1940)):
        expect(case.driver, replica, recorded(case.driver, replica, (1000, end_ms)))
    advice = case.advice()["profiler-cost"]
    assert re.search("^replica 1 .* 940 ms$", advice.because[1])
    assert "trainer" not in "".join(advice.because)
    assert "1: fewer iterations" in advice.do


def test_what_the_capture_cost_moves_no_threshold(tmp_path: Path) -> None:
    """A wait of 3 % of the step is one, also where opening took as long as three steps."""
    case = Case(tmp_path, cost_ms=3000)
    save = case.driver.span("save", 955 * MS, 985 * MS)
    for rank, actor in enumerate(case.actors):
        actor.span("save", 955 * MS, (985 if rank == 2 else 960) * MS, link=case.driver.link(save))
    assert case.advice()["straggler"].saves_ns == 25 * MS


def test_a_straggler_without_a_carrier_may_have_kept_nobody_waiting(case: Case) -> None:
    for rank, actor in enumerate(case.actors):
        actor.span("save", 0, (140 if rank == 2 else 80) * MS)
    advice = case.advice()["straggler"]
    assert advice.saves_ns is None
    assert "not known" in advice.because[0]


def test_what_no_span_covers_is_a_blind_spot(tmp_path: Path) -> None:
    advice = Case(tmp_path, update=False).advice()
    assert advice["blind-spot"].saves_ns == 500 * MS


def test_what_unaligned_processes_did_may_be_the_blind_spot(tmp_path: Path) -> None:
    case = Case(tmp_path, update=False)
    other_host(case)
    advice = case.advice()["blind-spot"]
    assert any("1 process whose clock" in why for why in advice.because)


@pytest.mark.parametrize(
    ("late", "consumed", "speaks"),
    [(2, 16, True), (1, 3, True), (1, 2, False), (2, 9, False), (5, 16, False)],
)
def test_trajectories_that_began_before_the_step_may_be_what_it_waits_for(
    case: Case, late: int, consumed: int, speaks: bool
) -> None:
    for number in range(late):
        case.replica.span("decode", 0, (100 + number) * MS, trajectory=f"t{number}")
    case.replica.span("decode", 0, 900 * MS, trajectory="next", step=3)
    for process in case.folder.processes:
        process.close(1000 * MS)
    report = step_report(load_step(case.folder.write()))
    tail = some(report.long_tail)
    assert tail.late == Late(trajectories=late, until_ns=(99 + late) * MS, last=f"t{late - 1}")
    advices = step_advice(
        Evidence(
            breakdown=report.breakdown, critical_path=report.critical_path, baseline=report.baseline,
            stages=Table(report.stages),
            idle=Table(report.idle), long_tail=msgspec.structs.replace(tail, consumed=consumed),
            engines=Table(report.engines), traces=report.traces, health=report.health,
        )
    )  # fmt: skip
    assert [advice.saves_ns for advice in advices if advice.rule == "long-tail"] == [
        (99 + late) * MS
    ] * speaks


@pytest.mark.parametrize("others", [1, 2])
def test_of_two_trajectories_the_last_is_no_long_tail(case: Case, others: int) -> None:
    case.trajectories([300] * others + [500], decode=(0, 300))
    assert ("long-tail" in case.advice()) is (others > 1)


def traces(case: Case, make: Callable[[int, FakeProcess], None]) -> dict[str, Advice]:
    for rank, actor in enumerate(case.actors):
        make(rank, actor)
    return case.advice(traces=True)


@pytest.mark.parametrize(("late_ms", "says"), [(200, "wait for actor 3 in"), (0, "not hidden")])
def test_collectives_are_told_from_late_ranks(case: Case, late_ms: int, says: str) -> None:

    def make(rank: int, actor: FakeProcess) -> None:
        enters = 520_000 + late_ms * 1000 * (rank == 3)
        reduce = event("gloo:all_reduce", "user_annotation", enters, 800_000 - enters, tid=2)
        add_trace(case.folder, actor, [op("aten::mm", 500_000, enters - 500_000), reduce])

    advice = traces(case, make)["collectives"]
    assert says in advice.what
    assert "280 ms, 28.0 %" in advice.because[0]  # of the step of 1 s: a wait is no part of the busy time


def test_ranks_that_are_late_in_turn_wait_for_each_other(case: Case) -> None:

    def make(rank: int, actor: FakeProcess) -> None:
        events = []
        for turn in range(4):
            at = 500_000 + turn * 100_000
            enters = at + 10_000 + 60_000 * (rank == turn)
            events.append(op("aten::mm", at, enters - at))
            events.append(event("gloo:all_reduce", "user_annotation", enters, at + 80_000 - enters, tid=2))
        add_trace(case.folder, actor, events)

    advice = traces(case, make)["collectives"]
    assert "180 ms " in "".join(advice.because)


@pytest.mark.parametrize("reduced_ms", [0, 100])
def test_a_broadcast_of_weights_is_no_gradient_to_reduce(case: Case, reduced_ms: int) -> None:
    case.actors[0].span("sync_weights", 900 * MS, 950 * MS)
    broadcast = event("gloo:broadcast", "user_annotation", 900_000, 45_000, tid=2)
    reduce = event("gloo:all_reduce", "user_annotation", 600_000, reduced_ms * 1000, tid=2)
    add_trace(case.folder, case.actors[0], [op("aten::mm", 500_000, 100_000), broadcast, reduce])
    advice = case.advice(traces=True).get("collectives")
    assert (None if advice is None else advice.saves_ns) == (reduced_ms * MS or None)


@pytest.mark.parametrize(("busy_ms", "speaks"), [(20, True), (300, False)])
def test_a_device_that_waits_is_named(case: Case, busy_ms: int, speaks: bool) -> None:

    def make(rank: int, actor: FakeProcess) -> None:
        add_trace(case.folder, actor, [kernel("gemm", 500_000, busy_ms * 1000), kernel("gemm", 900_000, 10)])

    assert ("idle-device" in traces(case, make)) == speaks


def test_alarms_stand_before_hints_and_the_largest_hint_first(case: Case) -> None:
    queue(case)
    weights(case)
    lost(case)
    advices = list(case.advice().values())
    assert [advice.kind for advice in advices] == ["alarm", "hint", "hint"]
    assert [advice.rule for advice in advices] == ["dropped", "queueing", "weight-sync"]


@pytest.mark.parametrize(("reserved", "speaks"), [(97, True), (60, False)])
def test_memory_that_is_nearly_full_is_an_alarm(case: Case, reserved: int, speaks: bool) -> None:

    def make(rank: int, actor: FakeProcess) -> None:
        properties = [{"id": 0, "name": "H100", "totalGlobalMem": 100}]
        events = [kernel("gemm", 500_000, 400_000), memory(600_000, 50, reserved)]
        add_trace(case.folder, actor, events, deviceProperties=properties)

    advice = traces(case, make)
    assert ("memory-nearly-full" in advice) == speaks
    if speaks:
        assert "fragments" in advice["memory-nearly-full"].do


def test_short_collectives_are_not_worth_a_word(case: Case) -> None:
    def make(rank: int, actor: FakeProcess) -> None:
        reduce = event("gloo:all_reduce", "user_annotation", 520_000, 3000, tid=2)
        add_trace(case.folder, actor, [op("aten::mm", 500_000, 20_000), reduce])

    assert traces(case, make) == {}
