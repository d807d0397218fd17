"""Tests that `examples/vllm_agent_loop.py` runs and captures what it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllm

from stepscope.files.layout import RunLayout
from stepscope_report import step_report
from stepscope_report.timeline import load_step, load_traces
from tests.tree import ROOT

assert vllm


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return the run that the example recorded."""
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, str(ROOT / "examples" / "vllm_agent_loop.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-5000:]
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    rewards = [float(line.rpartition(" ")[2]) for line in steps]
    assert len(rewards) == 4
    assert min(rewards) > 0.5
    return RunLayout(folder / "outputs/vllm_agent_loop")


def test_the_selected_steps_are_whole_and_have_the_engines_trace(captured: RunLayout) -> None:
    assert list(captured.steps()) == [1, 3]
    for layout in captured.steps().values():
        manifest = load_step(layout.root).manifest
        assert manifest is not None
        assert manifest.problems() == []
        assert len(list(layout.traces.glob("rollout/replica0/*.gz"))) == 2  # its trace and its passes


def test_each_trajectory_has_turns_with_the_engines_times_and_tools(captured: RunLayout) -> None:
    for layout in captured.steps().values():
        timeline = load_step(layout.root)
        report = step_report(timeline, load_traces(layout.root, timeline))
        calls = {(stage.role, stage.stage): stage.calls for stage in report.stages}
        turns, tools = calls["agent_loop", "turn"], calls["env", "tool"]
        assert calls["agent_loop", "trajectory"] == 8
        assert turns - 8 <= tools < turns  # the last turn of a trajectory calls no tool
        assert calls["rollout", "prefill"] == calls["rollout", "decode"] == turns
        (engine,) = report.engines
        assert engine.iterations
