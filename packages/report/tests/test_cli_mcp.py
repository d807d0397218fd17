"""The tools of `stepscope mcp`, without the protocol."""

from __future__ import annotations

import json
import os
import socket
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.commands import Command
from packages.report.tests.simulated import Rollout
from packages.report.tests.test_cli import a_run, damage
from packages.report.tests.test_what_if import a_step
from packages.report.tests.traces import kernel, write_trace
from stepscope.errors import CaptureError, RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.requests import Listening, read_requests, write_listening
from stepscope_report.cli.mcp import Tools
from stepscope_report.whatif.changes import Options


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a damaged run of steps 2 and 4, and one with a slow call of a tool."""
    a_run(tmp_path / "sub" / "plain")
    damage(tmp_path / "sub" / "plain")
    slow = Rollout(slots=2, tool_ms=lambda number, turn: 1500 if (number, turn) == (2, 1) else 30)
    slow.report(tmp_path / "slow")
    return tmp_path


def test_runs_are_listed_with_their_steps(root: Path) -> None:
    runs = json.loads(Tools(root).list_runs())
    assert list(runs) == ["slow", "sub/plain"]
    assert [(row["step"], row["took"]) for row in runs["sub/plain"]] == [(2, "10.0 ms"), (4, "10.0 ms")]
    assert {row["state"]: bool(row["problems"]) for row in runs["sub/plain"]} == {
        "ok": False,
        "partial": True,
    }


def test_the_brief_is_of_the_longest_step_or_of_the_one_named(root: Path) -> None:
    tools = Tools(root)
    assert "[slow-tools]" in tools.brief("slow").replace("\\", "")
    assert tools.brief("sub/plain", step=4).startswith("## Step 4 ")
    assert tools.brief("sub/plain/step_000004").startswith("## Step 4 ")


def test_a_stage_is_explained(root: Path) -> None:
    answer = json.loads(Tools(root).explain_stage("slow", "tool"))
    (calls,) = answer["calls"]
    assert (calls["role"], calls["calls"], calls["max_ns"]) == ("env", 24, 1_500_000_000)
    assert answer["share"][0]["wall_ns"] > 0
    assert answer["advice"][0]["rule"] == "slow-tools"
    with pytest.raises(RecordError, match=r"'tol'; .*env tool"):
        Tools(root).explain_stage("slow", "tol")


def test_the_slowest_trajectories_say_what_they_waited_for(root: Path) -> None:
    answer = json.loads(Tools(root).slowest_trajectories("slow", most=2))
    slowest, _ = answer["slowest"]
    assert (slowest["trajectory"], slowest["waits"][0]["stage"]) == ("t2", "tool")
    with pytest.raises(RecordError, match="has no trajectories"):
        Tools(root).slowest_trajectories("sub/plain", step=4)


def test_spans_are_found_and_bounded(root: Path) -> None:
    tools = Tools(root)
    answer = json.loads(tools.query_spans("slow", role="env", stage="tool", trajectory="t2"))
    assert answer["matching"] == 3
    assert [row["dur_ns"] for row in answer["spans"]] == [1_500_000_000, 30_000_000, 30_000_000]
    answer = json.loads(tools.query_spans("slow", limit=7))
    assert len(answer["spans"]) == 7 < answer["matching"]
    longest = json.loads(tools.query_spans("sub/plain"))
    assert longest["step"] == 2
    assert json.loads(tools.query_spans("sub/plain", step=4))["step"] == 4


def test_two_runs_are_compared(root: Path) -> None:
    answer = json.loads(Tools(root).diff("sub/plain", "slow"))
    assert answer["delta_ns"] == answer["b"]["step_ns"] - 10_000_000
    assert answer["changes"][0]["delta_ns"] > 0
    assert answer["kernels"] is None
    assert "gate" not in answer
    answer = json.loads(Tools(root).diff("sub/plain", "slow", kernels=True, fail_above="5%"))
    assert answer["gate"]["failed"]
    assert answer["kernels"]["changes"] == []


def test_what_if_takes_all_changes_of_the_command() -> None:
    changes = {field.name for field in msgspec.structs.fields(Options)}
    assert changes <= signature(Tools.what_if).parameters.keys()


def test_traces_of_others_have_a_brief_alone(root: Path) -> None:
    write_trace(root / "traces" / "rank0.json", [kernel("gemm", 0, 100)])
    assert "gemm (compute)" in Tools(root).brief("traces")
    with pytest.raises(RecordError, match="`brief`"):
        Tools(root).query_spans("traces")


@pytest.mark.parametrize("path", ["..", "/etc", "sub/../../x"])
def test_nothing_outside_of_the_folder_is_read(root: Path, path: str) -> None:
    with pytest.raises(RecordError, match="this server reads"):
        Tools(root).brief(path)


def test_readers_write_nothing(root: Path) -> None:
    a_step(root / "planned")
    before = contents(root)
    tools = Tools(root)
    arguments: dict[str, tuple[Any, ...]] = {
        "list_runs": (), "brief": ("slow",), "explain_stage": ("slow", "tool"),
        "slowest_trajectories": ("slow",), "query_spans": ("slow",), "diff": ("slow", "sub/plain"),
        "what_if": ("planned", None, "+2"),
    }  # fmt: skip
    for tool in tools.readers():
        assert tool(*arguments[tool.__name__])
    assert contents(root) == before


def contents(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_a_run_that_nobody_hears_is_not_asked(root: Path) -> None:
    with pytest.raises(CaptureError):
        Tools(root).trigger("slow")


def test_a_run_that_listens_is_asked_with_the_settings(root: Path) -> None:
    layout = RunLayout(root / "slow")
    hears = Listening(
        host=socket.gethostname(), pid=os.getpid(), role="trainer", rank=None, since_ns=1, step=7
    )
    write_listening(layout, hears)
    answer = Tools(root).trigger("slow", steps="20", ranks="first")
    (request,) = read_requests(layout.control)
    assert (request.steps, request.ranks) == ("20", "first")
    assert f"request {request.id}" in answer
    assert str(root / "slow") in answer


def test_without_the_package_the_command_names_the_extra(
    root: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.types", None)
    assert "'stepscope[cli,mcp]'" in command("mcp", root, code=2).err
