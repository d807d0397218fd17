"""`stepscope report` and traces: read unless told otherwise, and never more trouble than they are worth."""

from __future__ import annotations

from pathlib import Path

from packages.report.tests.commands import Command
from packages.report.tests.pictures import rl_step
from packages.report.tests.traces import add_trace, kernel, op


def a_step(tmp_path: Path) -> tuple[Path, Path]:
    """(the step's folder, a trace in it)."""
    folder = rl_step(tmp_path, ranks=2)
    trace = add_trace(folder, folder.processes[2], [kernel("gemm", 600_000, 50_000), op("aten::mm", 0, 5)])
    return folder.write(), trace


def test_traces_are_read(tmp_path: Path, command: Command) -> None:
    path, _ = a_step(tmp_path)
    traces = command("report", path, "--json").json["steps"][0]["traces"]
    assert [row["name"] for row in traces["operators"]] == ["gemm", "aten::mm"]
    assert [(row["device"], row["busy_ns"]) for row in traces["devices"]] == [("GPU 0", 50_000_000)]


def test_the_tables_of_traces_are_printed(tmp_path: Path, command: Command) -> None:
    path, _ = a_step(tmp_path)
    text = command("report", path, "--no-html").out
    for phrase in ("Idle", "Engines", "Operators and kernels: actor", "gemm", "Devices", "GPU 0"):
        assert phrase in text


def test_without_traces_none_is_opened(tmp_path: Path, command: Command) -> None:
    path, trace = a_step(tmp_path)
    trace.write_bytes(b"no trace at all")
    assert command("report", path, "--json", "--no-traces").json["steps"][0]["traces"] is None


def test_a_broken_trace_is_named_and_costs_nothing_else(tmp_path: Path, command: Command) -> None:
    path, trace = a_step(tmp_path)
    trace.write_bytes(trace.read_bytes()[:100])
    step = command("report", path, "--json", code=3).json["steps"][0]
    assert [problem["file"] for problem in step["traces"]["problems"]]
    assert step["idle"][0]["idle_ns"] > 0


def test_steps_side_by_side_say_what_changed(tmp_path: Path, command: Command) -> None:
    for step, ranks in ((2, 2), (4, 60)):
        rl_step(tmp_path, step=step, ranks=ranks).write()
    text = command("report", tmp_path, "--no-html").out
    assert "What changed" in text
    assert "2 → 4" in text
