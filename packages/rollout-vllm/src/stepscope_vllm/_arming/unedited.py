"""Preparation for captures of the engines that an unedited program builds."""

from __future__ import annotations

import os
from typing import Any

from stepscope import ProfileConfig
from stepscope_vllm._arming import environment, joined_extension

BUILDER = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
"""Function that builds the configuration of an LLM, an AsyncLLM or a server, before any of its processes
starts."""


def folder_of(config: ProfileConfig) -> str:
    """Return the folder for traces of all engines that an unedited program builds."""
    return os.path.join(os.path.abspath(config.save_path), environment.HIDDEN, "unedited")


def arm(config: ProfileConfig, settings: Any) -> None:
    """Add the values of `engine_args` to `settings` (an `EngineArgs`). A profiler that the user has set is
    kept.

    vLLM 0.12 and older are left alone, because they read the environment (`engine_environment`).
    """
    profiler: Any = getattr(settings, "profiler_config", None)
    if not hasattr(profiler, "profiler") or _is_chosen(profiler, config):
        return  # this vLLM has none, or somebody has written a mapping
    ours = environment.engine_args(config)
    wanted = ours["profiler_config"]
    if wanted["profiler"] == "torch":
        # One folder for all: the replica is not known yet, and captures name folders of their own.
        wanted["torch_profiler_dir"] = folder_of(config)
    checked = type(profiler)(**wanted)
    for name in wanted:  # in place: a server reads this object to decide about routes for its profiler
        setattr(profiler, name, getattr(checked, name))
    extension = ours.get("worker_extension_cls")
    if extension is not None:
        own = settings.worker_extension_cls
        settings.worker_extension_cls = joined_extension.name_of(own) if own else extension


def _is_chosen(profiler: Any, config: ProfileConfig) -> bool:
    """Return whether other code has set a profiler. Several engines of a process may share the object."""
    return profiler.profiler is not None and profiler.torch_profiler_dir != folder_of(config)
