"""Captures that each rank of a program opens by itself, under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope_report.cli import run

MAIN = Path(__file__).with_name("spmd_main.py")


@pytest.mark.needs("torch")
def test_one_rank_tells_of_a_step_and_it_is_one_that_closed_last(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(MAIN), str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    told = [line for line in done.stderr.splitlines() if "stepscope: step" in line]
    in_turn, at_once = told
    assert in_turn.startswith("rank 2: ")
    assert "3 processes, 3 traces" in in_turn
    assert "step 2 captured: 3 processes" in at_once
    assert run(["ls", str(tmp_path)]) == 0
    for step in (1, 2):  # nobody waits for the files of the second
        manifest = json.loads((tmp_path / f"step_00000{step}" / "manifest.json").read_text())
        assert (manifest["state"], len(manifest["processes"])) == ("ok", 3)
