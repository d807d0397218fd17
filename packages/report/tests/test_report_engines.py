"""The table of engines, against what the engines counted themselves.

`recorded_engines` holds steps of vLLM 0.32.0 and SGLang 0.5.23 on a CPU: two data-parallel engines, and two
tensor-parallel workers. Their traces are cut to the annotations of passes. Expected values are not ours: they
come from a `StatLogger` of vLLM's, from SGLang's `forward_ct`, and from the answers themselves.

One file above 400 lines: all of it reads one table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.steps import MS, printed
from packages.report.tests.test_report_stalls import expect
from packages.report.tests.test_report_stalls import recorded as written
from packages.report.tests.traces import add_trace, event
from stepscope.files.manifest import Expectation
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report import Engine, StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import load_step, load_traces

RECORDED = Path(__file__).with_name("recorded_engines")


def report_of(step: Path) -> StepReport:
    timeline = load_step(step)
    return step_report(timeline, load_traces(step, timeline))


def recorded(name: str) -> Engine:
    (row,) = report_of(RECORDED / name).engines
    assert row.replica == "replica 0"
    return row


@pytest.mark.parametrize(
    ("name", "by_engine"),
    [
        ("vllm-dp/step_000001", (24, 26)),
        ("vllm-dp/step_000003", (0, 6)),  # one request
        ("vllm-tp/step_000005", (54,)),  # each worker recorded all of them
        ("sglang-dp/step_000001", (24, 27)),
    ],
)
def test_iterations_are_those_that_the_engine_counted(name: str, by_engine: tuple[int, ...]) -> None:
    row = recorded(name)
    assert (row.iterations, row.iterations_by_engine) == (sum(by_engine), by_engine)


@pytest.mark.parametrize(
    ("name", "by_engine"), [("sglang-dp/step_000003", (6, 6)), ("sglang-tp/step_000003", (5,))]
)
def test_the_files_of_two_stages_are_one_recording(name: str, by_engine: tuple[int, ...]) -> None:
    row = recorded(name)
    assert row.iterations_by_engine == by_engine
    assert min(row.prefill_ns, row.decode_ns) > 0


@pytest.mark.parametrize(
    ("name", "prompt", "cached", "output", "preemptions"),
    [
        ("vllm-dp/step_000001", 234, 0, 129, 0),
        ("vllm-tp/step_000005", 282, 0, 156, 4),
        ("sglang-dp/step_000001", 234, 100, 129, 0),
        ("sglang-dp/step_000003", 234, 224, 129, 0),
        ("sglang-tp/step_000003", 234, 224, 129, 0),
    ],
)
def test_tokens_are_those_that_the_engine_counted(
    name: str, prompt: int, cached: int, output: int, preemptions: int
) -> None:
    row = recorded(name)
    assert (row.prompt_tokens, row.cached_tokens) == (prompt, cached)
    assert (row.output_tokens, row.preemptions) == (output, preemptions)


@pytest.mark.parametrize(("name", "most"), [("vllm-tp/step_000005", 4), ("vllm-dp/step_000003", 1)])
def test_the_most_that_ran_at_once_is_what_the_scheduler_said(name: str, most: int) -> None:
    assert recorded(name).running_most == most


@pytest.mark.parametrize("step", sorted(RECORDED.glob("*/step_*")), ids=lambda step: step.parent.name)
def test_the_times_of_a_row_add_up(step: Path) -> None:
    for row in report_of(step).engines:
        unknown = (row.held_ns, row.paused_ns, row.writing_ns, row.idle_ns)
        times = (row.prefill_ns, row.decode_ns, row.mixed_ns, *(ns or 0 for ns in unknown))
        assert sum(times) == row.recorded_ns <= row.window_ns


def test_an_engine_without_a_request_has_a_row_that_says_idle() -> None:
    row = recorded("vllm-dp/step_000004")
    assert (row.iterations, row.iterations_by_engine, row.is_idle) == (0, (0, 0), True)
    assert row.output_tokens == 0  # by its own counters
    assert (row.held_ns, row.running_most, row.waiting_most) == (0, None, None)
    report = report_of(RECORDED / "vllm-dp" / "step_000004")
    assert "replica 0 0 (idle)" in " ".join(printed(report).split())
    page = render_step(load_step(RECORDED / "vllm-dp" / "step_000004"), report)
    assert 'id="engine-load"' not in page  # nothing to draw
    assert "Height: requests" not in page


def test_terminal_page_and_json_show_the_same_rows() -> None:
    path = RECORDED / "vllm-tp" / "step_000005"
    report = report_of(path)
    (row,) = msgspec.to_builtins(report)["engines"]
    shown = (printed(report), render_step(load_step(path), report))
    for word in ("replica 0", f"{row['iterations']}", f"{row['output_tokens']}", "held up", "preempted"):
        assert all(word in text for text in shown)


class Rollout:
    """Engines of a step that lasts 100 ms."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = StepFolder(tmp_path)
        self.driver = self.folder.process("trainer", owner=True)

    def record(
        self, replica: int, passes: list[Any], *, pid: int = 7, until_ms: int = 100, **more: Any
    ) -> None:
        """Add a recording from 0 on by a worker of an engine."""
        worker = StepFolder(self.folder.layout.root).process("rollout", pid=pid)
        session = event("PyTorch Profiler (0)", "Trace", 0, 1000 * until_ms)
        name = f"replica{replica}"
        add_trace(self.folder, worker, [session, *passes], name=name, replica=replica, **more)

    def request(self, start_ms: int, end_ms: int, **attrs: Any) -> None:
        """A request that is queued and read for 1 ms each, as `record_request` says it."""
        call = self.driver.span(
            "generate", start_ms * MS, end_ms * MS, role="rollout", attrs={"request_id": "r", **attrs}
        )
        edges = (start_ms, start_ms + 1, start_ms + 2, end_ms)
        for stage, begin, end in zip(("queue", "prefill", "decode"), edges, edges[1:], strict=False):
            self.driver.span(stage, begin * MS, end * MS, role="rollout", parent=call)

    def report(self) -> StepReport:
        for process in self.folder.processes:
            process.close(100 * MS)
        return report_of(self.folder.write())

    def rows(self) -> dict[str, Engine]:
        rows = self.report().engines
        assert len({row.replica for row in rows}) == len(rows)
        return {row.replica: row for row in rows}


def decode(start_ms: float, dur_ms: float, requests: int = 1) -> Any:
    name = f"execute_context_0(0)_generation_{requests}({requests})"
    return event(name, "user_annotation", 1000 * start_ms, 1000 * dur_ms)


def test_time_without_a_pass_and_with_requests_is_held_up(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10), decode(50, 5)])
    rollout.request(0, 20)
    rollout.request(49, 55)
    (row,) = rollout.rows().values()
    assert (row.window_ns, row.decode_ns, row.held_ns) == (55 * MS, 15 * MS, 11 * MS)
    assert row.idle_ns == 29 * MS  # no request


def test_requests_of_several_servers_are_told_apart_where_they_name_theirs(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10)], pid=7)
    rollout.record(1, [decode(2, 10)], pid=8)
    rollout.request(0, 20, output_tokens=3, replica=0)
    rollout.request(0, 20, output_tokens=4, replica=1)
    rollout.request(0, 20, output_tokens=5)
    rows = rollout.rows()
    assert [(name, row.output_tokens) for name, row in rows.items()] == [
        ("replica 0", 3),
        ("replica 1", 4),
        ("requests of trainer", 5),
    ]


def test_an_engine_in_an_actor_is_one_row_with_its_process(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    for replica in (1, 0):
        actor = rollout.folder.process("rollout", replica, replica=replica)
        actor.span("decode", 10 * MS, 30 * MS)
        rollout.record(replica, [decode(10, 5)], pid=70 + replica)
    rows = rollout.rows()
    assert [(row.replica, row.processes) for row in rows.values()] == [
        ("replica 0", ("rollout 0",)),
        ("replica 1", ("rollout 1",)),
    ]
    assert {row.held_ns for row in rows.values()} == {15 * MS}


def test_workers_of_one_rank_in_two_worlds_are_two_engines(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    world: dict[str, Any] = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1}}
    rollout.record(0, [decode(2, 10), decode(20, 10)], pid=7, **world)
    rollout.record(0, [decode(4, 10)], pid=8, **world)
    (row,) = rollout.rows().values()
    assert (row.iterations, row.iterations_by_engine, row.running_most) == (3, (2, 1), 2)


def test_a_pause_lasts_until_the_engine_is_resumed(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10), decode(60, 10)])
    rollout.request(0, 70)
    rollout.driver.span("pause_generation", 14 * MS, 15 * MS, role="rollout")
    rollout.driver.span("resume_generation", 50 * MS, 52 * MS, role="rollout")
    (row,) = rollout.rows().values()
    assert (row.paused_ns, row.held_ns, row.writing_ns) == (38 * MS, 12 * MS, None)


def test_an_engine_that_writes_behind_its_recording_is_not_out_of_sight(tmp_path: Path) -> None:
    """Its recording ended with the second pass; 30 ms of the step went into the file."""
    rollout = Rollout(tmp_path)
    rollout.request(0, 60)
    rollout.record(0, [decode(2, 4), decode(6, 4)], until_ms=10)
    expect(rollout.driver, 0, written(rollout.driver, 0, (10, 40)))
    (row,) = rollout.rows().values()
    assert (row.decode_ns, row.held_ns, row.writing_ns) == (8 * MS, 2 * MS, 30 * MS)
    assert (row.recorded_ns, row.window_ns) == (40 * MS, 60 * MS)


def test_an_engine_that_was_idle_and_left_no_file_has_a_row(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10)])
    rollout.driver.expected = [
        Expectation(name=f"replica {number}", kind="engine", state="ok", idle=number == 1)
        for number in (0, 1)
    ]
    rollout.driver.counter("unfinished requests", {0: 0, 5 * MS: 0}, of="replica 1")
    rows = rollout.rows()
    assert [(row.replica, row.iterations, row.is_idle) for row in rows.values()] == [
        ("replica 0", 1, False),
        ("replica 1", 0, True),
    ]


@pytest.mark.parametrize("counted", [True, False])
def test_an_engine_that_holds_a_request_and_runs_no_pass_is_not_idle(tmp_path: Path, counted: bool) -> None:
    """Its scheduler hangs and knows of none: its front end counts those that it has not answered. Whether
    an engine that ran nothing was idle is not known if nothing counts its requests."""
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 90)])
    rollout.driver.expected = [Expectation(name="replica 1", kind="engine", state="ok", idle=True)]
    if counted:
        for name, last in (("unfinished requests", 1), ("running requests", 0)):
            rollout.driver.counter(name, {0: 0, 22 * MS: 0, 42 * MS: last}, of="replica 1")
    report = rollout.report()
    row = {row.replica: row for row in report.engines}["replica 1"]
    assert (row.iterations, row.is_idle) == (0, False)
    assert (row.held_ns, row.idle_ns) == ((70 * MS, 20 * MS) if counted else (None, None))
    assert row.window_ns == 90 * MS
    assert "0 (idle)" not in printed(report)


def test_an_idle_engine_that_writes_is_called_idle(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 90)])
    expect(rollout.driver, 1, written(rollout.driver, 1, (20, 50)), idle=True)
    for name in ("running requests", "waiting requests"):
        rollout.driver.counter(name, {0: 0}, of="replica 1")
    row = rollout.rows()["replica 1"]
    assert (row.iterations, row.writing_ns, row.is_idle) == (0, 30 * MS, True)


def test_a_short_recording_by_stage_says_nothing_of_prompts_against_tokens() -> None:
    """SGLang recorded as many passes of each stage, a fifth of the rollout. Prefill was 4 % of the step."""
    report = report_of(RECORDED / "sglang-dp" / "step_000003")
    (row,) = report.engines
    assert row.prefill_ns * 4 > row.recorded_ns
    assert "prefill-alone" not in {advice.rule for advice in report.advice}


def test_names_of_replicas_are_not_broken_on_100_columns(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    attrs: dict[str, AttrValue] = {
        "request_id": "r", "prompt_tokens": 104_857, "output_tokens": 12_345, "cached_tokens": 9,
        "preemptions": 1,
    }  # fmt: skip
    for number in (0, 1):
        replica = rollout.folder.process("rollout", number, replica=number)
        for count in range(12):
            above = replica.span("generate", count * MS, 99 * MS, attrs=attrs)
            replica.span("queue", count * MS, 50 * MS, parent=above)
            replica.span("decode", 50 * MS, 99 * MS, parent=above)
    lines = [line.split()[:2] for line in printed(rollout.report()).splitlines()]
    assert lines.count(["replica", "0"]) == 2


def test_a_replica_that_a_profiler_slowed_is_marked_where_it_did_not_record_all(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10)])
    rollout.folder.process("rollout", 1, replica=1).span("decode", 2 * MS, 9 * MS)
    rollout.rows()
    text = printed(report_of(rollout.folder.layout.root))
    assert "replica 0* " in text
    assert "replica 1 " in text


def test_what_nothing_says_is_unknown_and_not_zero(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10, requests=3)])
    (row,) = rollout.rows().values()
    unknown = (
        "held_ns", "paused_ns", "writing_ns", "requests", "prompt_tokens", "cached_tokens", "output_tokens",
        "output_tokens_per_s", "preemptions", "waiting_mean", "waiting_most",
    )  # fmt: skip
    assert {getattr(row, name) for name in unknown} == {None}
    assert (row.running_mean, row.running_most) == (3, 3)


def test_a_request_that_stands_around_others_is_counted_once(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    rollout.record(0, [decode(2, 10)])
    attrs: dict[str, AttrValue] = {"request_id": "r", "output_tokens": 4}
    outer = rollout.driver.span("generate", 0, 20 * MS, role="rollout", attrs=attrs)
    rollout.driver.span("request", 1 * MS, 20 * MS, role="rollout", parent=outer, attrs=attrs)
    (row,) = rollout.rows().values()
    assert (row.requests, row.output_tokens) == (1, 4)


def test_counters_that_two_engines_share_say_nothing_of_one(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path)
    options = {"generation_tokens_at_start": 10.0, "generation_tokens_at_stop": 17.0}
    rollout.record(0, [decode(2, 10)], pid=7, options=options)
    rollout.record(1, [decode(2, 10)], pid=8, options=options)
    assert [row.output_tokens for row in rollout.rows().values()] == [None, None]


_stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3)), max_size=6)


@pytest.mark.slow
@given(reads=_stretches, writes=_stretches, requests=_stretches, pauses=_stretches)
def test_each_instant_of_a_replica_counts_once(
    tmp_path_factory: pytest.TempPathFactory,
    reads: list[tuple[int, int, int]],
    writes: list[tuple[int, int, int]],
    requests: list[tuple[int, int, int]],
    pauses: list[tuple[int, int, int]],
) -> None:
    rollout = Rollout(tmp_path_factory.mktemp("step"))
    passes = [decode(start, ms, count) for start, ms, count in writes]
    for start, ms, count in reads:
        name = f"execute_context_{count}(9)_generation_0(0)"
        passes.append(event(name, "user_annotation", 1000 * start, 1000 * ms))
    rollout.record(0, [decode(0, 1), decode(59, 1), *passes])
    for start, ms, _ in requests:
        rollout.driver.span("decode", start * MS, (start + ms) * MS, role="rollout")
    for start, ms, _ in pauses:
        rollout.driver.span("load_weights", start * MS, (start + ms) * MS, role="rollout")
    (row,) = rollout.rows().values()

    def runs(stretches: list[tuple[int, int, int]], ms: int) -> bool:
        return any(start <= ms < start + length for start, length, _ in stretches)

    spent = dict.fromkeys(("prefill", "decode", "mixed", "held", "paused", "idle"), 0)
    for ms in range(60):
        reading, writing = runs(reads, ms), runs([*writes, (0, 1, 1), (59, 1, 1)], ms)
        if reading or writing:
            spent["mixed" if reading and writing else "prefill" if reading else "decode"] += MS
        elif runs(pauses, ms):
            spent["paused"] += MS
        else:
            spent["held" if runs(requests, ms) else "idle"] += MS
    measured = {"prefill": row.prefill_ns, "decode": row.decode_ns, "mixed": row.mixed_ns}
    assert measured == {name: spent[name] for name in measured}
    if requests:
        assert (row.held_ns, row.idle_ns) == (spent["held"], spent["idle"])
    assert (row.paused_ns or 0) == spent["paused"]


# Queues of replicas in the table of engines: two of four requests wait, and the table says so or nothing.


def slots(folder: StepFolder, *, named: tuple[str, ...], replicas: int = 2, calling: bool = False) -> None:
    """On each replica four requests at 0, of 10 + 40 ms, in two slots. So two of them wait for 50 ms."""
    for number in range(replicas):
        process = folder.process("agent_loop" if calling else "rollout", number)
        process.span("load_weights", 0, 5 * MS, role="rollout")
        for request in range(4):
            edges = (0, 50 * (request // 2), 50 * (request // 2) + 10, 50 * (request // 2) + 50)
            for stage, begin, end in zip(("queue", "prefill", "decode"), edges, edges[1:], strict=False):
                attrs: dict[str, AttrValue] = {"replica": number} if stage in named else {}
                process.span(stage, begin * MS, end * MS, role="rollout", attrs=attrs)


@pytest.mark.parametrize("named", [(), ("prefill", "decode"), ("queue", "prefill", "decode")])
def test_a_process_that_names_its_phases_is_one_row_with_its_queue(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    """Two of four requests wait for half of the time, whether or not their spans name the replica too."""
    rollout = Rollout(tmp_path)
    slots(rollout.folder, named=named)
    rows = rollout.rows()
    assert [row.processes for row in rows.values()] == [("rollout 0",), ("rollout 1",)]
    assert [(row.waiting_mean, row.waiting_most) for row in rows.values()] == [(1.0, 2)] * 2
    assert report_of(rollout.folder.layout.root).phaseless == ()


def test_queues_of_an_unknown_replica_are_not_called_empty(tmp_path: Path) -> None:
    """A caller of two replicas: its queues, which name none, stand in no row."""
    rollout = Rollout(tmp_path)
    slots(rollout.folder, named=("prefill", "decode"), calling=True)
    rows = rollout.rows()
    assert list(rows) == ["replica 0", "replica 1"]
    assert [(row.waiting_mean, row.waiting_most) for row in rows.values()] == [(None, None)] * 2
