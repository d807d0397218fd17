"""Weights & Biases: a step's figures and its page in the run that the training logs to, else in a new run.

W&B's service holds the training's run, and takes records from other processes too, online and offline.
Project, entity, group and mode of a run of their own are those of the WANDB_* variables.
"""

from __future__ import annotations

import os

import wandb

from stepscope_report.writers.publish import ReportedStep

_SERVICE = "WANDB_SERVICE"
"""Variable by which W&B passes its service on to the children of a process."""
_REPORTED = "stepscope/reported"
"""The last step whose figures were given to W&B. `stepscope/step` is the last that it has in a row."""


def on_report(step: ReportedStep) -> None:
    training = _training_run()
    if training is not None:
        _log_beside(training, step)  # and it stays open
        return
    os.environ.pop(_SERVICE, None)  # the training's may end before this process
    run_id = step.report.run_id
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "stepscope",
        id=f"stepscope-{run_id}",
        name=os.environ.get("WANDB_NAME") or f"stepscope {run_id}",
        resume="allow",
        dir=str(step.run.root),
        settings=wandb.Settings(console="off", silent=True),
    ) as run:
        _log(run, step)


def _training_run() -> wandb.Run | None:
    """Return the run of WANDB_RUN_ID, or None if the parent process has no such run open."""
    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id is None or _SERVICE not in os.environ:
        return None
    try:
        return wandb._attach(run_id)  # `wandb.attach` in newer versions, which have both
    except Exception:  # of several kinds: the run, or the service, has ended
        return None


def _log_beside(run: wandb.Run, step: ReportedStep) -> None:
    """Log a step in the row that the training has open, unless the figures of another step wait in that row.

    Raises:
        OSError: Figures of another step wait there, and would be overwritten.
    """
    reported, logged = run.summary.get(_REPORTED), run.summary.get("stepscope/step")
    if reported not in (None, logged, step.report.step):
        raise OSError(
            f"the figures of step {reported} wait for the training's next wandb.log, and these would take "
            f"their place. Fix: wandb.log(...) at the end of each step"
        )
    _log(run, step)
    run.summary[_REPORTED] = step.report.step


def _log(run: wandb.Run, step: ReportedStep) -> None:
    """Log the scalars as `stepscope/<name>` over `stepscope/step`, and the page.

    They join the row that is open: W&B drops what the training logs for a step that is below its own.
    """
    run.define_metric("stepscope/*", step_metric="stepscope/step")
    figures = {f"stepscope/{name}": value for name, value in step.scalars.items()}
    run.log({"stepscope/step": step.report.step, **figures}, commit=False)
    page = wandb.Artifact(f"stepscope-{step.report.run_id}", type="stepscope-report")
    with page.new_file("report.html", encoding="utf-8") as file:
        file.write(step.page)
    run.log_artifact(page, aliases=["latest", f"step-{step.report.step}"])
