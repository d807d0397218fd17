"""`stepscope ls` of one step's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope import ProfileConfig, capture, flush
from stepscope.files.manifest.records import Expectation
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run

MS = 1_000_000


def test_a_steps_folder_shows_that_step_whatever_it_is_called(tmp_path: Path, command: Command) -> None:
    folder = StepFolder(tmp_path / "run", step=7)
    folder.process("trainer", owner=True).close(10 * MS)
    moved = folder.write().rename(tmp_path / "from the cluster")
    (row,) = command("ls", moved, "--json").json
    assert (row["step"], row["wall_ns"]) == (7, 10 * MS)


def test_a_step_in_which_nothing_says_its_number_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "copy" / "spans").mkdir(parents=True)
    assert "unknown number" in command("ls", tmp_path / "copy", code=2).err


def test_a_step_that_an_exception_ended_is_marked_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config = ProfileConfig(save_path=tmp_path, steps=[0, 1])
    with capture(0, config=config):
        pass
    with pytest.raises(ValueError, match="no prompt"), capture(1, config=config):
        raise ValueError("no prompt")
    flush()
    run(["ls", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("ended early") == 1
    assert "ValueError: no prompt" in text
    run(["ls", str(tmp_path), "--json"])
    assert [row["error"] for row in json.loads(capsys.readouterr().out)] == [
        None,
        "ValueError: no prompt",
    ]
    run(["report", str(tmp_path), "--no-html"])
    text = capsys.readouterr().out
    assert "yes, ended early" in text
    assert "with ValueError: no" in text


def test_a_short_recording_of_an_engine_is_told_by_ls_the_report_and_its_page(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    note, ignored = (
        "9 of 50 engine iterations: the engine ran no more",
        {"iterations.count": "prefill was cut"},
    )
    driver.expected.append(
        Expectation(name="replica 0", kind="engine", state="ok", notes=(note,), ignored=ignored)
    )
    driver.close(10 * MS)
    step = folder.write()
    shown = command("ls", tmp_path).out, command("report", step).out
    for text in (*shown, (step / "report.html").read_text()):
        assert f"replica 0: {note}" in text
        assert "iterations.count is" in text
