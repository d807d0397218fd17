"""OpenRLHF, unedited: its default trainer and its asynchronous one, under `stepscope run`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")  # first: what the next lines import needs torch

from packages.core.tests.on_cpu.runs import CAPTURED, Step, StepsOfATraining, Training
from packages.core.tests.openrlhf_cpu import reward
from packages.core.tests.openrlhf_cpu.launch import PROMPTS, RESPONSES
from packages.core.tests.openrlhf_cpu.runs import MULTI_TURN, REWARDED, captured_training
from stepscope.config.presets import read_preset
from stepscope_report.timeline import load_step

TRAJECTORIES = PROMPTS * RESPONSES
BATCHES = 4
"""Experiences of a step, of four trajectories each."""
TIMINGS = {
    "generation": "generate",
    "make_experience": "make_experience",
    "ppo_train": "update_actor",
    "broadcast": "sync_weights",
}
"""OpenRLHF's `timing/...` and the stages of the role `trainer` that measure the same."""
WORKERS = {
    ("trainer", "make_experience"): 1,
    ("trainer", "compute_advantages"): 1,
    ("trainer", "update_actor"): 1,
    ("trainer", "sync_weights"): 1,
    ("trainer", "save_checkpoint"): 1,
    ("actor", "compute_log_prob"): BATCHES,
    ("ref", "compute_ref_log_prob"): BATCHES,
    ("actor", "update_actor"): 1,
    ("actor", "sync_weights"): 1,
}
HOW = ("func", "http")
"""Ways to ask for rewards: a function, or a server."""
CRITIC = {("critic", "compute_values"): BATCHES, ("critic", "update_critic"): 1}
"""Role and stage -> calls of a step."""


@pytest.fixture(scope="session")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return captured_training(tmp_path_factory.mktemp("rewarded"), *REWARDED)


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training of agents, with a critic."""
    folder = tmp_path_factory.mktemp("agents")
    critic = (
        "--critic.num_gpus_per_node",
        "1",
        "--critic.model_name_or_path",
        str(folder / "data" / "model"),
    )
    return captured_training(folder, *MULTI_TURN, "--algo.advantage.estimator", "gae", *critic)


@pytest.fixture(params=["rewarded", "agents"])
def training(request: pytest.FixtureRequest) -> Training:
    found: Training = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=CAPTURED)
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def step(training: Training, number: int) -> Step:
    return training.steps[number]


def named(entries: Iterable[str]) -> set[str]:
    """Return the functions of `module:name (role/stage)`."""
    return {entry.partition(":")[2].partition(" ")[0] for entry in entries}


def test_the_selected_steps_are_captured_and_openrlhf_runs_to_its_end(training: Training) -> None:
    assert sorted(training.metrics) == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)


def test_a_captured_step_has_the_number_of_its_line_in_the_log(training: Training, number: int) -> None:
    captured = training.output.index(f"stepscope: step {number} captured")
    before, after = (training.output.index(f"Global step {at}:") for at in (number, number + 1))
    assert before < captured < after


class TestTheSteps(StepsOfATraining):
    """The steps of the training in this file."""


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_stage_lasts_as_long_as_openrlhf_says(step: Step, timing: str) -> None:
    openrlhf_s = step.metrics[f"timing/{timing}"]
    assert step.seconds["trainer", TIMINGS[timing]] == pytest.approx(openrlhf_s, rel=0.05, abs=0.005)


def test_a_step_lasts_as_long_as_openrlhf_says(step: Step) -> None:
    # its sum leaves out what moves experiences to the workers
    assert step.report["breakdown"]["window_ns"] / 1e9 == pytest.approx(
        step.metrics["timing/step_total"], rel=0.1
    )


def test_each_worker_did_what_openrlhf_asks_of_it(rewarded: Training, agents: Training, number: int) -> None:
    for training, expected in ((rewarded, WORKERS), (agents, {**WORKERS, **CRITIC})):
        calls = training.steps[number].calls
        assert {label: calls.get(label) for label in expected} == expected


def test_every_trajectory_of_the_step_stands_in_the_long_tail(step: Step) -> None:
    tail = step.report["long_tail"]
    assert tail["trajectories"] == step.metrics["rollout/num_samples"] == TRAJECTORIES
    assert tail["open"] == 0


def test_synchronous_training_has_no_stale_trajectory(step: Step) -> None:
    assert step.report["staleness"] is None


def test_one_turn_has_one_reward_as_long_as_its_function_takes(rewarded: Training, number: int) -> None:
    step = rewarded.steps[number]
    assert step.calls["agent_loop", "turn"] == step.calls["reward", "compute_reward"] == TRAJECTORIES
    assert step.seconds["reward", "compute_reward"] >= TRAJECTORIES * reward.SECONDS


def test_the_turns_of_agents_are_those_that_the_agents_count(agents: Training, number: int) -> None:
    step = agents.steps[number]
    tools = agents.tools(step)
    assert step.calls["agent_loop", "turn"] == step.calls["rollout", "generate"] == len(tools) > TRAJECTORIES
    in_tools_s = sum(call.ended_ns - call.begun_ns for call in tools) / 1e9
    beside_s = step.seconds["agent_loop", "trajectory"] - step.seconds["agent_loop", "turn"]
    assert in_tools_s <= beside_s < in_tools_s * 1.1


def test_the_engine_read_and_wrote_as_many_tokens_as_openrlhf_counts(rewarded: Training, number: int) -> None:
    step = rewarded.steps[number]
    (replica,) = step.report["engines"]
    written = step.metrics["rollout/response_length_mean"]
    assert replica["output_tokens"] == written * TRAJECTORIES
    assert replica["prompt_tokens"] == (step.metrics["total_length"] - written) * TRAJECTORIES


def test_the_phases_of_the_engine_are_within_the_generation(step: Step) -> None:
    (replica,) = step.report["engines"]
    phases_ns = replica["prefill_ns"] + replica["decode_ns"] + replica["mixed_ns"]
    assert min(replica["prefill_ns"], replica["decode_ns"]) > 0
    assert phases_ns <= replica["recorded_ns"] <= step.metrics["timing/generation"] * 1e9


def test_the_weights_move_for_as_long_as_openrlhf_says(step: Step) -> None:
    moved_s = step.report["weight_sync"]["active_ns"] / 1e9
    assert moved_s == pytest.approx(step.metrics["timing/broadcast"], rel=0.05, abs=0.005)


def test_advice_names_neither_gradients_nor_devices_which_this_run_has_not(step: Step) -> None:
    # one actor reduces no gradient: its collectives are the broadcast of weights
    rules = {advice["rule"]: advice for advice in step.report["advice"]}
    assert "weight-sync" in rules
    assert "collectives" not in rules
    settings = [change["setting"] for advice in rules.values() for change in advice["settings"]]
    assert not {"--vllm.sync_backend", "--ds.overlap_comm"} & set(settings)
    assert not [advice for advice in rules.values() if advice["kind"] == "alarm"]


def test_functions_without_a_call_are_those_that_this_training_does_not_use(
    rewarded: Training, agents: Training, number: int
) -> None:
    rewards = {
        "RewardModelActor.forward",
        *(f"SingleTurnAgentExecutor._fetch_rewards_via_{by}" for by in HOW),
    }
    assert named(rewarded.steps[number].report["health"]["uncalled"]) == {"PPOTrainer.evaluate"}
    assert named(agents.steps[number].report["health"]["uncalled"]) == {"PPOTrainer.evaluate", *rewards}


def test_the_step_keeps_openrlhfs_settings(step: Step) -> None:
    manifest = load_step(step.folder).manifest
    listed = read_preset("openrlhf").settings
    assert manifest is not None
    assert listed is not None
    (openrlhfs,) = (
        framework for part in manifest.processes for framework in part.settings if not framework.engine
    )
    assert (openrlhfs.framework, openrlhfs.version) == ("openrlhf", version("openrlhf"))
    present = {setting.knob: setting.value for setting in openrlhfs.settings}
    assert set(present) == {knob for knob, _ in listed.items()}
    assert (present["fast_weights"], present["replicas"], present["micro_batch"]) == ("gloo", 1, 4)


def test_the_asynchronous_trainer_is_captured_too(tmp_path: Path) -> None:
    training = captured_training(tmp_path, *REWARDED, "--train.async_enable")
    assert sorted(training.metrics) == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)
    for step in training.steps.values():
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        calls = step.calls
        assert {label: calls.get(label) for label in WORKERS} == WORKERS
        # the lock that keeps weights from a generation that goes on, and the transfer
        waited_s = step.seconds["trainer", "wait_for_rollout"]
        assert waited_s == pytest.approx(step.metrics["timing/broadcast"], rel=0.05, abs=0.005)
