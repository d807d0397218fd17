"""Preparation of engines for captures in a program without stepscope's code (`stepscope run`)."""

from __future__ import annotations

import os
from typing import Any

from stepscope import ProfileConfig
from stepscope_vllm._arming import environment, joined_extension

BUILDER = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
"""Function that builds the configuration of an LLM, an AsyncLLM or a server, before any process of the engine
starts."""


def folder_of(config: ProfileConfig) -> str:
    """Return the folder to which all engines of the program write their traces."""
    return os.path.join(os.path.abspath(config.save_path), environment.HIDDEN, "unedited")


def arm(config: ProfileConfig, settings: Any) -> None:
    """Add the values of `engine_args` to `settings` (an `EngineArgs`), unless the user has set a profiler.

    Nothing is changed for vLLM 0.12 and older, which read environment variables (`engine_environment`).
    """
    profiler: Any = getattr(settings, "profiler_config", None)
    if not hasattr(profiler, "profiler") or _is_chosen(profiler, config):
        return  # this vLLM has no ProfilerConfig, or the user has set one or a mapping
    ours = environment.engine_args(config)
    wanted = ours["profiler_config"]
    if wanted["profiler"] == "torch":
        # All replicas share this folder, because the replica is not known yet. Captures use other folders.
        wanted["torch_profiler_dir"] = folder_of(config)
    checked = type(profiler)(**wanted)
    for name in wanted:  # changed in place, because a server reads this object when it adds its routes
        setattr(profiler, name, getattr(checked, name))
    extension = ours.get("worker_extension_cls")
    if extension is not None:
        own = settings.worker_extension_cls
        settings.worker_extension_cls = joined_extension.name_of(own) if own else extension


def _is_chosen(profiler: Any, config: ProfileConfig) -> bool:
    """Return True if the user has set `profiler`. False if stepscope has set `profiler` for an earlier engine
    of this process, because several engines may share the object.
    """
    return profiler.profiler is not None and profiler.torch_profiler_dir != folder_of(config)
