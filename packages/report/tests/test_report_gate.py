"""The gate of `stepscope diff`: intervals, limits, verdicts, and the files it reads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from packages.report.tests.commands import Command
from packages.report.tests.simulated_gate import names_stage, pair_gate
from packages.report.tests.steps import MS, some
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.steps import StepLine, UncapturedStep
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.cli import run
from stepscope_report.gate import (
    STEP,
    Check,
    GateSteps,
    Limit,
    Sample,
    change_interval,
    check_gate,
    parse_limits,
)


def around(mean: float, number: int = 30, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [mean * draw.lognormvariate(0, 0.03) for _ in range(number)]


def steps(*seconds: float, noise: Sequence[float] = (), whole: bool = True) -> GateSteps:
    captured = [{STEP: value, "rollout/generate": value / 2} for value in seconds]
    return GateSteps(whole=whole, captured=captured, timed=[{STEP: value} for value in noise])


def check(a: GateSteps, b: GateSteps, limit: Limit) -> Check:
    (only,) = check_gate(a, b, [limit]).checks
    return only


def a_run(path: Path, *, took_ms: int = 100, captured: Sequence[int] = (2,), run_id: str = "run1") -> Path:
    for number in captured:
        folder = StepFolder(path, step=number, run_id=run_id)
        driver = folder.process("trainer", owner=True)
        driver.span("generate", 0, took_ms // 2 * MS, role="rollout")
        driver.close(took_ms * MS)
        folder.write()
    return path


def write_lines(path: Path, lines: Iterable[msgspec.Struct]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")


def record(
    path: Path, seconds: Iterable[float], stages: Mapping[str, float] | None = None, *, run_id: str = "run1",
    since_ms: int = 0,
) -> None:  # fmt: skip
    """Write the recorder's lines of steps that took these times."""
    lines = (
        StepLine(
            step=number, start_ns=(since_ms + number) * MS, dur_ns=int(took * 1e9), stages=dict(stages or {})
        )
        for number, took in enumerate(seconds)
    )
    write_lines(RunLayout(path).step_lines(run_id), lines)


@pytest.mark.slow
def test_no_change_stays_within_its_interval_and_a_planted_one_does_not() -> None:
    assert sum(pair_gate(seed, limit=0).failed for seed in range(5)) <= 1
    named = [names_stage(pair_gate(900 + seed, "actor/update"), "actor/update") for seed in range(5)]
    assert sum(named) >= 4


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = Sample(around(1.0)), Sample(around(1.05, seed=1))
    interval = some(change_interval(a, b, seed=3))
    assert interval == change_interval(a, b, seed=3)
    assert 0 < interval[0] < 0.05 < interval[1] < 0.1


def test_more_comparisons_widen_the_interval() -> None:
    a, b = Sample(around(1.0)), Sample(around(1.05, seed=1))
    one, ten = change_interval(a, b), change_interval(a, b, comparisons=10)
    assert one is not None
    assert ten is not None
    assert ten[0] < one[0] < one[1] < ten[1]


def test_growth_beyond_the_limit_but_within_noise_passes() -> None:
    wide = [0.5, 1.5] * 15
    noisy = check(steps(1.0, noise=wide), steps(1.2, noise=wide), Limit(STEP, 0.05))
    assert (noisy.changed, noisy.failed, noisy.source) == (False, False, "unprofiled")


def noisy_run(seconds: float, number: int, seed: int, spread: float = 0.1) -> GateSteps:
    draw = random.Random(seed)
    return steps(1.0, noise=[seconds * draw.lognormvariate(0, spread) for _ in range(number)])


def test_with_the_steps_that_it_asks_for_the_gate_can_tell() -> None:
    limit = Limit(STEP, 0.05)
    few = [check(noisy_run(1.0, 15, seed), noisy_run(1.0, 15, seed + 100), limit) for seed in range(20)]
    undecided = [one for one in few if one.undecided]
    assert len(undecided) > 10
    assert not any(one.failed for one in undecided)
    needed = max(one.needed_steps or 0 for one in undecided)
    assert 15 < needed < 2000
    for seed in range(5):
        equal = check(noisy_run(1.0, needed, seed), noisy_run(1.0, needed, seed + 100), limit)
        slower = check(noisy_run(1.0, needed, seed), noisy_run(1.1, needed, seed + 100), limit)
        assert (equal.undecided, equal.needed_steps, equal.failed) == (False, None, False)
        assert (slower.undecided, slower.failed) == (False, True)


def test_steps_that_cannot_tell_have_an_exit_code_on_request(tmp_path: Path, command: Command) -> None:
    for name, seed in (("a", 3), ("b", 4)):
        draw = random.Random(seed)
        record(a_run(tmp_path / name), [draw.lognormvariate(0, 0.2) for _ in range(12)])
    gate = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "5%"]
    (step,) = command(*gate, "--json").json["gate"]["checks"]
    assert (step["undecided"], step["failed"]) == (True, False)
    shown = command(*gate, "--require-verdict", "--junit", tmp_path / "gate.xml", code=5).out
    assert f"needs about {step['needed_steps']:,} steps" in " ".join(shown.split())
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()[0]
    assert (suite.get("skipped"), suite.get("failures")) == ("1", "0")


def test_one_step_is_compared_with_the_noise_of_the_steps_beside_it() -> None:
    a, b = (steps(value, noise=around(1.0, seed=at), whole=False) for at, value in enumerate((1.0, 1.3)))
    slower = check(a, b, Limit(STEP, 0.05))
    assert (slower.source, slower.a_steps, slower.changed, slower.failed) == ("captured", 1, True, True)
    b = steps(1.06, noise=around(1.0, seed=1), whole=False)
    assert not check(a, b, Limit(STEP, 0.05)).failed


@pytest.mark.parametrize(("b_seconds", "failed"), [(1.06, True), (1.04, False)])
def test_without_noise_the_limit_alone_decides(b_seconds: float, failed: bool) -> None:
    alone = check(steps(1.0), steps(b_seconds), Limit("rollout/*", 0.05))
    assert (alone.interval, alone.changed, alone.failed) == (None, None, failed)


def test_a_stage_that_a_lacks_fails() -> None:
    b = GateSteps(whole=True, captured=[{STEP: 1.0, "env/tool": 0.1}])
    new = check(steps(1.0), b, Limit("env/*", 0.05))
    assert (new.change, new.failed) == (None, True)


def test_limits_pair_with_stages_in_order() -> None:
    assert parse_limits(["5%"], []) == [Limit("step", 0.05)]
    assert parse_limits(["5%", "10"], ["rollout/*"]) == [Limit("step", 0.05), Limit("rollout/*", 0.1)]
    assert parse_limits(["2.5 %"], ["a/*", "b/*"]) == [Limit("a/*", 0.025), Limit("b/*", 0.025)]
    assert parse_limits(["1", "2"], ["a/*", "b/*"]) == [Limit("a/*", 0.01), Limit("b/*", 0.02)]


@pytest.mark.parametrize(
    ("fail_above", "stages", "named"),
    [
        (["-5%"], [], r"--fail-above is '-5%'; allowed: a percentage from 0 up"),
        (["x"], [], r"--fail-above is 'x'.*Fix: --fail-above 5%"),
        (["1", "2", "3"], ["a/*"], r"one for each --stage \(1\)"),
    ],
)
def test_a_wrong_limit_is_named(fail_above: list[str], stages: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_limits(fail_above, stages)


def test_a_pattern_without_a_stage_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'rolout/\*'.* rollout/generate"):
        check_gate(steps(1.0), steps(1.0), [Limit("rolout/*", 0.05)])


def test_a_stage_that_only_captured_steps_time_needs_them_on_both_sides() -> None:
    lines = [{STEP: 1.0, "agent_loop/trajectory": 4.0}] * 5
    a = GateSteps(whole=True, captured=[{STEP: 1.0, "env/tool": 0.1}], recorded=lines)
    b = GateSteps(whole=True, recorded=lines)
    for one, other in ((a, b), (b, a)):
        with pytest.raises(ConfigError, match=r" have agent_loop/trajectory\."):
            check_gate(one, other, [Limit("env/*", 0.1)])
        assert check(one, other, Limit("*/*", 0.1)).stage == "agent_loop/trajectory"


def test_the_command_exits_with_1_and_writes_junit(tmp_path: Path, command: Command) -> None:
    a, b = str(a_run(tmp_path / "a")), str(a_run(tmp_path / "b", took_ms=120))
    junit = tmp_path / "ci" / "gate.xml"
    command("diff", a, b)
    assert "Too few steps" in command("diff", a, b, "--fail-above", "30%").out
    stage = ["--fail-above", "5%", "--stage", "rollout/*", "--fail-above", "30%"]
    assert "fails" in command("diff", a, b, *stage, "--junit", junit, code=1).out
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["step"]


def test_markdown_and_json_hold_the_verdict(tmp_path: Path, command: Command) -> None:
    a, b = str(a_run(tmp_path / "a")), str(a_run(tmp_path / "b", took_ms=120))
    printed = command("diff", a, b, "--fail-above", "5%", "--markdown", code=1).out
    assert printed.startswith("**stepscope: failed**\n\n| stage | A | B |")
    assert "| +20.0 % | none | +5.0 % | 1, 1 captured | fails |" in printed
    document = command("diff", a, b, "--fail-above", "5%", "--json", code=1).json
    assert (document["delta_ns"], document["gate"]["failed"]) == (20 * MS, True)


def test_runs_without_a_capture_are_compared_by_recorded_steps(tmp_path: Path, command: Command) -> None:
    for name, seconds in (("a", 1.0), ("bb", 1.2)):
        took = around(seconds, seed=len(name))
        record(tmp_path / name, took, {"rollout/generate": seconds / 2})
    both = ["diff", str(tmp_path / "a"), str(tmp_path / "bb")]
    (step,) = command(*both, "--fail-above", "5%", "--json", code=1).json["gate"]["checks"]
    assert (step["source"], step["a_steps"], step["changed"]) == ("unprofiled", 29, True)
    shown = command(*both, "--fail-above", "5%", "--stage", "rollout/*", "--steps-b", "1:11", code=1)
    assert "29, 10" in shown.out
    assert run(both) == 2  # nothing captured, and no gate


def test_a_newer_run_that_captured_nothing_is_not_judged_by_the_one_before_it(
    tmp_path: Path, command: Command
) -> None:
    record(tmp_path / "a", around(1.0, seed=1))
    record(a_run(tmp_path / "bb", captured=(2, 3)), around(1.0, seed=2))
    record(tmp_path / "bb", around(1.5), run_id="run2", since_ms=OPENED_NS // MS + 60_000)
    words = ("diff", tmp_path / "a", tmp_path / "bb", "--fail-above", "5%", "--json")
    (step,) = command(*words, code=1).json["gate"]["checks"]
    assert 1.4 < step["b_seconds"] < 1.6
    command(*words, "--run-b", "run1")


@pytest.mark.slow
def test_runs_with_different_numbers_of_checkpoints_compare_like_with_like(
    tmp_path: Path, command: Command
) -> None:
    for name, every, recorded in (("a", 8, True), ("b", 4, True), ("c", 8, False), ("d", 4, False)):
        layout = RunLayout(a_run(tmp_path / name))
        plain = around(1.0, 61, seed=ord(name))
        took = {number: seconds * (1 if number % every else 3) for number, seconds in enumerate(plain)}
        if recorded:
            saves = {"actor/update": 1.0, "actor/save": 2.0}
            stages = {number: saves if number % every == 0 else {"actor/update": 1.0} for number in took}
            lines = (
                StepLine(step=at, start_ns=at * MS, dur_ns=int(seconds * 1e9), stages=stages[at])
                for at, seconds in took.items()
            )
            write_lines(layout.step_lines("run1"), lines)
        else:
            write_lines(layout.root / "uncaptured" / "trainer_rank0_run1.jsonl", uncaptured(took.values()))
    for a, b in ("ab", "ba", "cd", "dc"):
        words = ("diff", tmp_path / a, tmp_path / b, "--fail-above", "10%", "--json")
        (step,) = command(*words).json["gate"]["checks"]
        assert abs(step["change"]) < 0.05


def uncaptured(seconds: Iterable[float]) -> Iterator[UncapturedStep]:
    for number, took in enumerate(seconds):
        yield UncapturedStep(step=number, start_ns=number, dur_ns=int(took * 1e9))


def test_uncaptured_steps_of_the_slowest_owner_are_compared(tmp_path: Path, command: Command) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        folder = a_run(tmp_path / name) / "uncaptured"
        for rank in (0, 1):
            took = (seconds * (rank + 1) for seconds in around(1.0, seed=seed))
            write_lines(folder / f"trainer_rank{rank}_run1.jsonl", uncaptured(took))
    words = ("diff", tmp_path / "a", tmp_path / "b", "--fail-above", "1%", "--json")
    (step,) = command(*words).json["gate"]["checks"]
    assert (step["source"], step["a_steps"], step["failed"]) == ("unprofiled", 30, False)
    assert 1.9 < step["a_seconds"] < 2.1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--stage", "a/*"], "--stage is 'a/*'; allowed: only with a limit"),
        (["--junit", "x.xml"], "--junit is 'x.xml'; allowed: only with a limit"),
        (["--require-verdict"], "--require-verdict is 'given'; allowed: only with a limit"),
        (["--steps-a", "7"], "allowed: captured steps: 2"),
        (["--steps-b", "x"], "--steps-b is 'x'"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_is_allowed(
    tmp_path: Path, command: Command, options: list[str], named: str
) -> None:
    a = str(a_run(tmp_path))
    assert named in command("diff", a, a, *options, code=2).err
