"""Steps with more names of stages than a table has rows: an id in an f-string, say."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.steps import printed
from stepscope.files.spans import MOST_NAMES, OTHER_NAMES
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.groups import group_spans
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import Timeline, load_step

MS = 1_000_000


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


def rules(report: StepReport) -> set[str]:
    return {advice.rule for advice in report.advice}


def test_the_longest_names_have_rows_and_the_others_share_one(tmp_path: Path) -> None:
    timeline = a_step(tmp_path, [f"generate {number}" for number in range(1, 2001)])
    report = step_report(timeline)
    longest = {f"generate {number}": number * MS for number in range(1951, 2001)}
    expected = {**longest, OTHER_NAMES: sum(range(1, 1951)) * MS}
    assert {stage.stage: stage.total_ns for stage in report.stages} == expected
    billed = {line.stage: line.wall_ns for line in report.breakdown.lines if line.kind == "stage"}
    assert billed == expected
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
