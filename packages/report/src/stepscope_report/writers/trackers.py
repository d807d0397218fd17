"""Writers of a step's figures and page to experiment trackers.

Each writer imports the package of its tracker. The configuration and `load_writers` check that it is
installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepscope_report.writers import ReportedStep

if TYPE_CHECKING:
    import wandb
    from mlflow.tracking import MlflowClient


def to_tensorboard(step: ReportedStep) -> None:
    """Add the scalars to event files in `<save_path>/tensorboard/<run>`. Needs no torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    report = step.report
    writer = EventFileWriter(str(step.run.tensorboard(report.run_id)))
    try:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in step.scalars.items()]
        # The time of the capture, not of writing, so that curves over time show the run.
        event = Event(wall_time=report.opened_ns / 1e9, step=report.step, summary=Summary(value=values))
        writer.add_event(event)
    finally:
        writer.close()


MLFLOW_TAG = "stepscope.run_id"
MLFLOW_MOST = 1000
"""Largest number of metrics in one request to MLflow."""


def to_mlflow(step: ReportedStep) -> None:
    """Log the figures as metrics and the page as an artifact, to the run named by MLFLOW_RUN_ID, or to a new
    run.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME name the store and the experiment.
    """
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    report, client = step.report, MlflowClient()
    run = os.environ.get("MLFLOW_RUN_ID") or _own_run(client, report.run_id)
    at_ms = report.opened_ns // 1_000_000
    metrics = [Metric(f"stepscope/{name}", value, at_ms, report.step) for name, value in step.scalars.items()]
    for start in range(0, len(metrics), MLFLOW_MOST):
        client.log_batch(run, metrics=metrics[start : start + MLFLOW_MOST])
    client.log_text(run, step.page, f"stepscope/step_{report.step:06d}.html")


def _own_run(client: MlflowClient, run_id: str) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "stepscope"
    experiment = client.get_experiment_by_name(name)
    where = client.create_experiment(name) if experiment is None else experiment.experiment_id
    runs = client.search_runs([where], f"tags.`{MLFLOW_TAG}` = '{run_id}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    made = client.create_run(where, tags={MLFLOW_TAG: run_id}, run_name=f"stepscope {run_id}")
    return str(made.info.run_id)


WANDB_SERVICE = "WANDB_SERVICE"
"""Variable in which W&B passes the address of its service to child processes."""
WANDB_REPORTED = "stepscope/reported"
"""Name of the value that holds the last step whose figures were given to W&B. `stepscope/step` in the run is
the last step in a complete row."""


def to_wandb(step: ReportedStep) -> None:
    """Log the figures and the page to Weights & Biases, in the run that the training logs to, or else in a
    new run.

    The service process of W&B holds the training's run and accepts records from other processes too, online
    and offline. For a new run, the WANDB_* variables set project, entity, group and mode.
    """
    import wandb

    training = _training_run()
    if training is not None:
        _log_beside(training, step)  # the training's run stays open
        return
    os.environ.pop(WANDB_SERVICE, None)  # the training's service may end before this process
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
    import wandb

    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id is None or WANDB_SERVICE not in os.environ:
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
    reported, logged = run.summary.get(WANDB_REPORTED), run.summary.get("stepscope/step")
    if reported not in (None, logged, step.report.step):
        raise OSError(
            f"the figures of step {reported} wait for the training's next wandb.log, and these would take "
            f"their place. Fix: wandb.log(...) at the end of each step"
        )
    _log(run, step)
    run.summary[WANDB_REPORTED] = step.report.step


def _log(run: wandb.Run, step: ReportedStep) -> None:
    """Log the figures as `stepscope/<name>` over `stepscope/step`, and the page.

    The figures are added to the row that is open. W&B would drop later logs of the training if they opened a
    new row with a higher step.
    """
    import wandb

    run.define_metric("stepscope/*", step_metric="stepscope/step")
    figures = {f"stepscope/{name}": value for name, value in step.scalars.items()}
    run.log({"stepscope/step": step.report.step, **figures}, commit=False)
    page = wandb.Artifact(f"stepscope-{step.report.run_id}", type="stepscope-report")
    with page.new_file("report.html", encoding="utf-8") as file:
        file.write(step.page)
    run.log_artifact(page, aliases=["latest", f"step-{step.report.step}"])
