"""verl 0.9.1's own `main_ppo` on two CPU cores, as a command. Nothing of verl is edited."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from packages.core.tests.on_cpu import launch

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[3] / "examples" / "verl_grpo.sh"
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu alone
    "ON_CPU": "verl",
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
SGLANG = (
    "actor_rollout_ref.rollout.name=sglang",
    *(
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}={value}"
        for name, value in {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "enable_memory_saver": False,  # its library is CUDA's
        }.items()
    ),
)
"""SGLang as the rollout, in the place of vLLM."""
IN_ORDER = (
    "data.shuffle=False",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.max_num_seqs=1",  # no pass computes two requests, whichever came first
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=False",
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'in_order.yaml'}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
    f"reward.custom_reward_function.path={HERE / 'in_order.py'}",
    "reward.custom_reward_function.name=reward_of_letters",
    f"trainer.v1.sampler.custom_sampler.path={HERE / 'in_order.py'}",
    "trainer.v1.sampler.custom_sampler.name=InOrder",
    # a step waits for the samples of the next one too: each version of the weights makes one batch
    "trainer.v1.sampler.max_off_policy_threshold=1",
    "trainer.v1.sampler.max_off_policy_strategy=wait",
)
"""Settings with which an asynchronous training is the same each time. Rewards differ, so each step trains."""


def train(
    folder: Path,
    *overrides: str,
    before: Sequence[str] = (),
    gpus: int = 1,
    main: str = "verl.trainer.main_ppo",
) -> tuple[int, str]:
    """Run a training in `folder`. Return its exit code and output.

    Args:
        overrides: Hydra overrides of the example's settings and of those below.
        before: A command in front of the training's: `stepscope run ...`.
        gpus: What Ray shall believe that this machine has.
        main: The module of verl that trains.
    """
    data = made_data(folder)
    settings = [*example_settings(data), *sizes_of_a_cpu(data, gpus)]
    command = [*before, sys.executable, "-m", main, *settings, *overrides]
    return run(folder, command, {})


def run_example(folder: Path, *overrides: str) -> tuple[int, str]:
    """Run `examples/verl_grpo.sh` in `folder`, as a user would. Return its exit code and output."""
    data, programs = made_data(folder), folder / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("stepscope", "-m stepscope")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    variables = {
        "MODEL": str(data / "model"),
        "DATA": str(data),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    return run(folder, ["bash", str(EXAMPLE), *sizes_of_a_cpu(data, 1), *overrides], variables)


def run(folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    logged = {"VERL_FILE_LOGGER_PATH": str(folder / LOGGED)}
    return launch.run(folder, command, [HERE, launch.HERE], {**ENVIRONMENT, **logged, **variables})


def made_data(folder: Path) -> Path:
    """Return the folder of the tiny model and its prompts; make them if necessary."""
    return launch.made_model(folder / "data").parent


def example_settings(data: Path) -> list[str]:
    """Return the overrides that `examples/verl_grpo.sh` gives to verl."""
    command = EXAMPLE.read_text().partition("main_ppo")[2].partition('"$@"')[0].replace("\\\n", " ")
    return shlex.split(Template(command).substitute(MODEL=data / "model", DATA=data))


def sizes_of_a_cpu(data: Path, gpus: int) -> list[str]:
    """Return overrides for two CPU cores: four steps of 4 prompts x 4 responses."""
    rollout, actor, model = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
    return [
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "data.dataloader_num_workers=0",
        f"+{model}.override_config.attn_implementation=sdpa",  # flash attention has no CPU build
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=False",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.use_torch_compile=False",
        f"{rollout}.n=4",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",  # vLLM refuses it on CPUs
        f"{rollout}.max_model_len=256",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.max_num_seqs=16",
        f"{rollout}.gpu_memory_utilization=0.1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.total_training_steps=4",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={data.parent / 'checkpoints'}",
        # verl's queue takes a CPU per storage unit and one more, and waits for ever for those it lacks
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.address=local",  # not the cluster of a test that runs beside this one
        "ray_kwargs.ray_init.num_cpus=32",
        f"+ray_kwargs.ray_init.num_gpus={gpus}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


# python -m packages.core.tests.verl_cpu.launch FOLDER [OVERRIDE ...] [-- stepscope run ...]
if __name__ == "__main__":
    launch.main(train)
