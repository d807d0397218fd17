from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packages.report.tests.steps import MS, Row, a_step, close, printed, reported, some
from stepscope.files.manifest import OwnCost
from stepscope.testing.steps import StepFolder
from stepscope_report import stage_times, step_breakdown, step_long_tail, step_report
from stepscope_report.formatting import LISTED, duration, middle, moment, percents, plain
from stepscope_report.html.step_page import render_step
from stepscope_report.sections.breakdown import say_left_out
from stepscope_report.sections.health import worst_first
from stepscope_report.sections.long_tail import trajectories
from stepscope_report.terminal_blocks import table
from stepscope_report.timeline import load_step


def rollout(tmp_path: Path, count: int = 20) -> StepFolder:
    """Trajectory i runs from 0 to (i + 1) ms: 1 ms in the loop, the rest in its decode."""
    folder = StepFolder(tmp_path)
    driver, replica = folder.process("trainer", owner=True), folder.process("rollout", 0)
    for index in range(count):
        name, end_ns = f"t{index}", (index + 1) * MS
        trajectory = driver.span("trajectory", 0, end_ns, role="agent_loop", trajectory=name)
        turn = driver.span("turn", 0, end_ns, role="agent_loop", trajectory=name, turn=0, parent=trajectory)
        if index:
            replica.span("decode", MS, end_ns, trajectory=name, turn=0, link=driver.link(turn))
    close(folder, count * MS)
    return folder


def test_calls_are_counted_and_timed_by_stage(tmp_path: Path) -> None:
    rows: list[Row] = [("trainer reward", 0, ms) for ms in (1, 2, 3)]
    rows += [("trainer reward", 0, 10, {"error": "ValueError"}), ("trainer reward", 0, None)]
    (stage,) = reported(a_step(tmp_path, 20, rows)).stages
    assert (stage.calls, stage.open, stage.errors) == (4, 1, 1)
    assert (stage.total_ns, stage.mean_ns, stage.p50_ns, stage.max_ns) == (16 * MS, 4 * MS, 2 * MS, 10 * MS)
    assert (stage.imbalance, stage.slowest) == (None, None)


def test_a_function_that_calls_another_of_its_stage_is_one_call(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer compute_advantages", 0, 10), ("trainer reduce", 1, 9, "compute_advantages"),
        ("trainer trajectory", 0, 9, "compute_advantages", {"trajectory": "t0"}),
        ("trainer trajectory", 0, 4, "trajectory", {"trajectory": "t0/agent"}),
        ("trainer compute_advantages", 2, 8, "reduce"), ("trainer compute_advantages", 2, 8, "reduce"),
    ]  # fmt: skip
    timeline = load_step(a_step(tmp_path, 20, rows).write())
    timeline.spans[-1].thread += 1
    stages = {stage.stage: stage for stage in stage_times(timeline)}
    advantages = stages["compute_advantages"]
    assert {name: stage.calls for name, stage in stages.items()} == {
        "compute_advantages": 2, "reduce": 1, "trajectory": 2,  # one in each thread
    }  # fmt: skip
    assert (advantages.total_ns, advantages.processes[0].calls) == (16 * MS, 2)


def test_concurrent_calls_in_one_process_are_busy_once(tmp_path: Path) -> None:
    rows: list[Row] = [("rollout generate", start, start + 4) for start in (0, 1, 2)]
    (stage,) = reported(a_step(tmp_path, 20, rows)).stages
    assert (stage.total_ns, stage.processes[0].busy_ns) == (12 * MS, 6 * MS)


@pytest.mark.parametrize("row", [("trainer/rollout generate", 0, 9), ("rollout load_weights", 0, 9)])
def test_who_only_calls_an_engine_or_loads_weights_has_no_phases_to_name(tmp_path: Path, row: Row) -> None:
    assert reported(a_step(tmp_path, 10, [row])).phaseless == ()


@pytest.mark.parametrize(
    ("busy_ms", "slowest"), [((100, 300), "actor 1"), ((10, 10, 15, 10), "actor 2")], ids=["two", "four"]
)
def test_the_slowest_rank_is_named_with_its_imbalance(
    folder: StepFolder, busy_ms: tuple[int, ...], slowest: str
) -> None:
    for rank, ms in enumerate(busy_ms):
        folder.process("actor", rank).span("update_actor", 0, ms * MS)
    timeline = load_step(folder.write())
    (stage,) = stage_times(timeline)
    assert (stage.slowest, stage.imbalance) == (slowest, 1.5)
    assert [(share.rank, share.busy_ns // MS) for share in stage.processes] == list(enumerate(busy_ms))
    assert step_long_tail(timeline) is None
    assert middle([1, 2, 9, 4]) == 3


def test_waiting_below_a_call_is_no_work_of_it(folder: StepFolder) -> None:
    for rank, late_ms in enumerate((0, 6)):
        process = folder.process("actor", rank, owner=rank == 0)
        update = process.span("update", 0, 10 * MS)
        process.span("all_reduce", (2 + late_ms) * MS, 9 * MS, parent=update, attrs={"wait": True})
        process.span("log", 2 * MS, 3 * MS, parent=update)
        process.close(20 * MS)
    stages = {stage.stage: stage for stage in stage_times(load_step(folder.write()))}
    shares = stages["update"].processes
    assert [(share.at_work_ns, share.waited_ns) for share in shares] == [(4 * MS, 6 * MS), (9 * MS, MS)]
    assert (stages["update"].slowest, stages["update"].imbalance) == ("actor 1", 1.385)
    text = printed(step_report(load_step(folder.write())), 120)
    assert re.search(r"update +4.00 .. \+ 6.00 .. +9.00 .. \+ 1.00 ", text)


def test_an_engine_whose_stages_nobody_named_is_told_how(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer/rollout generate", 0, 9), ("rollout prefill", 0, 4), ("rollout:1 generate_batch", 0, 9),
    ]  # fmt: skip
    timeline = load_step(a_step(tmp_path, 10, rows).write())
    report = step_report(timeline)
    (row,) = report.phaseless
    assert (row.process, row.stages) == ("rollout 1", ("generate_batch",))
    for output in (" ".join(printed(report).split()), render_step(timeline, report)):
        assert "rollout 1: unknown" in output
        assert re.search("`prefill` and `decode`", output)


def test_of_many_processes_those_that_matter_stand_first(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    actors = [
        folder.process("actor", rank, host="host-b" if rank == 61 else "host-a",
                       cost=OwnCost(stop_ns=9 * MS if rank == 62 else 0))
        for rank in range(64)
    ]  # fmt: skip
    driver.measures(actors[61], 0, uncertainty_ns=3 * MS)
    actors[60].dropped = 5
    for process in folder.processes:
        if process is not actors[63]:
            process.close(10 * MS)
    timeline = load_step(folder.write())
    report = step_report(timeline)
    ordered, rest = worst_first(report.health.processes, 24)
    assert [row.name for row in ordered[:6]] == [
        "trainer", "actor 60", "actor 63", "actor 61", "actor 62", "actor 0"
    ]  # fmt: skip
    assert rest in render_step(timeline, report)
    assert worst_first(report.health.processes, 100) == (report.health.processes, "")


def test_an_exception_that_ended_the_capture_is_said_once_and_leaves_nothing_incomplete(
    tmp_path: Path,
) -> None:
    folder = rollout(tmp_path)
    folder.processes[0].error = "ValueError: bad batch"
    report = reported(folder)
    text = printed(report)
    assert report.health.complete
    assert "ValueError: bad batch" in text
    assert "Complete: " in text
    assert "Not complete" not in text


def test_a_percentage_is_rounded_half_to_even() -> None:
    assert percents([79674199], 5000109081) == ["1.6"]
    assert percents([17], 10000) == ["0.2"]
    assert percents([5, 15, 25], 10000) == ["0.0", "0.2", "0.2"]


def test_the_last_tenth_of_the_trajectories_holds_the_others(tmp_path: Path) -> None:
    """The slowest of them say what they waited for."""
    tail = some(reported(rollout(tmp_path)).long_tail)
    assert (tail.trajectories, tail.last, tail.held_ns, tail.rollout_ns) == (20, 2, 2 * MS, 20 * MS)
    assert [slow.trajectory for slow in tail.worst] == [f"t{index}" for index in range(19, 9, -1)]
    worst = tail.worst[0]
    assert [(wait.stage, wait.wall_ns // MS) for wait in worst.waits] == [("decode", 19), ("turn", 1)]
    assert sum(wait.wall_ns for wait in worst.waits) == worst.wall_ns


def test_the_bubble_is_what_replicas_idle_in_the_tail(tmp_path: Path) -> None:
    folder = rollout(tmp_path)
    folder.process("rollout", 1).span("decode", 0, 19 * MS)
    folder.processes[-1].close(20 * MS)
    tail = some(reported(folder).long_tail)
    assert [(hold.percent, hold.trajectories) for hold in tail.holds] == [(10, 2), (5, 1)]
    assert [hold.held_ns for hold in tail.holds] == [2 * MS, MS]
    bubble = some(tail.bubble)
    assert (bubble.replicas, bubble.tail_ns, bubble.idle_ns) == (2, 2 * MS, MS)
    assert (bubble.in_flight, bubble.in_flight_before) == (1.5, 11.5)


def test_processes_that_only_call_replicas_are_none_in_the_bubble(tmp_path: Path) -> None:
    folder = rollout(tmp_path)
    for rank in (0, 1):
        loop = folder.process("agent_loop", rank)
        loop.span("generate", 0, 19 * MS, role="rollout")
        loop.close(20 * MS)
    report = reported(folder)
    bubble = some(some(report.long_tail).bubble)
    assert (bubble.replicas, bubble.idle_ns) == (1, 0)
    assert report.phaseless == ()


def test_percentiles_name_the_trajectories_behind_them(tmp_path: Path) -> None:
    spreads = some(reported(rollout(tmp_path, 100)).long_tail).spreads
    assert [(spread.role, spread.stage) for spread in spreads] == [
        ("agent_loop", "trajectory"), ("agent_loop", "turn"), ("rollout", "decode"),
    ]  # fmt: skip
    whole = spreads[0]
    assert (whole.p50_ns, whole.p90_ns) == (50 * MS, 90 * MS)
    assert (whole.p99.ns, whole.p99.trajectory, whole.max.trajectory) == (99 * MS, "t98", "t99")


def test_a_trajectory_that_never_ended_is_among_the_slowest(tmp_path: Path) -> None:
    folder = rollout(tmp_path)
    folder.processes[0].span("trajectory", 5 * MS, None, role="agent_loop", trajectory="hung")
    tail = some(reported(folder).long_tail)
    hung = next(slow for slow in tail.worst if slow.trajectory == "hung")
    assert (tail.open, hung.open, hung.wall_ns) == (1, True, 15 * MS)


def test_tools_in_no_trajectory_are_counted_where_their_clock_is_known(tmp_path: Path) -> None:
    folder = rollout(tmp_path)
    for host in ("host-a", "host-of-no-known-clock"):
        folder.process("env", host=host).span("tool", 2 * MS, 3 * MS, role="env")
    (outside,) = some(reported(folder).long_tail).outside
    assert (outside.role, outside.stage, outside.calls) == ("env", "tool", 1)


@pytest.mark.slow
def test_10_000_trajectories_are_reported_in_seconds(folder: StepFolder) -> None:
    driver, replica = folder.process("trainer", owner=True), folder.process("rollout", 0)
    for index in range(10_000):
        name, at = f"t{index}", index * 1000
        trajectory = driver.span("trajectory", at, at + 90 * MS, role="agent_loop", trajectory=name)
        for turn in range(3):
            begins = at + turn * 30 * MS
            below = driver.span(
                "turn", begins, begins + 29 * MS, parent=trajectory, trajectory=name, turn=turn
            )
            link = driver.link(below)
            replica.span("prefill", begins + MS, begins + 2 * MS, link=link, trajectory=name, turn=turn)
            replica.span("decode", begins + 2 * MS, begins + 28 * MS, link=link, trajectory=name, turn=turn)
    close(folder, 200 * MS)
    path = folder.write()
    began = time.process_time()
    report = step_report(load_step(path))
    took = time.process_time() - began
    assert sum(line.wall_ns for line in report.breakdown.lines) == report.breakdown.window_ns
    assert took < 20, f"100,000 spans took {took:.1f} s; 2 to 3 s are usual"


@given(st.lists(st.integers(0, 10**15), min_size=1))
def test_percentages_of_a_whole_add_up_to_100(parts: list[int]) -> None:
    printed = percents(parts, sum(parts))
    if sum(parts):
        assert sum(int(percent.replace(".", "")) for percent in printed) == 1000
    else:
        assert set(printed) == {"-"}


def test_durations_have_three_digits_and_a_unit() -> None:
    times = [None, 0, 5, 1_500, 78_900, 456 * MS, 1_234 * MS, 12_345 * MS, 1_234_567 * MS, -11_560 * MS]
    assert [duration(ns) for ns in times] == [
        "-", "0", "5 ns", "1.50 us", "78.9 us", "456 ms", "1.23 s", "12.3 s", "1235 s", "-11.6 s",
    ]  # fmt: skip
    near_a_unit = (999, 9_996, 99_960, 999_499, 999_700, 999_999_999)
    assert [duration(ns) for ns in near_a_unit] == [
        "999 ns", "10.0 us", "100 us", "999 us", "1.00 ms", "1.00 s",
    ]  # fmt: skip


def test_one_trajectory_at_once_is_singular() -> None:
    assert (trajectories(1.0), trajectories(2.5)) == ("1 trajectory", "2.5 trajectories")


def test_of_many_unaligned_processes_a_few_are_named(folder: StepFolder) -> None:
    folder.process("trainer", owner=True).close(MS)
    for rank in range(LISTED + 3):
        folder.process("actor", rank, host="elsewhere").span("update", 0, MS)
    message = say_left_out(step_breakdown(load_step(folder.write())))
    assert message.endswith(f"actor {LISTED - 1} and 3 more")


def test_names_from_files_cannot_command_a_terminal() -> None:
    assert plain("\x1b[31mred\x07") == "\\x1b[31mred\\x07"
    assert plain("two\n\tlines") == "two lines"
    assert plain("Größe 大") == "Größe 大"


def test_a_moment_beyond_the_calendar_is_still_printed() -> None:
    assert moment(1_750_000_000 * 1_000_000_000) == "2025-06-15 15:06:40 UTC"
    assert moment(10**25) == "10000000000000000000000000 ns after 1970"


def test_the_printed_report_fits_100_columns_and_means_what_it_says_without_colour(tmp_path: Path) -> None:
    folder = rollout(tmp_path)
    for rank in range(12):
        folder.process("actor", rank, host="a-host-with-a-rather-long-name").span(
            "a_stage_with_quite_a_long_name[bold]", 0, 5 * MS
        )
    text = printed(step_report(load_step(folder.write())))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    for phrase in ("Where it went", "unaccounted", "100.0", "Long tail", "Slowest trajectories", "[bold]"):
        assert phrase in text
    assert re.search("2.00 ms .* 2 of 20 ", text)
    assert "1.00 ms for the" in " ".join(text.split())
    assert "unaligned" in text


def test_ranks_stand_side_by_side_up_to_eight_and_are_summed_up_beyond(tmp_path: Path) -> None:
    for ranks, header in ((8, "actor 7"), (9, "slowest")):
        rows: list[Row] = [(f"actor:{rank} update_actor", 0, rank + 1) for rank in range(ranks)]
        text = printed(reported(a_step(tmp_path / str(ranks), 10, rows)))
        line = next(line for line in text.splitlines() if "max/median" in line)
        assert header in line


# Tables in narrow terminals.


COLUMNS = ("process", "device", ">recorded", ">busy", ">compute", ">exposed communication", ">copies")
ROWS = [
    ("trainer", "GPU 0", "49.8 ms", "45.6 ms 91.6 %", "45.4 ms 91.2 %", "13.7 ms 27.5 %", "215 us 0.4 %"),
    ("rollout 12", "GPU 3", "1,204 ms", "17.1 ms 1.4 %", "16.9 ms 1.4 %", "0 0.0 %", "98.3 us 0.0 %"),
]


def lines(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table("Devices", COLUMNS, ROWS, "A note."))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 45, *range(60, 112), 200])
def test_nothing_of_a_table_is_cut(width: int) -> None:
    drawn = lines(width)
    assert max(map(len, drawn)) <= width
    shown, cells = "".join(drawn), "".join(cell for row in (COLUMNS, *ROWS) for cell in row)
    for character in set(cells) - set(" >"):
        assert shown.count(character) >= cells.count(character), character


def test_a_wide_terminal_shows_a_row_in_one_line() -> None:
    assert any(all(cell in line for cell in ROWS[0]) for line in lines(110))


def test_shares_stand_below_their_times_at_80_columns() -> None:
    drawn = lines(80)
    (at,) = (at for at, line in enumerate(drawn) if "trainer" in line)
    assert [part for part in ("45.6 ms", "45.4 ms", "13.7 ms", "215 us") if part in drawn[at]] == [
        "45.6 ms", "45.4 ms", "13.7 ms", "215 us",
    ]  # fmt: skip
    assert drawn[at + 1].split() == ["91.6", "%", "91.2", "%", "27.5", "%", "0.4", "%"]


@pytest.mark.parametrize("width", [100, 74])  # with wide gaps, and with narrow ones
def test_words_of_texts_stay_whole_where_there_is_room(width: int) -> None:
    columns = ("stage", ">on the path", ">%", ">with below", ">could save", "process", "longest in")
    stage = ("ref compute_ref_log_prob", "251 ms", "9.6", "437 ms", "65.0 ms", "ref 0", "problem15-1 turn 3")
    wait = ("rollout queue (waiting)", "1.20 ms", "0.1", "", "", "agent_loop replica 12", "")
    out = io.StringIO()
    Console(file=out, width=width).print(table("Critical path", columns, [stage, wait]))
    for word in (*stage[0].split(), *wait[-2].split(), *stage[-1].split()):
        assert word in out.getvalue()
