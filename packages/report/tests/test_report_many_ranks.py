"""Reports of many ranks: the worst by name, percentiles of the rest, and a page that stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, close, printed, reported, rules
from packages.report.tests.test_report_html import Page
from packages.report.tests.traces import add_trace, kernel, memory
from stepscope.files.spans import MOST_NAMES, OTHER_NAMES
from stepscope.testing.steps import StepFolder
from stepscope_report import step_report
from stepscope_report.groups import group_spans
from stepscope_report.html.step_page import render_step
from stepscope_report.model import StepReport
from stepscope_report.sections.counters import BARS
from stepscope_report.sections.counters import ROWS as COUNTERS
from stepscope_report.sections.traces import DRAWN, trace_blocks
from stepscope_report.table import TextTable
from stepscope_report.timeline import Timeline, load_step, load_traces

RANKS = 150
LAZY, FULL = 77, 33


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, StepReport]:
    """A step in which one rank's GPU does little, another one's memory is fuller, and counters abound."""
    path = written(tmp_path_factory.mktemp("many"))
    timeline = load_step(path)
    return timeline, step_report(timeline, load_traces(path, timeline))


def written(root: Path) -> Path:
    folder = StepFolder(root)
    folder.process("trainer", owner=True).span("update", 0, 900 * MS)
    for rank in range(RANKS):
        actor = folder.process("actor", rank)
        actor.span("update_actor", 0, 800 * MS)
        busy_us = 100_000 if rank == LAZY else 500_000 + 1000 * rank
        held = 9 << 30 if rank == FULL else (4 << 30) + rank
        add_trace(folder, actor, [kernel("gemm", 0, busy_us), kernel("gemm", 799_000, 1000), memory(5, held)])
        for number in range(3):
            values = {at * 90 * MS: float(at + 1) for at in range(10)}
            actor.counter(f"counter {number}", values, unit="%")
    close(folder, 1000 * MS)
    return folder.write()


def tables(report: StepReport) -> dict[str, TextTable]:
    return {
        block.title: block for block in trace_blocks(report.traces, report) if isinstance(block, TextTable)
    }


def test_the_least_busy_device_comes_first_with_percentiles_of_all(step: tuple[Timeline, StepReport]) -> None:
    devices = tables(step[1])["Devices"]
    assert [row[0] for row in devices.rows[:2]] == [f"actor {LAZY}", "actor 0"]
    assert devices.note.startswith("Least busy first")
    assert f"of {RANKS}." in devices.note


def test_the_fullest_memory_comes_first_with_percentiles_of_all(step: tuple[Timeline, StepReport]) -> None:
    rows = tables(step[1])["Most memory"]
    assert rows.rows[0][0] == f"actor {FULL}"
    assert re.findall(r"[\d.]+(?= GB)", rows.note)[:4] == ["4.3", "4.3", "4.3", "9.7"]


def test_few_devices_stay_in_the_order_of_ranks(folder: StepFolder) -> None:
    folder.process("trainer", owner=True).close(1000 * MS)
    for rank, busy_us in enumerate((500, 100, 300)):
        actor = folder.process("actor", rank)
        add_trace(folder, actor, [kernel("gemm", 0, busy_us)])
        actor.close(1000 * MS)
    devices = tables(reported(folder, traces=True))["Devices"]
    assert [row[0] for row in devices.rows] == ["actor 0", "actor 1", "actor 2"]
    assert "p50" not in devices.note


def test_the_page_draws_some_devices_and_counters_and_counts_the_others(
    step: tuple[Timeline, StepReport],
) -> None:
    text = render_step(*step)
    page = Page(text)
    assert page.marks["devices"] <= 3 * (DRAWN + 24)
    assert page.marks["counters"] <= 1.2 * COUNTERS * BARS
    assert f"actor {LAZY}" in page.text["devices"]
    assert "least busy" in page.text["devices"]
    assert len(text) < 4_000_000


# Steps with more names of stages than a table has rows: an id in an f-string, say.


def a_step(root: Path, names: list[str], role: str = "rollout") -> Timeline:
    """Return a step in which the n-th name takes n ms in sum, one after the other."""
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    at = 0
    for number, name in enumerate(names, 1):
        driver.span(name, at, at + number * MS, role=role.format(number), error="ValueError: bad")
        at += number * MS
    driver.close(at)
    return load_step(folder.write())


def test_the_longest_names_have_rows_and_the_others_share_one(tmp_path: Path) -> None:
    timeline = a_step(tmp_path, [f"generate {number}" for number in range(1, 2001)])
    report = step_report(timeline)
    longest = {f"generate {number}": number * MS for number in range(1951, 2001)}
    expected = {**longest, OTHER_NAMES: sum(range(1, 1951)) * MS}
    assert {stage.stage: stage.total_ns for stage in report.stages} == expected
    attributed = {line.stage: line.wall_ns for line in report.breakdown.lines if line.kind == "stage"}
    assert attributed == expected
    assert sum(line.wall_ns for line in report.breakdown.lines) == timeline.window.wall_ns
    groups = {group.value: group.total_ns for group in group_spans(timeline, "stage").groups}
    assert sorted(groups.values()) == sorted(expected.values())
    assert len(printed(report, 120).splitlines()) < 300
    assert render_step(timeline, report).count("generate 7 ") == 0
    assert "ids-in-names" in rules(report)


def test_roles_with_ids_share_a_row_too(tmp_path: Path) -> None:
    report = step_report(a_step(tmp_path, ["generate"] * 2000, role="worker {}"))
    assert len(report.stages) == MOST_NAMES + 1
    assert (OTHER_NAMES, OTHER_NAMES) in {(stage.role, stage.stage) for stage in report.stages}
    assert "ids-in-names" in rules(report)


@pytest.mark.parametrize("name", ["trajectory", "turn", "queue", "prefill", "decode"])
def test_names_with_a_meaning_stay_however_short_they_are(tmp_path: Path, name: str) -> None:
    report = step_report(a_step(tmp_path, [name, *(f"generate {number}" for number in range(200))]))
    assert name in {stage.stage for stage in report.stages}


def test_as_many_names_as_rows_stay_as_they_are(tmp_path: Path) -> None:
    names = [f"stage {number}" for number in range(MOST_NAMES)]
    report = step_report(a_step(tmp_path, names))
    assert {stage.stage for stage in report.stages} == set(names)
    assert "ids-in-names" not in rules(report)


def test_what_lists_single_calls_keeps_their_names(tmp_path: Path) -> None:
    names = [f"generate {number}" for number in range(1, 101)]
    report = step_report(a_step(tmp_path, names))
    assert [row.stage for row in report.health.errors] == names
