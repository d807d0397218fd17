"""The demo with a vLLM replica and an SGLang replica, each in its own environment: one capture, one timeline.

Takes minutes and both environments: `python3 dev.py test --two-engines`, and no other run, finds it.
"""

from __future__ import annotations

import pytest

from stepscope.files.layout import RunLayout, StepLayout
from stepscope_report import step_report
from stepscope_report.demo.trainer import DemoResult, run_demo
from stepscope_report.timeline import Timeline, load_step, load_traces, merge_step
from tools.engine_environments import newest

STEP = 1
ENGINES = ("vllm", "sglang")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    engine = ",".join(f"{name}={newest(name).python}" for name in ENGINES)
    return run_demo(tmp_path_factory.mktemp("run"), steps=2, captured=[STEP], engine=engine)


@pytest.fixture(scope="module")
def layout(result: DemoResult) -> StepLayout:
    return RunLayout(result.save_path).steps()[STEP]


@pytest.fixture(scope="module")
def timeline(layout: StepLayout) -> Timeline:
    return load_step(layout.root)


def test_one_capture_holds_a_trace_of_each_engine(timeline: Timeline) -> None:
    manifest = timeline.manifest
    assert manifest is not None
    assert manifest.problems() == []
    replicas = [
        item for part in manifest.processes for item in part.expected if item.name.startswith("replica")
    ]
    tools = {artifact.replica: artifact.tool for item in replicas for artifact in item.artifacts}
    assert tools == dict(enumerate(ENGINES))


def test_both_engines_served_the_trajectories_of_one_rollout(timeline: Timeline) -> None:
    served = {span.process for span in timeline.spans if span.role == "rollout" and span.stage == "request"}
    assert len(served) == len(ENGINES)
    for stage in ("queue", "prefill", "decode"):
        assert {span.process for span in timeline.spans if span.stage == stage} == served
    trajectories = {span.trajectory for span in timeline.spans if span.stage == "decode"}
    assert len(trajectories) > len(ENGINES)


def test_both_traces_are_placed_in_one_timeline(layout: StepLayout) -> None:
    merged = merge_step(layout.root)
    assert merged.problems == ()


def test_the_report_has_iterations_of_both_engines(layout: StepLayout, timeline: Timeline) -> None:
    engines = step_report(timeline, load_traces(layout.root, timeline)).engines
    assert {row.replica for row in engines if row.source == "iterations"} == {"replica 0", "replica 1"}
