"""The real TensorBoard, W&B, MLflow and OpenTelemetry hold the figures of a step, read back from each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from mlflow.tracking import MlflowClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from stepscope import ProfileConfig, capture, on_report, profile_step, span, trajectory
from stepscope._recording.process import exports
from stepscope._recording.session import pipeline
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Expectation
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.scalars import StepScalars, read_scalars
from stepscope_report import step_report, to_scalars
from stepscope_report.timeline import load_step

pytestmark = pytest.mark.filterwarnings("ignore")  # they call what others deprecate
assert mlflow.__version__
assert wandb.__version__


@profile_step(role="actor")
def update_actor() -> int:
    return sum(range(200_000))


def recorded(folder: Path, report_to: list[str], steps: range = range(2, 3)) -> RunLayout:
    """Return a run whose captured steps were given to these."""
    config = ProfileConfig.from_mapping(
        {
            "save_path": str(folder / "run"),
            "steps": ["every:1"],
            "roles": {"*": {"profiler": "off"}},
            "finish": {"report_to": report_to, "timeout_s": 300},
        }
    )
    for step in steps:
        with (
            capture(step, config=config),
            trajectory("t0", policy_version=1),
            span("rollout", role="rollout"),
        ):
            update_actor()
    assert not exports.exporter().drain(60)
    assert not pipeline._commands.drain(300)
    assert not pipeline._hooks.drain(60)
    return RunLayout(config.save_path)


def run_id(run: RunLayout) -> str:
    (owner,) = read_parts(next(iter(run.steps().values())))[0]
    return owner.run_id


def scalars(run: RunLayout, step: int = 2) -> dict[str, float]:
    """As a report made here has them."""
    values = to_scalars(step_report(load_step(run.step(step).root)))
    assert read_scalars(run.step(step), run_id(run)).values == values
    assert values["stage/actor/update_actor_seconds"] > 0
    return values


def outcome_of(run: RunLayout, step: int = 2) -> Expectation:
    parts = fold(read_parts(run.step(step))[0]).processes
    return next(item for part in parts for item in part.expected if item.name == "scalars")


def test_tensorboard_draws_a_curve_over_the_captured_steps(tmp_path: Path) -> None:
    run = recorded(tmp_path, ["tensorboard"], range(2, 4))
    assert outcome_of(run).state == "ok"
    events = EventAccumulator(str(run.tensorboard(run_id(run))))
    events.Reload()
    wanted = {step: scalars(run, step) for step in (2, 3)}
    assert set(events.Tags()["scalars"]) == set(wanted[2])
    for name in wanted[2]:
        points = {point.step: point.value for point in events.Scalars(name)}
        assert points == {step: pytest.approx(wanted[step][name], rel=1e-6) for step in (2, 3)}


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file: LevelDB's log format, its header of 7 bytes counted with the
    first block.
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # the rest of a block is too short for a record
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, or the last of several
            yield whole
            whole = b""


def wandb_records(folder: Path) -> tuple[str, list[Any]]:
    """Return the id and the records of the one offline run in `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    items = [wandb_internal_pb2.Record.FromString(data) for data in records(file.read_bytes())]
    (run,) = {record.run.run_id for record in items if record.WhichOneof("record_type") == "run"}
    return run, items


def rows(items: list[Any]) -> list[dict[str, Any]]:
    """Return those of the run's history, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in items
        if record.WhichOneof("record_type") == "history"
    ]


def pages(items: list[Any]) -> dict[str, str]:
    """Return the page of each step, by the alias of its artifact."""
    logged = [record.artifact for record in items if record.WhichOneof("record_type") == "artifact"]
    assert {artifact.type for artifact in logged} <= {"stepscope-report"}
    return {
        alias: Path(entry.local_path).read_text()
        for artifact in logged
        for entry in artifact.manifest.contents
        for alias in artifact.aliases
        if alias != "latest"
    }


def wandb_figures(run: RunLayout, step: int) -> dict[str, float]:
    values = {f"stepscope/{name}": value for name, value in scalars(run, step).items()}
    return {**values, "stepscope/step": step}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_RUN_ID", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def a_training_run(folder: Path) -> Any:
    return wandb.init(project="training", dir=folder, settings=wandb.Settings(silent=True, console="off"))


@pytest.mark.usefixtures("offline")
def test_wandb_has_a_run_of_its_own_without_one_of_the_training(tmp_path: Path) -> None:
    run = recorded(tmp_path, ["wandb"])
    assert outcome_of(run).state == "ok", outcome_of(run).reason
    own, items = wandb_records(run.root)
    assert own == f"stepscope-{run_id(run)}"
    (row,) = rows(items)
    wanted = wandb_figures(run, 2)
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert "<title>Step 2 of run" in pages(items)["step-2"]


@pytest.mark.usefixtures("offline")
def test_wandb_has_them_in_the_trainings_run_and_leaves_its_steps_alone(tmp_path: Path) -> None:
    training, run = a_training_run(tmp_path), RunLayout(tmp_path / "run")
    for step in (2, 3):
        wandb.log({"loss": 1 / step}, step=step)
        recorded(tmp_path, ["wandb"], range(step, step + 1))
        assert outcome_of(run, step).state == "ok", outcome_of(run, step).reason
        wandb.log({"reward": step}, step=step)  # W&B drops it if its step has grown
    wandb.log({"loss": 0.0}, step=4)
    wandb.finish()
    assert not list(run.root.glob("wandb"))  # it has a run of its own too
    logged_to, items = wandb_records(tmp_path)
    assert logged_to == training.id
    assert [(row["_step"], row["loss"], row.get("reward")) for row in rows(items)] == [
        (2, 1 / 2, 2),
        (3, 1 / 3, 3),
        (4, 0.0, None),
    ]
    for step, row in zip((2, 3), rows(items), strict=False):
        wanted = wandb_figures(run, step)
        assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert ["<title>Step 2 of run" in page for page in pages(items).values()] == [True, False]
    assert list(pages(items)) == ["step-2", "step-3"]
    axes = [record.metric for record in items if record.WhichOneof("record_type") == "metric"]
    assert {(axis.glob_name, axis.step_metric) for axis in axes} == {("stepscope/*", "stepscope/step")}


@pytest.mark.usefixtures("offline")
def test_wandb_keeps_the_figures_that_wait_for_the_trainings_row(tmp_path: Path) -> None:
    """Steps 2 and 3 are reported in one row of the training. W&B would keep those of step 3 alone."""
    a_training_run(tmp_path)
    run = RunLayout(tmp_path / "run")
    wandb.log({"loss": 1.0}, step=2)
    recorded(tmp_path, ["wandb"], range(2, 3))
    recorded(tmp_path, ["wandb"], range(3, 4))
    assert outcome_of(run, 2).state == "ok", outcome_of(run, 2).reason
    assert outcome_of(run, 3).state == "failed"
    assert "wandb: OSError: " in str(outcome_of(run, 3).reason)
    wandb.log({"loss": 0.5}, step=4)
    recorded(tmp_path, ["wandb"], range(4, 5))
    assert outcome_of(run, 4).state == "ok", outcome_of(run, 4).reason
    wandb.finish()
    _, items = wandb_records(tmp_path)
    assert [(row["_step"], row.get("stepscope/step")) for row in rows(items)] == [(2, 2), (4, 4)]


LAST_STEP = """
import sys, wandb
from stepscope import capture, configure
spans_alone = {"*": {"profiler": "off"}}
configure(save_path=f"{sys.argv[1]}/run", steps=[7], roles=spans_alone, finish={"report_to": ["wandb"]})
wandb.init(project="training", dir=sys.argv[1])
with capture(7):
    wandb.log({"loss": 1.0}, step=7)
"""


@pytest.mark.usefixtures("offline")
def test_wandb_has_the_last_step_of_a_program_that_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LAST_STEP, str(tmp_path)], check=True, timeout=200)
    _, items = wandb_records(tmp_path)
    ((step, row),) = ((row["_step"], row) for row in rows(items))
    assert (step, row["loss"], row["stepscope/step"]) == (7, 1.0, 7)
    assert list(pages(items)) == ["step-7"]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("lost", ["the run has ended", "W&B's service has ended"])
def test_wandb_has_a_run_of_its_own_if_the_trainings_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    run = recorded(tmp_path, [])
    training = a_training_run(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", training.id)
    wandb.finish()
    if lost == "W&B's service has ended":
        service = os.environ["WANDB_SERVICE"]
        wandb.teardown()
        monkeypatch.setenv("WANDB_SERVICE", service)
    command = [sys.executable, "-m", "stepscope", "publish", str(run.root), "--to", "wandb"]
    subprocess.run(command, check=True, timeout=200)
    own, items = wandb_records(run.root)
    assert own == f"stepscope-{run_id(run)}"
    assert list(pages(items)) == ["step-2"]


@pytest.mark.parametrize("own", [True, False], ids=["a run of its own", "the training's run"])
def test_mlflow_has_them_in_its_own_or_the_trainings_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts unless told otherwise
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    if not own:
        training = client.create_run(client.create_experiment("training")).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", training)
    run = recorded(tmp_path, ["mlflow"], range(2, 4))
    assert outcome_of(run, 3).state == "ok", outcome_of(run, 3).reason
    name = "stepscope" if own else "training"
    experiment = client.get_experiment_by_name(name)
    (training_run,) = client.search_runs([experiment.experiment_id])
    for metric in scalars(run):
        history = client.get_metric_history(training_run.info.run_id, f"stepscope/{metric}")
        assert {point.step: point.value for point in history} == {
            step: pytest.approx(scalars(run, step)[metric]) for step in (2, 3)
        }
    pages = client.list_artifacts(training_run.info.run_id, "stepscope")
    assert [page.path for page in pages] == ["stepscope/step_000002.html", "stepscope/step_000003.html"]
    kept = Path(client.download_artifacts(training_run.info.run_id, pages[0].path, str(tmp_path)))
    assert "<title>Step 2 of run" in kept.read_text()


@contextmanager
def a_collector(status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    """Provide an OTLP collector over HTTP that keeps what it is sent."""
    taken: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_opentelemetry_is_sent_to_the_collector_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_collector() as (endpoint, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        run = recorded(tmp_path, ["otel"])
    assert outcome_of(run).state == "ok", outcome_of(run).reason
    request = ExportTraceServiceRequest.FromString(taken[0])
    names = [
        span.name for resource in request.resource_spans for one in resource.scope_spans for span in one.spans
    ]
    assert sorted(names) == ["rollout", "step 2", "trajectory", "update_actor"]


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "3")]
)
def test_opentelemetry_gets_all_whatever_services_here_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with a_collector() as (endpoint, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv(name, value)
        run = recorded(tmp_path, ["otel"])
    assert outcome_of(run).state == "ok", outcome_of(run).reason
    request = ExportTraceServiceRequest.FromString(taken[0])
    spans = [
        span for resource in request.resource_spans for one in resource.scope_spans for span in one.spans
    ]
    assert len(spans) == 4
    (root,) = (span for span in spans if span.name == "step 2")
    assert {f"stepscope.{name}" for name in scalars(run)} <= {item.key for item in root.attributes}


def test_a_step_of_which_opentelemetry_makes_nothing_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_collector() as (endpoint, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        run = recorded(tmp_path, ["otel"])
    assert (outcome_of(run).state, taken) == ("failed", [])


def test_a_writer_that_fails_is_named_and_keeps_the_others_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[StepScalars] = []
    on_report(heard.append)
    try:
        with a_collector(status=400) as (endpoint, _):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            run = recorded(tmp_path, ["otel", "tensorboard"])
    finally:
        pipeline.report_hooks.clear()
    assert outcome_of(run).state == "failed"
    assert str(outcome_of(run).reason).startswith("otel: OSError: ")
    assert list(run.tensorboard(run_id(run)).iterdir())
    assert [figures.values for figures in heard] == [scalars(run)]


def test_a_run_that_is_over_is_published_by_hand(tmp_path: Path) -> None:
    run = recorded(tmp_path, [])
    command = [sys.executable, "-m", "stepscope", "publish", str(run.root), "--to", "tensorboard"]
    subprocess.run(command, check=True, env=dict(os.environ))
    events = EventAccumulator(str(run.tensorboard(run_id(run))))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(scalars(run))
