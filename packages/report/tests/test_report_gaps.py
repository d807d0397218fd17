"""Gaps of unaccounted time, and their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, Row, a_step, printed, reported, rules
from packages.report.tests.test_report_html import page_of
from stepscope_report import StepReport
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.spans import MOVES_WEIGHTS, TRANSFER

SEND, RECEIVE = "send_weights", "receive_weights"


def gaps(account: Breakdown) -> list[tuple[str | None, str | None, int, int]]:
    """(stage before, stage after, ms, how many)."""
    return [
        (gap.before and gap.before[1], gap.after and gap.after[1], gap.wall_ns // MS, gap.count)
        for gap in account.gaps
    ]


def test_unaccounted_time_is_told_by_the_spans_around_it(tmp_path: Path) -> None:
    rows: list[Row] = [
        row
        for at in (10, 30)
        for row in (("trainer rollout", at, at + 5), ("trainer update", at + 7, at + 10))
    ]
    folder = a_step(tmp_path, 100, rows)
    report = reported(folder)
    assert gaps(report.breakdown) == [
        ("update", None, 60, 1),
        (None, "rollout", 10, 1),
        ("update", "rollout", 10, 1),
        ("rollout", "update", 4, 2),
    ]
    (unaccounted,) = (line for line in report.breakdown.lines if line.kind == "unaccounted")
    assert sum(gap.wall_ns for gap in report.breakdown.gaps) == unaccounted.wall_ns == 84 * MS
    section = printed(report).split("Unaccounted: the largest gaps")[1].split("\n\n")[0]
    told = [" ".join(line.split()) for line in section.splitlines()[3:]]
    where = ("after .* update", "before .* rollout", "between .* update .* rollout", "elsewhere")
    figures = ("60.0 ms 60.0 1", "10.0 ms 10.0 1", "10.0 ms 10.0 1", "4.00 ms 4.0 2")
    for row, figure, place in zip(told, figures, where, strict=True):
        assert re.fullmatch(f"{figure} {place}", row)
    page = page_of(folder)
    assert "span, trainer update" in page
    assert "elsewhere" in page
    (advice,) = (advice for advice in report.advice if advice.rule == "blind-spot")
    assert re.search("60.0 ms .* trainer update", "\n".join(advice.because))


def test_a_step_without_spans_is_one_gap(tmp_path: Path) -> None:
    assert gaps(reported(a_step(tmp_path, 10, [])).breakdown) == [(None, None, 10, 1)]


def synced(root: Path, first: str = f"actor {SEND}", then: str = f"rollout {RECEIVE}") -> StepReport:
    return reported(a_step(root, 70, [(first, 2, 3), (then, 65, 66)]))


def test_what_passes_between_the_ends_of_a_weight_sync_has_a_name(tmp_path: Path) -> None:
    """A process that is idle meanwhile waits for the weight sync."""
    report = synced(tmp_path)
    lines = {line.stage or line.kind: (line.role, line.wall_ns // MS) for line in report.breakdown.lines}
    assert lines[TRANSFER] == ("rollout", 62)
    assert lines["unaccounted"] == (None, 6)
    assert sum(gap.wall_ns for gap in report.breakdown.gaps) == 6 * MS
    for row in report.idle:
        assert row.causes[0].kind == "weight sync"
        assert row.busy_ns + sum(cause.wall_ns for cause in row.causes) == 70 * MS


@pytest.mark.parametrize(
    ("first", "then"),
    [(f"rollout {RECEIVE}", f"actor {SEND}"), ("actor update_actor", "rollout generate")],
    ids=["a training between two syncs", "other stages"],
)
def test_what_no_weight_sync_encloses_is_no_transfer(tmp_path: Path, first: str, then: str) -> None:
    lines = synced(tmp_path, first, then).breakdown.lines
    assert not any(line.stage == TRANSFER for line in lines)


def test_names_of_both_ends_of_a_weight_sync_are_known() -> None:
    known = (SEND, RECEIVE, "load_weights", "sync_params", "broadcast_weights", "recv_weights", "reshard")
    assert [name for name in known if not MOVES_WEIGHTS.search(name)] == []
    others = ("update_actor", "weighted_loss", "generate")
    assert [name for name in others if MOVES_WEIGHTS.search(name)] == []


def test_a_span_called_tool_inside_a_trajectory_counts_as_a_tool(tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(4):
        own = {"trajectory": f"t{number}"}
        rows.append(("trainer/agent_loop trajectory", 0, 100, own))
        rows.append(("trainer/agent_loop tool_call", 10, 90, "trajectory", own))
    assert "slow-tools" in rules(reported(a_step(tmp_path, 100, rows)))


def test_a_tool_inside_a_tool_is_not_added_to_it(tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(4):
        own = {"trajectory": f"t{number}"}
        rows.append(("trainer/agent_loop trajectory", 0, 100, own))
        rows.append(("trainer/env search", 10, 90, "trajectory", own))
        rows.append(("trainer/env request", 20, 90, "search", own))
    (advice,) = (one for one in reported(a_step(tmp_path, 100, rows)).advice if one.rule == "slow-tools")
    assert advice.because[0].endswith("80.0 %")
