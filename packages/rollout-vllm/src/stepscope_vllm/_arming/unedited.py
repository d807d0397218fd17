"""Engines that an unedited program builds, made ready for captures."""

from __future__ import annotations

import os
from typing import Any

from stepscope import ProfileConfig
from stepscope_vllm._arming import arguments, joined_extension

BUILDER = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
"""Called for an LLM, an AsyncLLM and a server, before any of its processes starts."""


def arm(config: ProfileConfig, settings: Any) -> None:
    """Give `settings` (an `EngineArgs`) what `engine_args` adds. A profiler that the user has set stays.

    vLLM 0.12 and older are left alone: they read the environment (`engine_environment`).
    """
    profiler: Any = getattr(settings, "profiler_config", None)
    if not hasattr(profiler, "profiler") or _is_chosen(profiler, config):
        return  # none in this vLLM, or a mapping, which somebody has written
    ours = arguments.engine_args(config)
    wanted = ours["profiler_config"]
    if wanted["profiler"] == "torch":
        # One folder for all: nobody knows the replica yet, and captures name folders of their own.
        wanted["torch_profiler_dir"] = folder(config)
    checked = type(profiler)(**wanted)
    for name in wanted:  # in place: a server looks at this object for whether it has routes for its profiler
        setattr(profiler, name, getattr(checked, name))
    extension = ours.get("worker_extension_cls")
    if extension is not None:
        own = settings.worker_extension_cls
        settings.worker_extension_cls = joined_extension.name_of(own) if own else extension


def _is_chosen(profiler: Any, config: ProfileConfig) -> bool:
    """Return whether somebody else has set a profiler. Several engines of a process may share the object."""
    return profiler.profiler is not None and profiler.torch_profiler_dir != folder(config)


def folder(config: ProfileConfig) -> str:
    """Return the folder of engines that were armed; what stays there has no owner, or came too late."""
    return os.path.join(os.path.abspath(config.save_path), ".vllm", "unedited")
