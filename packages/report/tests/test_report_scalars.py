"""A step's figures under flat names, for programs that draw curves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.pictures import HOSTILE, rl_step
from stepscope.testing.steps import StepFolder
from stepscope_report import step_report, to_scalars
from stepscope_report.timeline import load_step


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
