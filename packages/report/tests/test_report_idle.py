"""Idle processes and their probable causes, computed by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.pictures import rl_step
from packages.report.tests.steps import MS, Row, a_step, close
from packages.report.tests.traces import add_trace, event, kernel, op
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import Idle, idle_times
from stepscope_report.sections.idle import say_causes, say_collectives
from stepscope_report.timeline import load_step, load_traces


def rows(folder: StepFolder, *, traces: bool = False) -> dict[str, Idle]:
    path = folder.write()
    timeline = load_step(path)
    activities = load_traces(path, timeline).activities if traces else ()
    return {row.process: row for row in idle_times(timeline, activities)}


def causes(row: Idle) -> list[tuple[str, str | None, int]]:
    return [(cause.kind, cause.stage, cause.wall_ns // MS) for cause in row.causes]


def step(tmp_path: Path) -> StepFolder:
    """Rollout to 400 ms; weights of actor 0 to 500; ref to 600; update on rank 0 to 700, on rank 1 to 900."""
    rows: list[Row] = [
        ("trainer/agent_loop rollout", 0, 400), ("trainer update", 600, 950), ("rollout decode", 0, 400),
        ("actor sync_weights", 400, 500), ("actor:1 update_actor", 600, 900),
        ("ref compute_log_prob", 500, 600), ("actor update_actor", 600, 700),
    ]  # fmt: skip
    return a_step(tmp_path, 1000, rows)


def test_each_idle_instant_has_its_likely_cause(tmp_path: Path) -> None:
    by_process = rows(step(tmp_path))
    assert causes(by_process["actor 0"]) == [
        ("rollout", "decode", 400),
        ("slowest rank", "update_actor", 200),
        ("other work", "compute_log_prob", 100),
        ("not known", None, 50),
        ("other work", "update", 50),
    ]
    assert causes(by_process["actor 1"])[1] == ("weight sync", "sync_weights", 100)
    assert (by_process["actor 0"].busy_ns, by_process["actor 1"].busy_ns) == (200 * MS, 300 * MS)


def test_the_printed_causes_add_up_to_the_idle_time(tmp_path: Path) -> None:
    """Actor 0 works from 400 to 500 and from 600 to 700 of 1000 ms; three of four causes are named."""
    said = say_causes(rows(step(tmp_path))["actor 0"])
    assert re.findall(r"[\d.]+(?= ms)", said) == ["400", "200", "150", "50.0"]
    assert re.fullmatch("rollout .*, slowest .*, other .*", said)


def test_the_owners_spans_around_workers_are_waiting_for_them(tmp_path: Path) -> None:
    driver = rows(step(tmp_path))["trainer"]
    assert driver.busy_ns == 50 * MS  # its update goes on when the workers' is over
    assert causes(driver)[0] == ("rollout", "decode", 400)


def test_a_rank_works_also_while_a_worker_of_another_rank_does(tmp_path: Path) -> None:
    """Each rank opens its own capture, and rank 0 has a generator process."""
    folder = StepFolder(tmp_path)
    ranks = [folder.process("trainer", rank, owner=True) for rank in range(2)]
    generator = folder.process("worker")
    place = ranks[0].link(ranks[0].span("wait_rollout", 0, 200 * MS))
    generator.span("decode", 0, 200 * MS, role="rollout", link=place)
    ranks[1].span("forward", 0, 120 * MS)
    close(folder, 300 * MS)
    by_process = rows(folder)
    assert [by_process[f"trainer {rank}"].busy_ns // MS for rank in range(2)] == [0, 120]


def test_nobody_waits_for_what_a_later_step_consumes(tmp_path: Path) -> None:
    """Rollouts for the next step run all the time; those of this one end at 200 ms, its update at 600 ms."""
    work: list[Row] = [
        ("rollout:0 decode", 0, 200), ("rollout:1 decode@3", 0, 1000), ("actor update_actor", 200, 600),
        ("trainer advantages", 600, 700),
    ]  # fmt: skip
    by_process = rows(a_step(tmp_path, 1000, work))
    assert by_process["trainer"].busy_ns == 100 * MS
    later, decode, update = (
        ("not known", None, 300), ("rollout", "decode", 200), ("other work", "update_actor", 400),
    )  # fmt: skip
    assert causes(by_process["trainer"]) == [update, later, decode]
    assert causes(by_process["actor 0"]) == [later, decode, ("other work", "advantages", 100)]
    assert causes(by_process["rollout 0"])[:2] == [update, later]


def test_a_caller_of_replicas_is_no_slower_replica_and_waiting_no_work(tmp_path: Path) -> None:
    called = a_step(
        tmp_path / "a", 100, [("agent_loop/rollout generate", 0, 100), ("rollout generate", 0, 40)]
    )
    assert causes(rows(called)["rollout 0"]) == [("rollout", "generate", 60)]
    work: list[Row] = [("rollout generate", 0, 100), ("rollout queue", 0, 30, "generate")]
    assert rows(a_step(tmp_path / "b", 100, work))["rollout 0"].busy_ns == 70 * MS


def test_an_unaligned_process_has_no_row(tmp_path: Path) -> None:
    folder = step(tmp_path)
    folder.process("actor", 2, host="elsewhere").span("update_actor", 0, MS)
    assert "actor 2" not in rows(folder)


@pytest.mark.slow
def test_512_ranks_are_walked_once(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, ranks=512, trajectories=64)
    by_process = rows(folder)
    assert len(by_process) == 514
    assert causes(by_process["actor 0"])[0][:2] == ("rollout", "decode")
    assert {row.busy_ns + row.idle_ns for row in by_process.values()} == {1000 * MS}


spans = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["a", "queue", "sync_weights"]), st.integers(0, 90),
        st.integers(0, 30), st.sampled_from([None, 1, 3]),
    ),
    max_size=25,
)  # fmt: skip


@pytest.mark.slow
@given(spans)
def test_busy_and_causes_add_up_to_the_step(
    tmp_path_factory: Any, spans: list[tuple[int, str, int, int, int | None]]
) -> None:
    folder = StepFolder(tmp_path_factory.mktemp("step"))
    for role, rank in (("trainer", None), ("actor", 0), ("actor", 1), ("rollout", 0)):
        folder.process(role, rank, owner=role == "trainer")
    for process, stage, start, length, owned in spans:
        folder.processes[process].span(stage, start, start + length, step=owned)
    close(folder, 100)
    for row in rows(folder).values():
        assert row.busy_ns + row.idle_ns == 100
        assert sum(cause.wall_ns for cause in row.causes) == row.idle_ns
        assert min([cause.wall_ns for cause in row.causes], default=1) > 0


def test_time_in_collectives_comes_from_traces_and_the_late_rank_shows(tmp_path: Path) -> None:
    folder = step(tmp_path)
    for rank, process in enumerate(process for process in folder.processes if process.info.role == "actor"):
        enters = 610_000 + 40_000 * rank  # rank 1 comes 40 ms later
        add_trace(folder, process, [
            op("aten::mm", 600_000, enters - 600_000),
            event("gloo:all_reduce", "user_annotation", enters, 660_000 - enters, tid=2),
        ])  # fmt: skip
    by_process = rows(folder, traces=True)
    assert (by_process["actor 0"].collective_ns, by_process["actor 0"].skew_ns) == (50 * MS, 40 * MS)
    assert (by_process["actor 0"].awaited, by_process["actor 0"].awaited_ns) == ("actor 1", 40 * MS)
    assert (by_process["actor 1"].collective_ns, by_process["actor 1"].skew_ns) == (10 * MS, 0)
    assert by_process["actor 1"].awaited is None
    assert re.search(r"^50.0 ms \(40.0 ms .*: actor 1\)$", say_collectives(by_process["actor 0"]))
    assert by_process["rollout 0"].collective_ns is None


def test_calls_of_a_stage_that_have_traces_of_their_own_are_matched_in_order(tmp_path: Path) -> None:
    folder = step(tmp_path)
    for rank, process in enumerate(process for process in folder.processes if process.info.role == "actor"):
        for call, late_us in enumerate((40_000, 0)):
            at = 600_000 + 50_000 * call
            enters = at + late_us * rank
            reduce = event("gloo:all_reduce", "user_annotation", enters, at + 45_000 - enters, tid=2)
            add_trace(folder, process, [reduce], name=f"update_{call}", stage="update_actor")
    by_process = rows(folder, traces=True)
    assert [by_process[f"actor {rank}"].skew_ns for rank in (0, 1)] == [40 * MS, 0]


def test_on_a_device_only_exposed_communication_counts(tmp_path: Path) -> None:
    folder = step(tmp_path)
    actor = next(process for process in folder.processes if process.info.role == "actor")
    add_trace(folder, actor, [
        kernel("gemm", 600_000, 30_000), kernel("ncclDevKernel_AllReduce_Sum", 620_000, 30_000, stream=9),
    ])  # fmt: skip
    assert rows(folder, traces=True)["actor 0"].collective_ns == 20 * MS


def test_ranks_wait_only_for_those_of_their_process_group(folder: StepFolder) -> None:
    for rank in range(4):
        actor = folder.process("actor", rank, owner=rank == 0)
        actor.span("update_actor", 600 * MS, 900 * MS)
        pair = [0, 1] if rank < 2 else [2, 3]
        enters = 610_000 if rank < 2 else 650_000  # the other pair works longer
        reduce = kernel("ncclDevKernel_AllReduce_Sum", enters, 50_000, stream=9)
        reduce["args"] = {
            "Collective name": "allreduce", "In msg nelems": 5,
            "Process Group Name": "1", "Process Group Ranks": str(pair),
        }  # fmt: skip
        add_trace(folder, actor, [reduce])
        actor.close(1000 * MS)
    assert [row.skew_ns for row in rows(folder, traces=True).values()] == [0] * 4


def with_an_engine(tmp_path: Path) -> tuple[StepFolder, FakeProcess]:
    """A trainer that asks an engine in an actor for 40 ms and trains for 40 more; the actor has no span."""
    folder = a_step(tmp_path, 100, [("trainer/agent_loop turn", 0, 40), ("trainer update", 40, 80)])
    actor = folder.process("rollout", 0, replica=0)
    actor.close(100 * MS)
    return folder, actor


def test_an_actor_is_busy_while_its_engine_runs_passes(tmp_path: Path) -> None:
    folder, actor = with_an_engine(tmp_path)
    session = event("PyTorch Profiler (0)", "Trace", 0, 90_000)
    passes = [
        event("execute_context_0(0)_generation_1(1)", "user_annotation", start, 10_000)
        for start in (5_000, 25_000)
    ]
    add_trace(folder, actor, [session, *passes], replica=0)
    by_process = rows(folder, traces=True)
    row = by_process["rollout 0"]
    assert (row.busy_ns, row.idle_ns) == (20 * MS, 80 * MS)
    assert causes(row) == [("other work", "update", 40), ("not known", None, 20), ("rollout", "turn", 20)]
    assert by_process["trainer"].busy_ns == 80 * MS


@pytest.mark.parametrize("source", ["requests", "counter"])
def test_an_actor_without_a_trace_is_busy_while_its_engine_has_requests(tmp_path: Path, source: str) -> None:
    folder, _ = with_an_engine(tmp_path)
    driver = folder.processes[0]
    if source == "requests":
        driver.span("decode", 10 * MS, 30 * MS, role="rollout", attrs={"replica": 0})
    else:
        driver.counter("unfinished requests", {10 * MS: 0, 30 * MS: 2, 31 * MS: 0}, of="replica 0")
    assert rows(folder)["rollout 0"].busy_ns == 20 * MS
