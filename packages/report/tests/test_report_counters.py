"""Counters in the report, in advice and in the merged timeline, of steps whose counters are known."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, printed, some
from stepscope.files.counters import (
    EVENT_LOOP,
    GC,
    GPU,
    KV_CACHE,
    PREEMPTIONS,
    RUNNING_REQUESTS,
    WAITING_REQUESTS,
)
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report import CounterRow, StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import Selection, load_step, merge_step

S = 1000 * MS


class Case:
    """A step of 10 s with a trainer and an actor on another host, 5 ms ahead."""

    def __init__(self, root: Path) -> None:
        self.folder = StepFolder(root)
        self.trainer = self.folder.process("trainer", owner=True)
        self.actor = self.folder.process("actor", 0, host="host-b", skew_ns=5 * MS)
        self.trainer.measures(self.actor, 0)
        self.trainer.span("rollout", 0, 9 * S)

    def write(self) -> Path:
        for process in self.folder.processes:
            process.close(10 * S)
        return self.folder.write()

    def report(self) -> StepReport:
        return step_report(load_step(self.write()))

    def rows(self) -> list[CounterRow]:
        counters = some(self.report().counters)
        return list(counters.rows)

    def advice(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {advice.rule: (advice.what, advice.because) for advice in self.report().advice}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_mean_is_over_time(case: Case) -> None:
    case.actor.counter("process CPU", {0: 0.0, 1 * S: 100.0, 4 * S: 20.0}, unit="%", kind="interval")
    (row,) = case.rows()
    assert (row.process, row.host, row.samples) == ("actor 0", "host-b", 3)
    assert (row.least, row.mean, row.most) == (0.0, 40.0, 100.0), "100 for 1 s, 20 for 3 s"
    assert row.covered_ns == 4 * S


def test_values_outside_of_the_step_do_not_count(case: Case) -> None:
    case.trainer.counter("process memory", {-2 * S: 9.0, -1 * S: 8.0, 5 * S: 1.0, 15 * S: 4.0}, unit="B")
    (row,) = case.rows()
    assert (row.samples, row.least, row.most) == (2, 1.0, 4.0)
    assert row.mean == pytest.approx((5 * 1 + 5 * 4) / 10)  # the rest of the step is that of the next sample


def test_a_total_grows_from_its_last_value_before_the_step(case: Case) -> None:
    case.trainer.counter("generation tokens", {-S: 900.0, -MS: 1000.0, 9 * S: 1700.0}, kind="total")
    (row,) = case.rows()
    assert (row.samples, row.increase) == (1, 700)


def test_a_host_without_a_free_core_is_told_with_what_the_step_had_of_it(case: Case) -> None:
    for process in (case.trainer, case.actor):
        process.counter("process CPU", {0: 0.0, 10 * S: 45.0}, unit="%", kind="interval")
    case.actor.counter("host CPU", {0: 0.0, 10 * S: 97.0}, unit="%", kind="interval", scope="host")
    report = case.report()
    said = "All cores of host-b were busy (97 %), and 1 process of the step used 0.45 of them."
    assert said in printed(report, 150)
    assert said in render_step(load_step(case.write()), report)


def test_a_step_without_counters_has_no_section(case: Case) -> None:
    report = case.report()
    assert report.counters is None
    assert "Counters" not in printed(report, 150)
    assert 'id="counters"' not in render_step(load_step(case.write()), report)


def test_terminal_and_page_show_the_same_numbers(case: Case) -> None:
    case.actor.counter("process memory", {0: 1e9, S: 2.5e9}, unit="B")
    case.trainer.counter(GPU, {0: 0, S: 41.5}, of="GPU 3", unit="%", kind="interval", scope="host")
    report = case.report()
    text, page = printed(report, 150), render_step(load_step(case.write()), report)
    for words in ("actor 0", "2.5 GB", "GPU 3 of host-a", "41.5 %"):
        assert words in text
        assert words in page
    assert page.count('class="fall curve"') == 2


def test_a_bar_stands_where_the_value_was_sampled(case: Case) -> None:
    case.trainer.counter(GPU, {5 * S: 0, 6 * S: 50}, of="GPU 0", unit="%", kind="interval", scope="host")
    page = render_step(load_step(case.write()), case.report())
    chart = page.partition('class="fall curve"')[2].partition("</td>")[0]
    assert chart.count("<i ") == 12, "a tenth of 120 bars"
    assert "left:50%" in chart
    assert "left:60%" not in chart


def test_of_many_rows_the_terminal_shows_the_highest_of_each(case: Case) -> None:
    for rank in range(1, 20):
        case.folder.process("actor", rank).counter("process CPU", {0: 0.0, S: float(rank)}, unit="%")
    text = printed(case.report(), 150)
    assert "actor 19" in text.partition("Counters")[2]
    assert "Of 19 rows" in text


@pytest.mark.parametrize("late_ms", [300, 100])
def test_a_late_event_loop_is_named_with_its_thread(case: Case, late_ms: float) -> None:
    """A loop that is late by 100 ms is no news."""
    late = {0: 0, S: late_ms, 2 * S: 0}
    case.trainer.counter(EVENT_LOOP, late, of="MainThread", unit="ms", kind="interval")
    advice = case.advice()
    assert ("late-event-loop" in advice) == (late_ms == 300)
    if late_ms == 300:
        what, because = advice["late-event-loop"]
        assert what.startswith("something ")
        assert what.endswith(" trainer")
        assert re.search("MainThread .* 300 ms$", because[0])


def block(process: FakeProcess, start_ms: int, end_ms: int) -> None:
    """Sample an event loop at 10 Hz, as the recorder does, that did not run from `start_ms` to `end_ms`."""
    values, sent_ms = {}, None
    for at_ms in range(0, 10_000, 100):
        late_ms = 0 if sent_ms is None else min(at_ms, end_ms) - sent_ms
        values[at_ms * MS] = float(late_ms)
        sent_ms = (sent_ms or at_ms) if start_ms <= at_ms < end_ms else None
    process.counter(EVENT_LOOP, values, of="AsyncIO Thread: default", unit="ms", kind="interval")


def test_a_call_that_has_the_event_loop_for_itself_blocks_nothing(case: Case) -> None:
    case.trainer.span("update_actor", 2000 * MS, 2990 * MS)
    case.actor.span("compute_log_prob", 1500 * MS, 1900 * MS)
    around = case.actor.span("update_actor", 2010 * MS, 2980 * MS)
    case.actor.span("optimizer", 2900 * MS, 2970 * MS, parent=around)
    case.actor.span("sync_weights", 3000 * MS, 3100 * MS)
    block(case.actor, 2010, 2980)
    assert "late-event-loop" not in case.advice()
    counters = some(case.report().counters)
    assert [row.most for row in counters.rows] == [880.0]


def test_a_call_that_blocks_the_event_loop_of_others_is_named(case: Case) -> None:
    agents = case.folder.process("agent_loop", 0)
    for number in range(3):
        around = agents.span("trajectory", 0, (8000 + number) * MS, role="agent_loop")
        agents.span("turn", 100 * MS, 2000 * MS, role="agent_loop", parent=around)
        if number == 1:
            agents.span("add", 2100 * MS, 4050 * MS, role="env", parent=around)
    block(agents, 2100, 4050)
    what, because = case.advice()["late-event-loop"]
    assert what.startswith("env add ")
    assert what.endswith(" agent_loop 0")
    assert because[0].endswith("waited for 1.95 s")


@pytest.mark.parametrize(("start_ms", "end_ms"), [(2010, 9000), (2500, 2980)])
def test_a_block_that_no_call_explains_is_told(case: Case, start_ms: int, end_ms: int) -> None:
    case.actor.span("generate", start_ms * MS, end_ms * MS)
    block(case.actor, 2010, 2980)
    assert re.search("^something .* actor 0$", case.advice()["late-event-loop"][0])


def test_the_collectors_time_is_added_up(case: Case) -> None:
    case.actor.counter(GC, {0: 0, 5 * S: 10, 10 * S: 2}, unit="%", kind="interval")
    what, because = case.advice()["garbage-collection"]
    assert what.endswith(" actor 0")
    assert case.report().cause is None  # nothing is known to have waited for actor 0
    assert because[0].startswith("600 ms, 6.0 % "), "500 ms and 100 ms"


@pytest.mark.parametrize("tools", [True, False])
def test_a_device_at_0_percent_while_tools_ran_is_named(case: Case, tools: bool) -> None:
    if tools:
        case.trainer.span("tool", 2 * S, 5 * S, role="env")
        case.trainer.span("tool", 4 * S, 6 * S, role="env")
    values = {0: 50.0, 1 * S: 50.0, 3 * S: 0.0, 8 * S: 0.0, 9 * S: 60.0}
    case.trainer.counter(GPU, values, of="GPU 3", unit="%", kind="interval", scope="host")
    advice = case.advice()
    assert ("idle-while-tools-run" in advice) is tools
    if tools:
        what, because = advice["idle-while-tools-run"]
        assert what.startswith("GPU 3 of host-a ")
        assert re.search("^4.00 s, 40.0 % .* 7.00 s at 0 %$", because[0])


@pytest.mark.parametrize(("cache", "preempted", "speaks"), [(99, 7, True), (99, 0, False), (80, 3, False)])
def test_a_full_kv_cache_with_preemptions_is_named(
    case: Case, cache: float, preempted: float, speaks: bool
) -> None:
    case.actor.counter(KV_CACHE, {0: 10, S: cache}, of="replica 0", unit="%")
    case.actor.counter(PREEMPTIONS, {0: 2, S: 2 + preempted}, of="replica 0", kind="total")
    advice = case.advice()
    assert ("full-kv-cache" in advice) is speaks
    if speaks:
        what, because = advice["full-kv-cache"]
        assert "replica 0 is full" in what
        assert [re.findall(r"\d+", why) for why in because] == [["99"], ["7"]]


def events(step: Path, selection: Selection | None = None) -> list[tuple[str, int, float, float]]:
    """Return (name, pid, ms after the opening, value) of the counters of a merged timeline."""
    to = step / "merged.json.gz"
    merged = merge_step(step, to=to, selection=selection or Selection())
    content = json.loads(gzip.decompress(to.read_bytes()))
    drawn = [event for event in content["traceEvents"] if event["ph"] == "C"]
    assert merged.counters == len(drawn)
    opened_us = (OPENED_NS - content["baseTimeNanoseconds"]) / 1000
    return [
        (event["name"], event["pid"], round((event["ts"] - opened_us) / 1000), event["args"]["value"])
        for event in drawn
    ]


def test_counters_are_tracks_of_their_process_on_the_owners_clock(case: Case) -> None:
    case.actor.counter("process memory", {S: 7.0, 2 * S: 7.0, 3 * S: 9.0}, unit="B")
    case.trainer.counter(GPU, {S: 0, 2 * S: 50}, of="GPU 3", unit="%", kind="interval", scope="host")
    assert events(case.write()) == [
        ("GPU 3: GPU utilisation [%]", 1000, 1000, 50),
        ("process memory [B]", 1001, 1000, 7.0),
        ("process memory [B]", 1001, 3000, 9.0),
    ]


def test_a_selection_narrows_the_counters(case: Case) -> None:
    case.actor.counter("process memory", {S: 7.0, 3 * S: 9.0}, unit="B")
    case.trainer.counter("process memory", {S: 1.0, 3 * S: 2.0}, unit="B")
    drawn = events(case.write(), Selection(roles=("actor",), from_ms=2000))
    assert drawn == [("process memory [B]", 1001, 3000, 9.0)]


def test_a_damaged_file_is_named_and_the_rest_is_read(case: Case) -> None:
    case.actor.counter("process memory", {S: 7.0, 3 * S: 9.0}, unit="B")
    step = case.write()
    path = case.actor.counter_path
    path.write_bytes(path.read_bytes().replace(b'"values":{"0":7.0}', b'"values":7') + b'{"kind":"sam')
    timeline = load_step(step)
    assert [counter.values for counter in timeline.counters] == [(9.0,)]
    problems = {problem.what: problem.lines for problem in timeline.problems}
    assert {what.split()[0]: count for what, count in problems.items()} == {
        "lines": 1, "last": 1, "samples": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("waiting", "used", "spans", "speaks"),
    [
        (6.0, 40.0, False, True), (6.0, 99.0, False, False), (0.5, 40.0, False, False),
        (6.0, 40.0, True, False),  # a queue that spans show to be short
    ],
)  # fmt: skip
def test_requests_that_wait_beside_a_cache_with_room_are_named(
    case: Case, waiting: float, used: float, spans: bool, speaks: bool
) -> None:
    if spans:
        case.trainer.span("queue", 0, S // 100, role="rollout")
    for name, value in ((WAITING_REQUESTS, waiting), (RUNNING_REQUESTS, 2.0), (KV_CACHE, used)):
        case.actor.counter(name, {0: value, 9 * S: value}, of="replica 0")
    advice = case.advice()
    assert ("queueing" in advice) is speaks
    if speaks:
        waited, cache = advice["queueing"][1]
        assert re.search("replica 0: 6.0 .* 2.0 ran", waited)
        assert "to 40 % at most" in cache
