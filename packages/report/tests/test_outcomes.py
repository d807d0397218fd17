"""Spans that end on purpose, and tools that run in the threads of executors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture, profile_step, span, trajectory, turn
from stepscope.files.layout import RunLayout
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.sections.long_tail import tail_sentences
from stepscope_report.timeline import Span, Timeline, load_step, merge_step

MS = 1_000_000


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(tmp_path), steps=[1], roles={"*": {"profiler": "off"}})


def loaded(config: ProfileConfig) -> Timeline:
    return load_step(RunLayout(config.save_path).step(1).root)


def outcomes(config: ProfileConfig) -> dict[str, tuple[str | None, bool]]:
    return {span.stage: (span.error, span.cancelled) for span in loaded(config).spans}


def test_a_generator_that_is_left_early_is_no_error(config: ProfileConfig) -> None:
    def stream() -> Iterator[int]:
        with span("stream"):
            yield from range(100)

    async def astream() -> AsyncIterator[int]:
        with span("astream"):
            for number in range(100):
                yield number

    @profile_step(role="rollout")
    async def decorated() -> AsyncIterator[int]:
        with span("inner"):
            for number in range(100):
                yield number

    async def main() -> None:
        async with capture(1, config=config):
            for _ in stream():
                break
            for generator in (astream(), decorated()):
                async for _ in generator:
                    break
                await generator.aclose()  # type: ignore[attr-defined]  # of an async generator

    asyncio.run(main())
    assert outcomes(config) == dict.fromkeys(("stream", "astream", "inner", "decorated"), (None, False))


def test_the_end_of_an_iterator_is_no_error(config: ProfileConfig) -> None:
    with capture(1, config=config), pytest.raises(StopIteration), span("next batch"):
        next(iter(()))
    assert outcomes(config) == {"next batch": (None, False)}


@pytest.mark.parametrize("kind", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_cancellation_is_an_outcome_of_its_own(config: ProfileConfig, kind: type[BaseException]) -> None:
    with capture(1, config=config):
        with pytest.raises(kind), trajectory("t1"):
            raise kind
        with pytest.raises(ValueError, match="bad"), span("tool"):
            raise ValueError("bad")
    assert outcomes(config) == {"trajectory": (None, True), "tool": ("ValueError: bad", False)}
    report = step_report(loaded(config))
    assert {stage.stage: (stage.calls, stage.errors, stage.cancelled) for stage in report.stages} == {
        "trajectory": (1, 0, 1), "tool": (1, 1, 0),
    }  # fmt: skip
    assert [row.stage for row in report.health.errors] == ["tool"]
    folder = RunLayout(config.save_path).step(1).root
    merge_step(folder)
    events = json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event.get("args", {}).get("cancelled")] == ["trajectory"]


def of_trajectories(report: StepReport) -> str:
    assert report.long_tail is not None
    return " ".join(tail_sentences(report.long_tail))


def test_cancelled_trajectories_are_no_part_of_the_long_tail(tmp_path: Path) -> None:
    """Nine end at 100 ms. One is cancelled at 900 ms, when the trainer has enough."""
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    for number in range(9):
        driver.span("trajectory", 0, 100 * MS, role="agent_loop", trajectory=f"t{number}")
    driver.span("trajectory", 0, 900 * MS, role="agent_loop", trajectory="slow", cancelled=True)
    driver.close(1000 * MS)
    report = step_report(load_step(folder.write()))
    tail = report.long_tail
    assert tail is not None
    assert (tail.trajectories, tail.cancelled, tail.of_other_steps) == (9, 1, 0)
    assert (tail.held_ns, tail.rollout_ns, tail.cancelled_after_ns) == (0, 100 * MS, 800 * MS)
    assert max(spread.max.ns for spread in tail.spreads) == 100 * MS
    assert "1 cancelled, the last 800 " in of_trajectories(report)
    assert "long-tail" not in [advice.rule for advice in report.advice]


def tools_of(config: ProfileConfig, submit: Callable[[Callable[[], int]], object]) -> list[Span]:
    """Return the spans of the tool that six trajectories call through `submit`."""

    def tool() -> int:
        with span("tool", role="env"):
            return threading.get_ident()

    async def rollout(number: int) -> None:
        with trajectory(f"t{number}"), turn(0):
            result = submit(tool)
            if asyncio.isfuture(result):
                await result

    async def main() -> None:
        async with capture(1, config=config):
            await asyncio.gather(*map(rollout, range(6)))

    asyncio.run(main())
    return [span for span in loaded(config).spans if span.stage == "tool"]


def test_a_tool_in_an_executor_stays_in_its_trajectory(config: ProfileConfig) -> None:
    with ThreadPoolExecutor(4) as pool:
        tools = tools_of(config, lambda tool: asyncio.get_running_loop().run_in_executor(pool, tool))
        left = [pool.submit(lambda: len(loaded(config).spans)).result()]  # its threads are in no place
    assert {(tool.trajectory, tool.turn) for tool in tools} == {(f"t{number}", 0) for number in range(6)}
    assert {loaded(config).spans[tool.parent].stage for tool in tools if tool.parent is not None} == {"turn"}
    assert left == [18]
    assert "In no trajectory" not in of_trajectories(step_report(loaded(config)))


def test_a_tool_that_leaves_its_trajectory_has_a_name(config: ProfileConfig) -> None:
    def in_a_thread(tool: Callable[[], int]) -> None:
        thread = threading.Thread(target=tool)
        thread.start()
        thread.join()

    tools = tools_of(config, in_a_thread)
    if all(tool.trajectory for tool in tools):
        pytest.skip("threads inherit the context from Python 3.14 on, where that is switched on")
    report = step_report(loaded(config))
    assert re.search("6 calls .*env tool, .* 6 ", of_trajectories(report))


async def _returned(pool: ProcessPoolExecutor) -> str:
    with trajectory("t"):
        return await asyncio.get_running_loop().run_in_executor(pool, str, 5)


def test_an_executor_of_processes_gets_what_can_be_pickled(config: ProfileConfig) -> None:
    async def main() -> None:
        with ProcessPoolExecutor(1) as pool:
            async with capture(1, config=config):
                assert await _returned(pool) == "5"

    asyncio.run(main())
