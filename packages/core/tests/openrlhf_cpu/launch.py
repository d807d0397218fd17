"""OpenRLHF 0.11.2's own `train_ppo_ray` on two CPU cores, as a command. Nothing of OpenRLHF is edited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
TOOL_CALLS = "tool_calls.jsonl"
"""The file in which the agent notes each call of its tool, by its own clock."""
ENVIRONMENT = {
    "STEPSCOPE_RAISE": "0",  # as for users: the tests' own setting would end the training
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(
        Path(sys.prefix) / "torch_extensions"
    ),  # which the environment's recipe built
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 8, "CPU": 16}',  # Ray does not look whether they are there
    "RAY_DEDUP_LOGS": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    # On a busy machine Ray's own processes take longer to start than it allows by default.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
}
PROMPTS, RESPONSES = 4, 4
"""Prompts of a step, and responses to each."""


def train(folder: Path, *options: str, before: Sequence[str] = (), steps: int = 4) -> tuple[int, str]:
    """Run a training of `steps` steps in `folder`. Return its exit code and output.

    Args:
        options: Options of `train_ppo_ray`, behind those below.
        before: A command in front of the training's: `stepscope run ...`.
    """
    data = made_data(folder)
    command = [
        *before,
        sys.executable,
        "-m",
        "openrlhf.cli.train_ppo_ray",
        *sizes_of_a_cpu(data, steps),
        *options,
    ]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, for DeepSpeed
    clock = {"TOOL_CALLS": str(folder / TOOL_CALLS)}
    environment = {**os.environ, **ENVIRONMENT, **clock, "PYTHONPATH": path, "PATH": programs}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one forbids actors with GPUs
    log = folder / "output.log"
    with log.open("w") as output:  # not a pipe: Ray's processes may outlive the training, and hold it open
        code = subprocess.call(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return code, log.read_text()


def made_data(folder: Path) -> Path:
    """Return the folder of the tiny model and its prompts; make them if necessary."""
    data = folder / "data"
    if not data.exists():
        maker = HERE.parent / "verl_cpu" / "make_data.py"  # the same model, which vLLM takes on a CPU
        subprocess.run([sys.executable, str(maker), str(data)], check=True)
        (data / "prompts").mkdir()
        rows = [{"input": f"{number}+{number * 7}=", "label": str(8 * number)} for number in range(64)]
        (data / "prompts" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def sizes_of_a_cpu(data: Path, steps: int) -> list[str]:
    """Return the options for two CPU cores: `steps` steps of 4 prompts x 4 responses."""
    options = {
        "actor.model_name_or_path": data / "model",
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": data / "prompts",
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": 96,
        "data.max_samples": PROMPTS * steps,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.1,
        "vllm.sync_backend": "gloo",
        "ds.attn_implementation": "sdpa",  # flash attention has no CPU build
        "ds.zero_stage": 2,
        "train.batch_size": PROMPTS * RESPONSES,
        "train.micro_batch_size": 4,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": RESPONSES,
        "rollout.micro_batch_size": 4,
        "rollout.max_new_tokens": 24,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0.01,
        "ckpt.path": data.parent / "checkpoints",
        "ckpt.output_dir": data.parent / "final",
        "logger.logging_steps": 1,
    }
    return [
        "--vllm.enforce_eager",
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]


if __name__ == "__main__":  # python launch.py FOLDER [OPTION ...] [-- stepscope run ...]
    words, _, front = " ".join(sys.argv[2:]).partition(" -- ")
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    sys.exit(train(target, *words.split(), before=front.split())[0])
