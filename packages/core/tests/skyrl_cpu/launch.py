"""A training of SkyRL 0.4.0 on two CPU cores, as a command. Nothing of SkyRL is edited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
TOOL_CALLS = "tool_calls.jsonl"
"""The file in which the environment notes each call of its tool, by its own clock."""
ENVIRONMENT = {
    "STEPSCOPE_RAISE": "0",  # as for users: the tests' own setting would end the training
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "WANDB_MODE": "disabled",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 8, "CPU": 16}',  # Ray does not look whether they are there
    "RAY_DEDUP_LOGS": "0",
    # On a busy machine Ray's own processes take longer to start than it allows by default.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
}
PROMPTS, RESPONSES, TOKENS = 4, 4, 16
"""Prompts of a step, responses to each, and tokens of each turn of these."""
TURNS = 3
SLOW_S = 1.0
"""Time that the tool takes for every seventh prompt; for others a twentieth of it."""


def train(folder: Path, *overrides: str, before: Sequence[str] = (), steps: int = 4) -> tuple[int, str]:
    """Run a training of `steps` steps in `folder`. Return its exit code and output.

    Args:
        overrides: Settings of SkyRL, behind those below.
        before: A command in front of the training's: `stepscope run ...`.
    """
    data = made_data(folder, steps)
    command = [*before, sys.executable, str(HERE / "script.py"), *sizes_of_a_cpu(data), *overrides]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "TOOL_CALLS": str(folder / TOOL_CALLS),
        "TOOL_SLOW_S": str(SLOW_S),
        "PYTHONPATH": path,
        "PATH": programs,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one forbids actors with GPUs
    log = folder / "output.log"
    with log.open("w") as output:  # not a pipe: Ray's processes may outlive the training, and hold it open
        code = subprocess.call(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return code, log.read_text(errors="replace")


def made_data(folder: Path, steps: int) -> Path:
    """Return the folder of the tiny model and its prompts; make them if necessary."""
    data = folder / "data"
    if not data.exists():
        maker = HERE.parent / "verl_cpu" / "make_data.py"  # the same model, which vLLM takes on a CPU
        subprocess.run([sys.executable, str(maker), str(data)], check=True)
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


if __name__ == "__main__":  # python launch.py FOLDER [OVERRIDE ...] [-- stepscope run ...]
    words = [*sys.argv[2:], "--"]
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    at = words.index("--")
    sys.exit(train(target, *words[:at], before=words[at + 1 : -1])[0])
