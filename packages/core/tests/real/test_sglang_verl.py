"""verl, unedited, with SGLang as its rollout and a tool, under `stepscope run`. On request."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step
from packages.core.tests.verl_cpu.launch import SGLANG, TOOLS
from packages.core.tests.verl_cpu.runs import Training, captured_training

pytest.importorskip("verl")
pytest.importorskip("sglang")
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
BY_STAGE = """
instrument: [{preset: verl}]
roles:
  rollout: {ranks: all, engine: {by_stage: true, iterations: {count: 4}}}
"""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training of four steps, of which two were captured."""
    return captured_training(tmp_path_factory.mktemp("sglang"), *SGLANG, *TOOLS)


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    """Return one captured step."""
    return training.steps[request.param]


def test_the_selected_steps_are_captured_and_verl_runs_to_its_end(training: Training) -> None:
    assert sorted(training.metrics) == [1, 2, 3, 4]
    assert sorted(training.steps) == list(CAPTURED)
    assert "are not recorded: no adapter" not in training.output


def test_nothing_is_missing_in_the_manifest(step: Step) -> None:
    assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])


def test_less_than_a_twentieth_of_a_step_is_unaccounted(step: Step) -> None:
    assert step.unaccounted < 0.05


def test_every_trajectory_of_the_step_stands_in_the_long_tail(step: Step) -> None:
    tail = step.report["long_tail"]
    assert (tail["trajectories"], tail["open"], tail["consumed"]) == (TRAJECTORIES, 0, TRAJECTORIES)


def test_each_trajectory_is_consumed_under_the_policy_that_wrote_it(step: Step) -> None:
    staleness = step.report["staleness"]
    assert staleness["policy_version"] == step.number - 1
    assert staleness["versions"] == {"known": TRAJECTORIES, "p50": 0, "p90": 0, "max": 0}


def test_the_turns_are_those_that_verl_counts(step: Step) -> None:
    # verl counts the prompt, the responses and the answers of tools; no answer follows the last response
    assert 2 * step.calls["agent_loop", "turn"] == step.metrics["num_turns/mean"] * TRAJECTORIES
    assert step.calls["rollout", "generate"] == step.calls["agent_loop", "turn"]


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_stage_lasts_as_long_as_verl_says(step: Step, timing: str) -> None:
    verl_s = step.metrics[f"timing_s/{timing}"]
    # verl's timer begins before the function, and `gen` also puts the engine to sleep
    assert step.seconds["trainer", TIMINGS[timing]] == pytest.approx(verl_s, rel=0.05, abs=0.02)


def test_the_phases_of_the_engine_are_within_the_generation(step: Step) -> None:
    (replica,) = step.report["engines"]
    phases_ns = replica["prefill_ns"] + replica["decode_ns"] + replica["mixed_ns"]
    assert min(replica["prefill_ns"], replica["decode_ns"]) > 0
    assert phases_ns <= replica["recorded_ns"]


def test_traces_by_stage_are_one_of_prefills_and_one_of_decodes(tmp_path: Path) -> None:
    config = tmp_path / "stepscope.yaml"
    config.write_text(BY_STAGE)
    training = captured_training(tmp_path, *SGLANG, *TOOLS, configuration=["--config", str(config)])
    assert sorted(training.metrics) == [1, 2, 3, 4]
    for number in CAPTURED:
        step = training.steps[number]
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        traces = sorted(path.name for path in step.folder.glob("traces/rollout/replica0/*.json.gz"))
        assert [name.rpartition("-")[2].partition(".")[0] for name in traces] == ["DECODE", "EXTEND"]
        (replica,) = step.report["engines"]
        assert min(replica["prefill_ns"], replica["decode_ns"]) > 0
