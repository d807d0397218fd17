"""Tests of an unedited TRL script with vLLM in the trainer's process (`vllm_mode="colocate"`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trl  # noqa: F401  where it is not installed this file is left out

from stepscope.files.layout import RunLayout
from stepscope_report.cli.report import read_reports
from tests.tree import ROOT

MAIN = Path(__file__).with_name("trl_vllm_main.py")
STAGES = {
    ("rollout", "generate"): 1,
    ("actor", "sync_weights"): 1,
    ("actor", "compute_log_prob"): 1,
    ("reward", "compute_reward"): 1,
    ("trainer", "make_batch"): 1,
    ("actor", "update_actor_forward"): 1,
    ("actor", "update_actor_backward"): 1,
    ("actor", "update_actor_clip"): 1,
    ("actor", "update_actor_optimizer"): 1,
}


@pytest.fixture(autouse=True)
def no_limit_of_the_test() -> None:
    """Replace the time limit of tests, because an engine takes longer to start."""


def weights_after(folder: Path, *options: str) -> tuple[str, list[str]]:
    """Return the hash of the final weights, and the output of stepscope."""
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *options, str(MAIN), str(folder)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "stepscope:" in line]
    return (folder / "grpo.sha256").read_text(), [line for line in lines if " captured: " not in line]


def test_its_weight_sync_is_a_stage_and_the_weights_are_those_of_a_run_without_stepscope(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    options = ("-m", "stepscope", "run", "--preset", "trl", "--steps", "every:1", "--save-path", str(run))
    captured, complaints = weights_after(tmp_path / "captured", *options)
    plain, _ = weights_after(tmp_path / "plain")
    assert captured == plain
    assert complaints == []
    steps = read_reports(list(RunLayout(run).steps().values()), traces=False).steps
    assert [step.health.complete for step in steps] == [True, True, True]
    calls = [{(stage.role, stage.stage): stage.calls for stage in step.stages} for step in steps]
    assert [{label: called[label] for label in STAGES if label in called} for called in calls] == [STAGES] * 3
