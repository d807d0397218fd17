"""Arguments and environment variables that enable the profiler of an engine that is about to be built."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from stepscope import ProfileConfig
from stepscope.config import RoleConfig
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope_vllm import _versions
from stepscope_vllm._driving.built_settings import CUDA_VARIABLE, FOLDER_VARIABLE, VARIABLES, building
from stepscope_vllm._driving.discovery import owned

log = logging.getLogger("stepscope")
EXTENSION = "stepscope_vllm.WorkerExtension"
HIDDEN = ".vllm"
"""Name of the folder, in the run's folder, to which engines write traces. Captures move their traces away.

A trace stays in this folder if it belongs to no capture, or was written too late for its capture.
"""
Value = str | int | float | bool | None
_STACKS = (
    "torch.with_stack with vLLM: workers poll for work in Python. Each second without work records up to 2.7 "
    "million events (6 GB in the worker), and generation stops until they are written. Fix: "
    "roles.rollout.engine.iterations: {start: 1, count: 64}, which records from the first iteration on and "
    "ends by itself"
)


def engine_args(
    config: ProfileConfig, replica: int = 0, *, extension: bool = True, installed: str | None = None
) -> dict[str, Any]:
    """Return keyword arguments to add to your own for `AsyncEngineArgs`, `EngineArgs` or `LLM`.

    Args:
        config: Configuration of the run. `torch` and `roles.rollout.engine` say what is recorded. Keys of
            `engine.extra` are fields of vLLM's `ProfilerConfig`. With `tool: nsys` the workers open CUDA
            profiler ranges.
        replica: Number of the replica. Each replica has a folder of its own.
        extension: True to name `stepscope_vllm.WorkerExtension` as `worker_extension_cls`, so that every
            capture has its own folder and options, and a stop is short. If you need a worker extension of
            your own, let its class inherit from `WorkerExtension`, and pass False.
        installed: Version of vLLM to return arguments for; None for the installed version.

    Returns:
        The arguments. With STEPSCOPE_DISABLE=1 they are empty. For vLLM 0.12 and older, which read
        `engine_env` instead, they name the extension alone.

    Raises:
        ConfigError: `engine.extra` has a key that is no field of this vLLM's `ProfilerConfig`.
    """
    if switch.DISABLED:
        return {}
    release = installed or _versions.installed()
    extension = extension and config.tool != "nsys"  # nsys writes the files, not the workers
    if _versions.reads_environment(release):
        return {"worker_extension_cls": EXTENSION} if extension else {}
    arguments: dict[str, Any] = {"profiler_config": _profiler_config(config, replica, release, extension)}
    if extension:
        arguments["worker_extension_cls"] = EXTENSION
    return arguments


def server_args(config: ProfileConfig, replica: int = 0, *, installed: str | None = None) -> list[str]:
    """Return arguments to add to your own for `vllm serve`.

    These are the arguments of `engine_args` without the extension, because no route of a production server
    calls the extension.

    Raises:
        ConfigError: As for `engine_args`; also if `tool` is nsys, which was never tried with a server.
    """
    if config.tool == "nsys":
        raise ConfigError(
            "tool", "nsys", "torch, for a server", "serve it from a configuration of its own with tool: torch"
        )
    words = []
    for name, value in engine_args(config, replica, extension=False, installed=installed).items():
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return words


def folder_of(config: ProfileConfig, replica: int) -> str:
    """Return the folder to which one replica writes its traces."""
    return os.path.join(os.path.abspath(config.save_path), HIDDEN, f"replica{replica}")


def _profiler_config(
    config: ProfileConfig, replica: int, release: str, extension: bool
) -> dict[str, Value | list[str]]:
    _, role = config.role("rollout") or ("", RoleConfig())
    torch, window = config.torch, role.engine.iterations
    if torch.with_stack and config.tool != "nsys" and window.count is None:
        log.warning(_STACKS)
    settings: dict[str, Value | list[str]] = (
        {"profiler": "cuda"}
        if config.tool == "nsys"
        else {
            "profiler": "torch",
            "torch_profiler_dir": folder_of(config, replica),
            "torch_profiler_with_stack": torch.with_stack,
            "torch_profiler_record_shapes": torch.record_shapes,
            "torch_profiler_with_memory": torch.profile_memory,
            "torch_profiler_with_flops": torch.with_flops,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    )
    if not extension and not _versions.has(release, "delay_iterations") and (window.start or window.count):
        # A start of this vLLM accepts no range of iterations, so the engine's setting holds for all captures.
        settings.update(delay_iterations=window.start, max_iterations=window.count or 0)
    settings.update(_extra(role.engine.extra, release))
    return settings


def _extra(extra: Mapping[str, Value], release: str) -> Mapping[str, Value]:
    fields = _fields()
    if "profiler" in extra:
        raise ConfigError(
            "roles.rollout.engine.extra.profiler", extra["profiler"],
            "what `tool` says: torch, or nsys for vLLM's cuda; others write files that nobody reads",
            "take it out",
        )  # fmt: skip
    for option in extra:
        if fields is not None and option not in fields:
            raise ConfigError(
                "roles.rollout.engine.extra", option,
                f"the fields of ProfilerConfig in vLLM {release} ({', '.join(sorted(fields))})"
                f"{_versions.since(option)}",
                "take it out, or install that vLLM",
            )  # fmt: skip
    return extra


def _fields() -> frozenset[str] | None:
    """Return the fields of the installed `ProfilerConfig`, or None if this vLLM has no such class."""
    try:
        from vllm.config import ProfilerConfig
    except ImportError:
        return None
    return frozenset(ProfilerConfig.__dataclass_fields__)


def engine_env(config: ProfileConfig, replica: int = 0, *, installed: str | None = None) -> dict[str, str]:
    """Return environment variables for the process that builds the engine.

    Empty from vLLM 0.13 on, except with vllm-ascend 0.13, which still reads the variables.

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
    """Set the variables of `engine_env` while an engine is built. Then restore the environment.

    The settings are remembered for each engine that is built in the block, because captures need them later.
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
    from stepscope_vllm._driving import ascend_profiler  # imported here: only vLLM 0.13 and newer need it

    ascend = ascend_profiler.installed()
    return ascend is not None and ascend.by_environment
