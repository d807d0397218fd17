"""Collectives without a known end: a rank waited if its thread did nothing until the last rank came."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.steps import MS, some
from stepscope.files.values import AttrValue
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import step_report
from stepscope_report.stragglers import unseen_collectives
from stepscope_report.timeline import Timeline, load_step


def issue(process: FakeProcess, at_ms: int, number: int) -> None:
    attrs: dict[str, AttrValue] = {"begin_only": True, "group": "0", "sequence": number}
    process.span("all_reduce", at_ms * MS, at_ms * MS, attrs=attrs)


def of_two_ranks(folder: Path, between: str | None = None, ranks: tuple[int, int] = (0, 1)) -> Timeline:
    """Return a step in which one rank issues two buckets at 100 and 110 ms, and another at 300 and 310 ms."""
    step = StepFolder(folder)
    for begin_ms, rank in zip((100, 300), ranks, strict=True):
        process = step.process("actor", rank, owner=rank == ranks[0] and begin_ms == 100)
        update = process.span(
            "update", 0, (200 if between == "end" and rank == 0 else 400) * MS, role="learner"
        )
        if between == "work" and rank == 0:
            process.span("log", 200 * MS, 210 * MS, parent=update)
        for number in (7, 8):
            issue(process, begin_ms + 10 * (number - 7), number)
        process.close(400 * MS)
    return load_step(step.write())


def test_a_rank_waits_from_its_last_bucket_to_that_of_the_last_rank(tmp_path: Path) -> None:
    timeline = of_two_ranks(tmp_path)
    calls = [span for span in timeline.spans if span.stage == "all_reduce"]
    start_ns = timeline.window.start_ns
    assert [((one.start_ns - start_ns) // MS, one.dur_ns) for one in calls] == [(110, 200 * MS + 1), (310, 1)]
    assert [timeline.spans[one.parent or 0].stage for one in calls] == ["update", "update"]
    assert {one.role for one in calls} == {"learner"}
    report = step_report(timeline)
    cause = some(report.cause)
    assert (cause.kind, some(cause.process).rank) == ("late-rank", 1)
    (update,) = [stage for stage in report.stages if stage.stage == "update"]
    assert [share.waited_ns for share in update.processes] == [200 * MS + 1, 1]


@pytest.mark.parametrize("between", ["work", "end"])
def test_a_rank_that_did_something_meanwhile_did_not_wait(tmp_path: Path, between: str) -> None:
    timeline = of_two_ranks(tmp_path, between)
    assert "all_reduce" not in {span.stage for span in timeline.spans}


def test_two_jobs_with_the_same_numbers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    timeline = of_two_ranks(tmp_path, ranks=(0, 0))
    assert "all_reduce" not in {span.stage for span in timeline.spans}
    assert unseen_collectives(timeline) == 0
