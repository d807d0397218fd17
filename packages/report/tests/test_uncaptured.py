"""Steps that nobody captures: how long they take is kept near captured ones, and compared with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.commands import Command
from packages.report.tests.steps import MS, printed, rules, some
from stepscope import ProfileConfig, capture, flush
from stepscope._recording.process import shutdown
from stepscope._recording.recorder import steps
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending, Expectation
from stepscope.files.steps import UncapturedStep, read_uncaptured
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import StepReport, step_report, to_scalars
from stepscope_report.cli.ls import rows_of
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import load_step


@pytest.fixture(autouse=True)
def _no_loops_of_other_tests() -> Iterator[None]:
    steps._loops.clear()
    yield
    steps._loops.clear()


def loop(config: ProfileConfig, steps: range) -> None:
    for step in steps:
        with capture(step, config=config):
            pass
    assert flush() == []


def kept(config: ProfileConfig) -> list[UncapturedStep]:
    steps.flush()
    assert flush() == []
    return written(config)


def written(config: ProfileConfig) -> list[UncapturedStep]:
    files = sorted(Path(config.save_path).glob("uncaptured/*.jsonl"))
    return [row for file in files for row in read_uncaptured(file)]


def test_a_run_that_captures_nothing_writes_nothing(tmp_path: Path) -> None:
    loop(ProfileConfig(save_path=str(tmp_path / "run"), steps=[1000], record="off"), range(100))
    assert not (tmp_path / "run").exists()


def test_only_steps_near_a_capture_are_kept(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[100, 300], record="off")
    loop(config, range(500))
    near = steps.KEPT
    expected = [*range(100 - near, 100), *range(101, 101 + near), *range(300 - near, 300)]
    expected += range(301, 301 + near)
    assert [row.step for row in kept(config)] == expected
    assert [row.step for row in kept(config) if row.first] == [101, 301]


def test_what_a_run_still_knows_at_its_end_is_written(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[2])
    loop(config, range(5))
    assert [row.step for row in written(config)] == [0, 1]
    shutdown.close_everything(Ending("exit", "the process exited"), 10)
    assert [row.step for row in written(config)] == [0, 1, 3, 4]


def test_a_process_that_is_killed_loses_few_of_those_behind_a_capture(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[2])
    loop(config, range(9))
    assert [row.step for row in written(config)] == [0, 1, 3, 4, 5, 6]


def test_a_step_that_overlaps_a_captured_one_does_not_count(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[2])
    before, captured, inside = (capture(step, config=config) for step in (1, 2, 3))
    before.open()
    captured.open()
    before.close()
    inside.open()
    captured.close()
    inside.close()
    loop(config, range(4, 5))
    assert [row.step for row in kept(config)] == [4]


def test_a_step_that_an_exception_cut_short_does_not_count(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[2])
    with pytest.raises(KeyError), capture(0, config=config):
        raise KeyError
    loop(config, range(1, 3))
    assert [row.step for row in kept(config)] == [1]


async def test_the_same_in_asynchronous_code(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[2])
    for step in range(4):
        async with capture(step, config=config):
            pass
    assert [row.step for row in kept(config)] == [0, 1, 3]


def test_of_ranks_that_capture_for_themselves_the_first_one_keeps_them(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[1])
    for rank in (0, 1):
        for step in (0, 1):
            with capture(step, config=config, role=f"actor{rank}", rank=rank):
                pass
    assert kept(ProfileConfig(save_path=str(tmp_path)))
    assert [path.name[:6] for path in tmp_path.glob("uncaptured/*")] == ["actor0"]


def test_a_line_that_was_cut_off_costs_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"step":1,"start_ns":5,"dur_ns":7}\n{"step":2,"sta')
    assert [row.step for row in read_uncaptured(tmp_path / "a.jsonl")] == [1]
    assert read_uncaptured(tmp_path / "missing.jsonl") == []


def beside(path: Path, *took_ms: int, step_ms: int = 130, error: str | None = None) -> StepReport:
    """Return a step of 130 ms, with uncaptured ones before it and one after it."""
    folder = StepFolder(path, step=50)
    driver = folder.process("trainer", owner=True)
    driver.span("update", 0, step_ms * MS)
    driver.close(step_ms * MS)
    if error is not None:
        driver.expected.append(
            Expectation(name="spans", kind="spans", state="partial", reason=error, truncated=error)
        )
    folder.write()
    file = RunLayout(path).uncaptured(driver.info, folder.run_id)
    file.parent.mkdir()
    for place, ms in enumerate(took_ms):
        last = place == len(took_ms) - 1
        start_ns = OPENED_NS + (1000 if last else 200 * (place - len(took_ms))) * MS
        step = 51 if last else 50 - len(took_ms) + 1 + place
        with file.open("ab") as out:
            out.write(b'{"step":%d,"start_ns":%d,"dur_ns":%d%s}\n'
                      % (step, start_ns, ms * MS, b',"first":true' if last else b""))  # fmt: skip
    return step_report(load_step(folder.layout.root))


def test_the_report_says_what_uncaptured_steps_took_and_what_the_capture_cost(tmp_path: Path) -> None:
    report = beside(tmp_path, 90, 100, 110, 100, 120, 300)
    steps = some(report.baseline)
    assert steps.steps == (45, 46, 47, 48, 49)
    assert (steps.min_ns, steps.p50_ns, steps.p90_ns, steps.max_ns) == (90 * MS, 100 * MS, 120 * MS, 120 * MS)
    assert (steps.longer, steps.excess_ns, steps.next_ns) == (0, 30 * MS, 300 * MS)
    assert steps.cost_ns == report.breakdown.total_ns - report.breakdown.window_ns
    text = printed(report, 200)
    assert re.search(r"\(45-49\) took 100 ms .* 120 ms; 90.0 .* 120 ", text)
    assert "+30.0 ms, +30.0 %" in text
    assert "after it took 300 " in text
    assert "not-typical" in {advice.rule for advice in report.advice}
    assert "45-49" in render_step(load_step(RunLayout(tmp_path).step(50).root), report)
    assert to_scalars(report)["uncaptured/p50_seconds"] == 0.1


@pytest.mark.parametrize(
    ("took_ms", "error", "said"),
    [
        ((90, 140, 110, 150, 120, 300), None, "3 of the 5"),  # as long as others
        ((100, 200), None, r"2 uncaptured steps .*\(49, 51\).*too few"),
        ((90, 100, 110, 100, 120, 300), "budget.seconds: 1 s", "Not compared: "),
    ],
    ids=["as long as others", "too few", "ended early"],
)
def test_a_step_that_is_not_longer_than_many_others_raises_no_alarm(
    tmp_path: Path, took_ms: tuple[int, ...], error: str | None, said: str
) -> None:
    report = beside(tmp_path, *took_ms, error=error)
    assert "not-typical" not in rules(report)
    assert re.search(said, printed(report, 200), re.DOTALL)
    if error is not None:
        assert some(report.baseline).excess_ns is None


def test_without_uncaptured_steps_the_report_says_how_to_have_some(folder: StepFolder) -> None:
    folder.process("trainer", owner=True).close(10 * MS)
    report = step_report(load_step(folder.write()))
    assert report.baseline is None
    assert "capture(step)" in printed(report, 200)


def test_a_real_run_is_compared(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[10], record="off")
    loop(config, range(20))
    report = step_report(load_step(RunLayout(tmp_path).step(10).root))
    # 0 warms up, 11 came first, the rest is not written yet
    assert some(report.baseline).steps == (*range(1, 10), 12, 13, 14)


def test_ls_shows_them_beside_the_captured_step(tmp_path: Path, command: Command) -> None:
    loop(ProfileConfig(save_path=str(tmp_path), steps=[3]), range(5))
    (row,) = command("ls", tmp_path, "--json").json
    assert row["uncaptured_ns"] > 0
    assert "uncaptured" in command("ls", tmp_path).out


def test_the_first_step_of_a_loop_warms_up_and_is_no_neighbour_to_compare_with(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[1])
    loop(config, range(2))
    assert [(row.step, row.warm_up) for row in kept(config)] == [(0, True)]
    step = RunLayout(tmp_path).step(1)
    assert step_report(load_step(step.root)).baseline is None
    assert [row.uncaptured_ns for row in rows_of(1, step)] == [None]


def test_a_step_after_a_first_one_that_was_captured_is_no_warm_up(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[0])
    loop(config, range(3))
    assert [(row.step, row.warm_up) for row in kept(config)] == [(1, False), (2, False)]


def test_a_long_step_among_long_ones_every_few_steps_is_usual(tmp_path: Path) -> None:
    """No recorder runs, so that lengths alone tell the kinds apart."""
    rows = [
        UncapturedStep(step=n, start_ns=OPENED_NS + 1000 * n * MS, dur_ns=(40 if n % 4 else 160) * MS)
        for n in range(36)
    ]
    for number, took_ms in ((20, 160), (22, 40)):
        folder = StepFolder(tmp_path / str(number), step=number, opened_ns=OPENED_NS + 1000 * number * MS)
        owner = folder.process("trainer", owner=True)
        owner.close(took_ms * MS)
        step = folder.write()
        file = RunLayout(tmp_path / str(number)).uncaptured(owner.info, "run1")
        file.parent.mkdir()
        near = [row for row in rows if row.step != number]
        file.write_bytes(b"\n".join(map(msgspec.json.encode, near)))
        report = step_report(load_step(step))
        assert report.baseline is not None
        assert report.baseline.alike
        assert {step % 4 == 0 for step in report.baseline.steps} == {number % 4 == 0}
        assert report.baseline.excess_ns == 0
        assert to_scalars(report)["uncaptured/p50_seconds"] == took_ms / 1000
