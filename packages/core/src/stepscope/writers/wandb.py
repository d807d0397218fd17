"""Weights & Biases: a step's figures and its page in a run of their own, beside that of the training.

The training's own run belongs to the training's process; `stepscope.on_report` hands the figures to code
there. Project, entity, group and mode are those of the WANDB_* variables.
"""

from __future__ import annotations

import os

import wandb

from stepscope.writers.protocol import ReportedStep


def on_report(step: ReportedStep) -> None:
    """Log the scalars as `stepscope/<name>` over `stepscope/step`. W&B's own step would have to grow."""
    run_id = step.report.run_id
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "stepscope",
        id=f"stepscope-{run_id}",
        name=os.environ.get("WANDB_NAME") or f"stepscope {run_id}",
        resume="allow",
        dir=str(step.run.root),
        settings=wandb.Settings(console="off", silent=True),
    ) as run:
        run.define_metric("stepscope/*", step_metric="stepscope/step")
        figures = {f"stepscope/{name}": value for name, value in step.scalars.items()}
        run.log({"stepscope/step": step.report.step, **figures})
        page = wandb.Artifact(f"stepscope-{run_id}", type="stepscope-report")
        with page.new_file("report.html", encoding="utf-8") as file:
            file.write(step.page)
        run.log_artifact(page, aliases=["latest", f"step-{step.report.step}"])
