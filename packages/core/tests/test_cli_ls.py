"""`stepscope ls` of one step's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.cli import run
from stepscope.testing.steps import StepFolder

MS = 1_000_000


def test_a_steps_folder_shows_that_step_whatever_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = StepFolder(tmp_path / "run", step=7)
    folder.process("trainer", owner=True).close(10 * MS)
    moved = folder.write().rename(tmp_path / "from the cluster")
    assert run(["ls", str(moved), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["wall_ns"]) == (7, 10 * MS)


def test_a_step_in_which_nothing_says_its_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copy" / "spans").mkdir(parents=True)
    assert run(["ls", str(tmp_path / "copy")]) == 2
    assert "whose number nothing in it says: give the run's" in capsys.readouterr().err
