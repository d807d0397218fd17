"""Golden steps, their answers known by hand: aligned, killed, dropped, skewed by 11.56 s, overlapping."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.steps import MS, Row, a_step, close, reported
from stepscope.files.manifest import Absent, OwnCost
from stepscope.files.spans import PROFILING
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import Breakdown, step_breakdown
from stepscope_report.timeline import load_step


def wall(breakdown: Breakdown) -> dict[str, int]:
    """ms of each line; the lines add up to the total in every test that asks."""
    assert sum(line.wall_ns for line in breakdown.lines) == breakdown.window_ns
    named = {
        f"{line.role} {line.stage}" if line.kind == "stage" else line.kind: line for line in breakdown.lines
    }
    return {name: line.wall_ns // MS for name, line in named.items() if line.wall_ns}


def account(folder: StepFolder) -> dict[str, int]:
    return wall(step_breakdown(load_step(folder.write())))


def driver_of(folder: StepFolder, cost: OwnCost | None = None) -> FakeProcess:
    return folder.process("trainer", owner=True, cost=cost)


ACCOUNTS: dict[str, tuple[int, list[Row], dict[str, int]]] = {
    "a worker's stage is more specific than the driver's wait for it": (
        12, [("trainer update", 0, 10), ("actor update_actor", 2, 9)],
        {"actor update_actor": 7, "trainer update": 3, "unaccounted": 2},
    ),
    "a child is more specific than its parent": (
        10, [("trainer/agent_loop rollout", 0, 10), ("trainer/env tool", 3, 5, "rollout")],
        {"agent_loop rollout": 8, "env tool": 2},
    ),
    "ranks of one stage do not share it": (
        8, [("actor:0 update_actor", 0, 8), ("actor:1 update_actor", 1, 8)], {"actor update_actor": 8},
    ),
    "a later step's rollout is hidden behind this step's work": (
        16,
        [("rollout decode", 0, 4), ("actor update_actor", 4, 10), ("trainer advantages", 10, 12),
         ("trainer/env tool@3", 10, 16), ("rollout prefill@3", 4, 14)],
        {"actor update_actor": 6, "rollout decode": 4, "rollout prefill": 2, "trainer advantages": 2,
         "env tool": 2},
    ),
    "a later step's rollout that began in this step's work does not stand for it": (
        10,
        [("trainer update", 0, 10), ("trainer/rollout generate@3", 0, 10, "update"),
         ("trainer/rollout decode@3", 4, 10, "generate")],
        {"trainer update": 10},
    ),
    "work that an earlier step consumes shares as this step's does": (
        4, [("actor update_actor", 0, 4), ("rollout decode@1", 0, 4)],
        {"actor update_actor": 2, "rollout decode": 2},
    ),
    "a queue gets time only while nothing works": (
        10,
        [("trainer generate", 0, 10), ("rollout queue", 0, 6, "generate"),
         ("rollout decode", 2, 10, "generate")],
        {"rollout queue": 2, "rollout decode": 8},
    ),
    "what reaches beyond the window is clipped to it": (
        10, [("actor update_actor", 4, 25)], {"actor update_actor": 6, "unaccounted": 4},
    ),
    "a step without spans is unaccounted": (10, [], {"unaccounted": 10}),
    "a profiler that starts and stops around a stage is a line of the step": (
        10,
        [("trainer update", 0, 10), (f"actor {PROFILING}", 1, 3, "update"),
         ("actor update_actor", 3, 7, "update"), (f"actor {PROFILING}", 7, 8, "update")],
        {"actor update_actor": 4, "profiler": 3, "trainer update": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lasts_ms", "rows", "expected"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_each_instant_goes_to_the_most_specific_work(
    tmp_path: Path, lasts_ms: int, rows: list[Row], expected: dict[str, int]
) -> None:
    assert account(a_step(tmp_path, lasts_ms, rows)) == expected


def test_stages_that_run_at_once_share_the_time_equally_and_are_listed(tmp_path: Path) -> None:
    rows: list[Row] = [("actor compute_log_prob", 0, 6), ("ref compute_log_prob", 2, 10)]
    breakdown = reported(a_step(tmp_path, 10, rows)).breakdown
    assert wall(breakdown) == {"actor compute_log_prob": 4, "ref compute_log_prob": 6}
    (overlap,) = breakdown.overlaps
    assert overlap.stages == (("actor", "compute_log_prob"), ("ref", "compute_log_prob"))
    assert overlap.wall_ns == 4 * MS
    actor = next(line for line in breakdown.lines if line.role == "actor")
    assert (actor.alone_ns, actor.active_ns) == (2 * MS, 6 * MS)


def test_an_odd_nanosecond_is_not_lost_in_a_split(folder: StepFolder) -> None:
    driver_of(folder)
    for role in ("actor", "critic", "ref"):
        folder.process(role, 0).span("forward", 0, 10)
    close(folder, 10)
    breakdown = step_breakdown(load_step(folder.write()))
    assert [line.wall_ns for line in breakdown.lines] == [4, 3, 3, 0]


def test_opening_and_closing_the_capture_are_beside_the_step_and_no_part_of_it(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 10, [("trainer rollout", 0, 10), ("actor idle", 0, 0)])
    driver, actor = folder.processes
    driver.cost = OwnCost(start_ns=2 * MS, stop_ns=3 * MS, export_ns=500 * MS)
    actor.cost = OwnCost(start_ns=9 * MS)
    breakdown = reported(folder).breakdown
    assert wall(breakdown) == {"trainer rollout": 10}
    assert (breakdown.opening_ns, breakdown.window_ns, breakdown.closing_ns) == (2 * MS, 10 * MS, 3 * MS)
    assert breakdown.total_ns == 15 * MS


def test_a_killed_workers_open_span_counts_to_its_last_sign_of_life(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer update", 0, 10), ("actor:1 update_actor", 2, None),
        ("actor:1 forward", 2, 5, "update_actor"),
    ]  # fmt: skip
    folder = a_step(tmp_path, 10, rows)
    driver, actor = folder.processes
    actor.closed_ns = None
    gone = Absent(name="actor[1]", state="missing", reason="the actor died", process=actor.info.key)
    driver.absent.append(gone)
    report = reported(folder)
    assert wall(report.breakdown) == {"trainer update": 7, "actor forward": 3}
    health = report.health
    assert (health.state, health.complete) == ("missing", False)
    (hung,) = health.open_spans
    assert (hung.process, hung.stage) == ("actor 1", "update_actor")
    assert (hung.start_ns, hung.wall_ns) == (2 * MS, 3 * MS)
    assert health.missing[0].startswith("actor[1]: missing: ")


def test_an_unaligned_process_is_in_no_wall_time_and_is_named(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 10, [("trainer update", 0, 10)])
    actor = folder.process("actor", 0, host="host-b")
    actor.span("update_actor", 2 * MS, 9 * MS)
    actor.close(10 * MS)
    report = reported(folder)
    assert wall(report.breakdown) == {"trainer update": 10}
    assert report.breakdown.left_out == ("actor 0",)
    busy = {stage.stage: stage.total_ns // MS for stage in report.stages}
    assert busy == {"update": 10, "update_actor": 7}
    assert not report.health.complete


def test_ranks_that_each_own_their_capture_are_equals(folder: StepFolder) -> None:
    for rank in range(2):
        folder.process("trainer", rank, owner=True).span(f"stage_of_{rank}", 0, 10 * MS)
    close(folder, 10 * MS)
    assert account(folder) == {"trainer stage_of_0": 5, "trainer stage_of_1": 5}


def test_work_of_another_step_is_in_the_account_and_counted_by_its_owner(tmp_path: Path) -> None:
    rows: list[Row] = [("trainer update", 4, 10)]
    rows += [("rollout generate@5", 0, 4, {"policy_version": version}) for version in (2, 3)]
    report = reported(a_step(tmp_path, 10, rows))
    assert wall(report.breakdown) == {"rollout generate": 4, "trainer update": 6}
    (other,) = report.health.other_steps
    assert (other.step, other.spans, other.total_ns, other.policy_versions) == (5, 2, 8 * MS, (2, 3))


def test_ranks_that_capture_by_themselves_cost_as_much_as_the_slowest(folder: StepFolder) -> None:
    costs = OwnCost(start_ns=9 * MS, stop_ns=5 * MS), OwnCost(start_ns=2 * MS, stop_ns=70 * MS)
    for rank, cost in enumerate(costs):
        folder.process("trainer", rank, owner=True, cost=cost).span("update", 0, 10 * MS)
    folder.process("actor", 0, cost=OwnCost(start_ns=500 * MS)).span("step", 0, 10 * MS)
    close(folder, 10 * MS)
    breakdown = step_breakdown(load_step(folder.write()))
    assert (breakdown.opening_ns, breakdown.closing_ns) == (9 * MS, 70 * MS)
