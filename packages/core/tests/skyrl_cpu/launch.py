"""A training of SkyRL 0.4.0 on two CPU cores, as a command. Nothing of SkyRL is edited."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from packages.core.tests.on_cpu import launch

HERE = Path(__file__).parent
PROMPTS, RESPONSES, TOKENS = 4, 4, 16
"""Prompts of a step, responses to each, and tokens of each turn of these."""
TURNS = 3
SLOW_S = 1.0
"""Time that the tool takes for every seventh prompt; for others a twentieth of it."""
ASYNCHRONOUS = (
    "trainer.fully_async.enabled=true",
    "trainer.fully_async.max_staleness_steps=1",
    f"trainer.fully_async.num_parallel_generation_workers={2 * PROMPTS}",
    "trainer.algorithm.policy_loss_type=rollout_is",
)
"""Samples of up to one step before the one that trains on them."""
ENVIRONMENT = {
    **launch.MORE_GPUS,
    "ON_CPU": "skyrl",
    "WANDB_MODE": "disabled",
    "TOOL_SLOW_S": str(SLOW_S),
}


def train(folder: Path, *overrides: str, before: Sequence[str] = (), steps: int = 4) -> tuple[int, str]:
    """Run a training of `steps` steps in `folder`. Return its exit code and output.

    Args:
        overrides: Settings of SkyRL, behind those below.
        before: A command in front of the training's: `stepscope run ...`.
    """
    data = made_data(folder, steps)
    command = [*before, sys.executable, str(HERE / "script.py"), *sizes_of_a_cpu(data), *overrides]
    return launch.run(folder, command, [HERE, launch.HERE], ENVIRONMENT)


def made_data(folder: Path, steps: int) -> Path:
    """Return the folder of the tiny model and its prompts; make them if necessary."""
    data = folder / "data"
    launch.made_model(data)
    if not (data / "sums.parquet").exists():
        import pandas  # type: ignore[import-untyped]  # the engine's environment has it

        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{number}+{number * 7}="}],
                "env_class": "sums",
                "reward_spec": {"method": "rule", "ground_truth": str(8 * number)},
            }
            for number in range(PROMPTS * steps)
        ]
        pandas.DataFrame(rows).to_parquet(data / "sums.parquet")
    return data


def sizes_of_a_cpu(data: Path) -> list[str]:
    """Return the settings for two CPU cores: steps of 4 prompts x 4 responses."""
    folder, engine = data.parent, "generator.inference_engine"
    settings = {
        "data.train_data": f"['{data / 'sums.parquet'}']",
        "data.val_data": f"['{data / 'sums.parquet'}']",
        "data.dataloader.num_workers": 0,
        "trainer.policy.model.path": data / "model",
        "trainer.placement.colocate_all": "false",
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.placement.ref_num_gpus_per_node": 1,
        "trainer.placement.critic_num_gpus_per_node": 1,
        "trainer.strategy": "fsdp",
        "trainer.flash_attn": "false",  # it has no CPU build
        "trainer.remove_microbatch_padding": "false",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.use_kl_loss": "true",
        "trainer.epochs": 1,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.resume_mode": "null",
        "trainer.train_batch_size": PROMPTS,
        "trainer.policy_mini_batch_size": PROMPTS,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.max_prompt_length": 64,
        "trainer.policy.optimizer_config.lr": 1e-4,
        "trainer.logger": "console",
        "trainer.log_path": folder / "logs",
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.export_path": folder / "export",
        "generator.batched": "false",
        "generator.n_samples_per_prompt": RESPONSES,
        "generator.max_turns": TURNS,
        "generator.max_input_length": 200,
        "generator.sampling_params.max_generate_length": TOKENS,
        "environment.env_class": "sums",
        f"{engine}.num_engines": 1,
        f"{engine}.tensor_parallel_size": 1,
        f"{engine}.enforce_eager": "true",
        f"{engine}.weight_sync_backend": "delta",  # by files: NCCL knows no CPU
        f"{engine}.delta_weight_sync.sync_dir": folder / "sync",
        f"{engine}.delta_weight_sync.local_checkpoint_dir": folder / "local",
        f"{engine}.delta_weight_sync.publish_staging_dir": folder / "staging",
        f"{engine}.distributed_executor_backend": "mp",
        f"{engine}.engine_init_kwargs.worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        f"{engine}.gpu_memory_utilization": 0.1,
        f"{engine}.enable_ray_prometheus_stats": "false",
        f"{engine}.max_num_batched_tokens": 512,
        f"{engine}.max_num_seqs": 16,
    }
    return [f"{name}={value}" for name, value in settings.items()]


# python -m packages.core.tests.skyrl_cpu.launch FOLDER [OVERRIDE ...] [-- stepscope run ...]
if __name__ == "__main__":
    launch.main(train)
