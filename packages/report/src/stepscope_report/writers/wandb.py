"""Weights & Biases: a step's figures and its page, in the run that the training logs to if there is one, else
in a new run.

The service process of W&B holds the training's run and accepts records from other processes too, online and
offline. For a new run, the WANDB_* variables set project, entity, group and mode.
"""

from __future__ import annotations

import os

import wandb

from stepscope_report.writers.publish import ReportedStep

_SERVICE = "WANDB_SERVICE"
"""Variable in which W&B passes the address of its service to child processes."""
_REPORTED = "stepscope/reported"
"""Name of the value that holds the last step whose figures were given to W&B. `stepscope/step` in the run is
the last step in a complete row."""


def on_report(step: ReportedStep) -> None:
    training = _training_run()
    if training is not None:
        _log_beside(training, step)  # the training's run stays open
        return
    os.environ.pop(_SERVICE, None)  # the training's service may end before this process
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
    """Return the run named by WANDB_RUN_ID. None if the training process has no such run open."""
    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id is None or _SERVICE not in os.environ:
        return None
    try:
        return wandb._attach(run_id)  # newer versions also have `wandb.attach`
    except Exception:  # of various types: the run or the service has ended
        return None


def _log_beside(run: wandb.Run, step: ReportedStep) -> None:
    """Log a step in the row that the training has open. That row must not hold the figures of another step.

    Raises:
        OSError: figures of another step are in the row, and would be overwritten.
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
    """Log the figures as `stepscope/<name>` over `stepscope/step`, and the page.

    They are added to the row that is open. W&B would drop later logs of the training if they opened a new row
    with a higher step.
    """
    run.define_metric("stepscope/*", step_metric="stepscope/step")
    figures = {f"stepscope/{name}": value for name, value in step.scalars.items()}
    run.log({"stepscope/step": step.report.step, **figures}, commit=False)
    page = wandb.Artifact(f"stepscope-{step.report.run_id}", type="stepscope-report")
    with page.new_file("report.html", encoding="utf-8") as file:
        file.write(step.page)
    run.log_artifact(page, aliases=["latest", f"step-{step.report.step}"])
