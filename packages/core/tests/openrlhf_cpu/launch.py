"""OpenRLHF 0.11.2's own `train_ppo_ray` on two CPU cores, as a command. Nothing of OpenRLHF is edited."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from packages.core.tests.on_cpu import launch

HERE = Path(__file__).parent
ENVIRONMENT = {
    **launch.MORE_GPUS,
    "ON_CPU": "openrlhf",
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(
        Path(sys.prefix) / "torch_extensions"
    ),  # which the environment's recipe built
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
    return launch.run(folder, command, [HERE, launch.HERE], ENVIRONMENT)


def made_data(folder: Path) -> Path:
    """Return the folder of the tiny model and its prompts; make them if necessary."""
    data = folder / "data"
    launch.made_model(data)
    if not (data / "prompts").exists():
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


# python -m packages.core.tests.openrlhf_cpu.launch FOLDER [OPTION ...] [-- stepscope run ...]
if __name__ == "__main__":
    launch.main(train)
