"""Output about a captured step that the user of a script sees, with the script's logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, logging, sys
import stepscope
from stepscope import capture, configure, prepare

profiler = {"ranks": "all"} if "torch" in sys.modules else {"profiler": False}
configure(save_path="run", steps=[1, 2], roles={"*": profiler})
prepare()
for step in range(4):
    with capture(step):
        pass
"""
TELL = "stepscope: step {} captured: 1 process, {} trace{}, in run/step_00000{}; "
TELL += "`stepscope report run --step {}`"
TORCH = ". The lines that torch's profiler prints at its first start are harmless"


def printed(folder: Path, setup: str = "") -> list[str]:
    return run(folder, setup + SCRIPT)


def run(folder: Path, script: str) -> list[str]:
    """Run a script in `folder`, and return what it printed to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "KINETO_LOG_LEVEL": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.replace(f"{folder}/", "").splitlines()  # a relative `save_path` is absolute in them


def told(step: int, traces: int) -> str:
    return TELL.format(step, traces, "" if traces == 1 else "s", step, step)


def test_a_script_without_any_set_up_of_logging_sees_one_line_for_each_captured_step(tmp_path: Path) -> None:
    assert printed(tmp_path) == [told(1, 0), told(2, 0)]


@pytest.mark.parametrize(
    ("setup", "seen"),
    [
        ("logging.basicConfig(format='%(levelname)s %(message)s')", "INFO "),
        ("logging.basicConfig(level='INFO', format='%(levelname)s %(message)s')", "INFO "),
        ("logging.getLogger('stepscope').setLevel('WARNING')", None),
        ("logging.getLogger().setLevel('ERROR')", None),
        ("logging.disable(logging.INFO)", None),
    ],
)
def test_who_chose_a_level_decides(setup: str, seen: str | None, tmp_path: Path) -> None:
    lines = printed(tmp_path, f"import logging; {setup}\n")
    assert lines == ([] if seen is None else [seen + told(1, 0), seen + told(2, 0)])


def test_torchs_own_lines_are_explained_once_and_prepare_adds_none_to_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines = printed(tmp_path, "import torch\n")
    assert [line for line in lines if line.startswith("stepscope")] == [told(1, 1) + TORCH, told(2, 1)]
    others = {message(line) for line in lines if not line.startswith("stepscope")}
    assert others <= set(map(message, run(tmp_path, BARE)))


BARE = """
import torch
for _ in range(2):
    with torch.profiler.profile():
        pass
"""
"""The same traces without stepscope. A build of torch for CUDA prints an error where there is no device."""


def message(line: str) -> str:
    """Return a line of torch's C++ without its time, process and thread."""
    return re.sub(r"^(\w+):\S+ \S+ \d+:\d+ ", r"\1 ", line)
