"""The cost of a cause by advice, against the same rollout without that cause."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.simulated import MS, Rollout, Time
from packages.report.tests.steps import some
from stepscope.testing.steps import StepFolder
from stepscope_report import step_critical_path, step_report
from stepscope_report.timeline import load_step


def test_calls_of_two_replicas_that_only_overlap_differently_are_no_straggler(tmp_path: Path) -> None:
    """All prefills take 11 ms and all decodes 50 ms; those of replica 1 run at once, of replica 0 in turn."""
    rollout = Rollout(
        begin_ms=lambda number: 0 if number % 2 else 31 * number,
        prefill_ms=lambda number, turn: 11,
        prepare_ms=lambda number, turn: 0 if number % 2 else 200,
    )
    report = rollout.report(tmp_path)
    (prefill,) = (stage for stage in report.stages if stage.stage == "prefill")
    assert some(prefill.imbalance) > 1.2
    assert {(share.calls, share.total_ns) for share in prefill.processes} == {(12, 12 * 11 * MS)}
    assert "straggler" not in {advice.rule for advice in report.advice}


def test_a_straggler_costs_no_more_than_advice_says(tmp_path: Path) -> None:
    """Decodes of replica 0 take four times as long, whether they overlap or not."""
    slow = Rollout(decode_ms=lambda number, turn: 50 if number % 2 else 200)
    sound = Rollout()
    advice = slow.advice(tmp_path / "slow")["straggler"]
    assert "straggler" not in sound.advice(tmp_path / "sound")
    assert advice.what.startswith("rollout 0 ")
    assert re.findall(r"\d[\d.]*(?: ms)?", advice.because[2]) == ["12", "200 ms", "12", "50.0 ms"]
    assert advice.saves_ns is not None
    assert advice.saves_ns >= slow.wall_ns - sound.wall_ns
    assert advice.saves_ns <= 1.1 * (slow.wall_ns - sound.wall_ns)


def slow(ms: float, others_ms: float) -> Time:
    """Return a time in which one turn takes longer."""
    return lambda number, turn: ms if (number, turn) == (2, 1) else others_ms


one_slow, slow_once, quick = slow(1500, 30), slow(1500, 50), slow(50, 50)


def in_turn(number: int, turn: int) -> float:
    return 200


def first_alone(number: int, turn: int) -> float:
    return 200 if number == 0 else 0


TOOLS = {
    "one slow call": Rollout(slots=2, tool_ms=one_slow),
    "twenty trajectories": Rollout(slots=2, trajectories=20, tool_ms=one_slow),
    "all alike": Rollout(tool_ms=in_turn),
    "one trajectory at a time": Rollout(at_once=1, tool_ms=in_turn),
    "others queue behind its requests": Rollout(
        replicas=1, slots=1, trajectories=2, turns=2, tool_ms=first_alone,
        prepare_ms=lambda number, turn: 210 if (number, turn) == (1, 0) else 0,
        prefill_ms=lambda number, turn: 0,
        decode_ms=lambda number, turn: 300 if number + turn == 1 else 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_without_its_tools_a_step_loses_no_more_than_the_bound(tmp_path: Path, name: str) -> None:
    rollout = TOOLS[name]
    bound_ns = step_critical_path(rollout.timeline(tmp_path / "with")).tools_save_ns
    before_ns = rollout.wall_ns
    assert bound_ns is not None
    quick = replace(rollout, tool_ms=lambda number, turn: 0)
    quick.timeline(tmp_path / "without")
    assert 0 < before_ns - quick.wall_ns <= bound_ns <= before_ns


def test_the_advice_on_tools_gives_the_bound_of_the_slow_one(tmp_path: Path) -> None:
    """One call of 1.5 s among 24 of 30 ms. The bound was once the tools' share of all trajectories' time."""
    slow = Rollout(slots=2, tool_ms=one_slow)
    sound = Rollout(slots=2, tool_ms=lambda number, turn: 30)
    saves_ns = slow.advice(tmp_path / "slow")["slow-tools"].saves_ns
    sound.report(tmp_path / "sound")
    assert saves_ns is not None
    assert slow.wall_ns - sound.wall_ns <= saves_ns <= 1.2 * (slow.wall_ns - sound.wall_ns)


@pytest.mark.parametrize("at_once", [100, 5])
def test_with_a_slot_for_each_request_a_step_loses_no_more_than_the_bound(
    tmp_path: Path, at_once: int
) -> None:
    tight = Rollout(slots=1, trajectories=20, at_once=at_once, tool_ms=lambda number, turn: 20)
    bound_ns = some(step_critical_path(tight.timeline(tmp_path / "tight")).queues_save_ns)
    free = replace(tight, slots=100)
    free.report(tmp_path / "free")
    assert 0 < tight.wall_ns - free.wall_ns <= bound_ns <= tight.wall_ns


def test_without_prefill_a_step_loses_no_more_than_the_bound(tmp_path: Path) -> None:
    """Each replica reads prompts for 90 ms while it writes for others, and for 90 ms alone."""
    rollout = Rollout(prefill_ms=lambda number, turn: 60, begin_ms=lambda number: 40 if number > 3 else 0)
    cached = replace(rollout, prefill_ms=lambda number, turn: 0)
    saves_ns = rollout.advice(tmp_path / "with")["prefill-alone"].saves_ns
    cached.report(tmp_path / "without")
    assert saves_ns is not None
    assert rollout.wall_ns - cached.wall_ns <= saves_ns


def test_without_moving_weights_a_step_loses_no_more_than_the_bound(folder: StepFolder) -> None:
    """Weights move for 100 of 500 ms, half of that beside work that does not wait for them."""
    trainer, actor, reward = (
        folder.process("trainer", owner=True), folder.process("actor", 0), folder.process("reward", 0),
    )  # fmt: skip
    actor.span("update_actor", 0, 400 * MS)
    actor.span("sync_weights", 400 * MS, 500 * MS)
    reward.span("score", 400 * MS, 450 * MS)
    for process in (trainer, actor, reward):
        process.close(500 * MS)
    (advice,) = (
        advice for advice in step_report(load_step(folder.write())).advice if advice.rule == "weight-sync"
    )
    assert advice.saves_ns == 100 * MS


TAILS: dict[str, tuple[Rollout, dict[str, Any], str, str]] = {
    "tool": (Rollout(tool_ms=slow_once), {"tool_ms": quick}, "env tool", "deadline"),
    "tool of twenty": (
        Rollout(trajectories=20, tool_ms=slow_once), {"tool_ms": quick}, "env tool", "pool that serves",
    ),
    "decode": (Rollout(decode_ms=slow_once), {"decode_ms": quick}, "rollout decode", "limit turns"),
    "queue": (
        Rollout(replicas=1, turns=1, slots=7, decode_ms=quick), {"slots": 8}, "rollout queue", "max_num_seqs",
    ),
    "judge": (
        Rollout(score_ms=lambda number: 500 if number == 2 else 20),
        {"score_ms": lambda number: 20}, "reward score", "judge",
    ),
    "no place": (Rollout(at_once=7), {"at_once": 8}, "it began 180 ms later", "more trajectories at once"),
    "no span": (
        Rollout(prepare_ms=slow_once), {"prepare_ms": quick}, "agent_loop trajectory", "open a span",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_a_tail_costs_what_advice_says_and_its_remedy_is_for_its_cause(tmp_path: Path, name: str) -> None:
    rollout, cure, stage, remedy = TAILS[name]
    advice = rollout.advice(tmp_path / "slow")["long-tail"]
    cured = replace(rollout, **cure)
    assert "long-tail" not in cured.advice(tmp_path / "cured")
    assert advice.saves_ns == rollout.wall_ns - cured.wall_ns
    assert stage in advice.because[-1]
    assert remedy in advice.do
    assert ("limit turns" in advice.do) is (name == "decode")
