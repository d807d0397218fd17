from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packages.report.tests.steps import MS
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.diff import Diff, diff
from stepscope_report.formatting import signed
from stepscope_report.terminal import render_diff
from stepscope_report.timeline import load_step


def step(path: Path, number: int = 2, closes_ms: int = 20, **stages_ms: int) -> StepReport:
    """Return a driver that runs these stages one after the other."""
    folder = StepFolder(path, step=number)
    driver, at = folder.process("trainer", owner=True), 0
    for stage, milliseconds in stages_ms.items():
        driver.span(stage, at * MS, (at + milliseconds) * MS)
        at += milliseconds
    driver.close(closes_ms * MS)
    return step_report(load_step(folder.write()))


def printed(comparison: Diff) -> str:
    text = StringIO()
    Console(file=text, width=100).print(render_diff(comparison))
    return text.getvalue()


def changes(comparison: Diff) -> dict[str, int]:
    return {change.stage or change.kind: change.delta_ns // MS for change in comparison.changes}


def test_changes_add_up_and_the_largest_comes_first(tmp_path: Path) -> None:
    comparison = diff(
        [step(tmp_path, 2, rollout=8, update=4)], [step(tmp_path, 4, 30, rollout=15, update=3, eval=1)]
    )
    assert changes(comparison) == {"rollout": 7, "unaccounted": 3, "eval": 1, "update": -1}
    assert sum(change.delta_ns for change in comparison.changes) == comparison.delta_ns == 10 * MS
    assert comparison.changes[0].stage == "rollout"


def test_what_the_capture_took_is_no_change_of_the_step(tmp_path: Path) -> None:
    slow = _with_capture(step(tmp_path, 2, rollout=8), opening_ns=100 * MS, closing_ns=65 * MS)
    fast = _with_capture(step(tmp_path, 4, rollout=7), opening_ns=0, closing_ns=MS)
    comparison = diff([slow], [fast])
    assert comparison.delta_ns == sum(change.delta_ns for change in comparison.changes) == 0  # of 10 ms each
    assert (comparison.a.opening_ns, comparison.a.closing_ns, comparison.b.closing_ns) == (
        100 * MS, 65 * MS, MS,
    )  # fmt: skip
    assert "-164 ms" in next(
        line for line in printed(comparison).splitlines() if "+ opening, closing" in line
    )


def _with_capture(report: StepReport, *, opening_ns: int, closing_ns: int) -> StepReport:
    account = msgspec.structs.replace(report.breakdown, opening_ns=opening_ns, closing_ns=closing_ns)
    return msgspec.structs.replace(report, breakdown=account)


def test_a_stage_of_one_side_only_is_zero_on_the_other(tmp_path: Path) -> None:
    comparison = diff([step(tmp_path, 2, rollout=8)], [step(tmp_path, 4, eval=8)])
    gone = next(change for change in comparison.changes if change.stage == "rollout")
    assert (gone.a.calls, gone.b.calls, gone.b.wall_ns, gone.b.mean_ns) == (1, 0, 0, None)


def test_runs_are_compared_by_the_mean_of_their_steps(tmp_path: Path) -> None:
    a = [step(tmp_path / "a", number, rollout=milliseconds) for number, milliseconds in ((2, 8), (4, 10))]
    b = [step(tmp_path / "b", number, rollout=milliseconds) for number, milliseconds in ((2, 12), (4, 14))]
    comparison = diff(a, b)
    rollout = next(change for change in comparison.changes if change.stage == "rollout")
    assert (rollout.a.wall_ns, rollout.b.wall_ns, rollout.a.min_ns, rollout.a.max_ns) == (
        9 * MS, 13 * MS, 8 * MS, 10 * MS,
    )  # fmt: skip
    assert rollout.apart
    assert "+4.00 ms *" in printed(comparison)


def test_ranges_that_meet_are_not_apart(tmp_path: Path) -> None:
    a = [step(tmp_path / "a", number, rollout=milliseconds) for number, milliseconds in ((2, 8), (4, 12))]
    b = [step(tmp_path / "b", number, rollout=milliseconds) for number, milliseconds in ((2, 12), (4, 14))]
    assert not any(change.apart for change in diff(a, b).changes)
    assert not any(change.apart for change in diff(a[:1], b).changes)


def test_a_stage_that_some_steps_lack_has_a_minimum_of_zero(tmp_path: Path) -> None:
    a = [step(tmp_path / "a", 2, rollout=8, eval=6), step(tmp_path / "a", 4, rollout=8)]
    comparison = diff(a, a)
    eval_ = next(change for change in comparison.changes if change.stage == "eval")
    assert (eval_.a.wall_ns, eval_.a.min_ns, eval_.a.max_ns, eval_.a.calls) == (3 * MS, 0, 6 * MS, 0.5)


def test_a_side_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        diff([], [step(tmp_path)])


def test_the_printed_diff_fits_100_columns_and_names_both_sides(tmp_path: Path) -> None:
    many = {f"a_stage_with_quite_a_long_name_{index}": index + 1 for index in range(40)}
    text = printed(diff([step(tmp_path, 2, 1000, **many)], [step(tmp_path, 4, 1000, rollout=700)]))
    assert max(map(len, text.splitlines())) <= 100
    for phrase in ("A: step 2 of run run1", "B: step 4 of run run1", "smaller changes", "step", "+700 ms"):
        assert phrase in text


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
)
def test_the_lines_of_a_side_add_up_to_its_step(
    tmp_path_factory: pytest.TempPathFactory, a: list[int], b: list[int]
) -> None:
    base = step_report(load_step(_one(tmp_path_factory.mktemp("step"))))
    sides = [[_with(base, wall_ns) for wall_ns in side] for side in (a, b)]
    comparison = diff(*sides)
    assert sum(change.delta_ns for change in comparison.changes) == comparison.delta_ns
    assert sum(change.a.wall_ns for change in comparison.changes) == comparison.a.step_ns


def _one(path: Path) -> Path:
    folder = StepFolder(path)
    folder.process("trainer", owner=True).close(MS)
    return folder.write()


def _with(report: StepReport, wall_ns: int) -> StepReport:
    from msgspec.structs import replace

    lines = (replace(report.breakdown.lines[0], kind="stage", role="a", stage="b", wall_ns=wall_ns),)
    return replace(report, breakdown=replace(report.breakdown, lines=lines))


def test_signs_are_printed() -> None:
    assert [signed(ns) for ns in (5 * MS, -5 * MS, 0)] == ["+5.00 ms", "-5.00 ms", "0"]
