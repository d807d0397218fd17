"""Tests of the captured steps of verl's default trainer, whatever engine generates."""

from __future__ import annotations

from collections import Counter

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step, StepsOfATraining
from packages.core.tests.verl_cpu.runs import Training
from stepscope_report.sections.requests import step_requests
from stepscope_report.timeline import load_step
from stepscope_report.timeline.passes import RequestKey, linked_requests

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


class StepsOfVerl(StepsOfATraining):
    """The fixtures `training` and `step` are of the file that derives from this."""

    def test_the_selected_steps_are_captured_and_verl_runs_to_its_end(self, training: Training) -> None:
        assert sorted(training.metrics) == [1, 2, 3, 4]
        assert sorted(training.steps) == list(CAPTURED)
        assert "no adapter" not in training.output

    def test_every_trajectory_of_the_step_stands_in_the_long_tail(self, step: Step) -> None:
        tail = step.report["long_tail"]
        assert (tail["trajectories"], tail["open"], tail["consumed"]) == (TRAJECTORIES, 0, TRAJECTORIES)

    def test_the_turns_are_those_that_verl_counts(self, step: Step) -> None:
        # verl counts the prompt, the responses and the answers of tools; no answer follows the last response
        assert 2 * step.calls["agent_loop", "turn"] == step.metrics["num_turns/mean"] * TRAJECTORIES
        assert step.calls["rollout", "generate"] == step.calls["agent_loop", "turn"]

    def test_every_turn_leads_to_the_passes_that_wrote_its_tokens(self, step: Step) -> None:
        timeline = load_step(step.folder)
        links, wrote = linked_requests(timeline), Counter[tuple[str | None, int | None]]()
        for at, engine in enumerate(timeline.passes):
            for request, tokens in zip(engine.noted.served.request, engine.noted.served.output, strict=True):
                span = timeline.spans[links[RequestKey(at, request)]]
                wrote[span.trajectory, span.turn] += tokens
        turns = {
            (span.trajectory, span.turn): (span.attrs or {})["output_tokens"]
            for span in timeline.spans
            if span.stage == "turn"
        }
        weights = {(r.version_begun, r.version_ended, r.trained_by) for r in step_requests(timeline)}
        assert weights == {(step.number - 1, step.number - 1, step.number)}
        assert wrote == turns
        assert len(turns) == step.calls["agent_loop", "turn"]

    def test_each_trajectory_is_consumed_under_the_policy_that_wrote_it(self, step: Step) -> None:
        staleness = step.report["staleness"]
        assert staleness["policy_version"] == step.number - 1
        assert staleness["versions"] == {"known": TRAJECTORIES, "p50": 0, "p90": 0, "max": 0}

    @pytest.mark.parametrize("timing", TIMINGS)
    def test_a_stage_lasts_as_long_as_verl_says(self, step: Step, timing: str) -> None:
        verl_s = step.metrics[f"timing_s/{timing}"]
        # verl's timer begins before the function, and `gen` also puts the engine to sleep
        assert step.seconds["trainer", TIMINGS[timing]] == pytest.approx(verl_s, rel=0.05, abs=0.02)
