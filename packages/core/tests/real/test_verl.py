"""verl, unedited: its default trainer with a tool, under the command of `examples/verl_grpo.sh`."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step
from packages.core.tests.verl_cpu.launch import TOOLS
from packages.core.tests.verl_cpu.runs import Training, example_training
from packages.core.tests.verl_cpu.steps import TRAJECTORIES, StepsOfVerl
from stepscope.config.presets import read_preset
from stepscope_report.timeline import load_step

pytest.importorskip("verl")

NEVER_TRUE = {
    *("never-ended", "unaligned", "dropped", "straggler", "uneven-profiling", "collectives", "slow-tools"),
    *("idle-while-tools-run", "full-kv-cache", "ids-in-names", "shared-number", "no-rollout", "blind-spot"),
}
"""Rules of advice whose reason does not exist in this training, on a machine of any speed."""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return example_training(tmp_path_factory.mktemp("verl"), *TOOLS)


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    return training.steps[request.param]


class TestTheSteps(StepsOfVerl):
    """The steps of the training in this file."""


def test_a_tool_is_called_after_all_turns_but_the_last(step: Step) -> None:
    turns, tools = step.calls["agent_loop", "turn"], step.calls["env", "add"]
    assert turns - TRAJECTORIES <= tools <= turns  # verl drops an answer that is too long, and ends there


def test_every_response_has_a_reward(step: Step) -> None:
    assert step.calls["reward", "compute_reward"] == TRAJECTORIES


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
    # The actor's update runs on its event loop, and nothing waits for the loop. Times depend on the machine,
    # so that advice on them may be right; of this run's processes, files and tool no complaint is.
    assert "cannot work" not in training.output
    told = {advice["rule"]: advice["because"] for advice in step.report["advice"]}
    assert not NEVER_TRUE & told.keys(), told
    for advice in step.report["advice"]:
        if "actor 0 took longest" in " ".join(advice["because"]):
            assert "engine" not in advice["do"]


def test_no_prompt_or_response_is_recorded(training: Training) -> None:
    spans = b"".join(path.read_bytes() for path in training.save_path.glob("step_*/spans/*"))
    assert spans
    assert b"im_start" not in spans
