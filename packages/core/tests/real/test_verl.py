"""verl, unedited: its default trainer with a tool, under the command of `examples/verl_grpo.sh`."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step
from packages.core.tests.verl_cpu.launch import TOOLS
from packages.core.tests.verl_cpu.runs import Training, example_training
from stepscope.config.presets import read_preset
from stepscope_report.timeline import load_step

pytest.importorskip("verl")
TRAJECTORIES = 4 * 4
"""Prompts of a step, times responses to each."""
TIMINGS = {
    "gen": "wait_for_samples",
    "old_log_prob": "compute_log_prob",
    "ref": "compute_ref_log_prob",
    "adv": "compute_advantages",
    "update_actor": "update_actor",
    "update_weights": "sync_weights",
}
"""verl's `timing_s/...` and the stages of the role `trainer` that measure the same."""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training of four steps, of which two were captured."""
    return example_training(tmp_path_factory.mktemp("verl"), *TOOLS)


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    """Return one captured step."""
    return training.steps[request.param]


def test_the_selected_steps_are_captured_and_verl_runs_to_its_end(training: Training) -> None:
    assert sorted(training.metrics) == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)


def test_nothing_is_missing_in_the_manifest(step: Step) -> None:
    assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])


def test_less_than_a_twentieth_of_a_step_is_unaccounted(step: Step) -> None:
    assert step.unaccounted < 0.05


def test_every_trajectory_of_the_step_stands_in_the_long_tail(step: Step) -> None:
    tail = step.report["long_tail"]
    assert (tail["trajectories"], tail["open"], tail["consumed"]) == (TRAJECTORIES, 0, TRAJECTORIES)


def test_the_turns_are_those_that_verl_counts(step: Step) -> None:
    # verl counts the prompt, the responses and the answers of tools; no answer follows the last response
    assert 2 * step.calls["agent_loop", "turn"] == step.metrics["num_turns/mean"] * TRAJECTORIES


def test_a_tool_is_called_after_all_turns_but_the_last(step: Step) -> None:
    turns, tools = step.calls["agent_loop", "turn"], step.calls["env", "add"]
    assert turns - TRAJECTORIES <= tools <= turns  # verl drops an answer that is too long, and ends there


def test_every_response_has_a_reward(step: Step) -> None:
    assert step.calls["reward", "compute_reward"] == TRAJECTORIES


def test_each_trajectory_is_consumed_under_the_policy_that_wrote_it(step: Step) -> None:
    staleness = step.report["staleness"]
    assert staleness["policy_version"] == step.number - 1
    assert staleness["versions"] == {"known": TRAJECTORIES, "p50": 0, "p90": 0, "max": 0}


def test_the_replica_has_its_engine_trace(step: Step) -> None:
    assert list(step.folder.glob("traces/rollout/replica0/*.json.gz"))


def test_the_step_keeps_verls_settings_and_those_of_its_engine(step: Step) -> None:
    manifest = load_step(step.folder).manifest
    assert manifest is not None
    recorded = [framework for part in manifest.processes for framework in part.settings]
    verls, engine = sorted(recorded, key=lambda framework: framework.engine)
    assert (verls.framework, verls.version, engine.framework) == ("verl", version("verl"), "vllm")
    listed = read_preset("verl").settings
    assert listed is not None
    present = {setting.knob: setting.value for setting in verls.settings}
    assert set(present) == {knob for knob, _ in listed.items()}
    of_engine = {setting.knob: setting.value for setting in engine.settings}
    for knob in ("max_requests", "kv_memory", "tensor_parallel", "prefix_caching", "cuda_graphs"):
        assert of_engine[knob] == present[knob], knob


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_stage_lasts_as_long_as_verl_says(step: Step, timing: str) -> None:
    verl_s = step.metrics[f"timing_s/{timing}"]
    # verl's timer begins before the function, and `gen` also puts the engine to sleep
    assert step.seconds["trainer", TIMINGS[timing]] == pytest.approx(verl_s, rel=0.05, abs=0.02)


def test_the_numbers_are_those_of_verls_own_logger(training: Training, step: Step) -> None:
    numbers = step.report["metrics"]
    # verl's file rounds single precision to the digits that tell it apart
    assert numbers == pytest.approx(training.logged[step.number], rel=1e-6)
    assert len(numbers) > 50
    assert numbers["num_turns/mean"] == pytest.approx(step.metrics["num_turns/mean"])


def test_an_uncaptured_step_keeps_no_numbers(training: Training) -> None:
    folders = {path.parent.name for path in training.save_path.glob("*/metrics_*.json")}
    assert folders == {f"step_{number:06d}" for number in CAPTURED}


def test_the_wait_for_verls_poll_is_not_blamed_on_anybody(step: Step) -> None:
    waits = {(wait["role"], wait["stage"]): wait["vain_ns"] for wait in step.report["vain_waits"]}
    assert waits["trainer", "wait_for_samples"] > 0


def test_advice_blames_nobody_for_what_did_not_happen(training: Training, step: Step) -> None:
    # The actor's update runs on its event loop, and nothing waits for the loop; agent loops start slowly.
    assert "cannot work" not in training.output
    assert {advice["rule"] for advice in step.report["advice"]} <= {"vain-wait", "profiler-cost", "long-tail"}
    for advice in step.report["advice"]:
        if "actor 0 took longest" in " ".join(advice["because"]):
            assert "engine" not in advice["do"]


def test_no_prompt_or_response_is_recorded(training: Training) -> None:
    spans = b"".join(path.read_bytes() for path in training.save_path.glob("step_*/spans/*"))
    assert spans
    assert b"im_start" not in spans
