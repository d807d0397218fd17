"""`step_tokens`: tokens that a loop counts, in captures and in the lines of steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from packages.report.tests.steps import some
from stepscope import ProfileConfig, capture, span, step_tokens
from stepscope._recording.recorder import standing
from stepscope.files.layout import RunLayout
from stepscope.files.steps import StepLine, read_step_lines
from stepscope_report import step_report
from stepscope_report.timeline import Timeline, load_step

pytestmark = pytest.mark.usefixtures("one_recorder")

SETTINGS = {"record": "spans", "roles": {"*": {"profiler": "off"}}, "steps": [2]}


def captured(folder: Path) -> Timeline:
    return load_step(RunLayout(folder).step(2).root)


def lines_of(folder: Path) -> list[StepLine]:
    recorder = some(standing.standing())
    assert recorder.drain(30)
    (file,) = folder.glob("steps_*.jsonl")
    return read_step_lines(file)


def test_calls_of_all_threads_stand_in_the_timeline(tmp_path: Path) -> None:
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), **SETTINGS, "record": "off"})
    with capture(2, config=config), span("update", role="actor"):
        step_tokens(train=100)
        thread = threading.Thread(target=step_tokens, kwargs={"rollout": 40, "train": 1})
        thread.start()
        thread.join()
    timeline = captured(tmp_path)
    assert [mark.attrs for mark in timeline.tokens] == [{"train": 100}, {"rollout": 40, "train": 1}]
    assert [span.stage for span in timeline.spans] == ["update"]
    assert {line.stage for line in step_report(timeline).breakdown.lines} == {"update", None}


def test_a_steps_line_has_the_sums_captured_or_not(tmp_path: Path) -> None:
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), **SETTINGS})
    for step in range(4):
        with capture(step, config=config):
            if step != 3:
                step_tokens(rollout=1000 * step)
                step_tokens(rollout=1, train=7)
        step_tokens(rollout=99)
    lines = lines_of(tmp_path)
    assert {line.step: line.tokens for line in lines} == {
        0: {"rollout": 1, "train": 7},
        1: {"rollout": 1001, "train": 7},
        2: {"rollout": 2001, "train": 7},
        3: {},
    }
    assert [line.step for line in lines if line.captured] == [2]
    assert all(not line.stages for line in lines)  # a count is no stage


def test_numbers_of_numpy_count_and_a_text_does_not(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), **SETTINGS})
    with capture(0, config=config):
        step_tokens(rollout=numpy.int64(5), train=numpy.float32(6.0))
        step_tokens(rollout="many")  # type: ignore[arg-type]  # by mistake: training goes on
    (line,) = lines_of(tmp_path)
    assert line.tokens == {"rollout": 5, "train": 6}


def test_it_does_nothing_while_nothing_is_recorded(tmp_path: Path) -> None:
    step_tokens(rollout=1, train=2)
    assert list(tmp_path.iterdir()) == []
