"""`stepscope analyse`: finds what waits, does each, and says what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import BackendError
from stepscope.testing.steps import StepFolder
from stepscope_report.cli.app import run
from stepscope_report.timeline import analysers


class Raw:
    """Recordings are files that end in `.raw`; one that says `broken` cannot be analysed."""

    name = "raw"

    def waiting(self, folder: Path) -> list[Path]:
        return [path for path in sorted(folder.rglob("*.raw")) if not path.with_suffix(".json").exists()]

    def analyse(self, recording: Path, timeout_s: float) -> str:
        if recording.read_text() == "broken":
            raise BackendError(f"took longer than {timeout_s:g} s")
        recording.with_suffix(".json").write_text("[]")
        return "one file"


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(analysers, "installed", lambda: ["raw"])
    monkeypatch.setattr(analysers, "load", lambda point: Raw())
    made = StepFolder(tmp_path)
    made.process("actor", 0, owner=True).close(1000)
    root = made.write()
    (root / "traces").mkdir()
    (root / "traces" / "a.raw").write_text("sound")
    return root


def test_what_waits_is_analysed_once(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyse", str(step.parent)]) == 0
    assert "a.raw: one file" in capsys.readouterr().err
    assert (step / "traces" / "a.json").exists()
    assert run(["analyse", str(step)]) == 0
    assert "no recording waits" in capsys.readouterr().err


def test_one_that_fails_is_named_and_the_others_go_on(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step / "traces" / "0.raw").write_text("broken")
    assert run(["analyse", str(step), "--timeout", "7"]) == 3
    message = capsys.readouterr().err
    assert "0.raw: FAILED: " in message
    assert "a.raw: one file" in message


def test_without_an_analyser_it_says_what_to_install(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(analysers, "installed", list)
    assert run(["analyse", str(step)]) == 2
    assert "pip install 'stepscope[npu]'" in capsys.readouterr().err
