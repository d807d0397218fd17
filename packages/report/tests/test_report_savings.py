"""Savings that what-if predicts for the settings that advice names, and what is printed of these."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.cases import Case
from packages.report.tests.steps import MS, close, printed
from packages.report.tests.test_report_settings import full_cache, lines_of, named
from packages.report.tests.test_what_if import EVEN, UNEVEN, a_step, ends_ms
from stepscope import capture, span
from stepscope.engines import name_settings
from stepscope.files.manifest import FrameworkSettings
from stepscope.testing.recorded_run import FakeClock, RecordedRun
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import step_report
from stepscope_report.brief import brief_text, step_brief
from stepscope_report.cli import run
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import load_step
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import predict

pytest_plugins = ["stepscope.testing.plugin"]


def tail_step(root: Path) -> StepFolder:
    """Write a step of 20 trajectories on one replica that writes a token per ms: 18 of 100, two of 400.

    They end at 2,000 and 2,600 ms; the training takes 500 ms.
    """
    folder = StepFolder(root)
    driver, engine = folder.process("trainer", owner=True), folder.process("rollout", 0, replica=0)
    for index in range(20):
        tokens, end_ms = (400, 2600) if index >= 18 else (100, 2000)
        name = f"t{index}"
        above = driver.span("trajectory", 0, end_ms * MS, role="agent_loop", trajectory=name)
        engine.span(
            "decode", 0, end_ms * MS, role="rollout", trajectory=name, link=driver.link(above),
            attrs={"tokens": tokens},
        )  # fmt: skip
    driver.span("update_actor", 2600 * MS, 3100 * MS)
    close(folder, 3100 * MS)
    return folder


def owner(folder: StepFolder) -> FakeProcess:
    return folder.processes[0]


def test_the_predicted_saving_is_what_ifs(tmp_path: Path) -> None:
    folder = tail_step(tmp_path)
    owner(folder).settings = (
        named("verl", partial_rollout=("trainer.v1.trainer_mode", "sync", "colocate_async")),
    )
    timeline = load_step(folder.write())
    (advice,) = (item for item in step_report(timeline).advice if item.rule == "long-tail")
    (change,) = advice.settings
    assert change.predicted_saving_ns == pytest.approx(600 * MS, rel=0.03)  # it ends with the first 18
    prediction = predict(timeline, Options(cut_tail="p90"))
    assert change.predicted_saving_ns == prediction.measured_ns - prediction.predicted_ns
    assert change.error_ns is not None
    assert prediction.predicted_ns - change.error_ns <= prediction.low_ns
    assert prediction.predicted_ns + change.error_ns >= prediction.high_ns
    assert ": sync -> colocate_async (" in lines_of(advice.settings)[0]


def test_a_batch_is_begun_larger_so_that_nine_tenths_fill_it(tmp_path: Path) -> None:
    folder = tail_step(tmp_path)
    owner(folder).settings = (
        named(
            "slime",
            oversampling=("--over-sampling-batch-size", None),
            rollout_batch=("--rollout-batch-size", 18),
            partial_rollout=("--partial-rollout", False, True),
        ),
    )
    (advice,) = (a for a in step_report(load_step(folder.write())).advice if a.rule == "long-tail")
    more, kept = advice.settings
    assert (more.setting, more.present, more.suggested) == ("--over-sampling-batch-size", None, 20)
    assert more.predicted_saving_ns is not None
    assert (kept.setting, kept.predicted_saving_ns) == ("--partial-rollout", None)


def test_a_router_that_deals_by_load_saves_what_what_if_says(tmp_path: Path) -> None:
    path = a_step(tmp_path, UNEVEN)
    rewrite(path, named("slime", balance_requests=("--router-policy", "round_robin", "power_of_two")))
    timeline = load_step(path)
    (advice,) = (item for item in step_report(timeline).advice if item.rule == "straggler")
    (change,) = advice.settings
    prediction = predict(timeline, Options(balance="load"))
    assert change.predicted_saving_ns == prediction.measured_ns - prediction.predicted_ns > 0


def test_an_engine_more_saves_what_what_if_says(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    for number, tokens in enumerate(EVEN):
        engine = folder.process("rollout", number, replica=number)
        for place, (length, end) in enumerate(zip(tokens, ends_ms(tokens), strict=True)):
            name = f"r{number}-t{place}"
            above = driver.span("trajectory", 0, end * MS, role="agent_loop", trajectory=name)
            link, began_ns = driver.link(above), end * MS // 4
            engine.span("queue", 0, began_ns, trajectory=name, link=link)
            engine.span("decode", began_ns, end * MS, trajectory=name, link=link, attrs={"tokens": length})
    driver.span("update_actor", 1000 * MS, 1500 * MS)
    close(folder, 1500 * MS)
    driver.settings = (named("openrlhf", replicas=("--vllm.num_engines", 2)),)
    (advice,) = (item for item in step_report(load_step(folder.write())).advice if item.rule == "queueing")
    (change,) = advice.settings
    assert (change.setting, change.present, change.suggested) == ("--vllm.num_engines", 2, 3)
    # in turn on three: the first gets 100, 400 and 300 tokens, and had 1,000 before
    assert change.predicted_saving_ns == pytest.approx(200 * MS, rel=0.05)


def rewrite(path: Path, settings: FrameworkSettings) -> None:
    """Put settings into the owner's part of a step that was written."""
    for file in (path / "processes").glob("trainer*.json"):
        part = msgspec.json.decode(file.read_bytes())
        part["settings"] = [msgspec.to_builtins(settings)]
        file.write_bytes(msgspec.json.encode(part))


def test_settings_stand_in_the_terminal_the_page_the_brief_and_json(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    full_cache(case)
    case.driver.settings = (named("verl", max_requests=("actor_rollout_ref.rollout.max_num_seqs", 64)),)
    for process in case.folder.processes:
        process.close(1000 * MS)
    path = case.folder.write()
    timeline = load_step(path)
    report = step_report(timeline)
    line = "verl: actor_rollout_ref.rollout.max_num_seqs: 64 -> 40"
    assert line in printed(report, 200)
    assert f"<code>{line.replace('>', '&gt;')}</code>" in render_step(timeline, report)
    assert f"    {line}" in brief_text(step_brief(report))
    assert run(["report", str(path), "--json", "--no-html"]) in (0, 3)
    (advice,) = (
        item
        for item in json.loads(capsys.readouterr().out)["steps"][0]["advice"]
        if item["rule"] == "full-kv-cache"
    )
    assert advice["settings"] == [
        {
            "framework": "verl",
            "version": "1.2",
            "setting": "actor_rollout_ref.rollout.max_num_seqs",
            "present": 64,
            "suggested": 40,
            "direction": "lower",
            "predicted_saving_ns": None,
            "error_ns": None,
        }
    ]


def test_a_framework_of_ones_own_gets_advice_in_its_words(
    stepscope_run: RecordedRun, stepscope_clock: FakeClock
) -> None:
    name_settings("mine", {"weight_bucket": ("sync.bucket_mb", 512)}, version="1.2")
    with capture(1), span("sync_weights", role="trainer"):
        stepscope_clock.advance(2)
    report = step_report(load_step(stepscope_run.layout.step(1).root))
    (advice,) = (item for item in report.advice if item.rule == "weight-sync")
    (line,) = lines_of(advice.settings)
    assert line.endswith("bucket_mb: 512 -> higher")
