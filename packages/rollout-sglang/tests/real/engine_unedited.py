"""Tests of engines in an unedited framework under `stepscope run`. Run by `test_engines.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from tiny_sglang import settings, write_model

from stepscope.files.manifest import Manifest

HERE = Path(__file__).parent
LOCAL = """
import json, os
import unedited_sglang

if __name__ == "__main__":
    trainer = unedited_sglang.LocalTrainer(json.loads(os.environ["ENGINE"]))
    print([trainer.step() for _ in range(3)])
    trainer.replica.shut_down()
"""
ON_RAY = """
import json, os
import ray
import unedited_sglang

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
trainer = unedited_sglang.RayTrainer(json.loads(os.environ["ENGINE"]))
print([trainer.step() for _ in range(3)])
ray.get(trainer.replicas[0].shut_down.remote())
"""
LAUNCH = (
    "{module: unedited_sglang, name: Replica.launch, kind: engine, adapter: sglang, engine: self.engine, "
    "replica: self.rank}"
)
STEP = "{module: unedited_sglang, name: LocalTrainer.step, step: around}"
RAY_STEP = "{module: unedited_sglang, name: RayTrainer.step, step: around, engines: {sglang: self.replicas}}"


def run(folder: Path, program: str, *entries: str) -> subprocess.CompletedProcess[str]:
    """Run `program` under `stepscope run`, which captures its steps 1 and 2."""
    (folder / "train.py").write_text(program)
    listed = "".join(f"- {entry}\n" for entry in entries)
    roles = (
        "roles: {rollout: {ranks: all, profiler: off}, '*': {profiler: off}}\ntorch: {activities: [cpu]}\n"
    )
    (folder / "stepscope.yaml").write_text(f"steps: [1, 2]\n{roles}instrument:\n{listed}")
    command = ["run", "--config", "stepscope.yaml", "--save-path", "run", "train.py"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray_folder:  # sockets need a short path
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "ENGINE": json.dumps(settings(write_model(folder / "model"))),
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_TMPDIR": ray_folder,
            "STEPSCOPE_RAISE": "0",
        }
        return subprocess.run(
            [sys.executable, "-m", "stepscope", *command],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=1000,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "entries", "replica"),
    [(LOCAL, (STEP, LAUNCH), 0), (ON_RAY, (RAY_STEP, LAUNCH), 1)],
    ids=["in the loop's process", "in a Ray actor"],
)
def test_an_unedited_frameworks_engine_is_recorded(
    tmp_path: Path, program: str, entries: tuple[str, ...], replica: int
) -> None:
    done = run(tmp_path, program, *entries)
    assert "[6, 6, 6]" in done.stdout, done.stderr[-3000:]
    for step in (1, 2):
        folder = tmp_path / "run" / f"step_{step:06d}"
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        assert manifest.problems() == [], done.stderr[-3000:]
        (trace,) = (folder / "traces" / "rollout" / f"replica{replica}").glob("*.trace.json.gz")
        assert trace.stat().st_size > 1000
