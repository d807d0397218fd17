"""`stepscope what-if` on steps whose time with a change can be computed by hand."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests import steps
from packages.report.tests.commands import Command
from packages.report.tests.simulated import MS, Rollout
from packages.report.tests.steps import close
from stepscope.errors import ConfigError, RecordError
from stepscope.testing.steps import StepFolder
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Predicting, Prediction, predict

EVEN = [[100, 200, 300, 400], [100, 200, 300, 400]]
"""Tokens of each trajectory by replica. A replica writes one per ms, shared by its requests."""
UNEVEN = [[100, 200, 300, 400], [100]]


def ends_ms(tokens: Sequence[int]) -> list[int]:
    """Return the ends of requests that begin at once and share one token per ms. Ascending."""
    ends: list[int] = []
    end, shorter = 0, 0
    for place, length in enumerate(sorted(tokens)):
        end += (length - shorter) * (len(tokens) - place)
        shorter = length
        ends.append(end)
    return ends


def a_step(
    root: Path,
    replicas: Sequence[Sequence[int]] = EVEN,
    *,
    train_ms: int = 500,
    reward_ms: int = 100,
    updates: int = 1,
) -> Path:
    """Write a step: the rollout, a reward, the training, and 50 ms of weights."""
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    last = 0
    for number, tokens in enumerate(replicas):
        engine = folder.process("rollout", number, replica=number)
        for place, (length, end) in enumerate(zip(sorted(tokens), ends_ms(tokens), strict=True)):
            name = f"r{number}-t{place}"
            above = driver.span("trajectory", 0, end * MS, role="agent_loop", trajectory=name)
            engine.span(
                "decode", 0, end * MS, role="rollout", trajectory=name, link=driver.link(above),
                attrs={"tokens": length},
            )  # fmt: skip
            last = max(last, end)
    for stage, role, ms in (
        ("compute_reward", "reward", reward_ms),
        *[("update_actor", "trainer", train_ms // updates)] * updates,
        ("sync_weights", "trainer", 50),
    ):
        if ms:
            driver.span(stage, last * MS, (last + ms) * MS, role=role)
            last += ms
    close(folder, last * MS)
    return folder.write()


def predicted(root: Path, **options: str | int) -> Prediction:
    return predict(load_step(root), Options(**options))  # type: ignore[arg-type]  # of several types


def test_a_step_without_a_change_takes_what_it_took(tmp_path: Path) -> None:
    prediction = predicted(a_step(tmp_path))
    assert prediction.measured_ns == prediction.predicted_ns == 1650 * MS
    assert abs(prediction.replayed_ns - 1650 * MS) < 0.03 * 1650 * MS
    assert [(stage.name, stage.measured_ns) for stage in prediction.stages] == [
        ("rollout", 1000 * MS),
        ("reward compute_reward", 100 * MS),
        ("trainer update_actor", 500 * MS),
        ("trainer sync_weights", 50 * MS),
    ]
    assert prediction.model.replicas == ("replica 0", "replica 1")
    for point in prediction.model.curve:
        assert point.tokens_per_second == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(
    ("replicas", "options", "ms"),
    [
        # In turn on four: each gets two of the same length, L, which end at 2 L.
        (EVEN, {"replicas": "+2"}, 800 + 650),
        (EVEN, {"replicas": "x2"}, 800 + 650),
        # All eight on one: 2,000 tokens.
        (EVEN, {"replicas": "1"}, 2000 + 650),
        # 400 + 200; 300 + 100 + 100.
        (UNEVEN, {"balance": "length"}, 600 + 650),
        # The sixth of eight ends at 900.
        (EVEN, {"cut_tail": "p75"}, 900 + 650),
        # The training takes 600, and the rollout 1,000; weights move while neither runs.
        (EVEN, {"staleness": 1}, 1000 + 50),
        # Of eight rewards of 12.5 the last two are computed after the rollout, since both end with it.
        (EVEN, {"overlap": "reward"}, 1000 + 25 + 550),
        # The sixth ends at 600, and the training takes 600 too.
        (EVEN, {"replicas": "+2", "staleness": 1, "cut_tail": "p75"}, 600 + 50),
    ],
)
def test_a_change_takes_what_it_takes_by_hand(
    tmp_path: Path, replicas: list[list[int]], options: dict[str, str | int], ms: int
) -> None:
    prediction = predicted(a_step(tmp_path, replicas), **options)
    assert prediction.predicted_ns == pytest.approx(ms * MS, rel=0.03)
    assert prediction.low_ns <= prediction.predicted_ns <= prediction.high_ns
    assert prediction.changes


@pytest.mark.parametrize("replicas", [1, 2, 3, 31])
def test_equal_trajectories_share_any_number_of_replicas(tmp_path: Path, replicas: int) -> None:
    """31 of 100 tokens: a replica that gets n of them takes n x 100 ms."""
    measured = [[100] * count for count in (16, 8, 4, 2, 1)]
    prediction = predicted(a_step(tmp_path, measured), replicas=str(replicas))
    assert prediction.predicted_ns == pytest.approx((100 * -(-31 // replicas) + 650) * MS, rel=0.03)


def test_what_the_step_does_not_show_is_in_the_interval(tmp_path: Path) -> None:
    """24 were in flight at any time. Whether 12 get more each nobody knows: 1,200 ms, or 2,400 as now."""
    prediction = predicted(a_step(tmp_path, [[100] * 24]), replicas="2")
    assert prediction.low_ns < (1200 + 650) * MS * 1.05
    assert prediction.high_ns >= (2400 + 650) * MS


def test_changes_of_one_step_share_its_model(tmp_path: Path) -> None:
    timeline = load_step(a_step(tmp_path, UNEVEN))
    step = Predicting(timeline)
    for options in (Options(balance="length"), Options(cut_tail="p75"), Options(replicas="+1"), Options()):
        assert step.predict(options) == predict(timeline, options)


def test_the_interval_of_many_that_end_together_is_narrow(tmp_path: Path) -> None:
    """Few requests are ever in flight with few others, and resamples without these once took minutes."""
    draw = random.Random(0)
    prediction = predicted(a_step(tmp_path, [[draw.randrange(80, 100) for _ in range(150)]]), replicas="+1")
    assert prediction.high_ns < 1.1 * prediction.predicted_ns
    assert prediction.low_ns > 0.9 * prediction.predicted_ns


def queued(replicas: int, slots: int, seed: int) -> Rollout:
    """Return a rollout of 36 trajectories with two requests each, one token per ms, on these replicas."""
    draw = random.Random(seed)
    tokens = [min(1500, round(draw.lognormvariate(5.4, 0.9))) for _ in range(36)]
    return Rollout(
        trajectories=36, turns=2, replicas=replicas, slots=slots,
        prefill_ms=lambda number, turn: 0, decode_ms=lambda number, turn: tokens[number],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "replicas"), [(1, 3), (3, 1), (3, 3), (3, 5)])
def test_requests_wait_for_the_slots_of_a_replica(
    tmp_path: Path, slots: int, replicas: int, seed: int
) -> None:
    """The truth is the same rollout, played on that number of replicas."""
    prediction = predict(queued(2, slots, seed).timeline(tmp_path / "two"), Options(replicas=str(replicas)))
    changed = queued(replicas, slots, seed)
    changed.timeline(tmp_path / "changed")
    assert prediction.model.slots == slots
    assert prediction.replayed_ns == pytest.approx(prediction.measured_ns, rel=0.01)
    assert prediction.predicted_ns == pytest.approx(changed.wall_ns, rel=0.01)
    assert prediction.low_ns <= changed.wall_ns <= prediction.high_ns


def test_a_queue_with_a_span_of_its_own_is_the_same_queue(tmp_path: Path) -> None:
    """Four requests of 100 ms on one slot, each with its wait before the span of its generation, or in it."""
    for inside in (True, False):
        folder = StepFolder(tmp_path / str(inside))
        driver = folder.process("trainer", owner=True)
        for place in range(4):
            name, begin = f"t{place}", 100 * place * MS
            above = driver.span(
                "trajectory", 0, begin + 100 * MS, role="agent_loop", trajectory=name, attrs={"replica": 0}
            )
            start = 0 if inside else begin
            call = driver.span(
                "generate", start, begin + 100 * MS, role="rollout", parent=above, trajectory=name,
                attrs={"tokens": 100},
            )  # fmt: skip
            driver.span("queue", 0, begin, role="rollout", parent=call if inside else above, trajectory=name)
        driver.close(400 * MS)
        prediction = predicted(folder.write(), replicas="2")
        assert prediction.model.slots == 1
        assert prediction.predicted_ns == pytest.approx(200 * MS, rel=0.01)


def test_a_step_ends_its_rollout_with_what_it_consumes(folder: StepFolder) -> None:
    """The step takes the 8 shortest of 12 requests on two replicas. The others go on, and load them."""
    tokens = [100 * number for number in range(1, 13)]
    halves = [ends_ms(tokens[0::2]), ends_ms(tokens[1::2])]
    rollout_ns, train_ns = halves[1][3] * MS, (halves[1][3] + 500) * MS
    driver = folder.process("trainer", owner=True)
    for place, length in enumerate(tokens):
        end_ns, name = halves[place % 2][place // 2] * MS if place < 8 else None, f"t{place}"
        above = driver.span("trajectory", 0, end_ns, role="agent_loop", trajectory=name)
        driver.span(
            "generate", 0, end_ns, role="rollout", parent=above, trajectory=name,
            attrs={"replica": place % 2, **({"tokens": length} if place < 8 else {})},
        )  # fmt: skip
    update = driver.span("update_actor", rollout_ns, train_ns)
    for place in range(8):
        driver.span("consume", rollout_ns, rollout_ns, parent=update, trajectory=f"t{place}")
    driver.close(train_ns)
    prediction = predicted(folder.write(), replicas="1")
    assert prediction.replayed_ns == pytest.approx(prediction.measured_ns, rel=0.03)
    assert [(stage.name, stage.measured_ns) for stage in prediction.stages] == [
        ("rollout", rollout_ns), ("trainer update_actor", 500 * MS),
    ]  # fmt: skip
    assert prediction.predicted_ns == pytest.approx((ends_ms(tokens)[7] + 500) * MS, rel=0.03)


def with_tools(root: Path, places: int = 2) -> Timeline:
    """Return a step of eight trajectories: 100 tokens each, then a tool of 100 ms, `places` at once."""
    rows: list[steps.Row] = []
    for place in range(8):
        own: dict[str, Any] = {"trajectory": f"t{place}"}
        begin = 100 + place // places * 100
        of_engine, tokens = own | {"attrs": {"replica": 0}}, own | {"attrs": {"tokens": 100}}
        rows.append(("trainer/agent_loop trajectory", 0, begin + 100, of_engine))
        rows.append(("trainer/rollout generate", 0, 100, "trajectory", tokens))
        rows.append(("trainer/env tool", begin, begin + 100, "trajectory", own))
    return load_step(steps.a_step(root, 100 + 8 // places * 100, rows).write())


@pytest.mark.parametrize(("pool", "ms"), [("x2", 300), ("+6", 200), ("-1", 900), ("4", 300)])
def test_a_pool_of_tools_changes_its_size(tmp_path: Path, pool: str, ms: int) -> None:
    prediction = predict(with_tools(tmp_path), Options(tool_pool=pool))
    assert (prediction.measured_ns, prediction.model.tool_pool) == (500 * MS, 2)
    assert prediction.predicted_ns == pytest.approx(ms * MS, rel=0.03)


def test_tools_without_a_queue_can_only_get_a_limit(tmp_path: Path) -> None:
    timeline = with_tools(tmp_path, places=8)
    assert predict(timeline, Options(tool_pool="4")).predicted_ns == pytest.approx(300 * MS, rel=0.03)
    with pytest.raises(ConfigError, match=r"--tool-pool is 'x2'.* 8"):
        predict(timeline, Options(tool_pool="x2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "-2"}, "--replicas is '-2'; allowed: at least 1 left, from 2 now"),
        ({"replicas": "x0"}, "--replicas is 'x0'; allowed: at least 1 left, from 2 now"),
        (
            {"replicas": "two"},
            r"--replicas is 'two'; allowed: \+N, -N, xN or N, from 2 now. Fix: for instance",
        ),
        ({"balance": "size"}, "--balance is 'size'; allowed: length or load"),
        ({"balance": "length", "replicas": "1"}, r"only with several replicas.*Fix: omit it, or add --repl"),
        ({"cut_tail": "95"}, "--cut-tail is '95'; allowed: p1 to p99"),
        ({"cut_tail": "p99"}, "a part of 8 trajectories, and this is all of them. Fix: a lower percentile"),
        ({"tool_pool": "x2"}, "--tool-pool is 'x2'; allowed: only for a step with tools, and it has none"),
        ({"staleness": 2}, "--staleness is 2; allowed: 1, because one step cannot tell"),
        ({"overlap": "ref"}, "--overlap is 'ref'; allowed: reward"),
    ],
)
def test_a_change_that_cannot_apply_is_an_error(
    tmp_path: Path, options: dict[str, str | int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(a_step(tmp_path), **options)


def test_a_step_without_the_stage_that_a_change_moves_is_an_error(tmp_path: Path) -> None:
    step = a_step(tmp_path, train_ms=0, reward_ms=0)
    with pytest.raises(ConfigError, match="--overlap is 'reward'"):
        predicted(step, overlap="reward")
    with pytest.raises(ConfigError, match="--staleness is 1"):
        predicted(step, staleness=1)


def test_a_step_whose_tokens_do_not_explain_its_times_gets_no_prediction(tmp_path: Path) -> None:
    rows: list[steps.Row] = []
    for place, (tokens, end) in enumerate([(1000, 10), (10, 1000), (500, 20), (20, 900)]):
        own: dict[str, Any] = {"trajectory": f"t{place}"}
        rows.append(("trainer/agent_loop trajectory", 0, end, own))
        tokens_of = {**own, "attrs": {"tokens": tokens}}
        rows.append(("trainer/rollout generate", 0, end, "trajectory", tokens_of))
    with pytest.raises(RecordError, match=r"no prediction,.* rollout"):
        predicted(steps.a_step(tmp_path, 1000, rows).write())


TRAJECTORY: steps.Row = ("trainer/agent_loop trajectory", 0, 50, {"trajectory": "t"})


def generation(**attrs: int) -> steps.Row:
    return "trainer/rollout generate", 0, 50, "trajectory", {"trajectory": "t", "attrs": attrs}


LACKING: dict[str, list[steps.Row]] = {
    "has no trajectories, which a replay needs": [
        ("trainer/rollout generate", 0, 50, {"attrs": {"tokens": 5}})
    ],
    "trajectories that began in this step, in processes whose clocks are aligned": [
        ("trainer/agent_loop trajectory@0", 0, 50, {"trajectory": "t"})
    ],
    "no trajectory has a span of role `rollout`": [TRAJECTORY],
    "0 of 1 generations say how many tokens they wrote": [TRAJECTORY, generation()],
    "0 of 1 generations say how many tokens": [TRAJECTORY, generation(tokens=-5)],
    "trainer update_actor runs beside the rollout": [
        TRAJECTORY, generation(tokens=5), ("trainer update_actor", 20, 90)
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", LACKING)
def test_a_step_that_lacks_what_a_replay_needs_says_so(tmp_path: Path, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        predicted(steps.a_step(tmp_path, 100, LACKING[message]).write())


def test_calls_of_one_stage_are_one_row(tmp_path: Path, command: Command) -> None:
    step = a_step(tmp_path, updates=10)
    stages = command("what-if", step, "--replicas", "+2", "--json").json["stages"]
    assert {stage["name"]: (stage["calls"], stage["measured_ns"]) for stage in stages} == {
        "rollout": (1, 1000 * MS),
        "reward compute_reward": (1, 100 * MS),
        "trainer update_actor": (10, 500 * MS),
        "trainer sync_weights": (1, 50 * MS),
    }
    assert command("what-if", step).out.count("update_actor") == 1


def test_the_command_prints_and_has_json(tmp_path: Path, command: Command) -> None:
    step = a_step(tmp_path)
    text = " ".join(command("what-if", step.parent, "--replicas", "+2").out.split())
    assert "replicas 2 -> 4: 1.65 s -> 1.4" in text
    assert "839 ms to 1.49 s" in text
    assert "take 0 %" in text
    assert "Assumed: " in text
    answer = command("what-if", step, "--cut-tail", "p75", "--json").json
    assert re.search(" 75 % ", *answer["changes"])
    assert answer["measured_ns"] == 1650 * MS
    assert "Fix: omit it" in command("what-if", step, "--tool-pool", "x2", code=2).err
    shown = command("what-if", step.parent, "--run", "none", code=2)
    assert f"'none'. Runs: {answer['run_id']}\n" in shown.err
