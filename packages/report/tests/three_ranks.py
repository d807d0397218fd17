"""Three ranks of torch.distributed (gloo) that hang, for tests of what `stepscope why` says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packages.report.tests.steps import some

SETTING_UP = """
import json, os, sys, threading, time
import torch, torch.distributed as dist
from stepscope import capture, configure, profile_step
folder, rank = sys.argv[1], int(os.environ["RANK"])
configure(save_path=folder, record="spans", control={"poll_seconds": 0.1}, roles={"*": {"profiler": "off"}})
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
"""


@contextmanager
def hanging(folder: Path, program: str, **environ: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `program` in three ranks until each of them has printed "ready"."""
    around = {**os.environ, "STEPSCOPE_RUN_ID": "feed0004", **environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SETTING_UP + program, str(folder)],
            stdout=subprocess.PIPE, text=True, env={**around, "RANK": str(rank)},
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert some(process.stdout).readline() == "ready\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
