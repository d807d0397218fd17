"""Waits are told from work: a process that only waits gets time last, and nobody waits for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.steps import close, printed
from stepscope.config.presets import read_preset
from stepscope.files.manifest import Expectation
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.stragglers import Waited
from stepscope_report.timeline import load_step

MS = 1_000_000
WAIT: dict[str, AttrValue] = {"wait": True}


def report_of(folder: StepFolder, until_ms: int = 4480) -> StepReport:
    close(folder, until_ms * MS)
    return step_report(load_step(folder.write()))


def polling_step(root: Path, *, generates: bool = True) -> StepFolder:
    """Return a step that polls for samples every 2 s, made in 290 ms, and then updates for 2460 ms."""
    folder = StepFolder(root)
    trainer = folder.process("trainer", owner=True)
    trainer.span("wait_for_samples", 0, 2020 * MS, role="rollout", attrs=WAIT)
    worker = folder.process("agent_loop", 0)
    if generates:
        worker.span("generate_sequences", 0, 290 * MS)
    folder.process("actor", 0).span("update_actor", 2020 * MS, 4480 * MS)
    return folder


def test_a_wait_gets_the_time_that_no_work_covers(tmp_path: Path) -> None:
    lines = {line.stage: line for line in report_of(polling_step(tmp_path)).breakdown.lines}
    assert lines["generate_sequences"].wall_ns == 290 * MS
    assert lines["wait_for_samples"].wall_ns == 1730 * MS
    assert (lines["wait_for_samples"].waits, lines["generate_sequences"].waits) == (True, False)


def test_nobody_probably_waits_for_one_who_waits(tmp_path: Path) -> None:
    (actor,) = (row for row in report_of(polling_step(tmp_path)).idle if row.process == "actor 0")
    assert [(cause.kind, cause.stage, cause.wall_ns) for cause in actor.causes] == [
        ("not known", None, 2020 * MS)
    ]


def test_a_wait_while_nobody_was_busy_who_could_end_it_is_named_with_its_seconds(tmp_path: Path) -> None:
    report = report_of(polling_step(tmp_path))
    (advice,) = (advice for advice in report.advice if advice.rule == "vain-wait")
    assert re.search(" wait_for_samples ", advice.what)
    assert advice.because[0].startswith("1.73 s, 38.6 % ")
    assert advice.saves_ns == 1730 * MS


def test_other_work_meanwhile_does_not_end_a_wait_for_the_rollout(tmp_path: Path) -> None:
    folder = polling_step(tmp_path)
    folder.process("critic", 0).span("update_critic", 300 * MS, 2020 * MS)
    (wait,) = report_of(folder).vain_waits
    assert (wait.wall_ns, wait.vain_ns) == (2020 * MS, 1730 * MS)


def test_a_wait_in_which_the_rollout_works_is_not_in_vain(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).span("wait_for_samples", 0, 400 * MS, role="rollout", attrs=WAIT)
    folder.process("rollout", 0).span("decode", 0, 390 * MS)
    assert "vain-wait" not in {advice.rule for advice in report_of(folder, 1000).advice}


def test_a_rollout_that_nobody_recorded_is_missed_and_its_wait_not_called_vain(tmp_path: Path) -> None:
    rules = {advice.rule: advice for advice in report_of(polling_step(tmp_path, generates=False)).advice}
    assert "vain-wait" not in rules
    assert rules["no-rollout"].because[0].endswith(" wait_for_samples")


@pytest.mark.parametrize("given", [False, True])
def test_an_engine_that_was_given_is_not_asked_for_again(tmp_path: Path, given: bool) -> None:
    folder = polling_step(tmp_path, generates=False)
    if given:
        folder.processes[0].expected = [Expectation(name="replica 0", kind="engine", state="ok")]
    rules = {advice.rule: advice for advice in report_of(folder).advice}
    assert ("engines as engines" in rules["no-rollout"].do) is not given


@pytest.mark.parametrize("stage", ["update_actor", "compute_log_prob", "forward_backward"])
def test_supervised_training_misses_no_rollout(tmp_path: Path, stage: str) -> None:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).span(stage, 0, 900 * MS, role="actor")
    folder.process("ref", 0).span("compute_log_prob", 0, 100 * MS)
    assert "no-rollout" not in {advice.rule for advice in report_of(folder, 1000).advice}


def test_loading_weights_into_replicas_is_no_rollout(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).span("compute_advantage", 0, 900 * MS)
    folder.process("rollout", 0).span("load_weights", 0, 100 * MS)
    assert "no-rollout" in {advice.rule for advice in report_of(folder, 1000).advice}


def test_replicas_that_wait_differently_long_are_no_stragglers(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).span("rollout", 0, 1000 * MS, role="agent_loop")
    for rank in (0, 1):
        folder.process("rollout", rank).span("queue", 0, (100 + 700 * rank) * MS)
    assert "straggler" not in {advice.rule for advice in report_of(folder, 1000).advice}


def test_the_terminal_marks_what_waits(tmp_path: Path) -> None:
    assert "_samples (waiting)" in printed(report_of(polling_step(tmp_path)), 120)


def test_verls_poll_for_samples_is_a_wait() -> None:
    entries = [entry for entry in read_preset("verl").entries if entry.name == "ReplayBuffer.sample"]
    assert [entry.attrs for entry in entries if entry.kind == "span"] == [WAIT]


def test_a_wait_in_two_collectives_at_once_counts_once() -> None:
    waited = Waited()
    assert waited.add("rank 0", None, 0, 10) == 10
    assert waited.add("rank 0", None, 4, 14) == 4
    assert waited.add("rank 0", None, 5, 6) == 0
    assert waited.add("rank 1", None, 5, 6) == 1
