"""Advice about a step that an `instrument` entry captured: its reader can change no code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from packages.report.tests.test_advice_fits import engine_recorded, profiled
from packages.report.tests.test_report_advice import MS, Case, other_host
from stepscope.files.manifest.records import OwnCost
from stepscope_report import StepReport, step_report
from stepscope_report.timeline.step.load import load_step

IN_CODE = ("prepare()", "capture(", "span(", "profile_step", "decorate", "trajectory(")


def unedited(case: Case) -> StepReport:
    case.driver.opened_by = "instrument"
    for process in case.folder.processes:
        process.close(1000 * MS)
    return step_report(load_step(case.folder.write()))


def costly(folder: Path) -> Case:
    return Case(folder, cost_ms=400)


def blind(folder: Path) -> Case:
    return Case(folder, update=False)


def apart(folder: Path) -> Case:
    case = Case(folder)
    other_host(case)
    return case


def supervised(folder: Path) -> Case:
    case = Case(folder, update=False)
    case.driver.span("update", 0, 900 * MS, role="critic")
    case.driver.span("never", 900 * MS, None)
    return case


@pytest.mark.parametrize("make", [costly, blind, apart, supervised])
def test_no_advice_asks_for_a_line_of_code(tmp_path: Path, make: Callable[[Path], Case]) -> None:
    advice = unedited(make(tmp_path)).advice
    assert advice
    assert not [line.do for line in advice for word in IN_CODE if word in line.do]


def test_phases_are_not_asked_for(tmp_path: Path) -> None:
    """Its framework calls `generate`, and no entry of the reader's could take that apart."""
    case = Case(tmp_path)
    case.replica.span("answer", 0, 400 * MS)
    assert unedited(case).phaseless == ()


def slow_actor(case: Case) -> None:
    case.driver.cost = OwnCost(start_ns=10 * MS, stop_ns=390 * MS)
    case.actors[0].cost = OwnCost(start_ns=MS, stop_ns=380 * MS)


@pytest.mark.parametrize(
    ("recorded", "remedy"),
    [
        ([engine_recorded, profiled(0)], "spans alone cost next to nothing: roles: {actor: {profiler: off}}"),
        ([engine_recorded, profiled(0, 1)], "record less for actor 0: fewer ranks; or export.when: deferred"),
        ([engine_recorded], "look at `Processes`: a busy worker, or a slow folder, makes all others wait"),
        ([], "look at `Processes`: a busy worker, or a slow folder, makes all others wait"),
    ],
)
def test_a_slow_process_is_advised_on_by_what_recorded_it(
    tmp_path: Path, recorded: list[Callable[[Case], None]], remedy: str
) -> None:
    case = Case(tmp_path)
    for change in (slow_actor, *recorded):
        change(case)
    advice = {advice.rule: advice for advice in unedited(case).advice}["profiler-cost"]
    assert advice.because[1].startswith("actor 0 took longest")
    assert advice.do == remedy
