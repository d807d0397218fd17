"""AReaL, unedited: its trainer with a workflow of several turns, under `stepscope run`. On request."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.core.tests.areal_cpu import reward
from packages.core.tests.areal_cpu.launch import ASYNCHRONOUS, PROMPTS, RESPONSES
from packages.core.tests.areal_cpu.runs import captured_training
from packages.core.tests.on_cpu.runs import CAPTURED, Step, StepsOfATraining, Training
from stepscope_report.timeline import load_step

pytest.importorskip("areal")
TRAJECTORIES = PROMPTS * RESPONSES
TIMINGS = {
    "recompute_logp": ("actor", "compute_log_prob"),
    "ref_logp": ("ref", "compute_ref_log_prob"),
    "compute_advantage": ("actor", "compute_advantages"),
    "train_step": ("actor", "update_actor"),
    "update_weights": ("actor", "sync_weights"),
}
"""AReaL's `timeperf/...` and the stages that measure the same."""
STALENESS = "ppo_actor/update/version_stats/sample_staleness_theta_max"


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training of five steps, of which two were captured."""
    return captured_training(tmp_path_factory.mktemp("areal"))


def test_the_batches_of_asynchronous_rollouts_are_as_stale_as_areal_says(tmp_path: Path) -> None:
    training = captured_training(tmp_path, *ASYNCHRONOUS)
    assert sorted(training.steps) == list(CAPTURED)
    for step in training.steps.values():
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        assert step.unaccounted < 0.05
        staleness = step.report["staleness"]
        areal = step.metrics[STALENESS]
        assert (staleness["versions"]["known"], staleness["versions"]["max"]) == (PROMPTS, areal)
    # Whether a batch of a captured step is stale is up to the machine.
    assert 1 in {numbers.get(STALENESS) for numbers in training.metrics.values()}


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    return training.steps[request.param]


def test_the_selected_steps_are_captured_and_areal_runs_to_its_end(training: Training) -> None:
    assert sorted(training.metrics) == [0, 1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)


def test_every_path_of_the_preset_leads_somewhere(training: Training) -> None:
    assert "is left out" not in training.output


class TestTheSteps(StepsOfATraining):
    """The steps of the training in this file."""


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_stage_lasts_as_long_as_areal_says(step: Step, timing: str) -> None:
    assert step.calls[TIMINGS[timing]] == 1
    areal_s = step.metrics[f"timeperf/{timing}"]
    assert step.seconds[TIMINGS[timing]] == pytest.approx(areal_s, rel=0.1, abs=0.01)


def test_the_rollout_lasts_as_long_as_areal_says(step: Step) -> None:
    # AReaL's time begins before the capture opens
    opening_s = step.report["breakdown"]["opening_ns"] / 1e9
    generate_s = step.seconds["rollout", "generate"]
    assert generate_s <= step.metrics["timeperf/rollout"] <= generate_s + opening_s + 0.2


def test_every_trajectory_of_the_step_stands_in_the_long_tail(step: Step) -> None:
    tail = step.report["long_tail"]
    assert (tail["trajectories"], tail["open"]) == (TRAJECTORIES, 0)


def test_the_turns_are_those_that_areal_counts(step: Step) -> None:
    assert step.calls["agent_loop", "turn"] == round(step.metrics["rollout/num_turns"] * TRAJECTORIES)


def test_every_turn_has_a_reward_as_long_as_its_function_takes(step: Step) -> None:
    turns = step.calls["agent_loop", "turn"]
    assert step.calls["reward", "compute_reward"] == turns
    assert step.seconds["reward", "compute_reward"] >= turns * reward.SECONDS


def test_each_trajectory_is_trained_on_under_the_policy_that_wrote_it(step: Step) -> None:
    logged = {
        name: step.metrics[f"ppo_actor/update/version_stats/{name}"]
        for name in ("v_theta", "sample_staleness_theta_max")
    }
    assert logged == {"v_theta": step.number, "sample_staleness_theta_max": 0}
    spans = load_step(step.folder).spans
    versions = {span.policy_version for span in spans if span.stage in ("trajectory", "turn", "update_actor")}
    assert versions == {step.number}
    staleness = step.report["staleness"]
    assert (staleness["versions"]["known"], staleness["versions"]["max"]) == (PROMPTS, 0)


def test_the_servers_trace_is_that_of_one_replica(step: Step) -> None:
    assert len(list(step.folder.glob("traces/rollout/replica0/*.trace.json.gz"))) == 1


def test_the_weights_move_for_as_long_as_areal_says(step: Step) -> None:
    moved_s = step.report["weight_sync"]["active_ns"] / 1e9
    assert moved_s == pytest.approx(step.metrics["timeperf/update_weights"], rel=0.05, abs=0.01)
