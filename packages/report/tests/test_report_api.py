"""The report from Python: what the page shows, and data frames."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from packages.report.tests.pictures import rl_step
from packages.report.tests.traces import add_trace, op
from stepscope.errors import StepscopeError
from stepscope_report import stage_times
from stepscope_report.timeline import load_step

PAGE = Path(__file__).parents[3] / "docs" / "report.md"


def test_the_example_in_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = (text for text in blocks if "idle_times" in text)
    folder = rl_step(tmp_path / "outputs" / "profile")
    add_trace(folder, folder.processes[2], [op("aten::mm", 600_000, 50)])
    folder.write()
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "actor 0 100000000 900000000 rollout" in printed


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_without_the_library_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    table = stage_times(load_step(rl_step(tmp_path).write()))
    with pytest.raises(StepscopeError, match=f"pip install {library}"):
        getattr(table, f"to_{library}")()


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_with_it_a_frame_has_a_row_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    module = ModuleType(library)
    vars(module)["DataFrame"] = lambda rows, **options: rows
    monkeypatch.setitem(sys.modules, library, module)
    table = stage_times(load_step(rl_step(tmp_path).write()))
    rows = getattr(table, f"to_{library}")()
    assert [row["stage"] for row in rows] == [stage.stage for stage in table]
    stated = {"process", "rank", "calls", "busy_ns", "stalled_ns", "waited_ns", "total_ns", "profiled"}
    assert rows[0]["processes"][0].keys() == stated
