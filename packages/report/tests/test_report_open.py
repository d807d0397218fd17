"""`stepscope_report.open`: runs and steps for notebooks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import stepscope_report
from packages.report.tests.test_cli import a_run
from packages.report.tests.traces import kernel, op, write_trace
from stepscope.errors import RecordError, StepscopeError
from stepscope_report import OpenRun, OpenTraces
from tests.tree import ROOT


def open_run(path: Path) -> OpenRun:
    run = stepscope_report.open(a_run(path))
    assert isinstance(run, OpenRun)
    return run


def test_a_run_has_its_steps_by_number(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    assert list(run) == [2, 4]
    assert [report.step for report in run.report()] == [2, 4]
    assert run[4].folder == tmp_path / "step_000004"
    assert "steps 2, 4" in repr(run)
    with pytest.raises(KeyError, match=r"step 3 .*captured: 2, 4"):
        run[3]


def test_the_example_of_the_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path / "outputs/profile")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "packages/report/README.md").read_text()
    exec(readme.partition("```python\n")[2].partition("```")[0], {})  # as a reader would


def test_a_notebook_shows_the_brief(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    assert "<b>Step 2 of" in run._repr_html_()
    assert "<b>Step 4 of" in run[4]._repr_html_()
    assert "of 2 captured" in run.brief()
    assert run[4].brief(markdown=True).startswith("## Step 4")


def test_a_table_is_a_list_of_dicts(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    (row,) = run[2].table("stages")
    assert (row["role"], row["stage"], row["total_ns"]) == ("agent_loop", "rollout", 8_000_000)
    assert [row["step"] for row in run.table("stages")] == [2, 4]
    with pytest.raises(ValueError, match=r"'stage'; .*, breakdown, stages"):
        run[2].table("stage")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rows_and_tables_become_a_frame_where_the_library_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    step = open_run(tmp_path)[2]
    rows, table = step.table("stages"), step.report().stages
    monkeypatch.setitem(sys.modules, library, None)
    for each in (rows, table):
        with pytest.raises(StepscopeError, match=f"pip install {library}"):
            getattr(each, f"to_{library}")()
    module = ModuleType(library)
    vars(module)["DataFrame"] = lambda rows, **options: rows
    monkeypatch.setitem(sys.modules, library, module)
    assert getattr(rows, f"to_{library}")() == list(rows)
    (row,) = getattr(table, f"to_{library}")()
    assert row["stage"] == "rollout"
    stated = {"process", "rank", "calls", "busy_ns", "stalled_ns", "waited_ns", "total_ns", "profiled", "cut"}
    assert row["processes"][0].keys() == stated


def test_a_step_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    a_run(tmp_path)
    for path in (tmp_path / "step_000002").rglob("*"):
        if path.is_file():
            path.unlink()
    run = stepscope_report.open(tmp_path)
    assert isinstance(run, OpenRun)
    assert [report.step for report in run.report()] == [4]
    assert [row["step"] for row in run.table("stages")] == [4]


def test_traces_of_others_open_too(tmp_path: Path) -> None:
    for rank in range(2):
        events = [op("aten::mm", 0, 100), kernel("gemm", 100, 400), kernel("ncclAllReduce", 300, 400)]
        write_trace(tmp_path / f"rank{rank}.pt.trace.json", events)
    traces = stepscope_report.open(tmp_path)
    assert isinstance(traces, OpenTraces)
    (first, second) = traces.table("devices")
    assert (first["busy_ns"], first["exposed_ns"], second["rank"]) == (600_000, 200_000, 1)
    assert {row["name"]: row["self_ns"] for row in traces.table("operators")} == {
        "aten::mm": 200_000, "gemm": 800_000, "ncclAllReduce": 800_000,
    }  # fmt: skip
    assert {name for name in traces.tables if traces.table(name)} >= {"operators", "devices", "traces"}
    assert traces.report().traces is not None
    assert re.search(r"gemm .*: 800 us .*2 calls", traces.brief())
    assert f"Traces in {tmp_path.name}" in traces._repr_html_()
    assert (
        stepscope_report.open(tmp_path / "rank0.pt.trace.json")
        .brief(markdown=True)
        .startswith("## Traces in")
    )
    with pytest.raises(ValueError, match=r"'spans'; .* operators, devices"):
        traces.table("spans")


def test_the_brief_of_many_traces_stays_short(tmp_path: Path) -> None:
    for rank in range(30):
        names = [f"kernel_{number}" for number in range(30)]
        events = [kernel(name, 100 * at, 90) for at, name in enumerate(names)]
        write_trace(tmp_path / f"rank{rank}.json", [*events, {"ph": "X", "cat": "kernel", "dur": "x"}])
    brief = stepscope_report.open(tmp_path).brief()
    assert len(brief.splitlines()) <= 40
    assert "others were busier" in brief


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no captured step"):
        stepscope_report.open(tmp_path)
    with pytest.raises(RecordError, match="does not exist"):
        stepscope_report.open(tmp_path / "absent")
