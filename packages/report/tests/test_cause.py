"""The cause of a slow step is the culprit that was planted, in time, place and name, and not who waits.

One file above 500 lines, because all kinds are told from steps that the same few functions make.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.commands import Command
from packages.report.tests.steps import MS, Row, a_step, close, printed, reported, rules, some
from packages.report.tests.test_critical_path import span, step
from packages.report.tests.traces import add_trace, event
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Absent, Hardware
from stepscope.files.spans import SpanLink
from stepscope.files.steps import StepLine
from stepscope.files.values import AttrValue
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.brief import brief_text, step_brief
from stepscope_report.html.step_page import render_step
from stepscope_report.near import Neighbours
from stepscope_report.sections.baseline import say_beside
from stepscope_report.sections.cause import Cause, _say
from stepscope_report.suspects import CauseKind, Suspect, step_path, suspects_of
from stepscope_report.timeline import load_step


def test_the_docs_list_each_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    listed = page.partition("## The cause")[2].partition("\n## ")[0]
    items = listed[listed.index("\n* ") :]
    words = set(re.findall("`([a-z-]+)`", items)) - {"await", "tokens", "gc.freeze()"}
    assert words == set(get_args(CauseKind))


def cause_of(folder: StepFolder) -> Cause:
    return some(reported(folder).cause)


def told(cause: Cause | None) -> tuple[Any, ...] | None:
    """Return the kind, process, stage and ms of a cause."""
    if cause is None:
        return None
    process = None if cause.process is None else cause.process.name
    return cause.kind, process, cause.stage, None if cause.ns is None else cause.ns / MS


def percent(process: FakeProcess, name: str, values: dict[int, float], **more: Any) -> None:
    """Sample a counter. `values` are by the ms after the opening."""
    by_ns = {ms * MS: value for ms, value in values.items()}
    process.counter(name, by_ns, unit="%", kind="interval", **more)


def from_0(value: float, times_ms: Iterable[int]) -> dict[int, float]:
    return {0: 0.0, **dict.fromkeys(times_ms, value)}


def ranks(
    root: Path,
    number: int,
    work_ms: Callable[[int], int],
    *,
    attrs: dict[str, AttrValue] | None = None,
    thread: int | None = None,
) -> StepFolder:
    """Ranks that each capture the step for themselves: they work in `forward`, and meet in `all_reduce`."""
    folder = StepFolder(root)
    trainers = [folder.process("trainer", rank, owner=True, host="a") for rank in range(number)]
    at_ms = 5
    for _ in range(3):
        met_ms = at_ms + max(map(work_ms, range(number))) + 2
        for rank, trainer in enumerate(trainers):
            trainer.span("forward", at_ms * MS, (at_ms + work_ms(rank)) * MS, thread=thread)
            trainer.span("all_reduce", (at_ms + work_ms(rank)) * MS, met_ms * MS, attrs=attrs)
        at_ms = met_ms + 1
    close(folder, (at_ms + 5) * MS)
    return folder


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("attrs", [None, {"wait": True}])
def test_a_rank_for_which_others_wait_in_a_collective_is_named_with_its_stage(
    tmp_path: Path, number: int, late: int, attrs: dict[str, AttrValue] | None
) -> None:
    """The ranks that wait are longer in `all_reduce`, by as much: 3 x 180 ms."""
    cause = cause_of(ranks(tmp_path, number, lambda rank: 280 if rank == late else 100, attrs=attrs))
    assert told(cause) == ("late-rank", f"trainer {late}", "forward", 540)
    assert (cause.role, some(cause.process).host) == ("trainer", "a")
    assert (cause.took_ns, cause.usual_ns) == (840 * MS, 300 * MS)


def test_a_late_rank_found_beside_other_steps_is_told_by_its_stage(tmp_path: Path) -> None:
    timeline = load_step(ranks(tmp_path, 2, lambda rank: 280 if rank else 100).write())
    late = Suspect(
        "late-rank", 540 * MS, 540 * MS, ("trainer", "forward"), 1, 840 * MS, 300 * MS, "in the steps before"
    )
    assert _say(timeline, late).startswith("trainer forward took 840 ms")


def test_no_advice_and_no_line_of_a_brief_names_a_rank_that_waits(tmp_path: Path) -> None:
    report = reported(ranks(tmp_path, 2, lambda rank: 280 if rank else 100))
    (advice,) = (advice for advice in report.advice if advice.rule == "straggler")
    assert re.search("^trainer 1 .* forward$", advice.what)
    assert advice.saves_ns == some(report.cause).ns == 540 * MS
    brief = brief_text(step_brief(report))
    assert "trainer 1 is slower" in brief
    assert not [line for line in brief.splitlines() if "trainer 0 busy" in line or "trainer 0 is" in line]


def late_in_no_call(root: Path) -> StepFolder:
    folder = StepFolder(root)
    for rank in range(2):
        trainer = folder.process("trainer", rank, owner=True)
        trainer.span("forward", 10 * MS, 110 * MS)
        trainer.span("all_reduce", (630 if rank else 110) * MS, 640 * MS)
    close(folder, 650 * MS)
    return folder


def test_a_rank_that_was_late_without_a_core_is_told_once(tmp_path: Path) -> None:
    folder = late_in_no_call(tmp_path)
    waits = {ms: 90.0 if 100 < ms < 640 else 0.0 for ms in range(0, 660, 10)}
    percent(folder.processes[1], "main thread waits for a core", waits)
    cause = cause_of(folder)
    assert told(cause) == ("slow-host", "trainer 1", None, 520)
    assert re.search(r"trainer 1 began .* 520 ms .*no free core", cause.sentence)
    assert cause.sentence.count("no free core") == 1


def test_a_rank_that_is_late_in_no_call_began_late(tmp_path: Path) -> None:
    cause = cause_of(late_in_no_call(tmp_path))
    assert told(cause) == ("late-rank", "trainer 1", None, 520)
    assert re.search("trainer 1 .* 520 ms .* trainer 0", cause.sentence)


def test_a_rank_that_is_late_for_a_call_with_a_collective_inside_is_named(tmp_path: Path) -> None:
    """Before `backward`, the second rank of step 5 is in no span for 500 ms longer than in step 4."""

    def step(number: int, late_ms: int) -> StepFolder:
        folder = StepFolder(tmp_path, step=number)
        for rank in range(2):
            trainer, begin_ms = folder.process("trainer", rank, owner=True), 20 + late_ms * rank
            backward = trainer.span("backward", begin_ms * MS, (60 + late_ms) * MS)
            trainer.span(
                "all_reduce", (begin_ms + 10) * MS, (50 + late_ms) * MS, parent=backward,
                attrs={"wait": True, "group": "0", "sequence": 1},
            )  # fmt: skip
        close(folder, (70 + late_ms) * MS)
        return folder

    assert seen(step(4, 0)).cause is None
    report = seen(step(5, 500))
    assert told(report.cause) == ("late-rank", "trainer 1", None, 500)
    assert [advice.rule for advice in report.advice] == ["straggler"]


@pytest.mark.parametrize("more_ms", [0, 150])
def test_a_late_rank_has_all_of_its_micro_batches_counted(tmp_path: Path, more_ms: int) -> None:
    """The ranks meet inside the last of four calls, and rank 1 takes longer in each call."""
    folder = StepFolder(tmp_path)
    lasts_ms = 10 + 4 * (30 + more_ms)
    for rank in range(2):
        trainer, each_ms = folder.process("trainer", rank, owner=True), 30 + more_ms * rank
        for micro in range(3):
            begin_ms = 10 + micro * each_ms
            trainer.span("forward", begin_ms * MS, (begin_ms + each_ms) * MS)
        call = trainer.span("forward", (10 + 3 * each_ms) * MS, (lasts_ms + 5) * MS)
        trainer.span(
            "all_reduce", (10 + 4 * each_ms) * MS, lasts_ms * MS + 1, parent=call,
            attrs={"wait": True, "group": "0", "sequence": 1},
        )  # fmt: skip
    close(folder, (lasts_ms + 10) * MS)
    cause = reported(folder).cause
    assert told(cause) == (("late-rank", "trainer 1", "forward", 600) if more_ms else None)
    if cause is not None:
        assert (cause.took_ns, cause.usual_ns) == (720 * MS, 120 * MS)


def test_a_rank_that_is_late_inside_its_calls_is_told_by_their_stage(tmp_path: Path) -> None:
    """Each forward pass gathers weights after 20 ms, and on rank 1 after 170 ms."""
    folder = StepFolder(tmp_path)
    for rank in range(2):
        trainer, own_ms = folder.process("trainer", rank, owner=True), 170 if rank else 20
        for micro in range(3):
            begin_ms = micro * 200
            forward = trainer.span("forward", begin_ms * MS, (begin_ms + 190) * MS)
            trainer.span(
                "all_gather", (begin_ms + own_ms) * MS, (begin_ms + 171) * MS, parent=forward,
                attrs={"wait": True, "group": "0", "sequence": micro},
            )  # fmt: skip
    close(folder, 610 * MS)
    cause = cause_of(folder)
    assert told(cause) == ("late-rank", "trainer 1", "forward", 450)
    assert (cause.took_ns, cause.usual_ns) == (510 * MS, 60 * MS)


@pytest.mark.parametrize("outside_ms", [0, 100])
def test_a_rank_that_waited_for_its_worker_was_not_late_in_no_call(tmp_path: Path, outside_ms: int) -> None:
    """Each rank opens its own capture. Rank 0 asks a generator first, and rank 1 waits in a collective."""
    folder = StepFolder(tmp_path)
    ranks, begin_ms = [folder.process("trainer", rank, owner=True) for rank in range(2)], 300 + outside_ms
    place = ranks[0].link(ranks[0].span("wait_rollout", 0, 300 * MS))
    folder.process("worker").span("decode", 0, 300 * MS, role="rollout", link=place)
    for rank, trainer in enumerate(ranks):
        at_ms = 0 if rank else begin_ms
        update = trainer.span("update", at_ms * MS, (begin_ms + 100) * MS)
        trainer.span(
            "all_reduce", (at_ms + 50) * MS, (begin_ms + 50) * MS + 1, parent=update,
            attrs={"wait": True, "group": "0", "sequence": 1},
        )  # fmt: skip
    close(folder, (begin_ms + 110) * MS)
    cause = reported(folder).cause
    assert told(cause) == (("late-rank", "trainer 0", None, 100) if outside_ms else None)
    assert cause is None or re.search("400 ms after trainer 1.* 100 ms shorter", cause.sentence)


def updates(root: Path, begun_ms: int) -> StepFolder:
    """Two ranks whose `update` has a collective and work of 10 to 20 ms after it. The second rank begins the
    first one at `begun_ms`, and ends it with the first rank.
    """
    folder = StepFolder(root)
    trainers = [folder.process("trainer", rank, owner=True) for rank in range(2)]
    at_ms = ([5, 260, 282, 300, 316, 330], [begun_ms, 256, 276, 294, 312, 326])
    until_ms = ([259, 281, 299, 315, 329, 345], [255, 275, 293, 311, 325, 362])
    for trainer, begins, ends in zip(trainers, at_ms, until_ms, strict=True):
        for begin, end in zip(begins, ends, strict=True):
            trainer.span("update", begin * MS, end * MS)
        trainer.close((ends[-1] + 1) * MS)
    return folder


@pytest.mark.parametrize(
    ("begun_ms", "cause"), [(248, ("late-rank", "trainer 1", None, 243)), (-205, None)], ids=["late", "early"]
)
def test_a_rank_is_late_for_calls_with_work_after_their_collective(
    tmp_path: Path, begun_ms: int, cause: tuple[Any, ...] | None
) -> None:
    """A rank whose own capture opened 210 ms earlier, because no profiler started in it, is not slow."""
    assert told(reported(updates(tmp_path, begun_ms)).cause) == cause


@pytest.mark.parametrize("late_ms", [(400, 0), (400, 300), (20, 0)])
def test_a_rank_that_others_await_in_the_collectives_of_traces_is_late(
    folder: StepFolder, late_ms: tuple[int, int]
) -> None:
    """The spans of both are as long. Rank 1 is late for the first collective, rank 0 for the other."""
    for rank in range(2):
        trainer = folder.process("trainer", rank, owner=True)
        trainer.span("update", 5 * MS, 995 * MS)
        enters = [50_000 + late_ms[0] * 1000 * rank, 500_000 + late_ms[1] * 1000 * (1 - rank)]
        add_trace(folder, trainer, [
            event("gloo:all_reduce", "user_annotation", at, until - at, tid=2)
            for at, until in zip(enters, [460_000, 810_000], strict=True)
        ])  # fmt: skip
    close(folder, 1000 * MS)
    named = late_ms == (400, 0)
    cause = reported(folder, traces=True).cause
    assert told(cause) == (("late-rank", "trainer 1", None, 400) if named else None)


def test_a_rank_with_work_of_its_own_is_not_late_by_traces_either(tmp_path: Path) -> None:
    """Rank 0 alone samples, in a call of its own. Rank 1 waits meanwhile, in each step of the loop."""
    folder = StepFolder(tmp_path)
    for rank in range(2):
        trainer = folder.process("trainer", rank, owner=True)
        if not rank:
            for number, stage in enumerate(("load", "sample", "score")):
                trainer.span(stage, 170 * number * MS, 170 * (number + 1) * MS)
        begin_ms = 10 if rank else 510
        update = trainer.span("update", begin_ms * MS, 900 * MS)
        trainer.span(
            "all_reduce", (begin_ms + 50) * MS, 600 * MS, parent=update,
            attrs={"wait": True, "group": "0", "sequence": 1},
        )  # fmt: skip
        reduced = event(
            "gloo:all_reduce", "user_annotation", 1000 * (begin_ms + 50), 1000 * (550 - begin_ms), tid=2
        )
        add_trace(folder, trainer, [reduced])
    close(folder, 1000 * MS)
    assert reported(folder, traces=True).cause is None


def test_a_slow_replica_is_compared_with_one_that_already_works_for_the_next_step(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer wait_for_rollout", 0, 500),
        ("rollout:1 decode", 0, 480, "wait_for_rollout", {"attrs": {"tokens": 40}}),
        ("rollout:0 decode@3", 10, 110, {"attrs": {"tokens": 20}}),
        ("rollout:0 decode@3", 120, None, {"attrs": {"tokens": 99}}),
        ("trainer update", 500, 600),
    ]
    cause = cause_of(a_step(tmp_path, 605, rows))
    assert told(cause) == ("slow-replica", "rollout 1", "decode", 280)
    assert (cause.took_ns, cause.usual_ns) == (480 * MS, 200 * MS)


def test_without_tokens_no_replica_is_compared_with_work_for_the_next_step(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer wait_for_rollout", 0, 500),
        ("rollout:1 decode", 0, 480, "wait_for_rollout"),
        ("rollout:0 decode@3", 10, 110),
        ("trainer update", 500, 600),
    ]
    assert reported(a_step(tmp_path, 605, rows)).cause is None


def test_a_rank_with_more_tokens_has_an_uneven_batch(folder: StepFolder) -> None:
    for rank in range(4):
        trainer, took = folder.process("trainer", rank, owner=True), 400 if rank == 2 else 200
        trainer.span("forward", 0, took * MS, attrs={"tokens": took * 10})
        trainer.span("all_reduce", took * MS, 405 * MS)
    close(folder, 410 * MS)
    assert told(cause_of(folder)) == ("uneven-batch", "trainer 2", "forward", 200)


def called(root: Path, times_ms: list[int], **host: str) -> tuple[StepFolder, list[FakeProcess]]:
    """A driver that calls `update` on actors with a carrier, each as long as `times_ms` says, and waits."""
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    actors = [folder.process("actor", rank, host=host.get(f"_{rank}", "a")) for rank in range(len(times_ms))]
    for actor in actors:
        driver.measures(actor, 0)
    step = driver.span("update_actor", 10 * MS, (20 + max(times_ms)) * MS)
    for actor, took in zip(actors, times_ms, strict=True):
        actor.span("update", 15 * MS, (15 + took) * MS, link=driver.link(step))
    close(folder, (30 + max(times_ms)) * MS)
    return folder, actors


@pytest.mark.parametrize(
    ("times_ms", "saves_ms"),
    [
        ([600, 400], 200), ([560, 400], 160), ([400, 400, 400, 600], 200), ([400, 420, 380, 410, 600], 180),
        # Equal loads vary by up to 1.04 of 2 and 4 actors, and 1.13 of 8.
        ([416, 400], None), ([400, 416, 400, 400], None), ([400, 452, 390, 400, 410, 400, 420, 400], None),
    ],
)  # fmt: skip
def test_a_slow_rank_is_compared_with_the_others(
    tmp_path: Path, times_ms: list[int], saves_ms: int | None
) -> None:
    slowest = f"actor {times_ms.index(max(times_ms))}"
    cause = reported(called(tmp_path, times_ms)[0]).cause
    assert told(cause) == (None if saves_ms is None else ("slow-rank", slowest, "update", saves_ms))


def test_no_rank_is_slow_beside_one_that_died(folder: StepFolder) -> None:
    """The dead rank lives at least until its last sample, and the step ends with its death."""
    driver = folder.process("trainer", owner=True)
    actors = [folder.process("actor", rank) for rank in range(2)]
    for rank, actor in enumerate(actors):
        driver.measures(actor, 0)
        actor.span("update_actor", 15 * MS, None if rank else 3000 * MS)
    actors[1].counter("process CPU", {at * MS: 50.0 for at in range(0, 1000, 100)})
    key = actors[1].info.key
    died = Absent(name="actor[1]", state="missing", reason="actor died: OOM", died=True, process=key)
    driver.absent.append(died)
    driver.close(1600 * MS)
    actors[0].close(3010 * MS)
    report = reported(folder)
    assert report.cause is None
    assert "straggler" not in rules(report)
    (killed,) = report.health.open_spans
    assert (killed.process, killed.wall_ns) == ("actor 1", 885 * MS)
    (stage,) = report.stages
    assert (stage.slowest, stage.imbalance) == (None, None)
    assert "at least 885 ms" in printed(report, 200)
    first = "actor 1 died in actor update_actor; 1.60 s"
    assert f": {first} (" in printed(report, 200).splitlines()[0]
    assert f": {first}" in brief_text(step_brief(report))
    assert f">{first}" in render_step(load_step(folder.write()), report)


@pytest.mark.parametrize(
    ("waited", "kind"),
    [
        ((50.0, 50.0), "slow-rank"),  # twice the work, and both had half a core
        ((60.0, 20.0), "slow-host"),  # as much work, and one of them had less of the cores
        ((75.0, 50.0), "slow-host"),
        ((20.0, 0.0), "slow-rank"),
    ],
)
def test_processes_are_compared_without_their_waits_for_a_core(
    tmp_path: Path, waited: tuple[float, float], kind: str
) -> None:
    folder, actors = called(tmp_path, [1600, 800])
    for actor, value in zip(actors, waited, strict=True):
        percent(actor, "main thread waits for a core", from_0(value, range(50, 1650, 50)))
    assert cause_of(folder).kind == kind


def test_ranks_of_one_host_that_are_all_slow_are_a_slow_host(tmp_path: Path) -> None:
    folder, _ = called(tmp_path, [400, 600, 410, 610], _1="b", _3="b")
    cause = cause_of(folder)
    assert (cause.kind, some(cause.process).host) == ("slow-host", "b")
    assert "on host a: " in cause.sentence
    assert cause.ns == pytest.approx(200 * MS, rel=0.1)


def tools(
    root: Path, *calls: tuple[str, int, int], step: int = 2, others_ms: int = 20, around: bool = False
) -> StepFolder:
    """A step of four trajectories: they generate for 105 ms, then call `search` twice.

    Args:
        calls: (trajectory, call, ms) of the calls that take something else than `others_ms`.
        around: True if the driver has a span `tool_call` around each call of its worker.
    """
    folder = StepFolder(root, step=step, opened_ns=1_750_000_000_000_000_000 + step * 10**10)
    driver, worker = folder.process("trainer", owner=True), folder.process("env", 3, host="b")
    driver.measures(worker, 0)
    took = {(name, call): ms for name, call, ms in calls}
    begins = {
        f"t{number}": [
            120 + sum(took.get((f"t{number}", one), others_ms) for one in range(call)) for call in range(3)
        ]
        for number in range(4)
    }
    end_ms = max(times[-1] for times in begins.values())
    rollout = driver.span("rollout", 10 * MS, (end_ms + 2) * MS)
    for name, times in begins.items():
        own = driver.span(
            "trajectory", 15 * MS, times[-1] * MS, role="agent_loop", parent=rollout, trajectory=name
        )
        driver.span("generate", 15 * MS, 120 * MS, role="rollout", parent=own, trajectory=name)
        for start_ms, until_ms in pairwise(times):
            extent, above = (start_ms * MS, until_ms * MS), own
            if around:
                above = driver.span("tool_call", *extent, role="agent_loop", parent=own, trajectory=name)
            worker.span("search", *extent, link=driver.link(above), trajectory=name)
    driver.span("update", (end_ms + 2) * MS, (end_ms + 202) * MS)
    close(folder, (end_ms + 210) * MS)
    return folder


@pytest.mark.parametrize("around", [False, True])
def test_one_long_call_of_a_tool_is_named_in_the_first_line_of_each_report(
    tmp_path: Path, around: bool
) -> None:
    """Without it the step ends 780 ms earlier."""
    timeline = load_step(tools(tmp_path, ("t2", 1, 800), around=around).write())
    report = step_report(timeline)
    cause = some(report.cause)
    assert told(cause) == ("slow-tool", "env 3", "search", 780)
    assert (cause.trajectory, some(cause.process).host) == ("t2", "b")
    assert (cause.took_ns, cause.usual_ns) == (800 * MS, 20 * MS)
    said = "tool search took 800 ms (20.0 ms in its other calls)"
    assert cause.sentence.startswith(f"1.15 s: {said.partition(' in')[0]}")
    first, *_ = printed(report, 300).strip().splitlines()
    assert said in first
    assert said in brief_text(step_brief(report)).splitlines()[0]
    page = render_step(timeline, report)
    assert page.index(said) < page.index("<section")


def test_a_long_trajectory_is_named_with_what_it_did_longer(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    rollout = driver.span("rollout", 0, 1000 * MS)
    for number in range(10):
        name, end_ms = f"t{number}", 990 if number == 4 else 300 + number
        own = driver.span("trajectory", 0, end_ms * MS, role="agent_loop", parent=rollout, trajectory=name)
        driver.span("generate", 5 * MS, (end_ms - 5) * MS, role="rollout", parent=own, trajectory=name)
    close(folder, 1010 * MS)
    cause = cause_of(folder)
    assert (cause.kind, cause.trajectory) == ("long-trajectory", "t4")
    assert cause.ns == (990 - 309) * MS
    assert any("rollout generate" in line for line in cause.evidence)


def test_a_step_without_anything_out_of_the_ordinary_has_no_cause(tmp_path: Path) -> None:
    report = reported(tools(tmp_path))
    assert report.cause is None
    assert report.unexplained_ns is None


def seen(folder: StepFolder) -> StepReport:
    """Return the report of a step beside the other captured ones of its folder."""
    root = folder.write()
    timeline = load_step(root)
    return step_report(timeline, near=Neighbours().of(root, timeline))


def test_a_tool_that_is_slow_in_all_calls_is_compared_with_the_steps_before(tmp_path: Path) -> None:
    """The calls of a trajectory take 2 x 150 ms, and took 2 x 20 ms."""
    for number in (4, 5):
        tools(tmp_path, step=number).write()
    report = seen(tools(tmp_path, step=6, others_ms=150))
    cause = some(report.cause)
    assert (cause.kind, cause.stage, cause.ns) == ("slow-tool", "search", 260 * MS)
    assert (cause.took_ns, cause.usual_ns, report.unexplained_ns) == (150 * MS, 20 * MS, 0)
    assert re.findall(r"[\d.]+(?= ms)", cause.sentence) == ["630", "260", "150", "20.0"]


def test_what_is_as_long_in_the_steps_before_is_not_why_a_step_is_longer(tmp_path: Path) -> None:
    """One call always takes 300 ms more; in the last step, the update takes 400 ms more."""
    for number in (4, 5):
        tools(tmp_path, ("t2", 1, 320), step=number).write()
    folder = tools(tmp_path, ("t2", 1, 320), step=6)
    folder.processes[0].span("update", 662 * MS, 1062 * MS)
    close(folder, 1070 * MS)
    report = seen(folder)
    cause = some(report.cause)
    assert (cause.kind, cause.role, cause.stage, cause.ns) == ("slow-stage", "trainer", "update", 400 * MS)
    assert report.compared == (4, 5)
    assert "(4-5)" in brief_text(step_brief(report)).splitlines()[2]
    assert [other.kind for other in cause.others] == ["slow-tool"]


@pytest.mark.parametrize(("usually", "busy"), [(1, 50.0), (0, 50.0), (0, 99.0)])
def test_a_stage_of_many_short_calls_is_told_by_their_sum(tmp_path: Path, usually: int, busy: float) -> None:
    """In step 6 a hundred broadcasts of 5 ms, which no lack of cores explains if there were none before."""
    folder = StepFolder(tmp_path)
    for number in (4, 5, 6):
        calls = 100 if number == 6 else usually
        folder = StepFolder(tmp_path, step=number)
        owner = folder.process("trainer", owner=True)
        owner.span("update", 0, 200 * MS)
        sync = owner.span("publish", 200 * MS, (205 + 5 * calls) * MS)
        for call in range(calls):
            owner.span("broadcast", (200 + 5 * call) * MS, (205 + 5 * call) * MS, parent=sync)
        percent(owner, "host CPU", {0: busy, 705: busy}, scope="host")
        close(folder, (210 + 5 * calls) * MS)
        folder.write()
    cause = some(seen(folder).cause)
    assert (cause.stage, cause.took_ns, cause.usual_ns) == ("broadcast", 500 * MS, 5 * usually * MS)


def test_a_pools_process_with_longer_calls_is_named(tmp_path: Path) -> None:
    """The other process takes over what the slow one has no time for."""
    folder = StepFolder(tmp_path)
    for number, slow_ms, shares in ((4, 30, (4, 4)), (5, 30, (4, 4)), (6, 230, (1, 7))):
        folder = StepFolder(tmp_path, step=number)
        owner = folder.process("trainer", owner=True)
        each_ms = (slow_ms, 30)
        lasts_ms = max(share * ms for share, ms in zip(shares, each_ms, strict=True))
        rewards = owner.span("rewards", 0, (lasts_ms + 5) * MS)
        for rank, (share, ms) in enumerate(zip(shares, each_ms, strict=True)):
            worker = folder.process("worker", rank)
            for call in range(share):
                place = owner.link(rewards)
                worker.span("score", call * ms * MS, (call + 1) * ms * MS, role="reward", link=place)
        close(folder, (lasts_ms + 10) * MS)
        folder.write()
    cause = some(seen(folder).cause)
    assert (some(cause.process).name, cause.stage, cause.took_ns) == ("worker 0", "score", 230 * MS)


def test_a_profiled_rank_that_blocked_is_named_beside_other_profiled_steps(tmp_path: Path) -> None:
    """Rank 0 alone samples, for 700 ms, and rank 1 waits for it. In step 6, rank 0 blocks for 600 ms more."""
    folder = StepFolder(tmp_path)
    for number, more_ms in ((4, 0), (5, 0), (6, 600)):
        folder = StepFolder(tmp_path, step=number)
        until_ms = 810 + more_ms
        for rank, begin_ms in enumerate((700, 0)):
            trainer = folder.process("trainer", rank, owner=True)
            trainer.profiled = rank == 0
            if begin_ms:
                trainer.span("load", 0, 350 * MS)
                trainer.span("sample", 350 * MS, begin_ms * MS)
            first_ms = begin_ms + 50 + (0 if rank else more_ms)
            trainer.span("backward", begin_ms * MS, first_ms * MS)
            last = trainer.span("backward", first_ms * MS, until_ms * MS)
            trainer.span(
                "all_reduce", (first_ms + 50) * MS, (until_ms - 10) * MS + 1, parent=last,
                attrs={"wait": True, "group": "0", "sequence": number},
            )  # fmt: skip
        close(folder, until_ms * MS)
        lines(folder, 810, {"trainer/backward": 0.11, "trainer/load": 0.35, "trainer/sample": 0.35})
        folder.write()
    report = seen(folder)
    cause = some(report.cause)
    assert (some(cause.process).name, cause.took_ns, cause.usual_ns) == ("trainer 0", 650 * MS, 55 * MS)
    assert rules(report).isdisjoint({"uneven-profiling", "not-typical"})


def test_no_stage_saves_more_than_the_step_took_longer(tmp_path: Path) -> None:
    """On the path, `update` takes the place of `generate`, which is as long as before, but not beside it."""
    folder = StepFolder(tmp_path)
    for number, update_ms in ((4, 100), (5, 100), (6, 450)):
        folder = StepFolder(tmp_path, step=number)
        owner = folder.process("trainer", owner=True)
        work = owner.span("work", 0, max(300, update_ms) * MS)
        for name, ms in (("rollout", 300), ("actor", update_ms)):
            stage = "generate" if name == "rollout" else "update"
            folder.process(name).span(stage, 0, ms * MS, link=owner.link(work))
        close(folder, max(300, update_ms) * MS)
        folder.write()
    cause = some(seen(folder).cause)
    assert (cause.stage, cause.ns, cause.longer_ns) == ("update", 150 * MS, 450 * MS)


@pytest.mark.parametrize("took_ms", [300, 800])
def test_a_step_that_had_more_tokens_says_so(tmp_path: Path, took_ms: int) -> None:
    """Step 6 has three times the tokens, and takes 300 ms if each token takes as long as before."""
    folder = StepFolder(tmp_path)
    for number in (4, 5, 6):
        tokens, each_ms = (1500, took_ms) if number == 6 else (500, 100)
        folder = StepFolder(tmp_path, step=number)
        owner = folder.process("trainer", owner=True)
        owner.profiled = True
        owner.span("update", 0, each_ms * MS, attrs={"tokens": tokens})
        owner.span("step_tokens", each_ms * MS, each_ms * MS, attrs={"train": tokens})
        close(folder, each_ms * MS)
        lines(folder, 100, {"trainer/update": 0.1}, tokens={"train": 500})
        folder.write()
    report = seen(folder)
    cause = some(report.cause)
    assert (cause.stage, cause.took_ns, cause.usual_ns) == ("update", took_ms * MS, 100 * MS)
    assert some(report.baseline).tokens_ratio == 3.0
    assert ("1,500 tokens" in cause.sentence) == (took_ms == 300)
    assert "not-typical" not in rules(report)  # the other captured steps had a profiler, too


def test_what_no_stage_explains_is_said_with_its_place(tmp_path: Path) -> None:
    for number in (4, 5):
        tools(tmp_path, step=number).write()
    folder = tools(tmp_path, step=6)
    folder.processes[0].span("publish", 1360 * MS, 1365 * MS)
    close(folder, 1370 * MS)
    report = seen(folder)
    assert told(report.cause) == ("unexplained", None, None, 1000)
    assert report.unexplained_ns == 1000 * MS
    assert re.search("after trainer update and before trainer publish", some(report.cause).sentence)


def lines(
    folder: StepFolder,
    took_ms: int,
    stages: dict[str, float],
    number: int = 8,
    last_ms: int | None = None,
    tokens: dict[str, int] | None = None,
) -> None:
    """The recorder's lines of steps before, and a first one that warms up."""
    step_lines = [
        StepLine(
            step=folder.step + step - number, start_ns=folder.opened_ns - (number - step) * 10**10,
            dur_ns=(last_ms if last_ms and step == number - 1 else took_ms) * MS, stages=stages,
            tokens=tokens or {},
        )
        for step in range(number)
    ]  # fmt: skip
    path = RunLayout(folder.layout.root.parent).step_lines(folder.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in step_lines))


def test_a_stage_that_grew_is_found_in_the_recorders_lines(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer/rollout generate", 0, 300), ("trainer sync_weights", 300, 800),
        ("trainer update", 800, 1000),
    ]  # fmt: skip
    folder = a_step(tmp_path, 1000, rows)
    lines(folder, 600, {"rollout/generate": 0.3, "trainer/sync_weights": 0.1, "trainer/update": 0.2})
    report = reported(folder)
    assert told(report.cause) == ("weight-sync", "trainer", "sync_weights", 400)
    assert report.unexplained_ns == 0


@pytest.mark.parametrize(("waited", "kind"), [(5.0, "slow-stage"), (10.5, None), (60.0, "slow-host")])
def test_a_stage_that_waited_for_another_process_without_a_core_is_not_named(
    tmp_path: Path, waited: float, kind: str | None
) -> None:
    """The driver itself waits for the actor all the time, and for no core."""
    folder, (actor,) = called(tmp_path, [600])
    for process, value in ((folder.processes[0], 0.0), (actor, waited)):
        percent(process, "main thread waits for a core", from_0(value, range(50, 650, 50)))
    lines(folder, 500, {"trainer/update_actor": 0.48})
    cause = reported(folder).cause
    assert (cause and cause.kind) == kind


@pytest.mark.parametrize("slow_ms", [700, 350])
def test_a_part_of_a_stage_is_named_if_it_took_longer_than_all_of_the_stage_did(
    tmp_path: Path, slow_ms: int
) -> None:
    rows: list[Row] = [
        ("trainer make_batch", 0, 800), ("trainer/rollout generate", 0, 100, "make_batch"),
        ("trainer/reward compute_reward", 100, 100 + slow_ms, "make_batch"), ("trainer update", 800, 1000),
    ]  # fmt: skip
    folder = a_step(tmp_path, 1000, rows)
    lines(folder, 500, {"trainer/make_batch": 0.3, "trainer/update": 0.2})
    cause = cause_of(folder)
    stage, longer_ms = ("compute_reward", 400) if slow_ms == 700 else ("make_batch", 500)
    assert (cause.stage, cause.longer_ns) == (stage, longer_ms * MS)
    whole = "in all of trainer make_batch in 7 steps near it"
    assert (whole in cause.sentence) == (stage == "compute_reward")


@pytest.mark.parametrize("regular", [False, True])
def test_a_stage_that_no_step_near_has_is_the_cause_and_one_beside_the_path_is_not(
    folder: StepFolder, regular: bool
) -> None:
    driver = folder.process("trainer", owner=True)
    driver.span("update", 0, 200 * MS)
    driver.span("evaluate", 200 * MS, 1000 * MS)
    for number in range(8):  # in another thread: there are more of them because the step is longer
        driver.span("trajectory", 5 * MS, 990 * MS, role="agent_loop", thread=7, trajectory=f"t{number}")
    close(folder, 1000 * MS)
    usual = {"trainer/update": 0.2, "agent_loop/trajectory": 1.6}
    lines(folder, 200, usual)
    evaluated = [folder.step, *((folder.step + 10, folder.step + 20) if regular else ())]
    with RunLayout(folder.layout.root.parent).step_lines(folder.run_id).open("ab") as file:
        for number in range(folder.step, evaluated[-1] + 1):
            own = StepLine(
                step=number, start_ns=folder.opened_ns + number * 10**10, dur_ns=1000 * MS,
                captured=number in evaluated,
                stages={**usual, "trainer/evaluate": 0.8} if number in evaluated else usual,
            )  # fmt: skip
            file.write(msgspec.json.encode(own) + b"\n")
    report = reported(folder)
    assert not some(report.baseline).alike
    # every tenth step evaluates, or none
    assert told(report.cause) == (None if regular else ("slow-stage", "trainer", "evaluate", 800))
    assert regular or report.unexplained_ns == 0


def test_a_workers_stage_without_anything_to_compare_with_is_named_as_such(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 1000, [("trainer/rollout generate", 0, 10), ("actor update", 10, 1000)])
    lines(folder, 200, {"rollout/generate": 0.01})
    cause = cause_of(folder)
    assert (cause.kind, cause.stage, cause.ns) == ("unexplained", "update", 800 * MS)
    assert "uncaptured steps do not" in cause.sentence


def test_a_stage_that_a_profiler_may_have_slowed_is_told_with_that_doubt(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 1000, [("trainer update", 0, 1000)])
    folder.processes[0].profiled = True
    lines(folder, 600, {"trainer/update": 0.6})
    report = reported(folder)
    sentence = some(report.cause).sentence
    assert sentence.endswith(", without profilers)")
    assert "(600 ms in 7 " in sentence
    assert "not-typical" in rules(report)  # it may be the profiler


@pytest.mark.parametrize(("usual_ms", "is_known"), [(600, True), (1000, False)])
def test_a_step_with_a_stage_that_grew_is_not_called_untypical_too(
    tmp_path: Path, usual_ms: int, is_known: bool
) -> None:
    folder = a_step(tmp_path, 1000, [("trainer update", 0, 1000)])
    lines(folder, 600, {"trainer/update": usual_ms / 1000})
    report = reported(folder)
    assert some(report.cause).kind == ("slow-stage" if is_known else "unexplained")
    assert ("not-typical" in rules(report)) is not is_known


@pytest.mark.parametrize("used", [20.0, 180.0])
def test_a_slow_step_on_a_host_that_others_keep_busy_blames_no_profiler(tmp_path: Path, used: float) -> None:
    folder = a_step(tmp_path, 1000, [("trainer update", 0, 1000)])
    (owner,) = folder.processes
    owner.profiled = True
    percent(owner, "host CPU", {0: 99.0, 1000: 99.0}, scope="host")
    percent(owner, "process CPU", {0: used, 1000: used})
    lines(folder, 600, {"trainer/update": 0.6})
    (advice,) = (advice for advice in reported(folder).advice if advice.rule == "not-typical")
    assert ("profiler" in advice.do) == (used > 100)


def test_a_part_in_another_process_that_has_no_carrier_is_named(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer generate", 0, 800), ("rollout/reward compute_reward", 10, 790),
        ("trainer update", 800, 1000),
    ]  # fmt: skip
    folder = a_step(tmp_path, 1000, rows)
    lines(folder, 500, {"trainer/generate": 0.3, "trainer/update": 0.2})
    report = reported(folder)
    assert (some(report.cause).stage, report.unexplained_ns) == ("compute_reward", 20 * MS)


@pytest.mark.parametrize("number", [0, 3])
def test_the_first_step_of_a_run_is_not_slow_by_its_profiler(tmp_path: Path, number: int) -> None:
    """A run that resumed at step 3 warms up in step 3."""
    folder = StepFolder(tmp_path, step=number)
    owner = folder.process("trainer", owner=True)
    owner.profiled = True
    owner.span("update", 0, 1000 * MS)
    close(folder, 1000 * MS)
    later = [
        StepLine(
            step=step, start_ns=folder.opened_ns + (step - number) * 10**10, captured=step == number,
            dur_ns=(1000 if step == number else 100) * MS, stages={"trainer/update": 0.1},
        )
        for step in range(number, number + 9)
    ]  # fmt: skip
    path = RunLayout(tmp_path).step_lines(folder.run_id)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in later))
    report = reported(folder)
    assert some(report.baseline).warms_up
    assert "not-typical" not in rules(report)


def test_a_step_is_not_compared_with_those_of_other_kinds(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 1000, [("trainer update", 0, 1000)])
    lines(folder, 1, {})
    baseline = some(reported(folder).baseline)
    assert "+999 ms" in say_beside(baseline)
    assert "999" not in say_beside(msgspec.structs.replace(baseline, alike=False))


def test_a_tool_that_slept_in_one_step_is_not_attributed_to_the_capture(tmp_path: Path) -> None:
    folder = tools(tmp_path, ("t2", 1, 800))
    for process in folder.processes:
        process.profiled = True
    lines(folder, 370, {"trainer/rollout": 0.152, "trainer/update": 0.2})
    report = reported(folder)
    cause = some(report.cause)
    assert (cause.kind, cause.stage, report.unexplained_ns) == ("slow-tool", "search", 0)
    assert "780 ms longer" in cause.sentence
    assert some(report.baseline).cost_ns == 0  # opening and closing took no time
    assert "not-typical" not in rules(report)


def test_ls_says_why_a_step_was_slow(tmp_path: Path, command: Command) -> None:
    for number in (4, 5):
        tools(tmp_path, step=number).write()
    tools(tmp_path, step=6, others_ms=150).write()
    rows = command("ls", tmp_path, "--json").json
    assert [row["cause"] and row["cause"]["kind"] for row in rows] == [None, None, "slow-tool"]
    assert re.search("step 6: .*260 ms .* 150 ", command("ls", tmp_path).out)


def test_a_call_that_blocks_the_event_loop_of_others_is_named(folder: StepFolder) -> None:
    """A tool that does not await for 600 ms, while another trajectory generates."""
    driver = folder.process("trainer", owner=True)
    rollout = driver.span("rollout", 0, 1200 * MS)
    for name, stage, start_ms, end_ms in (("a", "tool", 300, 900), ("b", "generate", 200, 910)):
        own = driver.span("trajectory", 0, 1000 * MS, role="agent_loop", parent=rollout, trajectory=name)
        role = "env" if stage == "tool" else "rollout"
        driver.span(stage, start_ms * MS, end_ms * MS, role=role, parent=own, trajectory=name)
    late = {ms * MS: float(max(0, min(ms, 900) - 300) if ms < 1000 else 0) for ms in range(0, 1300, 100)}
    driver.counter("event loop late", late, of="MainThread", unit="ms", kind="interval")
    close(folder, 1300 * MS)
    cause = cause_of(folder)
    assert (cause.kind, cause.role, cause.stage) == ("event-loop", "env", "tool")
    assert cause.ns == pytest.approx(600 * MS, rel=0.1)


@pytest.mark.parametrize("since_ms", [5, 50, 95])
def test_a_block_of_a_loop_is_as_long_as_its_call_wherever_the_samples_lie(
    tmp_path: Path, since_ms: int
) -> None:
    begin_ms, end_ms = 300 + since_ms, 800 + since_ms
    rows: list[Row] = [
        ("trainer/env tool", begin_ms, end_ms), ("trainer/rollout generate", begin_ms - 1, end_ms + 1),
    ]  # fmt: skip
    folder = a_step(tmp_path, 1000, rows)
    # sent at 400 ms, and run at the end
    late = {ms * MS: float(max(0, ms - 400)) for ms in range(0, 900, 100)}
    late |= {900 * MS: 400.0 + since_ms, 1000 * MS: 0.0}
    folder.processes[0].counter("event loop late", late, of="MainThread", unit="ms", kind="interval")
    cause = cause_of(folder)
    assert (cause.kind, cause.stage, cause.longer_ns) == ("event-loop", "tool", 500 * MS)


@pytest.mark.parametrize("lacked", [90, 20])
def test_a_loop_whose_thread_had_no_free_core_is_not_blocked(tmp_path: Path, lacked: float) -> None:
    rows: list[Row] = [("trainer/rollout generate", 0, 1000), ("trainer/env tool", 300, 800)]
    folder = a_step(tmp_path, 1000, rows)
    late = {ms * MS: float(max(0, ms - 300)) for ms in range(0, 900, 100)} | {900 * MS: 0.0}
    folder.processes[0].counter("event loop late", late, of="MainThread", unit="ms", kind="interval")
    percent(folder.processes[0], "main thread waits for a core", from_0(lacked, range(100, 1000, 100)))
    rules = {advice.rule for advice in reported(folder).advice}
    assert ("late-event-loop" in rules) == (lacked == 20)


def test_a_block_begins_where_the_last_span_shows_that_its_loop_ran(tmp_path: Path) -> None:
    """The call that blocks began before the last sample, and other calls after it."""
    rows: list[Row] = [("trainer/reward judge", 0, 1000)]
    rows += (("trainer/rollout generate", since_ms, 200 + since_ms) for since_ms in range(0, 800, 190))
    folder = a_step(tmp_path, 1000, rows)
    late = {ms * MS: float(max(0, ms - 200)) for ms in range(0, 600, 100)} | {600 * MS: 0.0}
    for of, values in (("", late), (" in reward judge, a.py:3", {400 * MS: 200.0, 500 * MS: 300.0})):
        folder.processes[0].counter(
            "event loop late", values, of=f"MainThread{of}", unit="ms", kind="interval"
        )
    (loop,) = some(reported(folder).counters).late_loops
    assert (loop.blocker, loop.late_ns) == (("reward", "judge"), 310 * MS)


@pytest.mark.parametrize(("since_ms", "blocker"), [(290, "judge"), (230, None)])
def test_a_call_whose_timer_ran_out_during_a_block_is_not_accused(
    tmp_path: Path, since_ms: int, blocker: str | None
) -> None:
    """No sample shows what runs. `judge` goes on for 20 ms after it has blocked the loop."""
    rows: list[Row] = [("trainer/rollout generate", 250, 810), ("trainer/reward judge", since_ms, 820)]
    rows += [("trainer/env other", 260, 900)] if blocker is None else []
    folder = a_step(tmp_path, 1000, rows)
    late = {0: 0.0, 300 * MS: 0.0, 900 * MS: 500.0}
    folder.processes[0].counter("event loop late", late, of="MainThread", unit="ms", kind="interval")
    (loop,) = some(reported(folder).counters).late_loops
    assert (loop.blocker and loop.blocker[1]) == blocker


def test_blocks_of_one_place_are_added_up_and_other_places_follow(tmp_path: Path) -> None:
    blocks = {
        (100, 500): "env tool, a.py:3",
        (800, 1100): "reward score, b.py:5",
        (1400, 1600): "env tool, a.py:3",
    }
    rows: list[Row] = [("trainer/rollout generate", 0, 2000)]
    rows += ((f"trainer/{place.partition(',')[0]}", *extent) for extent, place in blocks.items())
    folder = a_step(tmp_path, 2000, rows)
    late, places = dict.fromkeys(range(0, 2100, 100), 0.0), defaultdict[str, dict[int, float]](dict)
    for (start_ms, end_ms), place in blocks.items():
        for ms in range(start_ms + 100, end_ms + 100, 100):
            late[ms] = places[place][ms] = ms - start_ms
    for of, values in {
        "MainThread": late,
        **{f"MainThread in {of}": own for of, own in places.items()},
    }.items():
        by_ns = {ms * MS: float(value) for ms, value in values.items()}
        folder.processes[0].counter("event loop late", by_ns, of=of, unit="ms", kind="interval")
    report = reported(folder)
    cause = some(report.cause)
    assert told(cause) == ("event-loop", "trainer", "tool", 600)
    assert [(other.kind, other.stage, other.ns) for other in cause.others] == [
        ("event-loop", "score", 300 * MS)
    ]
    assert [advice.saves_ns for advice in report.advice if advice.rule == "late-event-loop"] == [900 * MS]


def test_a_collector_that_stops_the_process_that_the_step_waits_for_is_named(tmp_path: Path) -> None:
    folder = a_step(tmp_path, 1000, [("trainer update", 0, 1000)])
    percent(folder.processes[0], "garbage collector", {0: 0, 1000: 30.0})
    cause = cause_of(folder)
    assert (cause.kind, cause.ns) == ("gc", 300 * MS)


def test_a_collector_that_ran_in_no_stage_explains_its_time(tmp_path: Path) -> None:
    for number in (4, 5):
        tools(tmp_path, step=number).write()
    folder = tools(tmp_path, step=6)
    percent(folder.processes[0], "garbage collector", {0: 0, 360: 0, 1360: 99, 1370: 0})
    close(folder, 1370 * MS)
    assert told(seen(folder).cause) == ("gc", "trainer", None, 990)


@pytest.mark.parametrize("sleeps", [(0,), (1,), (0, 1)])
def test_the_rank_that_waited_for_its_disk_is_named_if_a_stage_grew_in_all_ranks(
    tmp_path: Path, sleeps: tuple[int, ...]
) -> None:
    folders = {number: StepFolder(tmp_path, step=number) for number in (4, 5, 6)}
    for number, folder in folders.items():
        trainer, end_ms = folder.process("trainer", owner=True), 595 if number == 6 else 105
        around = trainer.span("train", 0, (end_ms + 5) * MS)
        actors = [folder.process("actor", rank) for rank in range(2)]
        for rank, actor in enumerate(actors):
            link = trainer.link(around)
            actor.span("backward", 5 * MS, (end_ms - (rank != sleeps[0])) * MS, link=link)
        if number == 6:
            for rank in sleeps:
                percent(actors[rank], "main thread in disk sleep", from_0(100, range(100, 600, 100)))
        close(folder, (end_ms + 10) * MS)
        folder.write()
    named = f"actor {sleeps[0]}" if len(sleeps) == 1 else None
    assert told(seen(folders[6]).cause) == ("slow-storage", named, "backward", 490)


def test_a_rank_that_others_await_in_traces_while_it_collects_is_told_once(folder: StepFolder) -> None:
    for rank in range(2):
        trainer = folder.process("trainer", rank, owner=True)
        trainer.span("update", 5 * MS, 995 * MS)
        ran = event("gloo:all_reduce", "user_annotation", 450_000 if rank else 50_000, 10_000, tid=2)
        add_trace(folder, trainer, [{**ran, "dur": 460_000 - ran["ts"]}])
    percent(folder.processes[1], "garbage collector", {0: 0, 50: 0, 450: 95, 1000: 0})
    close(folder, 1000 * MS)
    cause = some(reported(folder, traces=True).cause)
    assert (told(cause), cause.others) == (("gc", "trainer 1", None, 380), ())


@pytest.mark.parametrize(
    ("counter", "kind"),
    [
        ("garbage collector", "gc"),
        ("main thread in disk sleep", "slow-storage"),
        ("main thread waits for a core", "slow-host"),
        ("memory pressure", "slow-host"),
    ],
)
def test_what_held_a_late_rank_is_its_cause(tmp_path: Path, counter: str, kind: str) -> None:
    folder = ranks(tmp_path, 3, lambda rank: 280 if rank == 1 else 100)
    held = {0: 0.0, 100: 5.0, **dict.fromkeys(range(200, 1000, 100), 60.0)}
    of_host = counter == "memory pressure"
    percent(folder.processes[0 if of_host else 1], counter, held, scope="host" if of_host else "process")
    assert told(cause_of(folder)) == (kind, "trainer 1", "forward", pytest.approx(540))


@pytest.mark.parametrize(
    ("work_ms", "waited_ms", "busy", "kind"),
    [
        (120, 8, 100, None),  # in each 100 ms, anywhere: 20 ms longer three times
        (280, 20, 100, "late-rank"),
        (280, None, 100, None),  # no sample came
        (280, None, 40, "late-rank"),
        (280, 80, 100, "slow-host"),
    ],
)
def test_a_rank_that_may_have_lacked_a_core_for_as_long_is_not_named(
    tmp_path: Path, work_ms: int, waited_ms: int | None, busy: int, kind: str | None
) -> None:
    folder = ranks(tmp_path, 3, lambda rank: work_ms if rank == 1 else 100)
    percent(folder.processes[0], "host CPU", {0: busy, 500: busy}, scope="host")
    if waited_ms is not None:
        for process, waits in zip(folder.processes, (5.0, float(waited_ms), 5.0), strict=True):
            percent(process, "main thread waits for a core", dict.fromkeys(range(0, 1000, 100), waits))
            percent(process, "process CPU", {0: 20.0, 500: 20.0})
    cause = reported(folder).cause
    assert (cause and cause.kind) == kind
    if cause is not None and kind == "slow-host":
        busy_cores = "all cores of a were busy (100 %), and 3 processes of the step used 0.6 of them"
        assert busy_cores in cause.sentence


@pytest.mark.parametrize(("waited", "kind"), [(60.0, "slow-host"), (15.0, "late-rank")])
def test_a_call_on_another_thread_is_held_by_the_waits_of_that_thread(
    tmp_path: Path, waited: float, kind: str
) -> None:
    """The main thread, which runs nothing, waits for no core."""
    folder = ranks(tmp_path, 3, lambda rank: 280 if rank == 1 else 100, thread=77)
    for name, of, value in (
        ("main thread waits for a core", "", 0.0),
        ("other threads wait for a core", "thread 77", waited),
        ("other threads wait for a core", "thread 78", 100.0),
    ):
        percent(folder.processes[1], name, from_0(value, range(100, 1000, 100)), of=of)
    assert some(told(cause_of(folder)))[:3] == (kind, "trainer 1", "forward")


@pytest.mark.parametrize(("gpu", "named"), [(3, True), (2, False), (None, False)])
def test_a_rank_whose_gpu_was_slowed_in_its_calls_has_that_as_its_reason(
    tmp_path: Path, gpu: int | None, named: bool
) -> None:
    folder = ranks(tmp_path, 3, lambda rank: 280 if rank == 1 else 100)
    folder.processes[1].hardware = Hardware(device="NVIDIA H200", gpu=gpu)
    slowed = {0: 0.0, **{ms * MS: 1.0 for ms in range(100, 1000, 100)}}
    folder.processes[0].counter("GPU throttled", slowed, of="GPU 3", scope="host")
    cause = cause_of(folder)
    assert cause.kind == "late-rank"
    assert cause.ns == pytest.approx(540 * MS)
    assert ("heat or power slowed GPU 3 for " in cause.sentence) == named


@pytest.mark.parametrize(("last_ms", "named"), [(880, True), (1600, False)])
def test_a_difference_within_the_spread_of_the_neighbours_is_no_cause(
    tmp_path: Path, last_ms: int, named: bool
) -> None:
    """The rank costs 540 ms of 870; nine tenths of the steps before vary by 10 or by 730 ms."""
    folder = ranks(tmp_path, 3, lambda rank: 280 if rank == 1 else 100)
    lines(folder, 870, {}, last_ms=last_ms)
    assert (reported(folder).cause is not None) == named


@pytest.mark.parametrize("busy", [True, False])
def test_a_call_that_may_have_lacked_a_core_stands_behind_one_that_did(tmp_path: Path, busy: bool) -> None:
    def trained(step: int, play_ms: int, update_ms: int) -> StepFolder:
        folder = StepFolder(tmp_path, step=step, opened_ns=1_750_000_000_000_000_000 + step * 10**10)
        driver, other = folder.process("trainer", owner=True), folder.process("agent_loop")
        rollout = driver.span("rollout", 0, play_ms * MS)
        link = SpanLink(process=driver.info.key, span=rollout)
        other.span("play", 0, play_ms * MS, link=link)
        driver.span("update", (play_ms + 1) * MS, (play_ms + 1 + update_ms) * MS)
        if step == 6:
            end_ms = play_ms + update_ms
            percent(driver, "host CPU", dict.fromkeys((0, end_ms), 99.0 if busy else 50.0), scope="host")
            percent(driver, "main thread waits for a core", dict.fromkeys((0, end_ms), 60.0))
        close(folder, (play_ms + update_ms + 2) * MS)
        return folder

    for number in (4, 5):
        trained(number, 100, 100).write()
    cause = some(seen(trained(6, 400, 300)).cause)
    assert (cause.kind, cause.stage) == (("slow-host", "update") if busy else ("slow-stage", "play"))


def test_a_rank_that_opened_late_among_busy_cores_is_not_named(tmp_path: Path) -> None:
    def late_on(name: str, busy: float) -> StepReport:
        folder = StepFolder(tmp_path / name)
        trainers = [folder.process("trainer", rank, owner=True) for rank in range(3)]
        percent(trainers[0], "host CPU", {601: busy}, scope="host")
        for rank, trainer in enumerate(trainers):
            late_ms = 400 if rank == 1 else 0
            percent(trainer, "main thread waits for a core", dict.fromkeys(range(late_ms, 601, 100), 1.0))
            trainer.span("all_reduce", (late_ms + 10) * MS, 510 * MS)
        close(folder, 600 * MS)
        return reported(folder)

    free, busy = late_on("free", 40.0).cause, late_on("busy", 100.0).cause
    assert (free and free.kind, busy) == ("late-rank", None)


def test_a_disk_sleep_that_was_seen_in_another_call_holds_no_call(tmp_path: Path) -> None:
    folder = ranks(tmp_path, 3, lambda rank: 280 if rank == 1 else 100)
    percent(folder.processes[1], "main thread in disk sleep", from_0(100.0, (286, 570)))  # in `all_reduce`
    assert cause_of(folder).kind == "late-rank"


@pytest.mark.parametrize("skips", [True, False])
def test_a_rank_whose_collectives_meet_earlier_ones_of_the_others_skipped_one(
    folder: StepFolder, skips: bool
) -> None:
    """One that only works for longer between the same collectives is late."""
    trainers = [folder.process("trainer", rank, owner=True) for rank in range(3)]
    for rank, trainer in enumerate(trainers):
        trainer.span("forward", 0, 100 * MS)
        odd = rank == 1
        met = [(100, 601), (651, 655)] if not odd else [(600, 601), (603, 655)]
        if not odd or not skips:
            trainer.span("backward", met[0][0] * MS, met[0][0] * MS)
        if odd:
            trainer.span("dump", 100 * MS, 500 * MS)
        if odd and skips:
            trainer.span("update", 500 * MS, 600 * MS)
        for number, (start_ms, end_ms) in enumerate(met):
            attrs: dict[str, AttrValue] = {"wait": True, "group": "0", "sequence": 7 + number}
            if number == 0 and rank < 2:  # their threads lost the core between the call and the wait
                attrs["issued_ns"] = 5 * MS
            trainer.span("all_reduce", start_ms * MS, end_ms * MS, attrs=attrs)
            if number == 0 and not (odd and skips):
                trainer.span("update", 601 * MS, (602 if odd else 650) * MS)
    close(folder, 700 * MS)
    cause = cause_of(folder)
    kind, stage = ("skipped-collective", "all_reduce") if skips else ("late-rank", "dump")
    assert some(told(cause))[:3] == (kind, "trainer 1", stage)
    assert cause.longer_ns == 500 * MS


def test_requests_that_an_engine_preempted_are_the_cause_of_its_longer_calls(tmp_path: Path) -> None:
    def played(step: int, took_ms: int, preempted: int) -> StepFolder:
        folder = StepFolder(tmp_path, step=step, opened_ns=1_750_000_000_000_000_000 + step * 10**10)
        driver, engine = folder.process("trainer", owner=True), folder.process("rollout", 0)
        rollout = driver.span("rollout", 0, took_ms * MS)
        for number in range(3):
            attrs: dict[str, AttrValue] = {"output_tokens": 9, "preemptions": preempted * (number > 0)}
            engine.span("request", 0, took_ms * MS, link=driver.link(rollout), attrs=attrs)
        close(folder, (took_ms + 5) * MS)
        return folder

    played(1, 300, 0).write()
    cause = some(seen(played(2, 800, 2)).cause)
    assert told(cause) == ("preemption", "rollout 0", "request", 500)
    assert "2 requests" in cause.sentence


def test_the_time_since_the_step_before_is_compared_with_that_between_others(tmp_path: Path) -> None:
    folder = tools(tmp_path, step=8)
    lines(folder, 9_990, {})
    assert reported(folder).cause is None
    lines(folder, 9_990, {}, last_ms=9_000)
    cause = some(reported(folder).cause)
    assert (cause.kind, cause.took_ns, cause.usual_ns) == ("between-steps", 1_000 * MS, 10 * MS)
    assert "); " in cause.sentence  # no colon: it does not explain the step's own time


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.sampled_from(["a", "tool", "trajectory", "all_reduce"]), st.integers(0, 20),
            st.integers(0, 20), st.sampled_from(["r", "env", "rollout"]), st.sampled_from([None, 0, 10]),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_any_step_has_causes_that_save_no_more_than_the_step(
    calls: list[tuple[int, str, int, int, str, int | None]],
) -> None:
    spans = [
        span(where, stage, start * MS, (start + took) * MS, role=role, trajectory=f"t{where}")
        for where, stage, start, took, role, _ in calls
    ]
    for made, (*_, tokens) in zip(spans, calls, strict=True):
        made.attrs = None if tokens is None else {"tokens": tokens}
    timeline = step(40 * MS, sorted(spans, key=lambda one: (one.process, one.start_ns)))
    for suspect in suspects_of(step_path(timeline)):
        assert suspect.ns is None or 0 < suspect.ns <= 40 * MS
        assert suspect.longer_ns > 0


def test_no_process_is_slow_beside_one_whose_calls_ended_before_the_step() -> None:
    decode = partial(span, role="rollout")
    spans = [
        span(0, "rollout", 0, 500 * MS),
        decode(1, "decode", -90 * MS, -10 * MS),
        decode(2, "decode", -90 * MS, 480 * MS, parent=0),
    ]
    assert suspects_of(step_path(step(500 * MS, spans))) == []


def test_a_stage_that_most_ranks_leave_at_once_divides_by_nothing(tmp_path: Path) -> None:
    folder, actors = called(tmp_path, [400, 400, 400])
    actors[0].span("check", 420 * MS, 430 * MS)
    for actor in actors[1:]:
        actor.span("check", 420 * MS, 420 * MS)
    cause = reported(folder).cause
    assert cause is None or (cause.process is not None and cause.process.rank == 0)


def test_a_stage_in_which_a_rank_died_grew_in_no_single_rank(tmp_path: Path) -> None:
    """The other rank was recorded for longer, and the step before had both for 200 ms."""
    before, folder = StepFolder(tmp_path, step=1), StepFolder(tmp_path, step=2)
    for one, took_ms in ((before, 200), (folder, 3000)):
        driver = one.process("trainer", owner=True)
        call = driver.span("update", 10 * MS, (took_ms + 20) * MS)
        actors = [one.process("actor", rank) for rank in range(2)]
        for rank, actor in enumerate(actors):
            driver.measures(actor, 0)
            dies = rank == 1 and one is folder
            actor.span("update_actor", 15 * MS, None if dies else (15 + took_ms) * MS, link=driver.link(call))
            if dies:
                actor.counter("process CPU", {1000 * MS: 50.0})
            else:
                actor.close((took_ms + 30) * MS)
        driver.close((took_ms + 30) * MS)
        one.write()
    cause = some(seen(folder).cause)
    assert (cause.stage, cause.process) == ("update_actor", None)


def test_a_call_without_an_end_that_no_step_before_had_is_told_with_its_time(tmp_path: Path) -> None:
    before, folder = StepFolder(tmp_path, step=4), StepFolder(tmp_path, step=5)
    for one, took_ms in ((before, 0), (folder, 2500)):
        driver = one.process("trainer", owner=True)
        driver.span("update", 5 * MS, 10 * MS)
        if took_ms:
            driver.span("search", 12 * MS, None, role="env")
        close(one, (15 + took_ms) * MS)
    before.write()
    cause = some(seen(folder).cause)
    assert (cause.kind, cause.stage, cause.took_ns, cause.usual_ns) == ("slow-tool", "search", 2503 * MS, 0)
