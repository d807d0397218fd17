"""The critical path of a step, and its savings, against programs with a known path: they are run forwards.

One file above 500 lines: its programs serve all of its tests.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from packages.report.tests.steps import MS, printed, timeline_of
from stepscope.files.sidecar import ProcessInfo
from stepscope.testing.steps import StepFolder
from stepscope_report import CriticalPath, StepReport, step_report
from stepscope_report.demo import ARCHIVE
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import Process, Span, Timeline, Window, load_step, merge_step
from stepscope_report.timeline.critical_path import Piece, Replay, critical_path
from stepscope_report.timeline.model import Alignment, ProcessClock
from stepscope_report.timeline.step_graph import StepGraph, step_graph

DATA = Path(__file__).with_name("data")
Known = tuple[int, str | None, str, int]
"""(process, stage, kind, ns)."""


FIRST_PID = 100


def process(role: str, rank: int, *, alignment: Alignment = "same host", uncertainty_ns: int = 0) -> Process:
    info = ProcessInfo(role=role, rank=rank, world_size=None, host="a", pid=FIRST_PID + rank, replica=None)
    clock = ProcessClock(alignment=alignment, uncertainty_ns=uncertainty_ns)
    return Process(
        name=f"{role} {rank}", info=info, owner=role == "trainer", opened_ns=0, closed_ns=None, last_ns=0,
        clock=clock, spans=0, dropped=0, cost=None,
    )  # fmt: skip


def step(
    wall_ns: int, spans: Iterable[Span], *processes: Process, taken: frozenset[str] | None = None
) -> Timeline:
    there = processes or (process("trainer", 0), *(process("actor", rank) for rank in range(4)))
    return Timeline(
        step=1, run_id="r", runs=("r",), manifest=None, spans=list(spans),
        window=Window(start_ns=0, end_ns=wall_ns, opened=True, closed=True),
        processes=tuple(msgspec.structs.replace(one, last_ns=wall_ns) for one in there),
    )  # fmt: skip


def span(
    where: int, stage: str, start_ns: int, end_ns: int, *, parent: int | None = None, role: str = "r",
    waits: bool = False, trajectory: str | None = None, thread: int = 0, owner_step: int = 1,
) -> Span:  # fmt: skip
    return Span(
        process=where, parent=parent, role=role, stage=stage, start_ns=start_ns, end_ns=end_ns,
        dur_ns=end_ns - start_ns, step=owner_step, waits=waits, trajectory=trajectory, thread=thread,
    )  # fmt: skip


def known(timeline: Timeline) -> list[Known]:
    graph = step_graph(timeline)
    return [said(graph, piece) for piece in checked(graph)]


def said(graph: StepGraph, piece: Piece) -> Known:
    span = graph.span_of(piece.node)
    return graph.process_of(piece.node), None if span is None else span.stage, piece.kind, piece.wall_ns


def checked(graph: StepGraph) -> list[Piece]:
    """Return the path, which must add up to the step without gaps and overlaps."""
    pieces, window = critical_path(graph), graph.timeline.window
    assert all(piece.wall_ns > 0 for piece in pieces)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(pieces))
    assert sum(piece.wall_ns for piece in pieces) == window.wall_ns
    if pieces:
        assert (pieces[0].start_ns, pieces[-1].end_ns) == (window.start_ns, window.end_ns)
    return pieces


class Call(NamedTuple):
    """A call of a program: its own times, and between them groups of calls that run at once."""

    where: int
    stage: str
    waits: bool
    own_ns: tuple[int, ...]
    groups: tuple[tuple[Call, ...], ...]


def calls(draw: random.Random, depth: int) -> Call:
    groups = tuple(
        tuple(calls(draw, depth - 1) for _ in range(draw.choice((1, 1, 2, 3, 6))))
        for _ in range(draw.randrange(3) if depth else 0)
    )
    own_ns = tuple(draw.randrange(1, 50 * MS) for _ in range(len(groups) + 1))
    waits = not groups and draw.random() < 0.3
    return Call(draw.randrange(5), draw.choice("abcde"), waits, own_ns, groups)


class Run:
    """Runs a program forwards. Of each group of calls, the last to end is on the path."""

    def __init__(self, without: str | None = None) -> None:
        self.spans: list[Span] = []
        self._without = without

    def run(self, call: Call, at_ns: int, parent: int | None, gone: bool = False) -> tuple[int, list[Known]]:
        gone = gone or call.stage == self._without
        index = len(self.spans)
        made = span(call.where, call.stage, at_ns, at_ns, parent=parent, waits=call.waits, thread=index)
        self.spans.append(made)
        path: list[Known] = []
        for own_ns, group in zip(call.own_ns, (*call.groups, ()), strict=True):
            kind = "wait" if call.waits else "work"
            at_ns += 0 if gone else own_ns
            path.append((call.where, call.stage, kind, own_ns))
            ran = [self.run(below, at_ns, index, gone) for below in group]
            if ran:
                at_ns, longest = max(ran, key=lambda one: one[0])
                path += longest
        self.spans[index].end_ns = at_ns
        return at_ns, path


@given(st.integers(0, 2**32), st.integers(0, 4))
def test_the_path_of_a_program_is_that_of_the_last_call_of_each_group(seed: int, depth: int) -> None:
    draw = random.Random(seed)
    program, run = calls(draw, depth)._replace(where=0), Run()
    end_ns, path = run.run(program, 3, None)
    timeline = step(end_ns + 2, run.spans)
    assume(not step_graph(timeline).meetings)  # of calls that end together by chance: one in some thousand
    outside: list[Known] = [(0, None, "not known", 3), (0, None, "not known", 2)]
    assert known(timeline) == [outside[0], *path, outside[1]]


@given(st.integers(0, 2**32), st.integers(0, 4))
def test_what_a_stage_saves_is_what_the_program_saves_without_it(seed: int, depth: int) -> None:
    program, run = calls(random.Random(seed), depth)._replace(where=0), Run()
    end_ns, _ = run.run(program, 3, None)
    graph = step_graph(step(end_ns + 2, run.spans))
    assume(not graph.meetings)
    replay = Replay(graph)
    for stage in "abcde":
        shorter_ns, _ = Run(without=stage).run(program, 3, None)
        assert replay.saves_ns([("r", stage)]) == end_ns - shorter_ns


numbers = st.integers(-50, 1050)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), numbers, numbers, st.integers(-1, 30), st.sampled_from("abc"),
            st.integers(0, 2), st.booleans(), st.sampled_from((None, "t1", "t2")),
        ),
        max_size=30,
    )
)  # fmt: skip
@example([(0, 0, 1001, 0, "a", 0, False, None)])
@example(  # a wait of a worker below a call of the owner that lies below the worker's call
    [
        (0, 0, 0, 4, "a", 0, False, None), (0, 0, 0, 0, "a", 0, False, None),
        (1, 0, 258, -1, "c", 0, False, "t2"), (0, 0, 2, -1, "a", 1, False, None),
        (0, 0, 0, 2, "a", 0, False, None), (1, 0, 293, 1, "c", 0, True, None),
    ]
)  # fmt: skip
def test_the_path_of_any_spans_adds_up_to_the_step(
    made: list[tuple[int, int, int, int, str, int, bool, str | None]],
) -> None:
    spans = [
        span(
            where, stage, start, max(start, end), thread=thread, waits=waits, trajectory=trajectory,
            parent=parent if 0 <= parent < len(made) and parent != index else None,
        )
        for index, (where, start, end, parent, stage, thread, waits, trajectory) in enumerate(made)
    ]  # fmt: skip
    for index in range(len(spans)):  # only damaged files have cycles, which reading cuts
        seen, at = set[int](), index
        while (parent := spans[at].parent) is not None:
            seen.add(at)
            if parent in seen:
                spans[at].parent = None
                break
            at = parent
    timeline = step(
        1000, spans, process("trainer", 0), process("actor", 0, uncertainty_ns=30, alignment="measured"),
        process("trainer", 1), process("actor", 1, alignment="unaligned"),
    )  # fmt: skip
    graph = step_graph(timeline)
    checked(graph)
    replay = Replay(graph)
    assert replay.saves_ns([]) == 0
    assert 0 <= replay.saves_ns([("r", "a")]) <= 1000


def _recorded(tmp_path: Path) -> list[Path]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return [path.parent for root in (DATA, tmp_path) for path in sorted(root.rglob("processes"))]


def test_the_path_of_every_recorded_step_adds_up(tmp_path: Path) -> None:
    steps = _recorded(tmp_path)
    assert len(steps) == 9
    for folder in steps:
        graph = step_graph(load_step(folder))
        labels = {(one.role, one.stage) for one in graph.spans}
        assert checked(graph)
        replay = Replay(graph)
        assert replay.saves_ns([]) == 0
        for label in labels:
            saves_ns = replay.saves_ns([label])
            assert 0 <= saves_ns <= graph.timeline.window.wall_ns


@given(
    st.lists(st.integers(100 * MS, 2000 * MS), min_size=2, max_size=4, unique=True),
    st.integers(300 * MS, 900 * MS),
)
def test_ranks_without_a_carrier_are_called_by_the_call_of_the_owner_around_them(
    took: list[int], other_ns: int
) -> None:
    """The last rank to end is what the driver waited for."""
    ends = [3 * MS + ns for ns in took]
    end_ns = max(ends) + 2 * MS
    spans = [
        span(0, "update", 0, end_ns),
        *(span(rank + 1, "update_actor", 3 * MS, end) for rank, end in enumerate(ends)),
        span(0, "save", end_ns, end_ns + other_ns),
    ]
    last = ends.index(max(ends))
    assert known(step(end_ns + other_ns, spans)) == [
        (0, "update", "work", 3 * MS),
        (last + 1, "update_actor", "work", took[last]),
        (0, "update", "work", 2 * MS),
        (0, "save", "work", other_ns),
    ]


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_ranks_that_end_together_waited_for_the_one_that_began_last(late: int) -> None:
    """The late rank ran another call first, in the thread that then ran the one for which all waited."""
    spans = [span(0, "update", 0, 1000 * MS)]
    spans += [
        span(rank + 1, "update_actor", (520 if rank == late else 5) * MS, (998 * MS) - rank, role="actor")
        for rank in range(4)
    ]
    spans.append(span(late + 1, "load_batch", 5 * MS, 519 * MS, role="actor"))
    spans.sort(key=lambda one: one.process)
    assert known(step(1000 * MS, spans)) == [
        (0, "update", "work", 5 * MS),
        (late + 1, "load_batch", "work", 514 * MS),
        (0, "update", "work", 1 * MS),
        (late + 1, "update_actor", "work", 998 * MS - 520 * MS),
        (0, "update", "work", 2 * MS),
    ]
    replay = Replay(step_graph(step(1000 * MS, spans)))
    assert replay.saves_ns([("actor", "load_batch")]) == 514 * MS
    assert replay.saves_ns([("actor", "update_actor")]) >= 478 * MS


def test_a_rank_whose_capture_ended_before_the_step_does_not_hold_it(tmp_path: Path) -> None:
    """Each rank opens its own capture. Rank 0 sends weights for 600 ms more than rank 1."""
    folder = StepFolder(tmp_path)
    for rank, sync_ms in enumerate((620, 20)):
        trainer = folder.process("trainer", rank, owner=True)
        trainer.span("update", 0, 100 * MS)
        trainer.span("sync_weights", 100 * MS, (100 + sync_ms) * MS)
        trainer.close((101 + sync_ms) * MS)
    replay = Replay(step_graph(load_step(folder.write())))
    assert replay.saves_ns([("trainer", "sync_weights")]) == 620 * MS


@pytest.mark.parametrize("together", [True, False])
def test_a_broadcast_of_weights_to_another_role_waited_for_the_sender(together: bool) -> None:
    """If the calls end apart, they are collectives of two groups with one name."""
    ends_ms = 900 if together else 700
    sends, receives = partial(span, role="actor"), partial(span, role="rollout")
    spans = [
        span(0, "sync", 0, 900 * MS),
        sends(1, "send_weights", 1 * MS, ends_ms * MS, parent=0),
        sends(1, "broadcast", 600 * MS, ends_ms * MS, parent=1, waits=True),
        receives(2, "broadcast", 1 * MS, 900 * MS, parent=0, waits=True),
    ]
    for one in (spans[2], spans[3]):
        one.attrs = {"group": "0", "sequence": 3}
    path = known(step(900 * MS, spans))
    assert ((1, "send_weights", "work", 599 * MS) in path) == together


class Case(NamedTuple):
    wall_ms: int
    spans: list[Span]
    path: str
    """Its pieces: the process, the stage, the kind unless it is work, and ms."""
    processes: tuple[Process, ...] = ()


def at(where: int, stage: str, start_ms: int, end_ms: int, **more: Any) -> Span:
    return span(where, stage, start_ms * MS, end_ms * MS, **more)


TRAINER = process("trainer", 0)
GENERATE = at(0, "generate", 0, 300)
PATHS: dict[str, Case] = {
    "a late rank of unknown reason is not known": Case(
        1000,
        [
            at(0, "update", 0, 1000), at(1, "update_actor", 5, 998, role="actor"),
            at(2, "update_actor", 520, 998, role="actor"),
        ],
        "0 update 5, 0 update not known 515, 2 update_actor 478, 0 update 2",
    ),
    "work beside others that nothing followed is no cause": Case(
        1000,
        [
            at(0, "update", 0, 1000), at(1, "update_actor", 5, 600, role="actor"),
            at(2, "health_check", 500, 700, role="monitor"),
        ],
        "0 update 5, 0 update not known 695, 0 update 300",
    ),
    "work of a later step is not waited for": Case(
        500, [at(0, "update", 0, 500), at(1, "trajectory", 5, 498, trajectory="t7", owner_step=7)],
        "0 update 500",
    ),
    "a call whose place is not known leaves its caller not known": Case(
        400, [GENERATE, at(1, "decode", 50, 250, parent=0), at(0, "save", 300, 400)],
        "0 generate not known 300, 0 save 100", (TRAINER, process("rollout", 0, alignment="unaligned")),
    ),
    "a reply that seems to come after its call ended is within the clocks' error": Case(
        300, [GENERATE, at(1, "decode", 10, 301, parent=0)], "0 generate 10, 1 decode 290",
        (TRAINER, process("rollout", 0, alignment="measured", uncertainty_ns=2 * MS)),
    ),
    "and is no reply of an exact clock": Case(
        300, [GENERATE, at(1, "decode", 10, 301, parent=0)], "0 generate 300",
        (TRAINER, process("rollout", 0)),
    ),
    "a thread of the owner that runs beside the steps is no cause": Case(
        400, [at(0, "update", 0, 300), at(0, "prefetch", 100, 390, thread=1), at(0, "save", 300, 400)],
        "0 update 300, 0 save 100",
    ),
    # Rollouts run ahead of the steps. The first one here began before the step, the last ends after it.
    **{
        f"a wait of the main thread leads to what another {what} did meanwhile": Case(
            900,
            [
                at(0, "trajectory", -100, 600, trajectory="t1", thread=thread),
                at(0, "generate", -100, 100, parent=0, trajectory="t1", thread=thread),
                at(0, "search", 100, 600, parent=0, trajectory="t1", thread=thread),
                *(
                    at(0, "trajectory", 600, end, trajectory="t2", thread=thread, owner_step=2)
                    for end in range(1100, 1108)
                ),
                at(0, "wait_batch", 0, 600, waits=True, thread=FIRST_PID),
                at(0, "update", 600, 900, thread=FIRST_PID),
            ],
            "0 generate 100, 0 search 500, 0 update 300",
        )
        for what, thread in (("task", FIRST_PID), ("thread", FIRST_PID + 1))
    },
    "a driver without spans waits for its workers": Case(
        545,
        [
            at(rank, stage, start, end + took * rank, role="actor")
            for rank in (1, 2)
            for stage, start, end, took in (("log_prob", 10, 200, 1), ("update", 250, 500, 20))
        ],
        "0 None not known 10, 2 log_prob 192, 0 None not known 48, 2 update 290, 0 None not known 5",
    ),
    # No rank calls another: rank 0 waits in `update` for rank 1, which read its data until then.
    "ranks of one program each with a capture meet in their stages": Case(
        900,
        [
            at(0, "load", 0, 50, role="trainer"), at(0, "update", 50, 900, role="trainer"),
            at(1, "load", 0, 600, role="trainer"), at(1, "update", 601, 900, role="trainer"),
        ],
        "1 load 600, 1 None not known 1, 1 update 299", (TRAINER, process("trainer", 1)),
    ),
    "requests without a carrier follow the turns of their trajectory": Case(
        1000,
        [
            at(0, "rollout", 0, 1000),
            *(
                at(1, "request", start, end, trajectory=name, role="rollout")
                for name, start, end in (("t1", 5, 350), ("t2", 12, 250), ("t2", 330, 990), ("t1", 400, 900))
            ),
        ],
        "0 rollout 12, 1 request 238, 0 rollout not known 80, 1 request 660, 0 rollout 10",
    ),
    "ranks that begin together wait for the last to end": Case(
        700,
        [
            at(0, "score", 0, 700), at(1, "log_prob", 1, 400, role="actor"),
            at(2, "log_prob", 2, 698, role="actor"),
        ],
        "0 score 2, 2 log_prob 696, 0 score 2",
    ),
    "a short call of a worker inside a long call of the owner is no cause": Case(
        500, [at(0, "rollout", 0, 500), at(1, "save", 0, 100, role="actor")],
        "0 rollout not known 100, 0 rollout 400",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_the_path_through_a_step_is_that_by_hand(name: str) -> None:
    case = PATHS[name]
    pieces = [
        f"{where} {stage} {'' if kind == 'work' else f'{kind} '}{ns / MS:g}"
        for where, stage, kind, ns in known(step(case.wall_ms * MS, case.spans, *case.processes))
    ]
    assert ", ".join(pieces) == case.path


# The critical path in a report: its table, its marks, and its track in a merged timeline.


def recorded(save_path: Path) -> Path:
    """A step of 3 s: a rollout whose last trajectory called a slow tool, and a weight sync that aborts."""
    folder = StepFolder(save_path)
    trainer, actor = folder.process("trainer", owner=True), folder.process("actor", 0)
    rollout = trainer.span("rollout", 0, 900 * MS, role="agent_loop")
    for name, took in (("t1", 300), ("t2", 890)):
        own = {"trajectory": name, "turn": 0}
        turn = trainer.span("turn", 1 * MS, took * MS, parent=rollout, role="agent_loop", **own)  # type: ignore[arg-type]
        trainer.span("generate", 1 * MS, 90 * MS, parent=turn, role="rollout", **own)  # type: ignore[arg-type]
        trainer.span("queue", 90 * MS, 100 * MS, parent=turn, role="env", **own)  # type: ignore[arg-type]
        trainer.span("search", 100 * MS, took * MS, parent=turn, role="env", **own)  # type: ignore[arg-type]
    sync = trainer.span("sync_weights", 900 * MS, 2950 * MS)
    actor.span("abort_requests", 910 * MS, 2910 * MS, link=trainer.link(sync))
    actor.span("send_weights", 2910 * MS, 2940 * MS, link=trainer.link(sync))
    for process in (trainer, actor):
        process.close(3000 * MS)
    return folder.write()


def path_of(tmp_path: Path) -> tuple[StepReport, CriticalPath]:
    report = step_report(load_step(recorded(tmp_path)))
    return report, report.critical_path


def test_a_weight_sync_has_the_time_of_the_calls_below_it_and_their_shares(tmp_path: Path) -> None:
    _, path = path_of(tmp_path)
    (sync,) = (row for row in path.stages if row.stage == "sync_weights")
    assert (sync.wall_ns, sync.inside_ns, sync.saves_ns) == (20 * MS, 2050 * MS, 2050 * MS)
    assert [(part.stage, part.wall_ns) for part in sync.parts] == [
        ("abort_requests", 2000 * MS),
        ("send_weights", 30 * MS),
    ]


def test_advice_on_a_weight_sync_counts_the_calls_below_it_and_begins_with_the_longest(
    tmp_path: Path,
) -> None:
    """No stage that moves weights runs while requests are aborted, so that leaves alone say 50 ms."""
    report, path = path_of(tmp_path)
    assert path.weights is not None
    assert (path.weights.wall_ns, path.weights.saves_ns) == (2050 * MS, 2050 * MS)
    (advice,) = (item for item in report.advice if item.rule == "weight-sync")
    assert advice.saves_ns == 2050 * MS
    assert "abort_requests 2.00 s" in advice.because[1]
    assert "abort_requests" in advice.do


def test_a_slow_tool_has_its_trajectory_and_what_the_next_one_lets_it_save(tmp_path: Path) -> None:
    _, path = path_of(tmp_path)
    (tool,) = (row for row in path.stages if row.stage == "search")
    assert (tool.wall_ns, tool.trajectory, tool.turn) == (790 * MS, "t2", 0)
    assert tool.saves_ns == 790 * MS  # the search of the other trajectory takes no time either
    (queue,) = (row for row in path.stages if row.stage == "queue")
    assert (queue.kind, queue.wall_ns, queue.process) == ("wait", 10 * MS, "trainer")


def test_terminal_page_and_json_show_it(tmp_path: Path) -> None:
    timeline = load_step(recorded(tmp_path))
    report = step_report(timeline)
    text = printed(report, 150)
    assert "Critical path" in text
    assert "env queue (waiting)" in text
    page = render_step(timeline, report)
    assert 'id="critical-path"' in page
    assert page.count("critical path: ") >= 4  # the marks above the processes
    assert page.index('data-t="critical path: ') < page.index('data-t="trainer: ')


def test_a_merged_timeline_has_a_track_of_it(tmp_path: Path) -> None:
    step = recorded(tmp_path)
    merge_step(step)
    events = timeline_of(step)["traceEvents"]
    drawn = [event for event in events if event.get("cat") == "critical path"]
    names = [event["name"].partition(" ")[2] for event in drawn]
    assert names == ["rollout", "generate", "queue", "search", "rollout", "sync_weights", "abort_requests",
                     "send_weights", "sync_weights"]  # fmt: skip
    assert len({(event["pid"], event["tid"]) for event in drawn}) == 1
    assert sum(event["dur"] for event in drawn) == 2_950_000
    assert next(event["args"]["kind"] for event in drawn if event["name"] == "env queue") == "wait"
