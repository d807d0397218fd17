"""SkyRL, unedited: its trainer with agents of several turns and a tool, under `stepscope run`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step, StepsOfATraining, Training
from packages.core.tests.skyrl_cpu.launch import ASYNCHRONOUS, PROMPTS, RESPONSES, SLOW_S, TURNS
from packages.core.tests.skyrl_cpu.runs import captured_training
from stepscope_report.timeline import load_step

pytest.importorskip("skyrl")
TRAJECTORIES = PROMPTS * RESPONSES
TIMINGS = {
    "postprocess_generator_output": ["compute_reward"],
    "convert_to_training_input": ["make_batch"],
    "fwd_logprobs_values_reward": ["compute_log_prob", "compute_ref_log_prob"],
    "compute_advantages_and_returns": ["compute_advantages"],
    "policy_train": ["update_actor"],
    "sync_weights_only_transfer": ["sync_weights"],
}
"""SkyRL's `timing/...` and the stages of the role `trainer` that measure the same."""
BESIDE_S = {"fwd_logprobs_values_reward": 0.1}
"""Time of SkyRL's own that is in no stage: here to split the batch, and to join the answers."""
WORKERS = {
    ("actor", "compute_log_prob"),
    ("ref", "compute_ref_log_prob"),
    ("actor", "update_actor_forward_backward"),
    ("actor", "update_actor_optimizer"),
    ("actor", "sync_weights"),
}
SPENT = {"completion": ("agent_loop", "trajectory"), "llm": ("agent_loop", "turn"), "env": ("env", "SumsEnv")}
"""SkyRL's `generate/trajectory_time_..._mean` and the spans that measure the same."""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return captured_training(tmp_path_factory.mktemp("skyrl"))


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    return training.steps[request.param]


def test_the_selected_steps_are_captured_and_skyrl_runs_to_its_end(training: Training) -> None:
    assert [metrics["trainer/global_step"] for _, metrics in sorted(training.metrics.items())] == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)


class TestTheSteps(StepsOfATraining):
    """The steps of the training in this file."""


def test_a_step_lasts_as_long_as_skyrl_says(step: Step) -> None:
    # SkyRL's time begins before the capture opens, and for the second one before the first closes
    lasted_s = step.report["breakdown"]["window_ns"] / 1e9
    outside_s = step.metrics["timing/generate"] - step.seconds["rollout", "generate"]
    assert lasted_s + outside_s == pytest.approx(step.metrics["timing/step"], rel=0.05)


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_stage_lasts_as_long_as_skyrl_says(step: Step, timing: str) -> None:
    lasted_s = sum(step.seconds["trainer", stage] for stage in TIMINGS[timing])
    beside_s = BESIDE_S.get(timing, 0.005)
    assert lasted_s == pytest.approx(step.metrics[f"timing/{timing}"], rel=0.05, abs=beside_s)


def test_each_worker_did_its_part_once(step: Step) -> None:
    assert {label: step.calls.get(label) for label in WORKERS} == dict.fromkeys(WORKERS, 1)


def test_every_trajectory_of_the_step_stands_in_the_long_tail(step: Step) -> None:
    tail = step.report["long_tail"]
    assert (tail["trajectories"], tail["open"], tail["consumed"]) == (TRAJECTORIES, 0, TRAJECTORIES)
    longest_ns = max(row["wall_ns"] for row in tail["worst"])
    assert longest_ns / 1e9 == pytest.approx(
        step.metrics["generate/trajectory_time_completion_max"], rel=0.02, abs=0.01
    )


@pytest.mark.parametrize("spent", SPENT)
def test_trajectories_spend_as_much_as_skyrl_says(step: Step, spent: str) -> None:
    mean_s = step.metrics[f"generate/trajectory_time_{spent}_mean"]
    assert step.calls[SPENT[spent]] == TRAJECTORIES * (1 if spent == "completion" else TURNS)
    assert step.seconds[SPENT[spent]] == pytest.approx(mean_s * TRAJECTORIES, rel=0.05)


def test_the_tools_calls_are_those_that_the_tool_counts(training: Training, step: Step) -> None:
    calls = training.tools(step)
    assert step.calls["env", "search"] == len(calls) == TRAJECTORIES * (TURNS - 1)
    by_its_clock_s = sum(call.ended_ns - call.begun_ns for call in calls) / 1e9
    assert step.seconds["env", "search"] == pytest.approx(by_its_clock_s, rel=0.1)


def test_a_tool_that_runs_in_an_executor_is_a_part_of_its_environments_step(step: Step) -> None:
    timeline = load_step(step.folder)
    parents = Counter[tuple[str, bool]]()
    for span in timeline.spans:
        if span.stage == "search":
            above = timeline.spans[span.parent or 0]
            parents[above.stage, above.trajectory == span.trajectory is not None] += 1
    assert parents == {("SumsEnv", True): step.calls["env", "search"]}


def test_the_planted_slow_tool_is_named(training: Training, step: Step) -> None:
    slow = {call.number for call in training.tools(step) if call.ended_ns - call.begun_ns > SLOW_S * 0.9e9}
    worst = {row["trajectory"].partition("_")[0] for row in step.report["long_tail"]["worst"][:RESPONSES]}
    assert not slow or worst <= {str(number) for number in slow}


def test_each_trajectory_is_consumed_under_the_policy_that_wrote_it(step: Step) -> None:
    staleness = step.report["staleness"]
    assert (staleness["trajectories"], staleness["policy_version"]) == (TRAJECTORIES, step.number)
    assert staleness["versions"] == {"known": TRAJECTORIES, "p50": 0, "p90": 0, "max": 0}


def test_the_engine_wrote_as_many_tokens_as_skyrl_counts(step: Step) -> None:
    (replica,) = step.report["engines"]
    mean = step.metrics["generate/tokens_per_turn_mean"]
    assert replica["output_tokens"] == round(mean * TRAJECTORIES * TURNS)


def test_an_actor_is_busy_while_the_engine_in_it_runs(step: Step) -> None:
    (replica,) = step.report["engines"]
    (row,) = (row for row in step.report["idle"] if row["role"] == "rollout")
    passes_ns = replica["prefill_ns"] + replica["decode_ns"] + replica["mixed_ns"]
    assert min(replica["prefill_ns"], replica["decode_ns"]) > 0
    assert row["busy_ns"] == pytest.approx(passes_ns, rel=0.01)
    assert passes_ns <= replica["recorded_ns"] <= step.seconds["rollout", "generate"] * 1e9


def test_the_weights_move_for_as_long_as_skyrl_says(step: Step) -> None:
    moved_s = step.report["weight_sync"]["active_ns"] / 1e9
    assert moved_s == pytest.approx(step.metrics["timing/sync_weights"], rel=0.05, abs=0.005)


def test_no_prompt_or_response_is_recorded(step: Step) -> None:
    spans = b"".join(path.read_bytes() for path in step.folder.glob("spans/*"))
    assert spans
    assert b"im_start" not in spans


def test_the_fully_asynchronous_trainers_groups_are_as_stale_as_skyrl_says(tmp_path: Path) -> None:
    training = captured_training(tmp_path, *ASYNCHRONOUS)
    assert sorted(training.metrics) == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)
    for step in training.steps.values():
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        assert step.unaccounted < 0.05
        staleness = step.report["staleness"]
        assert staleness["versions"]["known"] == PROMPTS
        assert staleness["versions"]["max"] == step.metrics["async/staleness_max"]
        behind = sum(row["versions"] for row in staleness["worst"])
        assert behind == pytest.approx(step.metrics["async/staleness_mean"] * PROMPTS)
    assert max(step.metrics["async/staleness_max"] for step in training.steps.values()) > 0
