"""verl 0.9.1's own `main_ppo` on two CPU cores, as a command. Nothing of verl is edited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu alone
    "STEPSCOPE_RAISE": "0",  # as for users: the tests' own setting would end the training
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
LOGGED = "logged.jsonl"
"""The file of verl's logger `file`, in the training's folder."""
TOOLS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'tool.py'}",
    "actor_rollout_ref.rollout.multi_turn.format=always",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "data.max_response_length=128",
)
"""Agent loops of three turns, with a call of a tool after the first and the second."""


def train(folder: Path, *overrides: str, before: Sequence[str] = (), gpus: int = 1) -> tuple[int, str]:
    """Run a training in `folder`. Return its exit code and output.

    Args:
        overrides: Hydra overrides of the configuration below.
        before: A command in front of the training's: `stepscope run ...`.
        gpus: What Ray shall believe that this machine has.
    """
    data = folder / "data"
    if not data.exists():
        subprocess.run([sys.executable, str(HERE / "make_data.py"), str(data)], check=True)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": path,
        "VERL_FILE_LOGGER_PATH": str(folder / LOGGED),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one forbids ray.init(num_gpus=1)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *configuration(data, gpus), *overrides]
    log = folder / "output.log"
    with log.open("w") as output:  # not a pipe: Ray's processes may outlive the training, and hold it open
        code = subprocess.call(
            [*before, *command], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    return code, log.read_text()


def configuration(data: Path, gpus: int) -> list[str]:
    """Return GRPO of the tiny model in `data`: four steps of 4 prompts x 4 responses."""
    rollout, actor, model = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "data.dataloader_num_workers=0",
        f"{model}.path={data / 'model'}",
        f"+{model}.override_config.attn_implementation=sdpa",  # flash attention has no CPU build
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.use_kl_loss=True",
        f"{actor}.use_torch_compile=False",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.name=vllm",
        f"{rollout}.n=4",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",  # vLLM refuses it on CPUs
        f"{rollout}.max_model_len=256",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.max_num_seqs=16",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.gpu_memory_utilization=0.1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.nnodes=1",
        "trainer.total_training_steps=4",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={data.parent / 'checkpoints'}",
        # verl's queue takes a CPU per storage unit and one more, and waits for ever for those it lacks
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=32",
        f"+ray_kwargs.ray_init.num_gpus={gpus}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


if __name__ == "__main__":  # python launch.py FOLDER [OVERRIDE ...] [-- stepscope run ...]
    words, _, front = " ".join(sys.argv[2:]).partition(" -- ")
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    sys.exit(train(target, *words.split(), before=front.split())[0])
