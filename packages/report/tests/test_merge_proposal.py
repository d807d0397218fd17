"""The smaller timeline that `merge` proposes where the whole one is too large for a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packages.report.tests.pictures import MS, rl_step
from stepscope.testing.steps import StepFolder
from stepscope_report.cli.app import app


def uneven(path: Path) -> StepFolder:
    """Three ranks of an actor: rank 1 takes longest, rank 2 is the median."""
    folder = StepFolder(path)
    driver = folder.process("trainer", owner=True)
    driver.span("train", 0, 100 * MS)
    driver.close(100 * MS)
    for rank, busy in enumerate((20, 90, 40)):
        worker = folder.process("actor", rank)
        worker.span("update_actor", 0, busy * MS)
        worker.close(100 * MS)
    return folder


def test_the_slowest_and_the_median_rank_are_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = uneven(tmp_path).write()
    assert "Smaller" not in CliRunner().invoke(app, ["merge", str(step)]).output
    monkeypatch.setattr("stepscope_report.cli.merge.EVENTS", 3)
    output = " ".join(CliRunner().invoke(app, ["merge", str(step)]).output.split())
    assert f"stepscope merge {step} --ranks 1,2" in output
    assert re.search("slowest rank is 1, .* 2", output)


def test_without_an_uneven_stage_a_size_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope_report.cli.merge.EVENTS", 3)
    output = CliRunner().invoke(app, ["merge", str(rl_step(tmp_path, ranks=1).write())]).output
    assert "--max-mb 200" in " ".join(output.split())
