"""verl's other trainers: the asynchronous one, and that of before 0.9 with two replicas. On request."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.core.tests.verl_cpu.runs import CAPTURED, Step, Training, captured_training

pytest.importorskip("verl")
TRAJECTORIES = 4 * 4
"""Prompts of a step, times responses to each."""
RENAMED = """
instrument:
  - {preset: verl}
  - {module: verl.trainer.ppo.v1.trainer_base, name: PPOTrainer._update_actors, role: trainer}
  - {module: verl.trainer.ppo.v1.replay_buffer, name: ReplayBuffers.sample, role: trainer}
"""
"""The preset, and two names that a release of verl might have changed."""


@pytest.fixture(scope="session")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training with verl's `colocate_async`, with two names that are not there."""
    folder = tmp_path_factory.mktemp("asynchronous")
    config = folder / "stepscope.yaml"
    config.write_text(RENAMED)
    mode = "trainer.v1.trainer_mode=colocate_async"
    return captured_training(folder, mode, configuration=["--config", str(config)])


@pytest.fixture(scope="session")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training with RayPPOTrainer and two replicas."""
    return captured_training(tmp_path_factory.mktemp("legacy"), "trainer.use_v1=False", gpus=2)


@pytest.fixture(scope="session", params=[True, False], ids=["v1", "legacy"])
def selected(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Training:
    """Return a training whose steps verl's own configuration selects, with either trainer."""
    folder = tmp_path_factory.mktemp("selected")
    return captured_training(folder, f"trainer.use_v1={request.param}", by_verl=True)


@pytest.fixture(params=CAPTURED)
def asynchronous_step(asynchronous: Training, request: pytest.FixtureRequest) -> Step:
    """Return one captured step of the asynchronous trainer."""
    return asynchronous.steps[request.param]


@pytest.fixture(params=CAPTURED)
def legacy_step(legacy: Training, request: pytest.FixtureRequest) -> Step:
    """Return one captured step of the legacy trainer."""
    return legacy.steps[request.param]


def test_a_name_that_verl_changed_is_one_line_and_the_training_goes_on(asynchronous: Training) -> None:
    for name in ("PPOTrainer._update_actors", "ReplayBuffers.sample"):
        lines = [line for line in asynchronous.output.splitlines() if "stepscope: disabled" in line]
        processes = {line.partition(")")[0] for line in lines if name in line}
        assert processes
        assert len([line for line in lines if name in line]) == len(processes)


def test_the_asynchronous_step_is_accounted_for(asynchronous_step: Step) -> None:
    assert asynchronous_step.unaccounted < 0.05


def test_the_legacy_step_is_accounted_for(legacy_step: Step) -> None:
    assert legacy_step.unaccounted < 0.05


def test_every_trajectory_of_the_legacy_step_stands_in_the_long_tail(legacy_step: Step) -> None:
    tail = legacy_step.report["long_tail"]
    assert (tail["trajectories"], tail["open"]) == (TRAJECTORIES, 0)
    assert legacy_step.calls["agent_loop", "turn"] == TRAJECTORIES


@pytest.mark.parametrize("replica", [0, 1])
def test_each_replica_has_its_engine_trace(legacy_step: Step, replica: int) -> None:
    assert list(Path(legacy_step.folder).glob(f"traces/rollout/replica{replica}/*.json.gz"))


def test_verls_profiler_configuration_selects_whole_steps(selected: Training) -> None:
    assert sorted(selected.metrics) == [1, 2, 3, 4]
    assert sorted(selected.steps) == list(CAPTURED)
    for step in selected.steps.values():
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        assert step.unaccounted < 0.05
        assert step.calls["actor", "update_actor"] == 1
        assert ("actor_rollout_ref", "actor_update") not in step.calls  # verl's annotation of the same call
