"""Steps of which every position is known: merge and report recover them within what they state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.known import Clock, Known, KnownStep, some_clocks
from packages.report.tests.steps import MS, some, timeline_of
from stepscope.testing.steps import OPENED_NS
from stepscope_report.sections.breakdown import step_breakdown
from stepscope_report.sections.health import clock, clock_notes, step_health
from stepscope_report.timeline import Timeline, load_step, merge_step

S = 1_000 * MS
ROUNDED_NS = 3
SEEDS = range(8)


def known(seed: int, *, measured: bool = True, numbered: bool = True) -> KnownStep:
    """20 s, or 5 minutes."""
    lasted_ns = 300 * S if seed % 2 else 20 * S
    clocks = tuple(some_clocks(seed, measured=measured))
    return KnownStep(seed, clocks, lasted_ns=lasted_ns, numbered=numbered)


def check_spans(timeline: Timeline, truth: list[Known]) -> None:
    """Assert the starts, durations and owners of spans."""
    order = [process.info.key for process in timeline.processes]
    for span, true in zip(
        timeline.spans, sorted(truth, key=lambda one: order.index(one.process)), strict=True
    ):
        process = timeline.processes[span.process]
        assert (process.info.key, span.stage) == (true.process, true.name)
        within_ns = process.clock.uncertainty_ns
        assert within_ns is not None, process.clock.note
        assert span.end_ns is not None
        assert abs(span.start_ns - OPENED_NS - true.start_ns) <= within_ns + ROUNDED_NS, process.clock
        assert abs(span.end_ns - OPENED_NS - true.end_ns) <= within_ns + ROUNDED_NS, process.clock


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "counted"])
def test_every_span_is_where_it_was_within_the_stated_uncertainty(
    tmp_path: Path, seed: int, numbered: bool
) -> None:
    step = known(seed, numbered=numbered)
    timeline = load_step(step.write(tmp_path))
    check_spans(timeline, step.spans)
    alignments = [process.clock.alignment for process in timeline.processes if process.info.host != "host-0"]
    assert set(alignments) <= {"collectives", "measured"}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_is_where_it_was_within_the_stated_uncertainty(tmp_path: Path, seed: int) -> None:
    step = known(seed)
    path = step.write(tmp_path)
    merged = merge_step(path)
    written = timeline_of(path)
    truth = {event.name: event for event in step.events}
    within_ns = {row.pid: row.uncertainty_ns for row in merged.rows}
    kernels = [event for event in written["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) > 600
    for event in kernels:
        true = truth[event["name"]]
        start_ns = int(event["ts"] * 1000) + written["baseTimeNanoseconds"] - OPENED_NS
        allowed_ns = some(within_ns[event["pid"]])
        assert abs(start_ns - true.start_ns) <= allowed_ns + ROUNDED_NS


@pytest.mark.parametrize("seed", SEEDS)
def test_every_percentage_is_that_of_a_perfect_clock(tmp_path: Path, seed: int) -> None:
    step = known(seed)
    measured = step_breakdown(load_step(step.write(tmp_path / "skewed")))
    true = step_breakdown(load_step(step.write(tmp_path / "perfect", perfect=True)))
    shares = [
        {(line.kind, line.role, line.stage): 100 * line.wall_ns / account.window_ns for line in account.lines}
        for account in (measured, true)
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_know_more_than_slow_samples(tmp_path: Path, seed: int) -> None:
    step = known(seed)
    clocks = [p.clock for p in load_step(step.write(tmp_path)).processes if p.info.role == "actor"]
    assert "collectives" in {clock.alignment for clock in clocks}
    assert all(clock.matched >= 50 for clock in clocks if clock.alignment == "collectives")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("killed", ["actor", "rollout"])
def test_what_killed_processes_left_is_where_it_was_too(tmp_path: Path, seed: int, killed: str) -> None:
    step = KnownStep(seed, tuple(some_clocks(seed)), killed=killed)
    timeline = load_step(step.write(tmp_path))
    check_spans(timeline, step.spans)
    assert {process.info.role for process in timeline.processes if process.closed_ns is None} == {killed}


def test_hosts_that_nobody_measured_keep_together_and_say_so(tmp_path: Path) -> None:
    step = known(0, measured=False)
    timeline = load_step(step.write(tmp_path))
    clocks = [p.clock for p in timeline.processes if p.info.role == "actor"]
    assert {clock.alignment for clock in clocks} == {"unaligned"}
    assert all("to the owner's" in (clock.note or "") for clock in clocks)


def test_one_measured_host_places_those_it_had_collectives_with(tmp_path: Path) -> None:
    clocks = (Clock(11_560 * MS, 50, 400_000), Clock(-S, -50, 0), Clock(7 * S, 0, 0))
    step = KnownStep(3, clocks, lasted_ns=20 * S)
    timeline = load_step(step.write(tmp_path))
    check_spans(timeline, step.spans)
    assert {p.clock.alignment for p in timeline.processes if p.info.host == "host-3"} == {"collectives"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shifted", [1, 3, 5])
def test_windows_that_differ_unseen_place_nothing_wrongly(tmp_path: Path, seed: int, shifted: int) -> None:
    step = KnownStep(seed, tuple(some_clocks(seed)), numbered=False, shifted=shifted)
    timeline = load_step(step.write(tmp_path))
    check_spans(timeline, step.spans)
    (note,) = {process.clock.note for process in timeline.processes if process.info.host == "host-2"}
    assert "not the same" in (note or "")


def test_the_report_says_what_each_clock_rests_on(tmp_path: Path) -> None:
    step = KnownStep(0, tuple(some_clocks(0)), numbered=False, shifted=1)
    health = step_health(load_step(step.write(tmp_path / "shifted")))
    clocks = {process.host: clock(process) for process in health.processes}
    assert re.fullmatch(r"moved 3\.00 s, .* \+\d+\.\d ppm, \+-\d+ us", clocks["host-2"])
    (note, *_) = clock_notes(health)
    assert re.match(r"actor 1, actor 4, rollout 1: ", note)
    health = step_health(load_step(known(0).write(tmp_path / "matched")))
    clocks = {process.host: clock(process) for process in health.processes}
    assert re.fullmatch(r"moved 3\.00 s by 56 .*, \+-[\d.]+ us", clocks["host-2"])
    assert clock_notes(health) == []
