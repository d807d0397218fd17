"""verl's other trainers: three asynchronous ones, and that of before 0.9 with two replicas. On request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step
from packages.core.tests.verl_cpu.launch import IN_ORDER, train
from packages.core.tests.verl_cpu.runs import Training, captured_training
from packages.core.tests.verl_cpu.steps import TRAJECTORIES

verl = pytest.importorskip("verl")
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


SEPARATE = (
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=disk",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=disk_weights",
    "ray_kwargs.ray_init.num_gpus=2",
)
"""A rollout with processes of its own, to which an engine brings the weights."""
SEPARATE_ASYNC = (
    *SEPARATE,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)


@contextmanager
def weights_below(folder: Path) -> Iterator[None]:
    """Have the engine of `SEPARATE` keep each version of the weights in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISK_WEIGHTS", str(folder / "weights"))
        patch.setenv("VERL_LOGGING_LEVEL", "WARNING")  # verl's own line at INFO raises a TypeError
        yield


def separate_training(folder: Path, *overrides: str, main: str = "verl.trainer.main_ppo") -> Training:
    with weights_below(folder):
        return captured_training(folder, *overrides, main=main)


@pytest.fixture(scope="session")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return separate_training(tmp_path_factory.mktemp("separate"), *SEPARATE_ASYNC)


@pytest.fixture(scope="session")
def one_step_off(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training whose samples are of the weights before the last update."""
    folder = tmp_path_factory.mktemp("one_step_off")
    (folder / "verl").symlink_to(Path(str(verl.__file__)).parent)  # its configuration names a folder here
    main = "verl.experimental.one_step_off_policy.main_ppo"
    sizes = "rollout.nnodes=1", "rollout.n_gpus_per_node=1"
    return separate_training(folder, *SEPARATE, *sizes, main=main)


@pytest.fixture(scope="session")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return captured_training(tmp_path_factory.mktemp("legacy"), "trainer.use_v1=False", gpus=2)


@pytest.fixture(scope="session", params=[True, False], ids=["v1", "legacy"])
def selected(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Training:
    """Return a training whose steps verl's own configuration selects, with either trainer.

    Nothing of stepscope starts it: verl loads the entry point.
    """
    folder = tmp_path_factory.mktemp("selected")
    return captured_training(folder, f"trainer.use_v1={request.param}", by_verl=True)


@pytest.fixture(params=CAPTURED)
def asynchronous_step(asynchronous: Training, request: pytest.FixtureRequest) -> Step:
    return asynchronous.steps[request.param]


@pytest.fixture(params=CAPTURED)
def legacy_step(legacy: Training, request: pytest.FixtureRequest) -> Step:
    return legacy.steps[request.param]


def test_a_name_that_verl_changed_is_one_line_and_the_training_goes_on(asynchronous: Training) -> None:
    for name in ("PPOTrainer._update_actors", "ReplayBuffers.sample"):
        lines = [line for line in asynchronous.output.splitlines() if "stepscope: disabled" in line]
        processes = {line.partition(")")[0] for line in lines if name in line}
        assert processes
        assert len([line for line in lines if name in line]) == len(processes)


def test_the_asynchronous_step_is_accounted_for(asynchronous_step: Step) -> None:
    assert asynchronous_step.unaccounted < 0.05


def test_a_training_with_separate_rollouts_runs_to_its_end(separate: Training) -> None:
    # verl's manager awaits its own methods, below a decorator that looks for a coroutine as its caller
    assert sorted(separate.metrics) == [1, 2, 3, 4]
    for number in CAPTURED:
        calls = separate.steps[number].calls
        synced = [calls["trainer", stage] for stage in ("sync_weights", "abort_requests", "resume_requests")]
        assert synced == [1, 1, 1]


def test_the_weights_of_each_step_are_those_of_a_training_without_stepscope(tmp_path: Path) -> None:
    settings = (*SEPARATE_ASYNC, *IN_ORDER, "trainer.total_training_steps=3")
    versions = []
    for name in ("plain", "captured"):
        (folder := tmp_path / name).mkdir()
        if name == "captured":
            assert sorted(separate_training(folder, *settings).steps) == list(CAPTURED)
        else:
            with weights_below(folder):
                code, output = train(folder, *settings)
            assert code == 0, output[-5000:]
        versions.append({file.stem: digest(file) for file in (folder / "weights").glob("*.pt")})
    plain, captured = versions
    assert sorted(plain) == ["0", "1", "2", "3"]
    assert len(set(plain.values())) == 4  # each step changes the weights
    assert captured == plain


def digest(file: Path) -> str:
    """Return what tells apart weights that differ in a bit."""
    import torch

    summed = sha256()
    for name, weight in torch.load(file):
        summed.update(f"{name} {weight.dtype} {weight.shape}".encode())
        summed.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def test_a_step_of_one_step_off_is_one_call_of_its_loop(one_step_off: Training) -> None:
    assert sorted(one_step_off.metrics) == [1, 2, 3, 4]
    assert sorted(one_step_off.steps) == list(CAPTURED)
    for step in one_step_off.steps.values():
        assert (step.report["health"]["state"], step.report["health"]["missing"]) == ("ok", [])
        assert step.unaccounted < 0.05
        stages = (
            "wait_for_samples",
            "sync_weights",
            "compute_ref_log_prob",
            "compute_advantages",
            "update_actor",
        )
        assert [step.calls.get(("trainer", stage)) for stage in stages] == [1] * len(stages)
        assert step.calls["actor", "update_actor"] == 1
        for stage, timing in (("update_actor", "update_actor"), ("sync_weights", "update_weights")):
            measured = step.metrics[f"timing_s/{timing}"]
            assert step.seconds["trainer", stage] == pytest.approx(measured, rel=0.05, abs=0.02)


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
        assert step.calls["reward", "compute_reward"] == TRAJECTORIES
        assert list(step.folder.glob("traces/rollout/replica0/*.json.gz"))  # armed when it was built
        assert ("actor_rollout_ref", "actor_update") not in step.calls  # verl's annotation of the same call
