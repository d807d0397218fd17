"""TRL, unedited: a script that knows nothing of stepscope, profiled by `stepscope run --preset trl`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import trl

from stepscope.config.presets import read_preset
from stepscope.files.layout import RunLayout
from stepscope_report.cli.report import read_reports
from stepscope_report.model import StepReport
from stepscope_report.timeline import load_step
from tests.tree import ROOT
from tools.framework_facts import Source

SCRIPT = Path(__file__).parents[1] / "trl_script.py"
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
Calls = Mapping[tuple[str, str], int]
UPDATE: Calls = {
    ("trainer", "load_batch"): 1,
    ("actor", "update_actor_forward"): 2,  # two batches make one step of the optimizer
    ("actor", "update_actor_backward"): 2,
    ("actor", "update_actor_clip"): 1,
    ("actor", "update_actor_optimizer"): 1,
}
BATCH: Calls = {
    ("trainer", "make_batch"): 1,
    ("rollout", "generate"): 1,
    ("reward", "compute_reward"): 1,
    ("ref", "compute_ref_log_prob"): 1,
    ("actor", "compute_log_prob"): 1,
}
ONLINE: Calls = {
    ("rollout", "generate"): 2,
    ("reward", "compute_reward"): 2,
    ("ref", "compute_ref_log_prob"): 2,
}
CASES: Mapping[str, tuple[Calls, Calls, Calls]] = {
    "grpo": ({**UPDATE, **BATCH}, UPDATE, {**UPDATE, **BATCH}),  # num_iterations=2
    "shared_grpo": ({**UPDATE, **BATCH}, {**UPDATE, **BATCH}, UPDATE),  # steps_per_generation=3
    "rloo": ({**UPDATE, **BATCH},) * 3,
    "sft": (UPDATE,) * 3,
    "dpo": (UPDATE,) * 3,
    "kto": (UPDATE,) * 3,
    "reward": (UPDATE,) * 3,
    "online_dpo": ({**UPDATE, **ONLINE},) * 3,
    "gkd": ({**UPDATE, ("rollout", "generate"): 2},) * 3,
}
"""Trainer of the script -> calls of each of its three steps."""

SUPERVISED = ("sft", "dpo", "kto", "reward")
PARTS = ("forward", "backward", "optimizer")

REWARDS = """
steps: [{steps}]
record: {record}
instrument:
  - {{preset: trl}}
  - {{module: packages.core.tests.timed_rewards, name: judge, role: reward}}
  - {{module: packages.core.tests.timed_rewards, name: compare, role: reward}}
"""


class Run:
    """A run of the script: the weights it ends with, and what it captured."""

    def __init__(
        self,
        folder: Path,
        *cases: str,
        captured: bool,
        ranks: int = 1,
        options: Sequence[str] = ("--preset", "trl", "--steps", "every:1"),
    ) -> None:
        self.folder = folder / "run"
        stepscope = ("-m", "stepscope", "run", *options)
        profiled = (sys.executable, *stepscope, "--save-path", str(self.folder)) if captured else ()
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        program = (sys.executable, *(torchrun if ranks > 1 else ()), str(SCRIPT), str(folder), *cases)
        done = subprocess.run(
            [*profiled, *program], env={**os.environ, **OFFLINE}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        hashes = sorted(folder.glob("rank*/*.sha256"))
        self.weights = {(path.parent.name, path.stem): path.read_text() for path in hashes}
        """(rank, trainer) -> hash of all final weights, and what each timeout of a reward reached."""
        self.clocks = {path.stem: json.loads(path.read_text()) for path in folder.glob("rank0/*.json")}
        """Trainer -> what each of its steps spent where, in ns, by the script's own clock."""
        self.complaints = [
            line for line in done.stderr.splitlines() if "stepscope:" in line and " captured: " not in line
        ]

    @property
    def steps(self) -> list[StepReport]:
        layouts = [layout for _, layout in sorted(RunLayout(self.folder).steps().items())]
        return list(read_reports(layouts, traces=False).steps)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the trainers' run without stepscope, one after the other."""
    return Run(tmp_path_factory.mktemp("plain"), *CASES, captured=False)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(case: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of one trainer, each of whose steps is captured."""
    return Run(tmp_path_factory.mktemp(case), case, captured=True)


def test_every_step_of_the_optimizer_is_a_capture_that_shows_what_trl_did(case: str, run: Run) -> None:
    assert run.complaints == []
    calls = [{(stage.role, stage.stage): stage.calls for stage in report.stages} for report in run.steps]
    assert calls == list(CASES[case])
    # Steps that train on an earlier generation, and supervised ones, lack no rollout.
    assert "no-rollout" not in {advice.rule for report in run.steps for advice in report.advice}


def test_every_step_keeps_the_settings_of_the_trainer(case: str, run: Run) -> None:
    for layout in RunLayout(run.folder).steps().values():
        manifest = load_step(layout.root).manifest
        assert manifest is not None
        (trls,) = (framework for part in manifest.processes for framework in part.settings)
        assert (trls.framework, trls.version) == ("trl", version("trl"))
        present = {setting.name: setting.value for setting in trls.settings}
        assert present["per_device_train_batch_size"] == 4
        assert ("max_completion_length" in present) == (case in ("grpo", "shared_grpo", "rloo"))


def test_an_evaluation_and_a_checkpoint_are_stages_of_the_step_before_them(tmp_path: Path) -> None:
    run = Run(tmp_path, "evaluated_sft", captured=True)
    assert run.complaints == []
    calls = [{(stage.role, stage.stage): stage.calls for stage in report.stages} for report in run.steps]
    beside = {("trainer", "validate"): 1, ("trainer", "save_checkpoint"): 1}
    assert calls == [UPDATE, {**UPDATE, **beside}, {**UPDATE, **beside}]  # the last one always does


def test_little_of_a_step_is_unaccounted(case: str, run: Run) -> None:
    lines = [line for report in run.steps for line in report.breakdown.lines]
    unaccounted_ns = sum(line.wall_ns for line in lines if line.kind == "unaccounted")
    assert unaccounted_ns < sum(line.wall_ns for line in lines) * (0.05 if case in SUPERVISED else 0.25)


def test_a_step_and_its_stages_last_as_long_as_an_own_clock_says(case: str, run: Run) -> None:
    parts = PARTS if case in SUPERVISED else ()  # the loss of the others holds work of other stages
    for report, own in zip(run.steps, run.clocks[case], strict=True):
        stages = {stage.stage: stage.total_ns for stage in report.stages}
        ours = {
            "step": report.breakdown.window_ns,
            **{part: stages[f"update_actor_{part}"] for part in parts},
        }
        assert ours == pytest.approx({part: own[part] for part in ours}, rel=0.05, abs=3e6)


def test_the_final_weights_are_those_of_a_run_without_stepscope(case: str, run: Run, plain: Run) -> None:
    assert run.weights == {("rank0", case): plain.weights["rank0", case]}


def test_the_command_of_the_example_profiles_it_and_its_file_knows_of_no_profiler(tmp_path: Path) -> None:
    docstring, code = EXAMPLE.read_text().removeprefix('"""').split('"""', 1)
    assert "stepscope" not in code
    (command,) = [line for line in docstring.splitlines() if line.startswith("stepscope run")]
    words = command.replace("examples/", f"{EXAMPLE.parent}/").split()[1:]
    subprocess.run(
        [sys.executable, "-m", "stepscope", *words], cwd=tmp_path, env={**os.environ, **OFFLINE}, check=True
    )
    steps = RunLayout(tmp_path / "outputs/trl_grpo").steps()
    assert list(steps) == [0, 2]
    for report in read_reports(list(steps.values()), traces=False).steps:
        assert {(stage.role, stage.stage) for stage in report.stages} == set(CASES["grpo"][0])


def test_ranks_of_torchrun_are_captured_and_end_with_the_same_weights(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", "grpo", captured=False, ranks=2)
    run = Run(tmp_path / "captured", "grpo", captured=True, ranks=2)
    assert run.weights == plain.weights
    assert len(run.weights) == 2
    assert run.complaints == []
    assert [len(report.health.processes) for report in run.steps] == [2, 2, 2]


def test_rewards_that_time_out_make_the_same_weights_recorded_or_not(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", "timed_grpo", captured=False)
    (ends,) = plain.weights.values()
    assert ends.count("TimedOut of") == 16
    for steps, record in (("every:1", "off"), ("99", "spans"), ("99", "off")):
        folder = tmp_path / f"{record}_{steps}"
        config = tmp_path / f"{folder.name}.yaml"
        config.write_text(REWARDS.format(steps=steps, record=record))
        run = Run(folder, "timed_grpo", captured=True, options=("--config", str(config)))
        assert run.weights == plain.weights, folder.name
        assert (len(RunLayout(run.folder).steps()) == 3) == (steps == "every:1")


def test_a_trainer_that_the_preset_does_not_cover_is_named_at_the_start_and_in_the_report(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "cpo", captured=True)
    (complaint,) = run.complaints
    assert "CPOTrainer: " in complaint
    assert all("CPOTrainer" in warning for report in run.steps for warning in report.health.warnings)
    assert all(report.health.warnings for report in run.steps)


def test_a_trace_of_each_step_has_the_operators_of_the_model(run: Run) -> None:
    assert len(list(run.folder.glob("step_*/traces/trainer/*.json.gz"))) == 3


def test_the_functions_of_those_whom_trl_builds_upon_are_where_the_preset_says() -> None:
    assert trl.__version__ == version("trl")
    for entry in read_preset("trl", version).entries:
        spec = find_spec(str(entry.module).split(".")[0])
        assert spec is not None
        source = Path(str(spec.origin)).parents[1]
        assert Source(source).definition(str(entry.module), str(entry.name)), f"{entry.module}:{entry.name}"
