"""The times of a step against the caller's own clock, on slow storage and on a busy machine."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from packages.report.tests.steps import MS, some
from stepscope import ProfileConfig, capture, profile_step, span
from stepscope._recording.process import exports
from stepscope.errors import StepscopeError
from stepscope.files.layout import RunLayout
from stepscope_report import step_report
from stepscope_report.sections.breakdown import Breakdown, account_table, step_breakdown
from stepscope_report.timeline import load_step

pytestmark = pytest.mark.slow

BODY_S = 0.05
SLOW_S = 0.02
STEPS = range(5)
CROWD = 3
"""Number of other tasks in the loop of a crowded step."""
TURN_S = 0.005
"""Time that each of them holds the loop at a time."""


class Times(NamedTuple):
    """One step, in ns: by the caller's clock, or in the report."""

    opening: int
    body: int
    closing: int


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(tmp_path / "run"), steps=["every:1"], roles={"none": {"ranks": "all"}})


@pytest.fixture
def slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes its time to be created, and to be put in its place."""
    for name in ("replace", "open"):
        monkeypatch.setattr(os, name, _slowly(getattr(os, name)))


def _slowly(call: Callable[..., object]) -> Callable[..., object]:
    def slow(*args: object, **options: object) -> object:
        time.sleep(SLOW_S)
        return call(*args, **options)

    return slow


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """More processes that compute than there are processors."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    yield
    for process in busy:
        process.kill()
        process.wait()


class Trainer:
    def __init__(self) -> None:
        self.updated_ns = 0

    @profile_step(role="actor")
    def update(self) -> None:
        began_ns = time.perf_counter_ns()
        time.sleep(BODY_S)
        self.updated_ns = time.perf_counter_ns() - began_ns


def reported(config: ProfileConfig, step: int) -> Times:
    exports.exporter().drain(30)
    account = account_of(config, step)
    return Times(account.opening_ns, account.window_ns, account.closing_ns)


def account_of(config: ProfileConfig, step: int) -> Breakdown:
    return step_breakdown(load_step(RunLayout(config.save_path).step(step).root))


def one_step(
    config: ProfileConfig, step: int, body: Callable[[], object] = lambda: time.sleep(BODY_S), **options: Any
) -> Times:
    at = [time.perf_counter_ns()]
    with capture(step, config=config, **options):
        at.append(time.perf_counter_ns())
        body()
        at.append(time.perf_counter_ns())
    at.append(time.perf_counter_ns())
    return _between(at)


async def one_async_step(
    config: ProfileConfig,
    step: int,
    body: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(BODY_S),
    **options: Any,
) -> Times:
    at = [time.perf_counter_ns()]
    async with capture(step, config=config, **options):
        at.append(time.perf_counter_ns())
        await body()
        at.append(time.perf_counter_ns())
    at.append(time.perf_counter_ns())
    return _between(at)


async def _hog() -> None:
    """Hold the loop for `TURN_S` in each of its turns."""
    while True:
        until = time.perf_counter() + TURN_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


def _between(at: list[int]) -> Times:
    return Times(at[1] - at[0], at[2] - at[1], at[3] - at[2])


def assert_same(config: ProfileConfig, measured: list[Times], *, crowd: bool = False) -> None:
    """Within 1 ms, in two steps at least: on a busy machine the two clocks are not read at one moment.

    Args:
        crowd: True if each other task of the loop may have a turn between the end of the closing and the
            caller's look at its clock.
    """
    told = [reported(config, step) for step in STEPS]
    for name in Times._fields:
        off = [abs(getattr(a, name) - getattr(b, name)) for a, b in zip(measured, told, strict=True)]
        turns_ns = CROWD * TURN_S * 1e9 if crowd and name == "closing" else 0
        assert sorted(off)[1] < MS + turns_ns, (name, measured, told)


def test_opening_body_and_closing_are_what_the_callers_clock_says(config: ProfileConfig) -> None:
    assert_same(config, [one_step(config, step) for step in STEPS])


@pytest.mark.usefixtures("slow_storage")
def test_slow_storage_is_no_part_of_the_step(config: ProfileConfig) -> None:
    measured = [one_step(config, step) for step in STEPS]
    assert measured[-1].closing > SLOW_S * 1e9
    assert_same(config, measured)


@pytest.mark.usefixtures("busy_machine")
def test_the_times_hold_on_a_busy_machine(config: ProfileConfig) -> None:
    assert_same(config, [one_step(config, step) for step in STEPS])


@pytest.mark.usefixtures("slow_storage")
def test_the_times_hold_in_asynchronous_code_on_slow_storage(config: ProfileConfig) -> None:
    async def steps() -> list[Times]:
        return [await one_async_step(config, step) for step in STEPS]

    assert_same(config, asyncio.run(steps()))


def test_other_tasks_of_the_loop_do_not_move_the_end_of_the_step(config: ProfileConfig) -> None:
    async def in_a_crowd(step: int) -> Times:
        others = [asyncio.ensure_future(_hog()) for _ in range(CROWD)]
        times = await one_async_step(config, step)
        for other in others:
            other.cancel()
        return times

    async def steps() -> list[Times]:
        return [await in_a_crowd(step) for step in STEPS]

    assert_same(config, asyncio.run(steps()), crowd=True)


@pytest.mark.usefixtures("slow_storage")
def test_a_step_of_spans_has_no_time_of_the_profiler_in_them(config: ProfileConfig) -> None:
    for step in STEPS:
        with capture(step, config=config), span("work"):
            time.sleep(BODY_S)
    exports.exporter().drain(30)
    idle_ns = [
        line.wall_ns
        for step in STEPS
        for line in account_of(config, step).lines
        if line.kind == "unaccounted"
    ]
    assert statistics.median(idle_ns) < MS


def test_a_capture_whose_body_raises_has_its_times_too(config: ProfileConfig) -> None:
    with pytest.raises(StepscopeError), capture(0, config=config):
        time.sleep(BODY_S)
        raise StepscopeError("no")
    assert reported(config, 0).closing > 0


@pytest.fixture
def workers(ray_cluster: None) -> Iterator[list[Any]]:
    """Two actors of Ray, warm."""
    ray = pytest.importorskip("ray")
    made = [ray.remote(Trainer).remote() for _ in range(2)]
    ray.get([worker.update.remote() for worker in made])
    yield made
    for worker in made:
        ray.kill(worker)


@pytest.mark.usefixtures("slow_storage")
def test_the_wait_for_ray_workers_is_opening_and_closing(config: ProfileConfig, workers: list[Any]) -> None:
    def update() -> None:
        pytest.importorskip("ray").get([worker.update.remote() for worker in workers])

    assert_same(config, [one_step(config, step, update, workers=workers) for step in STEPS])


def test_windows_of_stages_are_in_the_step_and_not_in_its_opening(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = ProfileConfig(
        save_path=str(tmp_path), steps=["every:1"], mode="discrete", torch={"activities": ["cpu"]}
    )
    trainer, measured, updated_ns = Trainer(), [], []
    for step in STEPS:
        measured.append(one_step(config, step, trainer.update))
        updated_ns.append(trainer.updated_ns)
    assert_same(config, measured)
    off: dict[str, list[int]] = defaultdict(list)
    for step in STEPS:
        cost = some(load_step(RunLayout(tmp_path).step(step).root).processes[0].cost)
        wall_ns = {line.stage or line.kind: line.wall_ns for line in account_of(config, step).lines}
        off["profiler"].append(wall_ns["profiler"] - cost.inside_ns)
        off["update"].append(wall_ns["update"] - updated_ns[step])
        off["unaccounted"].append(wall_ns["unaccounted"])
    assert all(abs(statistics.median(values)) < MS for values in off.values()), off


@pytest.mark.usefixtures("slow_storage")
def test_the_times_hold_in_asynchronous_code_with_ray_workers(
    config: ProfileConfig, workers: list[Any]
) -> None:
    async def update() -> None:
        await asyncio.gather(*(worker.update.remote() for worker in workers))

    async def steps() -> list[Times]:
        return [await one_async_step(config, step, update, workers=workers) for step in STEPS]

    assert_same(config, asyncio.run(steps()))


PROGRAM = """
import os, sys, time
from stepscope import ProfileConfig, capture
replace = os.replace
def slowly(*paths, **options):
    time.sleep(0.05)
    replace(*paths, **options)
os.replace = slowly
config = ProfileConfig(save_path=sys.argv[1], steps=[0], roles={"none": {"ranks": "all"}})
with capture(0, config=config):
    began = time.perf_counter_ns()
print(time.perf_counter_ns() - began)
"""


def test_a_program_that_ends_after_its_step_records_all_of_the_closing(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, check=True, text=True
    )
    account = step_breakdown(load_step(RunLayout(tmp_path).step(0).root))
    assert account.closing_ns == pytest.approx(int(ran.stdout), abs=5 * MS)


def test_the_time_between_steps_is_that_of_the_loops_own_clock(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path / "run", steps="4", roles={"*": {"profiler": "off"}})
    around, inside = dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()
    for step in range(8):
        time.sleep(0.05 if step != 4 else 0.12)
        began = time.perf_counter()
        with capture(step, config=config), span("train"):
            entered = time.perf_counter()
            time.sleep(0.1)
            left = time.perf_counter()
        around[step], inside[step] = (began, time.perf_counter()), (entered, left)

    def gaps(clock: dict[int, tuple[float, float]], *steps: int) -> float:
        return 1e9 * median(clock[step + 1][0] - clock[step][1] for step in steps)

    report = step_report(load_step(RunLayout(tmp_path / "run").step(4).root))
    baseline = some(report.baseline)
    assert baseline.between_ns is not None
    assert baseline.before_ns is not None
    assert gaps(around, 1, 2, 5, 6) - MS <= baseline.between_ns <= gaps(inside, 1, 2, 5, 6) + MS
    assert gaps(around, 3) - MS <= baseline.before_ns <= gaps(inside, 3) + MS
    (advice,) = [one for one in report.advice if one.rule == "between-steps"]
    assert advice.saves_ns == baseline.between_ns
    assert " % of the" in advice.because[0]
    assert ("", "+ between steps") in [row[:2] for row in account_table(report.breakdown, 1).rows]
