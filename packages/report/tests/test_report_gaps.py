"""Gaps of unaccounted time, and their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, close, printed
from packages.report.tests.test_report_html import page_of
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import idle_times, step_report
from stepscope_report.sections.breakdown import Breakdown, step_breakdown
from stepscope_report.spans import MOVES_WEIGHTS, TRANSFER
from stepscope_report.timeline import load_step

SEND, RECEIVE = "send_weights", "receive_weights"


def account_of(folder: StepFolder) -> Breakdown:
    return step_breakdown(load_step(folder.write()))


def gaps(folder: StepFolder) -> list[tuple[str | None, str | None, int, int]]:
    """(stage before, stage after, ms, how many)."""
    return [
        (gap.before and gap.before[1], gap.after and gap.after[1], gap.wall_ns // MS, gap.count)
        for gap in account_of(folder).gaps
    ]


def driver_with_gaps(folder: StepFolder) -> FakeProcess:
    driver = folder.process("trainer", owner=True)
    for at in (10, 30):
        driver.span("rollout", at * MS, (at + 5) * MS)
        driver.span("update", (at + 7) * MS, (at + 10) * MS)
    driver.close(100 * MS)
    return driver


def test_unaccounted_time_is_told_by_the_spans_around_it(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    driver_with_gaps(folder)
    assert gaps(folder) == [
        ("update", None, 60, 1),
        (None, "rollout", 10, 1),
        ("update", "rollout", 10, 1),
        ("rollout", "update", 4, 2),
    ]
    report = step_report(load_step(folder.write()))
    (unaccounted,) = (line for line in report.breakdown.lines if line.kind == "unaccounted")
    assert sum(gap.wall_ns for gap in report.breakdown.gaps) == unaccounted.wall_ns == 84 * MS
    section = printed(report).split("Unaccounted: the largest gaps")[1].split("\n\n")[0]
    rows = [" ".join(line.split()) for line in section.splitlines()[3:]]
    where = ("after .* update", "before .* rollout", "between .* update .* rollout", "elsewhere")
    figures = ("60.0 ms 60.0 1", "10.0 ms 10.0 1", "10.0 ms 10.0 1", "4.00 ms 4.0 2")
    for row, figure, place in zip(rows, figures, where, strict=True):
        assert re.fullmatch(f"{figure} {place}", row)
    page = page_of(folder)
    assert "span, trainer update" in page
    assert "elsewhere" in page
    (advice,) = (advice for advice in report.advice if advice.rule == "blind-spot")
    assert re.search("60.0 ms .* trainer update", "\n".join(advice.because))


def test_a_step_without_spans_is_one_gap(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).close(10 * MS)
    assert gaps(folder) == [(None, None, 10, 1)]


def synced(folder: StepFolder, *, first: tuple[str, str], then: tuple[str, str]) -> None:
    folder.process("trainer", owner=True)
    one, other = folder.process(first[0], 0), folder.process(then[0], 0)
    one.span(first[1], 2 * MS, 3 * MS)
    other.span(then[1], 65 * MS, 66 * MS)
    close(folder, 70 * MS)


def test_what_passes_between_the_ends_of_a_weight_sync_has_a_name(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    synced(folder, first=("actor", SEND), then=("rollout", RECEIVE))
    lines = {line.stage or line.kind: (line.role, line.wall_ns // MS) for line in account_of(folder).lines}
    assert lines[TRANSFER] == ("rollout", 62)
    assert lines["unaccounted"] == (None, 6)
    assert sum(gap.wall_ns for gap in account_of(folder).gaps) == 6 * MS


def test_who_is_idle_meanwhile_waits_for_the_weight_sync(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    synced(folder, first=("actor", SEND), then=("rollout", RECEIVE))
    for row in idle_times(load_step(folder.write())):
        assert row.causes[0].kind == "weight sync"
        assert row.busy_ns + sum(cause.wall_ns for cause in row.causes) == 70 * MS


@pytest.mark.parametrize(
    ("first", "then"),
    [(("rollout", RECEIVE), ("actor", SEND)), (("actor", "update_actor"), ("rollout", "generate"))],
    ids=["a training between two syncs", "other stages"],
)
def test_what_no_weight_sync_encloses_is_no_transfer(
    tmp_path: Path, first: tuple[str, str], then: tuple[str, str]
) -> None:
    folder = StepFolder(tmp_path)
    synced(folder, first=first, then=then)
    assert not any(line.stage == TRANSFER for line in account_of(folder).lines)


def test_names_of_both_ends_of_a_weight_sync_are_known() -> None:
    for name in (
        SEND,
        RECEIVE,
        *["load_weights", "sync_params", "broadcast_weights", "recv_weights", "reshard"],
    ):
        assert MOVES_WEIGHTS.search(name), name
    for name in ("update_actor", "weighted_loss", "generate"):
        assert not MOVES_WEIGHTS.search(name), name


def test_a_span_called_tool_inside_a_trajectory_counts_as_a_tool(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    for number in range(4):
        name = f"t{number}"
        root = driver.span("trajectory", 0, 100 * MS, trajectory=name, role="agent_loop")
        driver.span("tool_call", 10 * MS, 90 * MS, parent=root, trajectory=name, role="agent_loop")
    driver.close(100 * MS)
    rules = {advice.rule for advice in step_report(load_step(folder.write())).advice}
    assert "slow-tools" in rules
