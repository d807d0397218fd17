"""RLlib, unedited: PPO on CartPole with two env runners, with and without `stepscope run --preset rllib`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("gymnasium")  # RLlib's own requirement; the package itself comes with Ray

SCRIPT = Path(__file__).parents[1] / "rllib_script.py"
ONCE = {
    ("trainer", "generate"): 1,
    ("rollout", "generate"): 2,
    ("trainer", "update_actor"): 1,
    ("actor", "update_actor"): 1,
    ("actor", "compute_advantages"): 1,
    ("trainer", "sync_weights"): 1,
    ("trainer", "sync_connectors"): 1,
}


class Run(NamedTuple):
    """The outcome of the script, and the reports of its steps."""

    plain: dict[str, Any]
    """Returns, weights and times, as the script wrote them."""
    captured: dict[str, Any]
    reports: list[dict[str, Any]]
    said: list[str]
    """Lines that stepscope printed."""


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True
    )


def outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return stdout and stderr of a process that must succeed."""
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stdout, stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return three iterations without stepscope, and the same three captured meanwhile."""
    folder = tmp_path_factory.mktemp("rllib")
    plain, captured, steps = folder / "plain.json", folder / "captured.json", folder / "run"
    options = ["--preset", "rllib", "--steps", "every:1", "--save-path", str(steps)]
    without = start(str(SCRIPT), str(plain))
    _, stderr = outputs(start("-m", "stepscope", "run", *options, str(SCRIPT), str(captured)))
    outputs(without)
    printed, _ = outputs(start("-m", "stepscope", "report", str(steps), "--no-traces", "--no-html", "--json"))
    return Run(
        json.loads(plain.read_text()),
        json.loads(captured.read_text()),
        json.loads(printed)["steps"],
        [line for line in stderr.splitlines() if "stepscope:" in line],
    )


def test_every_iteration_is_a_step_with_the_stages_of_ppo(run: Run) -> None:
    assert [report["step"] for report in run.reports] == [0, 1, 2]
    for report in run.reports:
        calls = {(stage["role"], stage["stage"]): stage["calls"] for stage in report["stages"]}
        minibatches = calls.pop(("actor", "update_actor_optimizer"))
        assert calls.pop(("actor", "update_actor_backward")) == minibatches
        assert calls.pop(("actor", "update_actor_forward")) == 2 * minibatches  # the module, then the loss
        assert calls == ONCE


def test_less_than_a_twentieth_of_a_step_is_unaccounted(run: Run) -> None:
    for report in run.reports:
        (rest,) = (line for line in report["breakdown"]["lines"] if line["kind"] == "unaccounted")
        assert rest["wall_ns"] < report["breakdown"]["window_ns"] / 20


def test_the_env_runners_are_recorded_though_rllib_keeps_them_in_a_mapping(run: Run) -> None:
    for report in run.reports:
        (sampling,) = (
            stage for stage in report["stages"] if (stage["role"], stage["stage"]) == ("rollout", "generate")
        )
        processes = {process["process"]: process["calls"] for process in sampling["processes"]}
        assert processes == {"rollout 0": 1, "rollout 1": 1}


def test_returns_and_weights_are_those_of_the_run_without_stepscope(run: Run) -> None:
    assert run.captured["returns"] == run.plain["returns"]
    assert run.captured["weights"] == run.plain["weights"]


def test_a_step_with_its_opening_and_closing_is_as_long_as_rllib_says(run: Run) -> None:
    # Not the first: before it the profilers were started once for nothing.
    for report, seconds in list(zip(run.reports, run.captured["seconds"], strict=True))[1:]:
        assert report["breakdown"]["total_ns"] / 1e9 == pytest.approx(seconds, rel=0.05)


def test_each_stage_of_the_driver_fits_into_rllibs_own_timer_of_it(run: Run) -> None:
    # The first iteration alone: later timers are moving averages.
    timers, report = run.captured["timers"][0], run.reports[0]
    seconds = {
        stage["stage"]: stage["total_ns"] / 1e9 for stage in report["stages"] if stage["role"] == "trainer"
    }
    named = {"generate": "env_runner_sampling_timer", "update_actor": "learner_update_timer"}
    for stage, timer in {**named, "sync_weights": "synch_weights"}.items():
        assert 0.8 * timers[timer] < seconds[stage] <= timers[timer]
    assert report["breakdown"]["window_ns"] / 1e9 >= timers["training_iteration"]


def test_every_step_is_complete_and_nothing_is_complained_of(run: Run) -> None:
    for report in run.reports:
        assert (report["health"]["state"], report["health"]["missing"]) == ("ok", [])
    assert all(" captured: " in line for line in run.said)
