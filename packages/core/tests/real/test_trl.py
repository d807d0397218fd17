"""TRL, unedited: a script that knows nothing of stepscope, profiled by `stepscope run --preset trl`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import trl

from packages.core.tests.framework_names import definition
from stepscope.config.presets import read_preset

SCRIPT = Path(__file__).parents[1] / "trl_script.py"
TRAINING = {
    ("actor", "update_actor_forward"): 2,  # two batches make one step of the optimizer
    ("actor", "update_actor_backward"): 2,
    ("actor", "update_actor_optimizer"): 1,
}
GENERATING = {
    ("trainer", "make_batch"): 1,
    ("rollout", "generate"): 1,
    ("reward", "compute_reward"): 1,
    ("ref", "compute_ref_log_prob"): 1,
    ("actor", "compute_log_prob"): 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run's folder, after three steps."""
    folder = tmp_path_factory.mktemp("trl")
    command = [
        "run",
        "--preset",
        "trl",
        "--steps",
        "every:1",
        "--save-path",
        str(folder / "run"),
        str(SCRIPT),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *command, str(folder)],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "stepscope:" in line]
    assert all(" captured: " in line for line in told)  # no complaint of ours
    return folder / "run"


def test_every_step_of_the_optimizer_is_a_capture_that_shows_what_trl_did(run: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "report", str(run), "--no-traces", "--no-html", "--json"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    steps = {report["step"]: report for report in json.loads(printed)["steps"]}
    assert sorted(steps) == [0, 1, 2]
    for number, report in steps.items():
        calls = {(stage["role"], stage["stage"]): stage["calls"] for stage in report["stages"]}
        assert calls == (TRAINING if number == 1 else TRAINING | GENERATING)


def test_a_trace_of_each_step_has_the_operators_of_the_model(run: Path) -> None:
    assert len(list(run.glob("step_*/traces/trainer/*.json.gz"))) == 3


def test_the_functions_of_those_whom_trl_builds_upon_are_where_the_preset_says() -> None:
    assert trl.__version__ == version("trl")
    for entry in read_preset("trl", version).entries:
        spec = find_spec(str(entry.module).split(".")[0])
        assert spec is not None
        source = Path(str(spec.origin)).parents[1]
        assert definition(source, str(entry.module), str(entry.name)), f"{entry.module}:{entry.name}"
