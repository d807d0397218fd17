from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.pictures import MS, rl_step
from packages.report.tests.steps import Row, a_step, some
from stepscope.testing.steps import StepFolder
from stepscope_report import stage_times
from stepscope_report.charts import (
    FULL_ROWS,
    Gantt,
    Mark,
    blend_short,
    draw_gantt,
    join_near,
    pack_trajectories,
    pick,
)
from stepscope_report.timeline import load_step
from stepscope_report.timeline.merge.step_events import Interval, pack

A, B = ("actor", "forward"), ("actor", "backward")


def chart(folder: StepFolder, budget: int = 12_000) -> Gantt:
    timeline = load_step(folder.write())
    return draw_gantt(timeline, stage_times(timeline), budget)


def lanes_of(drawn: Gantt, role: str, row: int = 0) -> list[list[str]]:
    group = next(group for group in drawn.groups if group.role == role)
    return [[mark.label[1] for mark in lane] for lane in group.rows[row].lanes]


def test_callers_stand_above_what_they_call(tmp_path: Path) -> None:
    drawn = chart(rl_step(tmp_path))
    assert lanes_of(drawn, "actor") == [["update_actor"], ["forward"]]
    assert lanes_of(drawn, "trainer") == [["rollout", "update"], ["trajectory"], ["turn"]]


def test_concurrent_calls_of_a_stage_are_one_mark_that_says_how_many(tmp_path: Path) -> None:
    drawn = chart(rl_step(tmp_path, trajectories=24))
    trainer = drawn.groups[0].rows[0]
    (trajectory,) = trainer.lanes[1]
    assert (trajectory.spans, trajectory.at_once) == (24, 24)
    assert (trajectory.start_ns, trajectory.end_ns) == (0, 600 * MS)


@pytest.mark.parametrize(
    ("rows", "lanes"),
    [
        (
            [("trainer reward", 0, 6), ("trainer ref", 4, 8), ("trainer update", 8, 9)],
            [["reward", "update"], ["ref"]],
        ),
        (
            [("trainer solve", 0, 8), ("trainer ask", 1, 7, "solve"), ("trainer solve", 2, 3, "ask")],
            [["ask"], ["solve"]],
        ),
    ],
    ids=["overlap", "stages that call each other"],
)
def test_stages_that_overlap_have_lanes_of_their_own(
    tmp_path: Path, rows: list[Row], lanes: list[list[str]]
) -> None:
    assert lanes_of(chart(a_step(tmp_path, 10, rows)), "trainer") == lanes


def test_open_and_failed_calls_are_marked(tmp_path: Path) -> None:
    rows: list[Row] = [("trainer reward", 0, 1, {"error": "ValueError"}), ("trainer update", 2, None)]
    (failed, hung) = chart(a_step(tmp_path, 10, rows)).groups[0].rows[0].lanes[0]
    assert (failed.failed, failed.open) == (1, False)
    assert (hung.open, hung.end_ns) == (True, 10 * MS)


def test_an_unaligned_process_has_a_row_and_no_marks(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, ranks=1)
    folder.process("actor", 1, host="elsewhere").span("update_actor", 0, MS)
    group = next(group for group in chart(folder).groups if group.role == "actor")
    assert [(row.aligned, len(row.lanes)) for row in group.rows] == [(True, 2), (False, 0)]


def test_many_processes_are_strips_of_the_most_specific_stage(tmp_path: Path) -> None:
    drawn = chart(rl_step(tmp_path, ranks=FULL_ROWS + 1))
    group = next(group for group in drawn.groups if group.role == "actor")
    assert (group.strips, group.processes) == (True, FULL_ROWS + 1)
    assert lanes_of(drawn, "actor") == [["update_actor", "forward", "update_actor"]]


def test_the_slowest_of_thousands_is_drawn(tmp_path: Path) -> None:
    drawn = chart(rl_step(tmp_path, ranks=1100, trajectories=2))
    group = next(group for group in drawn.groups if group.role == "actor")
    assert group.processes == 1100
    assert len(group.rows) <= 513
    assert "actor 1099" in [row.name for row in group.rows]


def test_a_budget_is_kept_and_what_it_cost_is_said(tmp_path: Path) -> None:
    rows: list[Row] = [("trainer tool", index * 4, index * 4 + 1) for index in range(1000)]
    drawn = chart(a_step(tmp_path, 4000, rows), budget=300)
    assert drawn.marks <= 300
    assert drawn.spans == 1000
    assert drawn.shortest_ns > 3 * MS
    lane = drawn.groups[0].rows[0].lanes[0]
    assert sum(mark.spans for mark in lane) == 1000
    assert sum(map(busy_ns, lane)) == 1000 * MS


def test_a_step_without_time_or_spans_can_be_drawn(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 0, [])
    drawn = chart(folder)
    assert (drawn.window_ns, drawn.marks, drawn.groups[0].rows[0].lanes) == (0, 0, ())
    assert pack_trajectories(load_step(folder.write())) is None


def test_a_trajectory_shows_what_it_waited_for_at_each_instant(tmp_path: Path) -> None:
    packed = some(pack_trajectories(load_step(rl_step(tmp_path, trajectories=1).write())))
    ((flight,),) = packed.lanes
    assert [(mark.label[1], mark.start_ns // MS, mark.end_ns // MS) for mark in flight.marks] == [
        ("queue", 0, 10),
        ("prefill", 10, 20),
        ("decode", 20, 600),
    ]


def test_in_flight_counts_trajectories_over_the_window(tmp_path: Path) -> None:
    packed = some(pack_trajectories(load_step(rl_step(tmp_path, trajectories=10).write())))
    assert max(packed.in_flight) == 10
    assert packed.in_flight[-1] == 0
    # The area under the curve is the trajectories' time: 1 s in parts.
    area_ms = sum(packed.in_flight) * 1000 / len(packed.in_flight)
    flights = [flight for lane in packed.lanes for flight in lane]
    assert abs(area_ms - sum(flight.end_ns - flight.start_ns for flight in flights) / MS) < 5


def test_of_too_many_lanes_those_of_the_slowest_are_kept(tmp_path: Path) -> None:
    timeline = load_step(rl_step(tmp_path, trajectories=600).write())
    packed = some(pack_trajectories(timeline, ["t599", "t7"], budget=400))
    assert (packed.trajectories, packed.needed) == (600, max_overlap(600))
    assert len(packed.lanes) <= 258
    drawn = {flight.trajectory for lane in packed.lanes for flight in lane}
    assert {"t599", "t7"} <= drawn


def max_overlap(count: int) -> int:
    times = [(index, 100 + 500 * (index + 1) // count) for index in range(count)]
    return max(sum(start <= at < end for start, end in times) for at, _ in times)


def in_a_row(lengths: list[tuple[int, int, bool]]) -> list[Mark]:
    """Marks one after the other, from (gap before, length, which stage)."""
    marks, at = [], 0
    for gap, length, first in lengths:
        marks.append(Mark(A if first else B, at + gap, at + gap + length))
        at += gap + length
    return marks


def busy_ns(mark: Mark) -> int:
    return mark.end_ns - mark.start_ns - mark.gaps_ns


rows = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.booleans())).map(in_a_row)


@given(rows, st.integers(1, 40))
def test_blending_keeps_long_marks_and_leaves_two_in_any_stretch(marks: list[Mark], shortest: int) -> None:
    fewer = blend_short(marks, shortest)
    assert [mark for mark in fewer if mark.end_ns - mark.start_ns >= shortest and mark.spans == 1] == [
        mark for mark in marks if mark.end_ns - mark.start_ns >= shortest
    ]
    assert sum(mark.spans for mark in fewer) == len(marks)
    starts = [mark.start_ns for mark in fewer]
    assert all(starts[at + 2] - starts[at] >= shortest for at in range(len(starts) - 2))


@given(rows, st.integers(1, 40))
def test_joining_neighbours_loses_no_call_and_keeps_the_extent(marks: list[Mark], gap: int) -> None:
    of_label = [mark for mark in marks if mark.label == A]
    fewer = join_near(of_label, gap)
    assert sum(mark.spans for mark in fewer) == len(of_label)
    assert sum(map(busy_ns, fewer)) == sum(map(busy_ns, of_label))
    if of_label:
        assert (fewer[0].start_ns, fewer[-1].end_ns) == (of_label[0].start_ns, of_label[-1].end_ns)


@given(st.integers(0, 3000), st.integers(1, 600), st.lists(st.integers(0, 4000), max_size=5))
def test_rows_are_picked_evenly_and_the_wanted_ones_always(count: int, limit: int, wanted: list[int]) -> None:
    picked = pick(count, limit, wanted)
    assert len(picked) <= limit + len(wanted)
    assert {at for at in wanted if at < count} <= set(picked)
    assert picked == sorted(set(picked))
    assert count > limit or picked == list(range(count))


# Intervals packed into lanes: they nest, nothing wanders, and no lane is wasted.


@st.composite
def forests(draw: st.DrawFn) -> list[Interval]:
    """Trees as recorders leave them: parents open first; some children outlive them."""
    made: list[Interval] = []
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.none() | st.integers(0, len(made) - 1)) if made else None
        first = 0 if parent is None else made[parent].start_ns
        start_ns = first + draw(st.integers(0, 12))
        made.append(Interval(start_ns, start_ns + draw(st.integers(0, 20)), parent))
    return made


@pytest.mark.slow
@given(forests())
def test_in_a_lane_intervals_nest_or_are_apart(intervals: list[Interval]) -> None:
    lanes = pack(intervals)
    for one, (lane, a) in enumerate(zip(lanes, intervals, strict=True)):
        for other_lane, b in zip(lanes[:one], intervals[:one], strict=True):
            apart = a.end_ns <= b.start_ns or b.end_ns <= a.start_ns
            nested = (a.start_ns <= b.start_ns and b.end_ns <= a.end_ns) or (
                b.start_ns <= a.start_ns and a.end_ns <= b.end_ns
            )
            assert lane != other_lane or apart or nested


@given(forests())
def test_what_stands_inside_another_belongs_to_it(intervals: list[Interval]) -> None:
    lanes = pack(intervals)
    for one, inner in enumerate(intervals):
        ancestors = set()
        at = inner.parent
        while at is not None:
            ancestors.add(at)
            at = intervals[at].parent
        around = {
            other
            for other, outer in enumerate(intervals)
            if other != one and lanes[other] == lanes[one] and outer.start_ns < inner.start_ns < outer.end_ns
        }
        assert around <= ancestors
