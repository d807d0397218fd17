"""`stepscope analyse`: finds what waits, does each, and says what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope.errors import BackendError
from stepscope.testing.steps import StepFolder
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


def test_what_waits_is_analysed_once(step: Path, command: Command) -> None:
    assert "a.raw: one file" in command("analyse", step.parent).err
    assert (step / "traces" / "a.json").exists()
    assert "no recording waits" in command("analyse", step).err


def test_one_that_fails_is_named_and_the_others_go_on(step: Path, command: Command) -> None:
    (step / "traces" / "0.raw").write_text("broken")
    message = command("analyse", step, "--timeout", "7", code=3).err
    assert "0.raw: FAILED: " in message
    assert "a.raw: one file" in message


def test_without_an_analyser_it_says_what_to_install(
    step: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(analysers, "installed", list)
    assert "install 'stepscope[npu]'" in command("analyse", step, code=2).err
