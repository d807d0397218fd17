"""A capture on a disk without room: the manifest names the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOUNTED = ["unshare", "--mount", "--map-root-user"]
"""A namespace in which a test may mount a disk of its own."""
PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch
from stepscope import ProfileConfig, capture
config = ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"*": {"ranks": "all"}}, budget={"free_mb": 0})
with capture(1, config=config) as cap:
    values = torch.ones(10)
    for _ in range(20_000):
        values = values + 1
(line,) = [line for line in cap.result.wait(60).problems() if "torch trace" in line]
print(line)
"""


@pytest.mark.needs("torch")
def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    if subprocess.run([*MOUNTED, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    script = 'mount -t tmpfs -o size=2m tmpfs "$1" && exec "$2" -c "$3" "$1/run"'
    done = subprocess.run(
        [*MOUNTED, "sh", "-c", script, "sh", str(tmp_path), sys.executable, PROGRAM],
        capture_output=True, text=True, timeout=120, env={**os.environ, "STEPSCOPE_RAISE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed: BackendError: " in done.stdout
    assert "torch trace: failed" in done.stderr  # the log tells it too
