"""Asynchronous RL, recorded: a trajectory begins under one captured step and is consumed by another."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from stepscope import ProfileConfig, attach, capture, carrier, span, trajectory, turn
from stepscope.files.layout import RunLayout
from stepscope.report import StepReport, report_step
from stepscope.timeline import Span, Timeline, load_step, merge_step


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """t7 begins while step 5 is captured, under weights 4, and ends in step 7, under weights 6."""
    save_path = tmp_path_factory.mktemp("run")
    config = ProfileConfig(save_path=str(save_path), steps=[5, 7], roles={"rollout": {"ranks": "all"}})
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
    """The arguments of each span in the merged timeline."""
    path = layout.step(step).root
    merge_step(path)
    events = json.loads(gzip.decompress((path / "timeline.json.gz").read_bytes()))["traceEvents"]
    return {
        (event["name"], event["args"].get("trajectory")): event["args"]
        for event in events
        if event["ph"] == "X"
    }


def report(layout: RunLayout, step: int) -> StepReport:
    return report_step(load_step(layout.step(step).root))


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
    assert five.long_tail is not None
    assert (five.long_tail.trajectories, five.long_tail.of_other_steps) == (1, 1)
    assert seven.health.other_steps == ()
    for found in (five, seven):
        assert sum(line.wall_ns for line in found.breakdown.lines) == found.breakdown.total_ns
