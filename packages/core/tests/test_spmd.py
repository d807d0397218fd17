"""Captures that each rank of a program opens by itself, under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stepscope.cli import run

MAIN = Path(__file__).with_name("spmd_main.py")


def test_ranks_that_close_first_are_silent_and_the_last_one_tells(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(MAIN), str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    told = [line for line in done.stderr.splitlines() if "stepscope: " in line]
    (line,) = told
    assert line.startswith("rank 2: stepscope: step 1 captured: 3 processes, 3 traces")
    assert run(["ls", str(tmp_path)]) == 0
