"""The core where stepscope-report is not installed, as on most training workers."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.tree import CORE

PATHS = [str(CORE / "src"), sysconfig.get_paths()["purelib"]]
"""Folders of the core and of what it requires. `python -S` follows no link to the other packages here."""
FIX = "Fix: pip install 'stepscope[cli]'"


def alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-S", "-c", f"import sys; sys.path += {PATHS}\n{program}", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_report_is_really_absent_here() -> None:
    outcome = alone("import stepscope, stepscope_report")
    assert "named 'stepscope_report'" in outcome.stderr


def test_the_command_names_the_extra_in_one_line() -> None:
    outcome = alone("import runpy; runpy.run_module('stepscope', run_name='__main__')")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.endswith(f"{FIX}\n")
    assert outcome.stderr.count("\n") == 1


def test_curves_without_the_report_are_refused_before_the_run() -> None:
    program = """
import stepscope
from stepscope.errors import ConfigError
try:
    stepscope.configure(finish={"report_to": ["tensorboard"]}, save_path=sys.argv[1])
except ConfigError as error:
    print(error.field, error.value, error.fix)
"""
    outcome = alone(program, "never-made")
    expected = "finish.report_to tensorboard pip install 'stepscope[tensorboard]'\n"
    assert outcome.stdout == expected, outcome.stderr


def test_figures_that_cannot_be_computed_are_named_once_and_the_training_goes_on(tmp_path: Path) -> None:
    program = """
import stepscope
stepscope.configure(save_path=sys.argv[1], steps=[1, 2], roles={"*": {"profiler": "off"}})
stepscope.on_report(print)
for step in range(4):
    with stepscope.capture(step), stepscope.span("tool"):
        pass
    stepscope.flush()
print("trained")
"""
    outcome = alone(program, str(tmp_path))
    assert (outcome.returncode, outcome.stdout) == (0, "trained\n"), outcome.stderr
    assert outcome.stderr.count(FIX) == 1
    for step in (1, 2):
        manifest = json.loads((tmp_path / f"step_00000{step}" / "manifest.json").read_text())
        [figures] = [entry for entry in manifest["processes"][0]["expected"] if entry["name"] == "scalars"]
        assert figures["state"] == "failed"
        assert figures["reason"].endswith(FIX)
