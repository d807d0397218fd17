"""Trainings of frameworks on two CPU cores, as commands. Nothing of a framework is edited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
COMMON = {
    "STEPSCOPE_RAISE": "0",  # as for users: the tests' own setting would end the training
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
MORE_GPUS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 8, "CPU": 16}',  # Ray does not look whether they are there
    "RAY_ADDRESS": "local",  # not the cluster of a test that runs beside this one
    "RAY_DEDUP_LOGS": "0",
    # On a busy machine Ray's own processes take longer to start than it allows by default.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
}
"""For frameworks that start Ray without saying what the machine has."""
TOOL_CALLS = "tool_calls.jsonl"
"""The file in which a tool notes each of its calls, by its own clock."""


def run(
    folder: Path,
    command: Sequence[str],
    paths: Sequence[Path],
    variables: Mapping[str, str],
    programs: Sequence[Path] = (),
) -> tuple[int, str]:
    """Run a training in `folder`. Return its exit code and output.

    Args:
        paths: Folders that all its processes import from first.
        variables: Its environment, beside this process' and `COMMON`.
        programs: Folders whose programs are found first.
    """
    found = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **COMMON,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        # ninja, for DeepSpeed, is beside Python
        "PATH": os.pathsep.join([*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TOOL_CALLS": str(folder / TOOL_CALLS),
        **variables,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one forbids actors with GPUs
    log = folder / "output.log"
    with log.open("w") as output:  # not a pipe: Ray's processes may outlive the training, and hold it open
        code = subprocess.call(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return code, log.read_text(errors="replace")


def made_model(data: Path) -> Path:
    """Return the folder of the tiny model, which is made if it is not there, with its prompts beside it."""
    if not data.exists():
        subprocess.run([sys.executable, str(HERE / "make_data.py"), str(data)], check=True)
    return data / "model"


def main(train: Callable[..., tuple[int, str]]) -> None:
    """Train as the command line says: `FOLDER [WORD ...] [-- stepscope run ...]`.

    A word is an option of the framework.
    """
    target, words, before = parse(sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    sys.exit(train(target, *words, before=before)[0])


def parse(arguments: Sequence[str]) -> tuple[Path, list[str], list[str]]:
    """Return the folder, the words, and the command in front of the training's."""
    folder, *rest = arguments
    at = rest.index("--") if "--" in rest else len(rest)
    return Path(folder).resolve(), rest[:at], rest[at + 1 :]
