"""`stepscope run`: modules beside the program, the program itself, and steps that never come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope_report.cli import app as main

pytestmark = pytest.mark.slow


def beside(
    folder: Path, program: str, entries: str, name: str = "train.py"
) -> subprocess.CompletedProcess[str]:
    """`stepscope run` from a folder above that of the program and of the module `beside`."""
    inner = folder / "inner"
    inner.mkdir()
    (inner / "beside.py").write_text("def step(number): return number\n")
    (inner / name).write_text(program)
    (folder / "stepscope.yaml").write_text('roles: {"*": {profiler: off}}\n' + entries)
    command = ["-m", "stepscope", "run", "--config", "stepscope.yaml", "--save-path", "run", f"inner/{name}"]
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env={**os.environ, "STEPSCOPE_RAISE": "0"}, capture_output=True, text=True,
    )  # fmt: skip


LOOPING = "import beside\nfor number in range(3): beside.step(number)\n"


def test_a_module_beside_the_program_is_instrumented(tmp_path: Path) -> None:
    entries = "steps: [1]\ninstrument:\n- {module: beside, name: step, step: around, number: number}\n"
    done = beside(tmp_path, LOOPING, entries)
    assert (done.returncode, "no step" in done.stderr) == (0, False)
    assert (tmp_path / "run" / "step_000001" / "manifest.json").exists()


def test_a_framework_beside_the_program_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "inner" / "trl" / "trainer"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (tmp_path / "inner" / "train.py").write_text("import trl\n")
    paths = os.pathsep.join(path for path in sys.path if path and "trl" not in path)
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", "--preset", "trl", "--save-path", "run", "inner/train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths, "STEPSCOPE_RAISE": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "not installed" not in done.stderr
    assert "no step began" in done.stderr


def test_a_module_that_the_program_cannot_find_either_is_named_at_its_first_step(tmp_path: Path) -> None:
    entries = (
        "steps: [1]\ninstrument:\n- {module: beside, name: step, step: around}\n"
        "- {module: besides, name: judge, role: reward}\n"
    )
    done = beside(tmp_path, LOOPING, entries)
    assert "disabled instrument('besides')" in done.stderr
    assert "install 'besides'" in done.stderr


@pytest.mark.parametrize("entry", ["module: besides, name: judge", "module: beside, name: stepp"])
def test_an_entry_that_is_not_in_effect_is_missing_from_the_step(
    tmp_path: Path, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        "steps: [1]\ninstrument:\n- {module: beside, name: step, step: around, number: number}\n"
        f"- {{{entry}, role: reward}}\n"
    )
    assert beside(tmp_path, LOOPING, entries).returncode == 0
    assert main.run(["ls", str(tmp_path / "run")]) == 3
    target = entry.replace("module: ", "instrument ").replace(", name: ", ":")
    assert f"{target}: missing" in " ".join(capsys.readouterr().out.split())
    assert main.run(["report", str(tmp_path / "run"), "--step", "1", "--no-html"]) == 3


def test_a_boundary_in_a_module_that_is_not_there_says_so_at_the_end(tmp_path: Path) -> None:
    entries = "steps: [1]\ninstrument:\n- {module: besides, name: step, step: around}\n"
    assert "no module 'besides'" in beside(tmp_path, LOOPING, entries).stderr


@pytest.mark.parametrize("module", ["__main__", "train"])
def test_the_program_itself_is_refused_with_the_reason(
    tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = f"steps: [1]\ninstrument:\n- {{module: {module}, name: step, step: around}}\n"
    done = beside(tmp_path, LOOPING, entries)
    assert done.returncode == 2
    assert f"instrument.module is '{module}'" in done.stderr
    assert "into a module" in done.stderr
    assert main.run(["validate", str(tmp_path / "stepscope.yaml"), "train.py"]) == 2
    assert "runs as `__main__`" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["raise ValueError('no data')", "sys.exit('no data')"])
def test_a_program_that_fails_before_its_first_step_is_told_so(tmp_path: Path, end: str) -> None:
    entries = "steps: [1]\ninstrument:\n- {module: beside, name: step, step: around}\n"
    done = beside(tmp_path, f"import sys\n{end}\nimport beside\n", entries)
    (line,) = [line for line in done.stderr.splitlines() if "no step began" in line]
    if "raise" in end:
        assert line.endswith("ValueError: no data")
    else:
        assert "program failed" in line
    assert done.returncode == 1


def test_a_begin_without_number_and_end_starts_a_step_at_each_call(tmp_path: Path) -> None:
    entries = "steps: [1]\ninstrument:\n- {module: beside, name: step, step: begin}\n"
    done = beside(tmp_path, LOOPING, entries)
    assert (done.returncode, "no step" in done.stderr) == (0, False)
    assert [folder.name for folder in tmp_path.glob("run/step_*")] == ["step_000001"]


def test_steps_that_the_program_never_reaches_are_said_at_its_end(tmp_path: Path) -> None:
    entries = "steps: [7]\ninstrument:\n- {module: beside, name: step, step: around}\n"
    (line,) = beside(tmp_path, LOOPING, entries).stderr.splitlines()
    reason = "stepscope: no step was captured: the program's steps were 0 to 2, and `steps` selects 7. Fix: "
    assert line.startswith(reason)
