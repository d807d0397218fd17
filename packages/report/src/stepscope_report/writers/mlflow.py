"""MLflow: a step's figures as metrics, and its page as an artifact.

Both go to the run named by MLFLOW_RUN_ID, or to a new run. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME
name the store and the experiment.
"""

from __future__ import annotations

import os

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from stepscope_report.writers.publish import ReportedStep

TAG = "stepscope.run_id"
MOST = 1000
"""Largest number of metrics in one request to MLflow."""


def on_report(step: ReportedStep) -> None:
    report, client = step.report, MlflowClient()
    run = os.environ.get("MLFLOW_RUN_ID") or _own_run(client, report.run_id)
    at_ms = report.opened_ns // 1_000_000
    metrics = [Metric(f"stepscope/{name}", value, at_ms, report.step) for name, value in step.scalars.items()]
    for start in range(0, len(metrics), MOST):
        client.log_batch(run, metrics=metrics[start : start + MOST])
    client.log_text(run, step.page, f"stepscope/step_{report.step:06d}.html")


def _own_run(client: MlflowClient, run_id: str) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "stepscope"
    experiment = client.get_experiment_by_name(name)
    where = client.create_experiment(name) if experiment is None else experiment.experiment_id
    runs = client.search_runs([where], f"tags.`{TAG}` = '{run_id}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    made = client.create_run(where, tags={TAG: run_id}, run_name=f"stepscope {run_id}")
    return str(made.info.run_id)
