"""Calls grouped by an attribute: which tool is slow, which environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.simulated import Rollout
from packages.report.tests.steps import MS, printed
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report.groups import group_spans
from stepscope_report.html.step_page import render_step
from stepscope_report.report import step_report
from stepscope_report.spans import MOST
from stepscope_report.timeline import load_step


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    """Return a run with a step of 100 ms: two overlapping calls of `search`, 20 of `python`, all in envs."""
    folder = StepFolder(tmp_path, step=2)
    driver = folder.process("trainer", owner=True)

    def call(start_ns: int, end_ns: int, **attrs: AttrValue) -> None:
        driver.span("tool", start_ns, end_ns, role="env", attrs=attrs)

    call(0, 30 * MS, name="search", env="web", cached=False)
    call(10 * MS, 50 * MS, name="search", env="web", cached=True)
    for number in range(20):
        start_ns = 50 * MS + number * 2 * MS
        call(start_ns, start_ns + (number + 1) * 100_000, name="python", env="math")
    driver.span("update_actor", 90 * MS, 100 * MS, role="actor")
    driver.close(100 * MS)
    folder.write()
    return tmp_path


def test_calls_of_a_tool_are_counted_summed_and_spread(save_path: Path) -> None:
    grouping = group_spans(load_step(save_path / "step_000002"), "tool")
    search, python = grouping.groups
    assert (search.value, search.calls, search.total_ns, search.mean_ns) == ("search", 2, 70 * MS, 35 * MS)
    assert (python.value, python.calls, python.total_ns, python.mean_ns) == ("python", 20, 21 * MS, 1_050_000)
    assert (python.p50_ns, python.p95_ns, python.max_ns) == (1_000_000, 1_900_000, 2 * MS)


def test_calls_at_once_are_active_once(save_path: Path) -> None:
    grouping = group_spans(load_step(save_path / "step_000002"), "env")
    assert {group.value: group.active_ns for group in grouping.groups} == {"web": 50 * MS, "math": 21 * MS}
    assert grouping.window_ns == 100 * MS


@pytest.mark.parametrize(
    ("attribute", "calls"),
    [
        ("cached", {"true": 1, "false": 1}),
        ("name", {"search": 2, "python": 20, "update_actor": 1}),  # without a name, by its stage
    ],
)
def test_any_attribute_groups_the_spans_that_state_it(
    save_path: Path, attribute: str, calls: dict[str, int]
) -> None:
    grouping = group_spans(load_step(save_path / "step_000002"), attribute)
    assert {group.value: group.calls for group in grouping.groups} == calls


def test_the_command_prints_a_table_for_each_attribute(save_path: Path, command: Command) -> None:
    lines = command("report", save_path, "--by", "tool", "--by", "cached").out.splitlines()
    (search,) = (" ".join(line.split()) for line in lines if line.startswith("  search"))
    assert re.findall(r"[\d.]+", search) == ["2", "70.0", "35.0", "30.0", "40.0", "40.0", "50.0", "50.0"]
    assert "Step 2 by cached" in lines
    assert not (save_path / "report.html").exists()


def test_it_prints_markdown_and_json_too(save_path: Path, command: Command) -> None:
    printed = command("report", save_path, "--by", "env", "--markdown").out
    assert "### Step 2 by env" in printed
    assert "| web | 2 | 70.0 ms | 35.0 ms |" in printed
    step = command("report", save_path, "--by", "env", "--json").json["steps"][0]
    assert [(by["attribute"], [group["value"] for group in by["groups"]]) for by in step["by"]] == [
        ("env", ["web", "math"])
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--by", "tol"],
            "no span has an attribute 'tol'. Allowed: name, tool, env, role, stage, process, cached",
        ),
        (["--by", "tool", "--html"], "--by goes without"),
        (["--by", "tool", "--json", "--markdown"], "--markdown goes without"),
    ],
)
def test_a_wrong_one_is_refused_with_those_that_are_there(
    arguments: list[str], message: str, save_path: Path, command: Command
) -> None:
    assert message in " ".join(command("report", save_path, *arguments, code=2).err.split())


# Tools of one stage, told apart by the attribute `name` of their spans.


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
