"""Tools of one stage, told apart by the attribute `name` of their spans."""

from __future__ import annotations

from pathlib import Path

from packages.report.tests.simulated import MS, Rollout
from packages.report.tests.steps import printed
from stepscope_report import step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.spans import MOST


def either(number: int, turn: int) -> str:
    return "search" if turn else "calculator"


def test_two_tools_have_a_line_each(tmp_path: Path) -> None:
    """Eight calculators of 20 ms, and sixteen searches of 80 ms."""
    rollout = Rollout(tool=either, tool_ms=lambda number, turn: 80 if turn else 20)
    timeline = rollout.timeline(tmp_path)
    report = step_report(timeline)
    assert {stage.title: (stage.calls, stage.total_ns) for stage in report.stages if stage.role == "env"} == {
        "tool calculator": (8, 8 * 20 * MS),
        "tool search": (16, 16 * 80 * MS),
    }
    assert report.long_tail is not None
    spreads = {spread.title: spread.max.ns for spread in report.long_tail.spreads if spread.role == "env"}
    assert spreads == {"tool calculator": 20 * MS, "tool search": 80 * MS}
    for slow in report.long_tail.worst:
        waits = {wait.title: wait.wall_ns for wait in slow.waits if wait.role == "env"}
        assert waits == {"tool search": 160 * MS, "tool calculator": 20 * MS}
    for output in (" ".join(printed(report).split()), render_step(timeline, report)):
        assert "tool search 160 ms" in output
        assert "env tool calculator" in output


def test_advice_names_the_tool(tmp_path: Path) -> None:
    slow = Rollout(tool=either, tool_ms=lambda number, turn: 900 if (number, turn) == (2, 1) else 20)
    advice = slow.advice(tmp_path)
    assert advice["slow-tools"].what.endswith(" env search")
    for rule in ("slow-tools", "long-tail"):
        assert advice[rule].saves_ns == 880 * MS
        assert any(line.startswith("tool search took 900 ") for line in advice[rule].because)


def test_names_of_calls_are_none_of_tools(tmp_path: Path) -> None:
    """Each call has a name of its own: one line, and not 24."""
    rollout = Rollout(tool=lambda number, turn: f"call {number} {turn}", tool_ms=lambda number, turn: 20)
    (stage,) = (stage for stage in rollout.report(tmp_path).stages if stage.role == "env")
    assert (stage.title, stage.calls) == ("tool", 24)
    assert stage.calls > MOST
