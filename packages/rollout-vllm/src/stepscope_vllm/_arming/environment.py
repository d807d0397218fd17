"""Environment variables to build an engine with, so that its profiler can be started later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from stepscope import ProfileConfig
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope_vllm import _versions
from stepscope_vllm._arming.arguments import folder_of
from stepscope_vllm._driving.built_settings import CUDA_VARIABLE, FOLDER_VARIABLE, VARIABLES, building
from stepscope_vllm._driving.discovery import owned


def engine_env(config: ProfileConfig, replica: int = 0, *, installed: str | None = None) -> dict[str, str]:
    """Return environment variables for the process that builds the engine.

    They are empty from vLLM 0.13 on, except with vllm-ascend 0.13, which still reads them.

    Raises:
        ConfigError: `tool` is nsys, and this vLLM opens no CUDA profiler ranges.
    """
    if switch.DISABLED:
        return {}
    release = installed or _versions.installed()
    if not _versions.reads_environment(release) and not (installed is None and _ascend_by_environment()):
        return {}
    if config.tool == "nsys":
        if not _versions.has(release, "cuda"):
            raise ConfigError(
                "tool", "nsys", f"torch with vLLM {release}{_versions.since('cuda')}", "install that vLLM"
            )
        return {CUDA_VARIABLE: "1"}
    torch = config.torch
    options = {
        "torch_profiler_with_stack": torch.with_stack,
        "torch_profiler_record_shapes": torch.record_shapes,
        "torch_profiler_with_memory": torch.profile_memory,
        "torch_profiler_with_flops": torch.with_flops,
    }
    named = {VARIABLES[field]: str(int(value)) for field, value in options.items()}
    return {FOLDER_VARIABLE: folder_of(config, replica), **named}


@contextmanager
def engine_environment(config: ProfileConfig, replica: int = 0) -> Iterator[None]:
    """Set `engine_env` while an engine is built, and restore the environment, also if building fails.

    The settings are remembered for each engine built inside the block, because its captures need them.
    """
    wanted = engine_env(config, replica)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with building(owned) if wanted else nullcontext():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _ascend_by_environment() -> bool:
    from stepscope_vllm._driving import ascend_profiler  # import time: for vLLM 0.13 and newer alone

    ascend = ascend_profiler.installed()
    return ascend is not None and ascend.by_environment
