"""A capture on a disk without room: the manifest names the disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packages.core.tests.runs import python

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


CUT = """
import json, os, resource, sys, time
from stepscope import ProfileConfig, capture, span
config = ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}}, record="off")
with capture(1, config=config) as cap:
    for _ in range(100):
        with span("kept"):
            pass
    files = []
    while int(sys.argv[2]) and not any(file.stat().st_size for file in files):
        files = list(cap.result.path.glob("spans/*.jsonl"))
        time.sleep(0.01)
    size = max((file.stat().st_size for file in files), default=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for _ in range(70):
        with span("lost"):
            pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
(spans,) = [item for item in cap.result.manifest().processes[0].expected if item.kind == "spans"]
print(json.dumps([spans.state, spans.reason, cap.result.summary()]))
"""


@pytest.mark.parametrize("begins", [1, 0], ids=["full later", "full at once"])
def test_spans_that_are_on_disk_when_it_is_full_are_told(begins: int, tmp_path: Path) -> None:
    state, reason, summary = json.loads(python(CUT, tmp_path, begins, STEPSCOPE_RAISE="0").splitlines()[0])
    assert state == ("partial" if begins else "failed")
    assert re.findall(r"\d+ spans|\d+ are", reason) == (["100 spans", "70 are"] if begins else ["170 are"])
    assert ("1 process," in summary) == bool(begins)


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


FULL = """
import sys, time
from pathlib import Path
from stepscope import ProfileConfig, capture, span
roles = {"*": {"profiler": "off"}}
config = ProfileConfig(save_path=sys.argv[1], steps=[2], roles=roles, budget={"free_mb": 0})
for step in range(4):
    with capture(step, config=config), span("update"):
        if step == 2:
            while not list(Path(sys.argv[1]).glob("steps_*.jsonl")):  # the recorder's thread writes it
                time.sleep(0.01)
            with Path(sys.argv[1] + ".fill").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
"""


@pytest.mark.slow
def test_a_process_that_could_not_write_its_end_is_not_called_dead(tmp_path: Path) -> None:
    if subprocess.run([*MOUNTED, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    mount = 'mount -t tmpfs -o size=400k tmpfs "$1" && "$2" -c "$3" "$1/run"'
    script = f'{mount}; rm "$1/run.fill"; exec "$2" -m stepscope ls --json "$1/run"'
    done = subprocess.run(
        [*MOUNTED, "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL],
        capture_output=True, text=True, timeout=120, env={**os.environ, "STEPSCOPE_RAISE": "0"},
    )  # fmt: skip
    (row,) = json.loads(done.stdout)
    assert (row["step"], row["complete"], row["died"]) == (2, False, "")
