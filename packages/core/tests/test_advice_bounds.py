"""The cost of a cause by advice, against the same rollout without that cause."""

from __future__ import annotations

from pathlib import Path

from packages.core.tests.simulated import MS, Rollout


def test_calls_of_two_replicas_that_only_overlap_differently_are_no_straggler(tmp_path: Path) -> None:
    """All prefills take 11 ms and all decodes 50 ms; those of replica 1 run at once, of replica 0 in turn."""
    rollout = Rollout(
        begin_ms=lambda number: 0 if number % 2 else 31 * number,
        prefill_ms=lambda number, turn: 11,
        prepare_ms=lambda number, turn: 0 if number % 2 else 200,
    )
    report = rollout.report(tmp_path)
    (prefill,) = (stage for stage in report.stages if stage.stage == "prefill")
    assert prefill.imbalance is not None
    assert prefill.imbalance > 1.2
    assert {(share.calls, share.total_ns) for share in prefill.processes} == {(12, 12 * 11 * MS)}
    assert "straggler" not in {advice.rule for advice in report.advice}


def test_a_straggler_costs_no_more_than_advice_says(tmp_path: Path) -> None:
    """Decodes of replica 0 take four times as long, whether they overlap or not."""
    slow = Rollout(decode_ms=lambda number, turn: 50 if number % 2 else 200)
    sound = Rollout()
    advice = slow.advice(tmp_path / "slow")["straggler"]
    assert "straggler" not in sound.advice(tmp_path / "sound")
    assert advice.what == "rollout 0 is slower than the others in rollout decode"
    assert advice.because[1] == "12 calls of 200 ms on average, the others 12 of 50.0 ms"
    assert advice.saves_ns is not None
    assert advice.saves_ns >= slow.wall_ns - sound.wall_ns
    assert advice.saves_ns <= 1.1 * (slow.wall_ns - sound.wall_ns)
