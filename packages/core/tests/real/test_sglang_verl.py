"""verl, unedited, with SGLang as its rollout and a tool, under `stepscope run`. On request."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.core.tests.on_cpu.runs import CAPTURED, Step
from packages.core.tests.verl_cpu.launch import SGLANG, TOOLS
from packages.core.tests.verl_cpu.runs import Training, captured_training
from packages.core.tests.verl_cpu.steps import StepsOfVerl

pytest.importorskip("verl")
pytest.importorskip("sglang")
BY_STAGE = """
instrument: [{preset: verl}]
roles:
  rollout: {ranks: all, engine: {by_stage: true, iterations: {count: 4}}}
"""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return captured_training(tmp_path_factory.mktemp("sglang"), *SGLANG, *TOOLS)


@pytest.fixture(params=CAPTURED)
def step(training: Training, request: pytest.FixtureRequest) -> Step:
    return training.steps[request.param]


class TestTheSteps(StepsOfVerl):
    """The steps of the training in this file."""


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
        traces = sorted(path.name for path in step.folder.glob("traces/rollout/replica0/*.trace.json.gz"))
        assert [name.rpartition("-")[2].partition(".")[0] for name in traces] == ["DECODE", "EXTEND"]
        (replica,) = step.report["engines"]
        assert min(replica["prefill_ns"], replica["decode_ns"]) > 0
