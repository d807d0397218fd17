"""Stretches in which an engine serves nothing for its own profiler: the profiler's time, and no decode's."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.steps import MS, Row, a_step, close, reported, rules, some, timeline_of
from packages.report.tests.test_report_breakdown import account, driver_of
from stepscope.files.manifest import Expectation
from stepscope.files.sidecar import Artifact, Stall
from stepscope.files.steps import UncapturedStep
from stepscope.files.values import AttrValue
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report import idle_times, step_breakdown, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import Selection, load_step, merge_step
from stepscope_report.timeline.merge.step_events import STALL


def recorded(
    driver: FakeProcess, replica: int, *stalls: tuple[int, int], dp: int = 0, host: str = "host-a"
) -> Artifact:
    """Return a trace of an engine that stalled from and to these ms of its host's clock."""
    written = [(OPENED_NS + start * MS, OPENED_NS + end * MS) for start, end in stalls]
    return Artifact(
        path=f"traces/rollout/replica{replica}/dp{dp}.json.gz", kind="vllm_trace", tool="vllm",
        role="rollout", replica=replica, topology={"tp": 0, "dp": dp}, host=host, size_bytes=1,
        stalls=tuple(
            Stall(start_ns=start_ns, end_ns=end_ns, doing="writing", source="stamps")
            for start_ns, end_ns in written
        ),
    )  # fmt: skip


def expect(driver: FakeProcess, replica: int, *artifacts: Artifact, idle: bool = False) -> None:
    name = f"replica {replica}"
    driver.expected.append(Expectation(name=name, kind="engine", state="ok", artifacts=artifacts, idle=idle))


DECODE: Row = ("trainer/rollout decode", 0, 100)
ACCOUNTS: dict[str, tuple[list[Row], list[list[tuple[int, int]] | None], dict[str, int]]] = {
    "what an engine writes inside the step is the profiler's": (
        [DECODE], [[(10, 50), (60, 90)]], {"rollout decode": 30, "profiler": 70},
    ),
    "so is a turn that waits for it": (
        [("trainer/agent_loop turn", 0, 100)], [[(10, 90)]], {"agent_loop turn": 20, "profiler": 80},
    ),
    "others go on beside an engine that writes": (
        [("trainer/rollout decode", 0, 10), ("actor update_actor", 20, 60), ("trainer/env tool", 60, 80)],
        [[(10, 90)]],
        {"rollout decode": 10, "actor update_actor": 40, "env tool": 20, "unaccounted": 30},
    ),
    "a replica that serves on gets its time as ever": (
        [("rollout:0 prefill", 0, 100), ("rollout:1 decode", 0, 100)], [[(0, 80)], []],
        {"rollout decode": 50, "rollout prefill": 10, "profiler": 40},
    ),
    "work of an unnamed replica is held up only when all write": (
        [DECODE], [[(10, 60)], [(40, 90)]], {"rollout decode": 80, "profiler": 20},
    ),
    "a replica that is not recorded may be who serves": (
        [DECODE], [[(10, 60)], None], {"rollout decode": 100},
    ),
}  # fmt: skip


Writes = list[list[tuple[int, int]] | None]
"""Times in which the engine of each replica writes. None for a replica that is not recorded."""


def stalled(root: Path, rows: list[Row], writes: Writes) -> StepFolder:
    folder = a_step(root, 100, rows)
    driver = folder.processes[0]
    for replica, stalls in enumerate(writes):
        if stalls is None:
            skipped = Expectation(name=f"replica {replica}", kind="engine", state="skipped", reason="no")
            driver.expected.append(skipped)
        else:
            expect(driver, replica, recorded(driver, replica, *stalls))
    return folder


@pytest.mark.parametrize(("rows", "writes", "expected"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_time_in_which_no_engine_serves_for_its_profiler_is_the_profilers(
    tmp_path: Path, rows: list[Row], writes: Writes, expected: dict[str, int]
) -> None:
    assert account(stalled(tmp_path, rows, writes)) == expected


def test_data_parallel_engines_of_a_replica_serve_each_for_itself(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 100, [DECODE])
    driver = folder.processes[0]
    expect(driver, 0, recorded(driver, 0, (10, 60)), recorded(driver, 0, (40, 90), dp=1))
    assert account(folder) == {"rollout decode": 80, "profiler": 20}
    assert step_breakdown(load_step(folder.write())).stalled_ns == 20 * MS


@pytest.mark.parametrize("named", ["turn", "decode"])
def test_a_span_may_name_the_replica_that_it_waits_for(folder: StepFolder, named: str) -> None:
    driver = driver_of(folder)
    for replica in range(2):  # one process drives both
        attrs: dict[str, AttrValue] = {"replica": replica}
        turn = driver.span(
            "turn", 0, 100 * MS, role="agent_loop", trajectory=f"t{replica}", turn=0,
            attrs=attrs if named == "turn" else None,
        )  # fmt: skip
        driver.span(
            "decode" if replica else "prefill", 0, 100 * MS, role="rollout", parent=turn,
            attrs=attrs if named == "decode" else None,
        )  # fmt: skip
    expect(driver, 0, recorded(driver, 0, (0, 80)))
    expect(driver, 1, recorded(driver, 1))
    close(folder, 100 * MS)
    assert account(folder) == {"rollout decode": 50, "rollout prefill": 10, "profiler": 40}


def test_a_stage_that_one_process_runs_on_two_replicas_stalls_while_both_write(
    folder: StepFolder,
) -> None:
    driver = driver_of(folder)
    for replica in range(2):
        driver.span("decode", 0, 100 * MS, role="rollout", attrs={"replica": replica})
    expect(driver, 0, recorded(driver, 0, (0, 80)))
    expect(driver, 1, recorded(driver, 1, (60, 90)))
    close(folder, 100 * MS)
    (stage,) = step_report(load_step(folder.write())).stages
    (share,) = stage.processes
    assert (share.busy_ns, share.stalled_ns) == (100 * MS, 20 * MS)


def test_what_no_span_names_may_have_waited_for_an_engine_that_writes(tmp_path: Path) -> None:
    folder = stalled(tmp_path, [("trainer/rollout decode", 0, 70)], [[(10, 90)], []])
    assert account(folder) == {"rollout decode": 70, "unaccounted": 30}
    report = reported(folder)
    assert (report.breakdown.stalled_ns, report.breakdown.stalled_most_ns) == (0, 60 * MS)
    assert "not-typical" in rules(report)


def test_stalls_of_another_host_are_placed_by_its_clock(folder: StepFolder) -> None:
    driver = driver_of(folder)
    engine = folder.process("rollout", 0, host="host-b", replica=0, skew_ns=5000 * MS)
    driver.measures(engine, 0)
    engine.span("decode", 0, 100 * MS)
    expect(driver, 0, recorded(driver, 0, (5010, 5090), host="host-b"))
    close(folder, 100 * MS)
    assert account(folder) == {"rollout decode": 20, "profiler": 80}


def test_a_slow_trajectory_waited_for_the_profiler(tmp_path: Path) -> None:
    own = {"trajectory": "t"}
    rows: list[Row] = [
        ("trainer/agent_loop trajectory", 0, 100, own), ("trainer/rollout decode", 0, 100, "trajectory", own),
    ]  # fmt: skip
    timeline = load_step(stalled(tmp_path, rows, [[(10, 90)]]).write())
    report = step_report(timeline)
    assert 'class="m profiler"' in render_step(timeline, report).split('id="slowest"')[1].split("</table>")[0]
    waits = {
        f"{wait.role} {wait.stage}": wait.wall_ns // MS for wait in some(report.long_tail).worst[0].waits
    }
    assert waits == {"profiler engine trace": 80, "rollout decode": 20}


def test_advice_says_what_the_step_would_have_taken(tmp_path: Path) -> None:
    """Without steps to compare with, an engine that writes for long is told too."""
    timeline = load_step(stalled(tmp_path, [DECODE], [[(10, 90)]]).write())
    (alone,) = step_report(timeline).advice
    assert (alone.rule, alone.kind) == ("not-typical", "alarm")
    near = tuple(UncapturedStep(step=step, start_ns=0, dur_ns=20 * MS) for step in range(10, 15))
    (advice,) = step_report(msgspec.structs.replace(timeline, uncaptured=near)).advice
    assert advice.rule == "not-typical"
    assert re.search("80.0 ms, 80.0 %.* 20.0 ms$", advice.because[1])


def test_a_replica_that_writes_is_no_straggler(tmp_path: Path) -> None:
    """Both decode for 20 ms. One has work left when its profiler writes, and stands still for 80 ms."""
    rows: list[Row] = [("rollout:0 decode", 0, 100), ("rollout:1 decode", 0, 20)]
    assert "straggler" not in rules(reported(stalled(tmp_path, rows, [[(10, 90)], []])))


def test_trajectories_that_wait_for_an_engine_that_writes_are_no_long_tail(tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(10):
        own, end_ms = {"trajectory": f"t{number}"}, 100 if number == 9 else 10
        rows.append(("trainer/agent_loop trajectory", 0, end_ms, own))
        rows.append(("trainer/rollout decode", 0, end_ms, "trajectory", own))
    report = reported(stalled(tmp_path, rows, [[(10, 99)]]))
    tail = some(report.long_tail)
    assert (tail.held_ns, tail.stalled_ns) == (90 * MS, 89 * MS)
    assert "long-tail" not in rules(report)


def test_a_queue_for_an_engine_that_writes_asks_for_no_more_replicas(tmp_path: Path) -> None:
    own = {"trajectory": "t"}
    rows: list[Row] = [
        ("trainer/agent_loop trajectory", 0, 100, own), ("trainer/rollout queue", 5, 95, "trajectory", own),
    ]  # fmt: skip
    assert "queueing" not in rules(reported(stalled(tmp_path, rows, [[(10, 90)]])))


def test_a_replica_that_waits_for_its_own_profiler_is_not_busy(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    for replica in range(2):
        engine = folder.process("rollout", replica, replica=replica)
        engine.span("decode", 0, 100 * MS)
        expect(driver, replica, recorded(driver, replica, *([] if replica else [(40, 90), (95, 120)])))
    close(folder, 110 * MS)
    stalled, serving = (row for row in idle_times(load_step(folder.write())) if row.role == "rollout")
    assert (stalled.busy_ns, stalled.idle_ns) == (45 * MS, 65 * MS)
    assert [(cause.kind, cause.wall_ns // MS) for cause in stalled.causes] == [
        ("own profiler", 55), ("not known", 10),
    ]  # fmt: skip
    assert serving.busy_ns == 100 * MS


# Stalls of engines in a merged timeline: spans in the engine's row.


def two_replicas(tmp_path: Path) -> Path:
    """A driver, and two replicas, the first of which has two processes and stalls twice."""
    folder = StepFolder(tmp_path)
    driver = driver_of(folder)
    driver.span("turn", 0, 100 * MS, role="agent_loop")
    for rank, replica in enumerate((0, 0, 1)):
        folder.process("rollout", rank, replica=replica).span("decode", 0, 100 * MS)
    expect(driver, 0, recorded(driver, 0, (10, 20), (60, 90)))
    expect(driver, 1, recorded(driver, 1))
    close(folder, 100 * MS)
    return folder.write()


def stalls_in(path: Path, base_ns: int) -> list[tuple[int, int, int]]:
    """Return (pid, first ms, last ms) of each drawn stall."""
    events = timeline_of(path)["traceEvents"]
    begin_us = (OPENED_NS - base_ns) // 1000
    return [
        (e["pid"], int(e["ts"] - begin_us) // 1000, int(e["ts"] + e["dur"] - begin_us) // 1000)
        for e in events
        if e["name"] == STALL
    ]


def test_stalls_are_spans_of_the_replicas_first_row(tmp_path: Path) -> None:
    path = two_replicas(tmp_path)
    merged = merge_step(path)
    (first, *_) = [row.pid for row in merged.rows if row.replica == 0]
    assert stalls_in(path, merged.base_ns) == [(first, 10, 20), (first, 60, 90)]
    assert merged.spans == 4 + 2


def test_a_selection_of_time_leaves_stalls_out(tmp_path: Path) -> None:
    path = two_replicas(tmp_path)
    merged = merge_step(path, selection=Selection(to_ms=50))
    assert [stall[1:] for stall in stalls_in(path, merged.base_ns)] == [(10, 20)]
    assert [what.split()[:2] for what in merged.left_out] == [["1", "spans"]]


def test_a_selection_of_other_roles_leaves_stalls_out(tmp_path: Path) -> None:
    path = two_replicas(tmp_path)
    merged = merge_step(path, selection=Selection(roles=("agent_loop",)))
    assert stalls_in(path, merged.base_ns) == []
