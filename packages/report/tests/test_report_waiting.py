"""Waits are told from work: a process that only waits gets time last, and nobody waits for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, Row, a_step, printed, reported, rules
from stepscope.config.presets import read_preset
from stepscope.files.manifest import Expectation
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report.stragglers import Waited

WAIT: dict[str, AttrValue] = {"wait": True}


def polling_step(root: Path, *, generates: bool = True) -> StepFolder:
    """Return a step that polls for samples every 2 s, made in 290 ms, and then updates for 2460 ms."""
    rows: list[Row] = [("trainer/rollout wait_for_samples", 0, 2020, {"attrs": WAIT})]
    rows += [("agent_loop generate_sequences", 0, 290)] * generates
    return a_step(root, 4480, [*rows, ("actor update_actor", 2020, 4480)])


def test_a_wait_gets_the_time_that_no_work_covers(tmp_path: Path) -> None:
    report = reported(polling_step(tmp_path))
    lines = {line.stage: line for line in report.breakdown.lines}
    assert lines["generate_sequences"].wall_ns == 290 * MS
    assert lines["wait_for_samples"].wall_ns == 1730 * MS
    assert (lines["wait_for_samples"].waits, lines["generate_sequences"].waits) == (True, False)
    assert "_samples (waiting)" in printed(report, 120)


def test_nobody_probably_waits_for_one_who_waits(tmp_path: Path) -> None:
    (actor,) = (row for row in reported(polling_step(tmp_path)).idle if row.process == "actor 0")
    assert [(cause.kind, cause.stage, cause.wall_ns) for cause in actor.causes] == [
        ("not known", None, 2020 * MS)
    ]


def test_a_wait_while_nobody_was_busy_who_could_end_it_is_named_with_its_seconds(tmp_path: Path) -> None:
    report = reported(polling_step(tmp_path))
    (advice,) = (advice for advice in report.advice if advice.rule == "vain-wait")
    assert re.search(" wait_for_samples ", advice.what)
    assert advice.because[0].startswith("1.73 s, 38.6 % ")
    assert advice.saves_ns == 1730 * MS


def test_other_work_meanwhile_does_not_end_a_wait_for_the_rollout(tmp_path: Path) -> None:
    folder = polling_step(tmp_path)
    folder.process("critic", 0).span("update_critic", 300 * MS, 2020 * MS)
    (wait,) = reported(folder).vain_waits
    assert (wait.wall_ns, wait.vain_ns) == (2020 * MS, 1730 * MS)


def test_a_wait_in_which_the_rollout_works_is_not_in_vain(tmp_path: Path) -> None:
    wait: Row = ("trainer/rollout wait_for_samples", 0, 400, {"attrs": WAIT})
    assert "vain-wait" not in rules(reported(a_step(tmp_path, 1000, [wait, ("rollout decode", 0, 390)])))


@pytest.mark.parametrize("given", [False, True])
def test_a_rollout_that_nobody_recorded_is_missed_and_its_wait_not_called_vain(
    tmp_path: Path, given: bool
) -> None:
    """An engine that was given is not asked for again."""
    folder = polling_step(tmp_path, generates=False)
    if given:
        folder.processes[0].expected = [Expectation(name="replica 0", kind="engine", state="ok")]
    advice = {advice.rule: advice for advice in reported(folder).advice}
    assert "vain-wait" not in advice
    assert advice["no-rollout"].because[0].endswith(" wait_for_samples")
    assert ("engines as engines" in advice["no-rollout"].do) is not given


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        *(
            ([(f"trainer/actor {stage}", 0, 900), ("ref compute_log_prob", 0, 100)], False)
            for stage in ("update_actor", "compute_log_prob", "forward_backward")
        ),
        ([("trainer compute_advantage", 0, 900), ("rollout load_weights", 0, 100)], True),
    ],
)
def test_supervised_training_misses_no_rollout(tmp_path: Path, rows: list[Row], missed: bool) -> None:
    """Loading weights into replicas is no rollout."""
    assert ("no-rollout" in rules(reported(a_step(tmp_path, 1000, rows)))) is missed


def test_replicas_that_wait_differently_long_are_no_stragglers(tmp_path: Path) -> None:
    rows: list[Row] = [("trainer/agent_loop rollout", 0, 1000)]
    rows += [(f"rollout:{rank} queue", 0, 100 + 700 * rank) for rank in (0, 1)]
    assert "straggler" not in rules(reported(a_step(tmp_path, 1000, rows)))


def test_verls_poll_for_samples_is_a_wait() -> None:
    entries = [entry for entry in read_preset("verl").entries if entry.name == "ReplayBuffer.sample"]
    assert [entry.attrs for entry in entries if entry.kind == "span"] == [WAIT]


def test_a_wait_in_two_collectives_at_once_counts_once() -> None:
    waited = Waited()
    assert waited.add("rank 0", None, 0, 10) == 10
    assert waited.add("rank 0", None, 4, 14) == 4
    assert waited.add("rank 0", None, 5, 6) == 0
    assert waited.add("rank 1", None, 5, 6) == 1
