"""Asynchronous RL, recorded: a trajectory begins under one captured step and is consumed by another.

This file has more than 500 lines, because all its tests record the same kind of asynchronous run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.steps import MS, close, printed, some, timeline_of
from stepscope import ProfileConfig, attach, capture, carrier, consume, profile_step, span, trajectory, turn
from stepscope.files.layout import RunLayout
from stepscope.testing.steps import StepFolder
from stepscope_report import Lag, StepReport, step_report, to_scalars
from stepscope_report.html.step_page import render_step
from stepscope_report.sections.long_tail import tail_sentences
from stepscope_report.timeline import Span, Timeline, load_step, merge_step


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """t7 begins while step 5 is captured, under weights 4, and ends in step 7, under weights 6."""
    save_path = tmp_path_factory.mktemp("run")
    config = ProfileConfig(
        save_path=str(save_path), steps=[5, 7], roles={"rollout": {"ranks": "all", "profiler": "off"}}
    )
    with capture(5, config=config):
        with trajectory("t5", policy_version=4), turn(0):
            pass
        with trajectory("t7", step=7, policy_version=4):
            with turn(0):
                pass
            begun = carrier()
        with span("update", role="trainer", policy_version=5):
            pass
    with capture(7, config=config):
        with attach(begun), span("resumed", role="agent_loop", policy_version=6), turn(1):
            pass
        with span("update", role="trainer", policy_version=7):
            pass
    return RunLayout(save_path)


def spans(timeline: Timeline) -> dict[tuple[str, str | None, int | None], Span]:
    return {(span.stage, span.trajectory, span.turn): span for span in timeline.spans}


def drawn(layout: RunLayout, step: int) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Return the arguments of each span in the merged timeline, and those of each mark."""
    path = layout.step(step).root
    merge_step(path)
    events = timeline_of(path)["traceEvents"]
    args = {(one["name"], one["args"].get("trajectory")): one["args"] for one in events if one["ph"] == "X"}
    return args | {(one["name"], None): one.get("args", {}) for one in events if one["ph"] == "i"}


def test_a_call_hangs_below_the_call_whose_carrier_is_from_before_the_capture(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[7])

    async def call_tool(sent: asyncio.Future[Any], answered: asyncio.Event) -> None:
        with trajectory("t7", step=7), span("tool_call", role="env"):
            sent.set_result(carrier())
            await answered.wait()

    async def loop() -> None:
        sent, answered = asyncio.Future[Any](), asyncio.Event()
        with capture(6, config=config):
            with span("before"):  # so that both logs number the call differently
                pass
            task = asyncio.create_task(call_tool(sent, answered))
            begun = await sent
        with capture(7, config=config):
            with attach(begun), span("search", role="env"):
                pass
            answered.set()
            await task

    asyncio.run(loop())
    calls = load_step(RunLayout(tmp_path).step(7).root).spans
    (search,) = (one for one in calls if one.stage == "search")
    assert search.parent is not None
    assert calls[search.parent].stage == "tool_call"


def report(layout: RunLayout, step: int) -> StepReport:
    return step_report(load_step(layout.step(step).root))


def test_each_capture_knows_whose_its_work_is_and_under_which_weights(recorded: RunLayout) -> None:
    five, seven = (spans(load_step(recorded.step(step).root)) for step in (5, 7))
    assert {(key, span.step, span.policy_version) for key, span in five.items()} == {
        (("trajectory", "t5", None), 5, 4),
        (("turn", "t5", 0), 5, 4),
        (("trajectory", "t7", None), 7, 4),
        (("turn", "t7", 0), 7, 4),
        (("update", None, None), 5, 5),
    }
    resumed = seven["resumed", "t7", None]
    assert (resumed.step, resumed.begun_step, resumed.policy_version) == (7, 5, 6)
    assert seven["turn", "t7", 1].policy_version == 6
    assert seven["update", None, None].begun_step is None


def test_the_timeline_labels_what_belongs_to_another_step(recorded: RunLayout) -> None:
    five, seven = drawn(recorded, 5), drawn(recorded, 7)
    assert five["trajectory", "t7"]["step"] == 7
    assert "step" not in five["trajectory", "t5"]
    assert seven["resumed", "t7"]["begun_step"] == 5
    assert "step" not in seven["resumed", "t7"]


def test_the_report_counts_it_where_it_ran_and_names_whose_it_is(recorded: RunLayout) -> None:
    five, seven = report(recorded, 5), report(recorded, 7)
    assert [(other.step, other.spans, other.policy_versions) for other in five.health.other_steps] == [
        (7, 2, (4,))
    ]
    tail = some(five.long_tail)
    assert (tail.trajectories, tail.of_other_steps) == (1, 1)
    assert seven.health.other_steps == ()
    for outcome in (five, seven):
        assert sum(line.wall_ns for line in outcome.breakdown.lines) == outcome.breakdown.window_ns


def under(layout: RunLayout, step: int) -> str:
    return printed(report(layout, step), 120)


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Step 7 trains, under weights 6, on what began under steps 5 (captured) and 3, and one of its own."""
    save_path = tmp_path_factory.mktemp("stale")
    config = ProfileConfig(save_path=str(save_path), steps=[5, 7], roles={"*": {"ranks": "all"}})
    with capture(5, config=config), trajectory("t5", policy_version=4), turn(0):
        pass
    with capture(6, config=config), trajectory("half", policy_version=5):
        begun = carrier()
    with capture(7, config=config):
        with trajectory("t7", policy_version=6), turn(0):
            pass
        with trajectory("t8", step=8, policy_version=6):
            pass
        with attach(begun), span("resumed", role="agent_loop", policy_version=6), turn(1):
            pass
        with span("update", role="trainer", policy_version=6):
            consume("t5", begun=5, policy_version=4)
            consume("old", begun=3, policy_version=2)
            consume("half", begun=6, policy_version=5)
            consume("t7", begun=7, policy_version=6)
            consume("unknown")
    return RunLayout(save_path)


def test_how_stale_each_trajectory_is_that_the_step_consumes(stale: RunLayout) -> None:
    staleness = some(report(stale, 7).staleness)
    assert (staleness.trajectories, staleness.policy_version, staleness.mixed) == (5, 6, 1)
    assert staleness.steps == Lag(known=4, p50=1, p90=4, max=4)
    assert staleness.versions == Lag(known=4, p50=1, p90=4, max=4)
    assert [(row.trajectory, row.begun_step, row.policy_versions) for row in staleness.worst] == [
        ("old", 3, (2,)), ("t5", 5, (4,)), ("half", 6, (5, 6)),
    ]  # fmt: skip


def test_staleness_is_in_the_tables_the_page_and_the_scalars(stale: RunLayout) -> None:
    path = stale.step(7).root
    timeline = load_step(path)
    text, page = under(stale, 7), render_step(timeline, step_report(timeline))
    for output in (text, page):
        assert re.search("5 trajectories .* policy version 6; 1 ", output)
        assert "Stalest trajectories" in output
    values = to_scalars(step_report(timeline))
    assert {name: value for name, value in values.items() if name.startswith("staleness/")} == {
        "staleness/steps_p50": 1, "staleness/steps_max": 4,
        "staleness/versions_p50": 1, "staleness/versions_max": 4,
    }  # fmt: skip


def test_consuming_takes_no_time_and_is_no_stage(stale: RunLayout) -> None:
    result = report(stale, 7)
    assert "consume" not in {stage.stage for stage in result.stages}
    assert "consume" not in {line.stage for line in result.breakdown.lines}
    assert result.long_tail is not None
    assert result.long_tail.consumed == 5
    assert (result.long_tail.trajectories, result.long_tail.of_other_steps, result.long_tail.under_way) == (
        1, 1, 1,
    )  # fmt: skip


def test_a_slow_trajectory_says_which_step_it_is_for(stale: RunLayout) -> None:
    tail = some(report(stale, 7).long_tail)
    assert {(row.trajectory, row.consumed_by, row.policy_version) for row in tail.worst} == {
        ("t7", None, 6), ("t8", 8, 6),
    }  # fmt: skip
    assert "t8, for step 8" in under(stale, 7)


def test_the_timeline_marks_what_is_consumed(stale: RunLayout) -> None:
    mark = drawn(stale, 7)["consume old", None]
    marked = {name: mark[name] for name in ("begun", "begun_version", "policy_version", "trajectory")}
    assert marked == {"begun": 3, "begun_version": 2, "policy_version": 6, "trajectory": "old"}


def test_where_nothing_calls_consume_the_steps_own_spans_say_it(recorded: RunLayout) -> None:
    five, seven = (some(report(recorded, step).staleness) for step in (5, 7))
    assert five.steps == Lag(known=1, p50=0, p90=0, max=0)
    assert five.versions == Lag(known=1, p50=1, p90=1, max=1)
    assert [(row.trajectory, row.begun_step, row.steps) for row in seven.worst] == [("t7", 5, 2)]


def test_without_a_capture_consuming_does_nothing() -> None:
    consume("t1", begun=1, policy_version=2)


def test_the_very_first_step_is_captured_with_what_was_under_way(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[0])
    with trajectory("early", policy_version=0), turn(0):
        cap = capture(0, config=config).open()
        with span("generate", role="rollout"):
            pass
    with trajectory("late", policy_version=0):
        pass
    cap.close()
    cap.result.wait()
    result = report(RunLayout(tmp_path), 0)
    assert {(s.trajectory, s.turn) for s in load_step(RunLayout(tmp_path).step(0).root).spans} == {
        ("early", 0), ("late", None),
    }  # fmt: skip
    assert result.long_tail is not None
    assert (result.long_tail.trajectories, result.long_tail.under_way) == (1, 1)
    assert "1 begun before" in under(RunLayout(tmp_path), 0)


def test_a_capture_that_runs_into_the_next_step_keeps_the_two_apart(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[5])
    cap = capture(5, config=config).open()
    with span("update", role="trainer"):
        pass
    with capture(6, config=config), span("update", role="trainer", step=6, policy_version=6):
        pass
    cap.close()
    cap.result.wait()
    result = report(RunLayout(tmp_path), 5)
    assert [(other.step, other.spans) for other in result.health.other_steps] == [(6, 1)]
    assert result.health.complete


def with_stragglers(root: Path, *, named: Sequence[str] = (), dropped: int = 0) -> Timeline:
    """Return a step that takes 27 trajectories at 300 ms, and trains to 1200 ms. Three go on beside it.

    Args:
        named: The names that it consumes. Empty: the 27.
        dropped: The number of records that the trainer lost.
    """
    folder = StepFolder(root)
    driver, replica = folder.process("trainer", owner=True), folder.process("rollout", 0)
    names = [f"t{number}" for number in range(27)]
    for name, end_ns in [*((name, 300 * MS) for name in names), *((f"slow{at}", None) for at in range(3))]:
        above = driver.span("trajectory", 0, end_ns, role="agent_loop", trajectory=name)
        replica.span("generate", 0, end_ns, trajectory=name, link=driver.link(above))
    driver.span("wait_for_samples", 0, 300 * MS, attrs={"wait": True})
    update = driver.span("update_actor", 300 * MS, 1200 * MS, policy_version=2)
    for name in named or names:
        driver.span("consume", 300 * MS, 300 * MS, parent=update, trajectory=name, attrs={"begun": 2})
    driver.dropped = dropped
    close(folder, 1200 * MS)
    return load_step(folder.write())


def time_ms(report: StepReport) -> dict[str | None, int]:
    return {line.stage: line.wall_ns // MS for line in report.breakdown.lines if line.wall_ns}


def test_a_step_does_not_wait_for_what_it_does_not_consume(tmp_path: Path) -> None:
    timeline = with_stragglers(tmp_path, named=[*(f"t{number}" for number in range(27)), "ended before"])
    result = step_report(timeline)
    assert time_ms(result) == {"generate": 300, "update_actor": 900}
    assert [advice.rule for advice in result.advice] == []
    tail = some(result.long_tail)
    assert (tail.trajectories, tail.open, tail.of_other_steps, tail.consumed_before) == (27, 0, 3, 1)
    assert "3 not consumed by this step, 1 consumed without" in " ".join(tail_sentences(tail))
    assert (tail.held_ns, tail.rollout_ns) == (0, 300 * MS)
    assert max(spread.max.ns for spread in tail.spreads) == 300 * MS
    assert [row.consumed for row in tail.worst] == [True] * 10
    trainer, replica = result.idle
    assert (trainer.busy_ns, replica.idle_ns) == (900 * MS, 0)
    assert result.health.open_spans == ()
    values = to_scalars(result)
    assert (values["long_tail/held_seconds"], values["stage/trainer/update_actor_seconds"]) == (0, 0.9)


@pytest.mark.parametrize(
    ("named", "dropped"), [(["another id"], 0), ([f"t{number}" for number in range(27)], 1)]
)
def test_marks_that_do_not_tell_all_decide_nothing(tmp_path: Path, named: list[str], dropped: int) -> None:
    tail = some(step_report(with_stragglers(tmp_path, named=named, dropped=dropped)).long_tail)
    assert (tail.open, tail.of_other_steps) == (3, 0)


def test_marks_decide_over_the_step_that_a_trajectory_was_begun_for(tmp_path: Path) -> None:
    """The step consumes a trajectory that was begun for the next one, and leaves one of its own."""
    with capture(5, config=ProfileConfig(save_path=str(tmp_path), steps=[5])):
        with trajectory("early", step=6), turn(0):
            pass
        with trajectory("late"), turn(0):
            pass
        consume("early")
    timeline = load_step(RunLayout(tmp_path).step(5).root)
    assert {name for (_, name, _), span in spans(timeline).items() if timeline.consumes(span)} == {"early"}
    assert {name for (_, name, _), span in spans(timeline).items() if timeline.leaves(span)} == {"late"}
    tail = some(step_report(timeline).long_tail)
    assert [(row.trajectory, row.consumed, row.consumed_by) for row in tail.worst] == [
        ("early", True, None), ("late", False, None),
    ]  # fmt: skip
    assert "late, not consumed" in under(RunLayout(tmp_path), 5)


# Spans that end on purpose, and tools that run in the threads of executors.


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
    events = drawn(RunLayout(config.save_path), 1)
    assert [name for (name, _), args in events.items() if args.get("cancelled")] == ["trajectory"]


def of_trajectories(report: StepReport) -> str:
    return " ".join(tail_sentences(some(report.long_tail)))


def test_cancelled_trajectories_are_no_part_of_the_long_tail(folder: StepFolder) -> None:
    """Nine end at 100 ms. One is cancelled at 900 ms, when the trainer has enough."""
    driver = folder.process("trainer", owner=True)
    for number in range(9):
        driver.span("trajectory", 0, 100 * MS, role="agent_loop", trajectory=f"t{number}")
    driver.span("trajectory", 0, 900 * MS, role="agent_loop", trajectory="slow", cancelled=True)
    driver.close(1000 * MS)
    report = step_report(load_step(folder.write()))
    tail = some(report.long_tail)
    assert (tail.trajectories, tail.cancelled, tail.of_other_steps) == (9, 1, 0)
    assert (tail.held_ns, tail.rollout_ns, tail.cancelled_after_ns) == (0, 100 * MS, 800 * MS)
    assert max(spread.max.ns for spread in tail.spreads) == 100 * MS
    assert "1 cancelled (the last one 800 " in of_trajectories(report)
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


def test_where_nothing_is_stale_nothing_is_said(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=str(tmp_path), steps=[0])
    with capture(0, config=config):
        with trajectory("a", policy_version=1), turn(0):
            pass
        with span("update", role="trainer", policy_version=1):
            pass
    assert report(RunLayout(tmp_path), 0).staleness is None


def test_a_planned_timeout_is_a_cancellation(config: ProfileConfig) -> None:
    async def main() -> None:
        async with capture(1, config=config):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(hangs(), 0)

    async def hangs() -> None:
        with span("hangs"):
            await asyncio.Event().wait()

    asyncio.run(main())
    assert set(outcomes(config).values()) <= {(None, True)}  # Python 3.12 starts nothing that has no time


def test_an_exception_in_an_executor_reaches_its_caller(config: ProfileConfig) -> None:
    def fails() -> None:
        raise KeyError("tool")

    async def main() -> None:
        async with capture(1, config=config):
            with trajectory("t"), pytest.raises(KeyError, match="tool"):
                await asyncio.get_running_loop().run_in_executor(None, fails)

    asyncio.run(main())
