"""A training of AReaL 1.0.4 on two CPU cores, as a command. Nothing of AReaL is edited."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packages.core.tests.on_cpu import launch

HERE = Path(__file__).parent
ENVIRONMENT = {"ON_CPU": "areal", "WANDB_MODE": "disabled"}
PROMPTS, RESPONSES, TOKENS = 4, 4, 16
"""Prompts of a step, responses to each, and tokens of each turn of these."""


ASYNCHRONOUS = ("rollout.max_head_offpolicyness=1", f"+rollout.max_concurrent_rollouts={2 * PROMPTS}")
"""Rollouts of the next step beside the training of this one."""


def train(folder: Path, *overrides: str, before: Sequence[str] = (), steps: int = 5) -> tuple[int, str]:
    """Run a training of `steps` steps in `folder`. Return its exit code and output.

    Args:
        overrides: Settings of AReaL, behind those below.
        before: A command in front of the training's: `stepscope run ...`.
    """
    config = folder / "areal.yaml"
    config.write_text(json.dumps(sizes_of_a_cpu(folder, launch.made_model(folder / "data"), steps)))
    programs = folder / "bin"
    for made in (programs, folder / "files", folder / "names"):
        made.mkdir()
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)
    launcher = [sys.executable, "-m", "areal.infra.launcher.local", str(HERE / "script.py")]
    command = [*before, *launcher, "--config", str(config), *overrides]
    return launch.run(folder, command, [HERE, launch.HERE], ENVIRONMENT, [programs])


def sizes_of_a_cpu(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Return the settings for two CPU cores: steps of 4 prompts x 4 responses."""
    named = {"experiment_name": "sums", "trial_name": "cpu"}
    cores = {"scheduling_spec": [{"cpu": 1}]}
    engine = {
        **named,
        **cores,
        "backend": "fsdp:d1",
        "path": str(model),
        "attn_impl": "sdpa",  # flash attention has no CPU build
        "dtype": "float32",
        "mb_spec": {"max_tokens_per_mb": 4096},
    }
    return {
        **named,
        "total_train_epochs": 1,
        "total_train_steps": steps,
        "tokenizer_path": str(model),
        "allocation_mode": "sglang:d1+fsdp:d1",
        "cluster": {
            "n_nodes": 1,
            "n_gpus_per_node": 1,
            "fileroot": str(folder / "files"),
            "name_resolve": {"type": "nfs", "nfs_record_root": str(folder / "names")},
        },
        "rollout": {
            **named,
            **cores,
            "backend": "sglang:d1",
            "consumer_batch_size": PROMPTS,
            "max_head_offpolicyness": 0,  # each batch is written in the step that trains on it
            "tokenizer_path": str(model),
        },
        "gconfig": {"n_samples": RESPONSES, "max_new_tokens": TOKENS},
        "actor": {
            **engine,
            "optimizer": {"type": "adam", "lr": 1e-4, "lr_scheduler_type": "constant"},
            "weight_update_mode": "disk",  # NCCL knows no CPU
            "kl_ctl": 0.01,
            "ppo_n_minibatches": 1,
            "use_decoupled_loss": True,
            "recompute_logprob": True,
        },
        "ref": engine,
        "sglang": {
            "model_path": str(model),
            "random_seed": 1,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_running_requests": 16,
            "context_length": 512,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
        },
        "train_dataset": {"batch_size": PROMPTS, "shuffle": False, "type": "rl", "path": "sums"},
        "stats_logger": {**named, "fileroot": str(folder / "files")},
        "saver": {**named, "fileroot": str(folder / "files")},
        "evaluator": {**named, "fileroot": str(folder / "files")},
        "recover": {**named, "fileroot": str(folder / "files"), "mode": "disabled"},
    }


# python -m packages.core.tests.areal_cpu.launch FOLDER [OVERRIDE ...] [-- stepscope run ...]
if __name__ == "__main__":
    launch.main(train)
