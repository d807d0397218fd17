"""The callbacks of stepscope in the real trainers of transformers and Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from packages.core.tests import callback_main
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.integrations import lightning, transformers
from stepscope.testing.recorded_run import RecordedRun

pytest_plugins = ["stepscope.testing.plugin"]
pytestmark = pytest.mark.filterwarnings("ignore")  # they call what others deprecate
TWO_BATCHES = [
    *["actor/update_actor_backward"] * 2,
    "actor/update_actor_clip",
    *["actor/update_actor_forward"] * 2,
    "actor/update_actor_optimizer",
]


class Failure(TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers
    """A failure of step 2, once it has begun."""

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if getattr(state, "global_step", None) == 2:
            raise RuntimeError("no luck")


class Module(LightningModule):  # type: ignore[misc]  # mypy does not see lightning
    def __init__(self, failing_step: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.failing_step = failing_step

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.failing_step:
            raise RuntimeError("no luck")
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path,
    module: Module,
    *callbacks: lightning.StepscopeCallback,
    steps: int = 4,
    enable_checkpointing: bool = False,
) -> None:
    """Train for four steps of two batches each, or more: after the fourth, the module is evaluated."""
    trainer = LightningTrainer(
        max_steps=steps,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=enable_checkpointing,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    batches: DataLoader[torch.Tensor] = DataLoader([torch.ones(4)] * 16, batch_size=2)  # type: ignore[arg-type]  # a list will do
    trainer.fit(module, batches, batches)


def test_the_callback_of_transformers_captures_a_step_of_the_optimizer(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    stepscope_run.configure(steps=[2])
    callback_main.train(tmp_path, transformers.StepscopeCallback())
    assert list(stepscope_run.layout.steps()) == [2]
    assert sorted(stepscope_run.stages(2)) == [*TWO_BATCHES, "trainer/load_batch"]


def test_an_evaluation_and_a_checkpoint_belong_to_the_step_before_them(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    stepscope_run.configure(steps=[1, 2])
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    callback_main.train(tmp_path, transformers.StepscopeCallback(), **often)
    own = [*TWO_BATCHES, "trainer/load_batch"]
    assert sorted(stepscope_run.stages(2)) == own
    assert sorted(stepscope_run.stages(1)) == [*own, "trainer/save_checkpoint", "trainer/validate"]


def test_lightnings_evaluation_and_checkpoint_belong_to_the_step_before_them(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    callback = lightning.StepscopeCallback(stepscope_run.config.replace(steps=[7]))
    fit(tmp_path, Module(), callback, steps=8, enable_checkpointing=True)
    assert {"trainer/save_checkpoint", "trainer/validate"} <= set(stepscope_run.stages(7))


def test_the_callback_of_transformers_takes_settings_of_its_own(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    callback_main.train(tmp_path, transformers.StepscopeCallback(stepscope_run.config.replace(steps=[0, 3])))
    assert list(stepscope_run.layout.steps()) == [0, 3]


def test_an_exception_of_the_trainer_of_transformers_ends_the_step_and_goes_on(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    callback = transformers.StepscopeCallback()
    with pytest.raises(RuntimeError, match="no luck"):
        callback_main.train(tmp_path, callback, Failure())
    assert ending_of(stepscope_run, 2) == "RuntimeError: no luck"
    callback_main.train(tmp_path, callback)  # no capture is left open
    assert list(stepscope_run.layout.steps()) == [0, 1, 2, 3]


def test_each_rank_of_torchrun_takes_part_in_a_capture_of_the_callback(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run([*torchrun, callback_main.__file__, str(tmp_path)], check=True, timeout=300)
    parts, _ = read_parts(RunLayout(tmp_path / "run").step(2))
    assert {part.process.rank for part in fold(parts).processes} == {0, 1}


def test_the_callback_of_lightning_captures_the_batches_of_one_step_of_the_optimizer(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    stepscope_run.configure(steps=[2])
    fit(tmp_path, Module(), lightning.StepscopeCallback())
    assert list(stepscope_run.layout.steps()) == [2]
    assert sorted(stepscope_run.stages(2)) == [*TWO_BATCHES, *["trainer/load_batch"] * 2]


def test_an_exception_of_lightnings_trainer_ends_the_step_and_goes_on(
    stepscope_run: RecordedRun, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        fit(tmp_path, Module(failing_step=2), lightning.StepscopeCallback())
    assert ending_of(stepscope_run, 2) == "RuntimeError: no luck"


def ending_of(run: RecordedRun, step: int) -> str | None:
    """Return the error that ended the capture of a step."""
    [process] = run.manifest(step).processes
    return process.error
