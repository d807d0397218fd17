"""Tests of engines that an unedited framework builds, from their preparation to their recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm

from stepscope import ProfileConfig
from stepscope.files.manifest import Expectation, Manifest
from stepscope.files.passes import SUFFIX as PASSES
from stepscope_vllm._arming import unedited

assert vllm

LOCAL = """
import json, os, sys
import unedited_loop

if __name__ == "__main__":
    trainer = unedited_loop.LocalTrainer(json.loads(os.environ["ENGINE"]))
    print([trainer.step() for _ in range(3)])
    print(trainer.llm.collective_rpc("greet"))
"""
ON_RAY = """
import asyncio, json, os, sys
import ray
import unedited_loop

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
trainer = unedited_loop.RayTrainer(json.loads(os.environ["ENGINE"]))
print([asyncio.run(trainer.step()) for _ in range(3)])
trainer.end()
"""
SERVED = """
import json, os, socket
import unedited_loop

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
trainer = unedited_loop.ServerTrainer(json.loads(os.environ["ENGINE"])["model"], port)
print([trainer.step() for _ in range(3)])
trainer.end()
"""
LOOP = "module: unedited_loop"
STEP = "{{{loop}, name: {trainer}.step, step: around, engines: {{vllm: {path}}}}}"
ROLES = "roles: {rollout: {ranks: all, profiler: off}, '*': {profiler: off}}\n"

Run = Callable[..., subprocess.CompletedProcess[str]]
IS_NEWEST = vllm.__version__.startswith("0.32")


@pytest.fixture
def run(model: str, sizes: dict[str, Any], tmp_path: Path) -> Run:
    """Return `run(program, entries, **engine)`, which runs a program under `stepscope run` and captures steps
    1 and 2.
    """

    def running(program: str, *entries: str, **engine: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(program)
        listed = "".join(f"- {entry}\n" for entry in entries)
        (tmp_path / "stepscope.yaml").write_text(f"steps: [1, 2]\n{ROLES}instrument:\n{listed}")
        command = ["run", "--config", "stepscope.yaml", "--save-path", "run", "train.py"]
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets need a short path
            environment = {
                **os.environ,
                "ENGINE": json.dumps({"model": model, **sizes, **engine}),
                "PYTHONPATH": os.pathsep.join(paths),
                "RAY_TMPDIR": folder,
                "STEPSCOPE_RAISE": "0",
            }
            return subprocess.run(
                [sys.executable, "-m", "stepscope", *command],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1000,
            )  # fmt: skip

    return running


def engines(tmp_path: Path, step: int) -> dict[str, Expectation]:
    path = tmp_path / "run" / f"step_{step:06d}" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    items = [item for part in manifest.processes for item in part.expected]
    return {item.name: item for item in items if item.kind == "engine"}


def problems(tmp_path: Path, step: int) -> list[str]:
    path = tmp_path / "run" / f"step_{step:06d}" / "manifest.json"
    return msgspec.json.decode(path.read_bytes(), type=Manifest).problems()


def test_a_profiler_that_the_user_has_chosen_stays(model: str, config: ProfileConfig) -> None:
    chosen = vllm.config.ProfilerConfig(profiler="cuda")
    settings = vllm.EngineArgs(model=model, profiler_config=chosen)
    unedited.arm(config, settings)
    assert settings.profiler_config is chosen
    assert settings.worker_extension_cls == ""


def test_engines_of_the_same_arguments_are_all_armed(model: str, config: ProfileConfig) -> None:
    shared = vllm.config.ProfilerConfig()
    for settings in [vllm.EngineArgs(model=model, profiler_config=shared) for _ in range(2)]:
        unedited.arm(config, settings)
        assert settings.worker_extension_cls == "stepscope_vllm.WorkerExtension"
    assert shared.profiler == "torch"


def test_an_llm_of_the_loops_own_process_is_recorded(run: Run, tmp_path: Path) -> None:
    entry = STEP.format(loop=LOOP, trainer="LocalTrainer", path="self.llm")
    done = run(LOCAL, entry, worker_extension_cls="unedited_loop.Extension")
    assert "['hello from rank 0']" in done.stdout
    assert "[[4, 4, 4], [4, 4, 4], [4, 4, 4]]" in done.stdout, done.stderr[-3000:]
    for step in (1, 2):
        assert problems(tmp_path, step) == [], done.stderr[-3000:]
        assert {name: row.state for name, row in engines(tmp_path, step).items()} == {"replica 0": "ok"}
        files = (tmp_path / "run" / f"step_{step:06d}" / "traces/rollout/replica0").glob("*.gz")
        (trace,) = (path for path in files if not path.name.endswith(PASSES))
        assert trace.stat().st_size > 1000


@pytest.mark.skipif(not IS_NEWEST, reason="two engines, minutes of CPU: the newest vLLM runs it")
def test_engines_in_ray_actors_are_recorded_under_the_numbers_of_the_framework(
    run: Run, tmp_path: Path
) -> None:
    launch = (
        f"{{{LOOP}, name: Replica.launch, kind: engine, adapter: vllm, engine: self.engine, "
        "replica: self.rank}"
    )
    done = run(ON_RAY, STEP.format(loop=LOOP, trainer="RayTrainer", path="self.replicas"), launch)
    assert "[[4, 4, 4, 4, 4, 4]," in done.stdout, done.stderr[-3000:]
    for step in (1, 2):
        assert problems(tmp_path, step) == [], done.stderr[-3000:]
        assert {name: row.state for name, row in engines(tmp_path, step).items()} == {
            "replica 2": "ok",
            "replica 3": "ok",
        }
        traces = tmp_path / "run" / f"step_{step:06d}" / "traces" / "rollout"
        assert {path.parent.name for path in traces.rglob("*.gz")} == {"replica2", "replica3"}


@pytest.mark.skipif(not IS_NEWEST, reason="files of older servers bear no prefix")
def test_a_server_that_the_framework_launches_is_recorded(run: Run, tmp_path: Path) -> None:
    done = run(SERVED, STEP.format(loop=LOOP, trainer="ServerTrainer", path="self.url"))
    assert "[[4, 4, 4], [4, 4, 4], [4, 4, 4]]" in done.stdout, done.stderr[-3000:]
    for step in (1, 2):
        assert problems(tmp_path, step) == [], done.stderr[-3000:]
        assert {name: row.state for name, row in engines(tmp_path, step).items()} == {"replica 0": "ok"}
