"""Numbers that a trainer logs of its steps: beside a captured step, in its report and among its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.pictures import HOSTILE, rl_step
from packages.report.tests.steps import printed
from stepscope._recording.process import exports, identity
from stepscope.files.layout import RunLayout
from stepscope.files.scalars import StepMetrics, read_metrics, write_metrics
from stepscope.integrations.verl import MetricsLog
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report, to_scalars
from stepscope_report.html.step_page import render_step
from stepscope_report.sections.metrics import metrics_blocks
from stepscope_report.table import TextTable
from stepscope_report.timeline import load_step

VALUES = {"perf/mfu": 0.1, "timing_s/gen": 4.03, "critic/score/mean": 0.5, "critic/score/max": 1.0}


def logged(folder: Path, *values: dict[str, object], step: int = 2) -> dict[str, float]:
    """Log the values of a step, one call after another, and return what lies in its folder."""
    log = MetricsLog(folder)
    for some in values:
        log.log(step, some)
    exports.exporter().drain(10)
    return read_metrics(RunLayout(folder).step(step), identity.run_id())


def report_with(folder: Path, values: dict[str, float]) -> StepReport:
    """Return the report of a step of which the trainer logged the values."""
    written = rl_step(folder, ranks=1)
    path = written.write()
    write_metrics(written.layout, StepMetrics(run_id=written.run_id, step=2, values=values))
    return step_report(load_step(path))


def test_only_a_captured_step_keeps_the_numbers(tmp_path: Path) -> None:
    RunLayout(tmp_path).step(2).root.mkdir()
    assert logged(tmp_path, {"loss": 0.5}) == {"loss": 0.5}
    assert logged(tmp_path, {"loss": 0.5}, step=3) == {}
    assert not RunLayout(tmp_path).step(3).root.exists()


def test_two_calls_of_one_step_make_one_file(tmp_path: Path) -> None:
    RunLayout(tmp_path).step(2).root.mkdir()
    assert logged(tmp_path, {"loss": 0.5, "kl": 1}, {"kl": 2}) == {"loss": 0.5, "kl": 2.0}


@pytest.mark.parametrize("value", [None, "0.5", float("nan"), float("inf"), [1.0], 10**400])
def test_what_is_no_finite_number_is_left_out(tmp_path: Path, value: object) -> None:
    RunLayout(tmp_path).step(2).root.mkdir()
    assert logged(tmp_path, {"odd": value, "loss": 0.5}) == {"loss": 0.5}


def test_the_report_shows_the_numbers_without_their_extremes(tmp_path: Path) -> None:
    report = report_with(tmp_path, VALUES)
    for shown in (printed(report, 150), render_step(load_step(RunLayout(tmp_path).step(2).root), report)):
        assert "by the trainer" in shown
        assert "critic/score/mean" in shown
        assert "critic/score/max" not in shown
    assert json.loads(msgspec.json.encode(report))["metrics"] == VALUES


def test_the_numbers_that_people_look_for_come_first(tmp_path: Path) -> None:
    (table,) = metrics_blocks(VALUES, report_with(tmp_path, VALUES))
    assert isinstance(table, TextTable)
    assert [name for name, _ in table.rows] == ["critic/score/mean", "timing_s/gen", "perf/mfu"]


def test_the_numbers_are_figures_of_the_step(tmp_path: Path) -> None:
    scalars = to_scalars(report_with(tmp_path, VALUES | {"val core/acc@1": 1.0}))
    assert scalars["trainer/timing_s/gen"] == 4.03
    assert scalars["trainer/val-core/acc-1"] == 1.0


def test_a_broken_file_is_named_and_its_numbers_are_left_out(tmp_path: Path) -> None:
    written = rl_step(tmp_path, ranks=1)
    path = written.write()
    broken = written.layout.metrics(written.run_id)
    broken.write_text("{")
    timeline = load_step(path)
    assert step_report(timeline).metrics == {}
    (problem,) = timeline.problems
    assert problem.file == broken.name
    assert "no numbers" in problem.what


# A step's figures under flat names, for programs that draw curves.


def scalars(folder: StepFolder) -> dict[str, float]:
    return to_scalars(step_report(load_step(folder.write())))


def test_stages_and_the_rest_add_up_to_the_step_without_its_capture(tmp_path: Path) -> None:
    values = scalars(rl_step(tmp_path))
    parts = [value for name, value in values.items() if name.startswith("stage/")]
    rest = values["step/profiler_seconds"] + values["step/unaccounted_seconds"]
    assert values["step/wall_seconds"] == pytest.approx(1.0) == pytest.approx(sum(parts) + rest)
    assert values["capture/opening_seconds"] == pytest.approx(0.004)
    assert values["capture/closing_seconds"] == pytest.approx(0.006)
    assert "stage/actor/update_actor_seconds" in values


def test_idle_is_the_mean_of_a_roles_processes(tmp_path: Path) -> None:
    # Rank r of two works from 600 ms to (700 + r) ms, of a second.
    assert scalars(rl_step(tmp_path, ranks=2))["idle/actor_seconds"] == pytest.approx(0.8995)


def test_the_long_tail_is_there_where_there_are_trajectories(tmp_path: Path) -> None:
    with_some = scalars(rl_step(tmp_path / "some"))
    without = scalars(rl_step(tmp_path / "none", trajectories=0))
    assert with_some["long_tail/rollout_seconds"] == pytest.approx(0.6)
    assert not any(name.startswith("long_tail/") for name in without)


def test_names_hold_nothing_that_a_store_of_metrics_refuses(tmp_path: Path) -> None:
    values = scalars(rl_step(tmp_path, hostile=HOSTILE))
    assert all(re.fullmatch(r"(\w[\w.-]*/)+[\w.-]+", name) for name in values)
