"""The fixtures and the clock that users of stepscope test their own instrumented code with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import capture, profile_step, span, trajectory
from stepscope.errors import ConfigError, RecordError
from stepscope.testing.recorded_run import FakeClock, RecordedRun

pytest_plugins = ["stepscope.testing.plugin"]


def test_a_capture_needs_no_configuration_and_its_spans_can_be_asked_for(stepscope_run: RecordedRun) -> None:
    @profile_step(role="actor")
    def update() -> None: ...

    with capture(7), trajectory("t1"), span("generate", role="rollout"):
        update()
    assert stepscope_run.stages(7) == ["agent_loop/trajectory", "rollout/generate", "actor/update"]
    assert {recorded.trajectory for recorded in stepscope_run.spans()} == {"t1"}
    assert stepscope_run.manifest(7).state == "ok"


def test_span_times_are_exactly_what_the_clock_was_told(
    stepscope_run: RecordedRun, stepscope_clock: FakeClock
) -> None:
    with capture(1):
        with span("outer"):
            stepscope_clock.advance(0.25)
            with span("inner"):
                stepscope_clock.advance(1.5)
        stepscope_clock.advance(2)
    outer, inner = stepscope_run.spans()
    assert (outer.dur_ns, inner.dur_ns, inner.start_ns - outer.start_ns) == (
        1_750_000_000,
        1_500_000_000,
        250_000_000,
    )
    (part,) = stepscope_run.manifest(1).processes
    assert part.closed is not None
    assert part.closed.mono_ns - part.opened.mono_ns == 3_750_000_000
    assert part.closed.wall_ns - part.opened.wall_ns == 3_750_000_000


def test_the_clock_of_spans_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        FakeClock().advance(-1)


def test_a_step_that_was_not_captured_is_named_with_those_that_were(stepscope_run: RecordedRun) -> None:
    stepscope_run.configure(steps=[2])
    for step in (1, 2):
        with capture(step):
            pass
    with pytest.raises(RecordError, match=r"step 1 .*captured: 2"):
        stepscope_run.manifest(1)


def test_a_wrong_setting_is_an_error_here_too(stepscope_run: RecordedRun) -> None:
    with pytest.raises(ConfigError, match="mode"):
        stepscope_run.configure(mode="sometimes")  # type: ignore[arg-type]  # the fact of this test


@pytest.mark.slow
def test_a_capture_that_a_test_leaves_open_does_not_reach_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import stepscope\n"
        "pytest_plugins = ['stepscope.testing.plugin']\n"
        "def test_leaves_it_open(stepscope_run): stepscope.capture(1).open()\n"
        "def test_finds_nothing_open(stepscope_run):\n"
        "    with stepscope.capture(1): pass\n"
        "    assert stepscope_run.stages() == []\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout
