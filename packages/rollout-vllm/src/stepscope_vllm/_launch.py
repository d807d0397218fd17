"""Engines that an unedited program builds, made ready for captures."""

from __future__ import annotations

import os
from typing import Any

from stepscope import ProfileConfig
from stepscope_vllm import _args, _beside

BUILDER = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
"""Called for an LLM, an AsyncLLM and a server, before any of its processes starts."""


def arm(config: ProfileConfig, settings: Any) -> None:
    """Give `settings` (an `EngineArgs`) what `engine_args` adds. A profiler that the user has set stays.

    vLLM 0.12 and older are left alone: they read the environment (`engine_environment`).
    """
    theirs = getattr(settings, "profiler_config", None)
    chosen = theirs.get("profiler") if isinstance(theirs, dict) else getattr(theirs, "profiler", None)
    if theirs is None or chosen is not None:
        return
    ours = _args.engine_args(config)
    fields = ours["profiler_config"]
    if "torch_profiler_dir" in fields:
        # One folder for all: nobody knows the replica yet, and captures name folders of their own.
        fields["torch_profiler_dir"] = folder(config)
    settings.profiler_config = type(theirs)(**fields) if not isinstance(theirs, dict) else fields
    extension = ours.get("worker_extension_cls")
    if extension is not None:
        own = getattr(settings, "worker_extension_cls", "")
        settings.worker_extension_cls = _beside.name_of(own) if own else extension


def folder(config: ProfileConfig) -> str:
    """Return the folder of engines that were armed; what stays there has no owner, or came too late."""
    return os.path.join(os.path.abspath(config.save_path), ".vllm", "unedited")
