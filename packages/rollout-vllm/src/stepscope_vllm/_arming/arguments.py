"""Arguments and variables to build an engine with, so that its profiler can be started later."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakKeyDictionary

from stepscope import ProfileConfig, switch
from stepscope.config import RoleConfig
from stepscope.engines.supported import numbers
from stepscope.errors import ConfigError
from stepscope_vllm import _versions

log = logging.getLogger("stepscope")
EXTENSION = "stepscope_vllm.WorkerExtension"
Value = str | int | float | bool | None

CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
"""Has vLLM 0.11.1 to 0.12 open CUDA profiler ranges; later ones have `ProfilerConfig(profiler="cuda")`."""
FOLDER_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
VARIABLES = {
    "torch_profiler_with_stack": "VLLM_TORCH_PROFILER_WITH_STACK",
    "torch_profiler_record_shapes": "VLLM_TORCH_PROFILER_RECORD_SHAPES",
    "torch_profiler_with_memory": "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    "torch_profiler_with_flops": "VLLM_TORCH_PROFILER_WITH_FLOPS",
}
"""Settings before there was a `ProfilerConfig` (vLLM 0.12 and older); before 0.10.2 only the folder."""

_built_in: WeakKeyDictionary[object, Mapping[str, object]] = WeakKeyDictionary()
"""Engine -> settings of its profiler. One writer: `building`."""


def engine_args(
    config: ProfileConfig, replica: int = 0, *, extension: bool = True, installed: str | None = None
) -> dict[str, Any]:
    """Keyword arguments for `AsyncEngineArgs`, `EngineArgs` or `LLM`, beside your own.

    Args:
        config: The run's. `torch` and `roles.rollout.engine` say what is recorded; keys of `engine.extra`
            are fields of vLLM's `ProfilerConfig`. With `tool: nsys` the workers open CUDA profiler ranges.
        replica: Number of the replica: each has a folder of its own.
        extension: Whether to name `stepscope_vllm.WorkerExtension` as `worker_extension_cls`, so that every
            capture has its own folder and options and stop is short. False where that argument is taken:
            inherit from it there.
        installed: vLLM's version; None for the one that is installed here.

    Returns:
        Empty for vLLM 0.12 and older, which read `engine_env` instead, and with STEPSCOPE_DISABLE=1.

    Raises:
        ConfigError: `engine.extra` has what this vLLM's `ProfilerConfig` has not.
    """
    if switch.DISABLED:
        return {}
    release = installed or _installed()
    extension = extension and config.tool != "nsys"  # there are no files to point anywhere
    if _by_environment(release):
        return {"worker_extension_cls": EXTENSION} if extension else {}
    found: dict[str, Any] = {"profiler_config": _profiler_config(config, replica, release, extension)}
    if extension:
        found["worker_extension_cls"] = EXTENSION
    return found


def engine_env(config: ProfileConfig, replica: int = 0, *, installed: str | None = None) -> dict[str, str]:
    """Environment variables for the process that builds the engine; empty from vLLM 0.13 on, but for
    vllm-ascend 0.13, which looks there still.

    Raises:
        ConfigError: `tool` is nsys, and this vLLM opens no CUDA profiler ranges.
    """
    if switch.DISABLED:
        return {}
    release = installed or _installed()
    if not _by_environment(release) and not (installed is None and _ascend_by_environment()):
        return {}
    if config.tool == "nsys":
        if not _has(release, "cuda"):
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
    return {FOLDER_VARIABLE: _folder(config, replica), **named}


@contextmanager
def engine_environment(config: ProfileConfig, replica: int = 0) -> Iterator[None]:
    """Around building an engine: sets `engine_env` for it and takes it back, also when building fails. What
    an engine was built with is remembered: its captures need it.
    """
    from stepscope_vllm._driving import in_process  # not at the top: asyncio comes with it

    wanted = engine_env(config, replica)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with building(in_process.owned) if wanted else nullcontext():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def building(owned: Callable[[], list[object]]) -> Iterator[None]:
    """Keep the settings of the environment for the engines that are built inside.

    Args:
        owned: The engines that live in this process.
    """
    earlier = owned()
    yield
    settings = settings_of_environment()
    for engine in owned():
        if all(engine is not each for each in earlier):
            _built_in[engine] = settings


def settings_of(engine: object) -> Mapping[str, object]:
    """Return the settings by the environment that an engine was built in; by today's if that is unknown."""
    known = _built_in.get(engine)
    return settings_of_environment() if known is None else known


def settings_of_environment() -> dict[str, object]:
    """Return the settings that the environment states now, as a `ProfilerConfig` has them."""
    if os.environ.get(CUDA_VARIABLE) == "1":
        return {"profiler": "cuda"}
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return {}
    found: dict[str, object] = {"profiler": "torch", "torch_profiler_dir": os.path.abspath(folder)}
    for field, variable in VARIABLES.items():
        default = "1" if field == "torch_profiler_with_stack" else "0"
        found[field] = os.environ.get(variable, default) != "0"
    return found


def server_args(config: ProfileConfig, replica: int = 0, *, installed: str | None = None) -> list[str]:
    """Return arguments for `vllm serve`, beside your own. As `engine_args`, without the extension: no
    route of a server in production reaches it.

    Raises:
        ConfigError: as there; or `tool` is nsys, whose ranges nobody has opened in a server yet.
    """
    if config.tool == "nsys":
        raise ConfigError(
            "tool", "nsys", "torch, for a server", "serve it from a configuration of its own with tool: torch"
        )
    found = []
    for name, value in engine_args(config, replica, extension=False, installed=installed).items():
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        found += [f"--{name.replace('_', '-')}", text]
    return found


def _profiler_config(
    config: ProfileConfig, replica: int, release: str, extension: bool
) -> dict[str, Value | list[str]]:
    role = _role(config)
    torch, window = config.torch, role.engine.iterations
    if torch.with_stack and config.tool != "nsys" and window.count is None:
        log.warning(
            "torch.with_stack with vLLM: a worker polls for work in Python, so each second in which its "
            "engine has none gives up to 2.7 million events (6 GB in the worker), and generation stands "
            "still until they are written. Fix: roles.rollout.engine.iterations: {start: 1, count: 64}, "
            "which records from the first iteration on and ends by itself"
        )
    found: dict[str, Value | list[str]] = (
        {"profiler": "cuda"}
        if config.tool == "nsys"
        else {
            "profiler": "torch",
            "torch_profiler_dir": _folder(config, replica),
            "torch_profiler_with_stack": torch.with_stack,
            "torch_profiler_record_shapes": torch.record_shapes,
            "torch_profiler_with_memory": torch.profile_memory,
            "torch_profiler_with_flops": torch.with_flops,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    )
    if not extension and not _has(release, "delay_iterations") and (window.start or window.count):
        # No start takes them, so they are what every capture gets.
        found.update(delay_iterations=window.start, max_iterations=window.count or 0)
    found.update(_extra(role.engine.extra, release))
    return found


def _extra(extra: Mapping[str, Value], release: str) -> Mapping[str, Value]:
    fields = _fields()
    if "profiler" in extra:
        raise ConfigError(
            "roles.rollout.engine.extra.profiler", extra["profiler"],
            "what `tool` says: torch, or nsys for vLLM's cuda; nobody has read the files of others (proton)",
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
    """Of the installed `ProfilerConfig`; None where there is none to ask."""
    try:
        from vllm.config import ProfilerConfig
    except ImportError:
        return None
    return frozenset(ProfilerConfig.__dataclass_fields__)


def _folder(config: ProfileConfig, replica: int) -> str:
    """Hidden in the run's folder: what stays there has no owner, or came too late."""
    return os.path.join(os.path.abspath(config.save_path), ".vllm", f"replica{replica}")


def _role(config: ProfileConfig) -> RoleConfig:
    found = config.role("rollout")
    return RoleConfig() if found is None else found[1]


def _by_environment(release: str) -> bool:
    return not _has(release, "profiler_config")


def _ascend_by_environment() -> bool:
    from stepscope_vllm._driving import ascend_profiler

    found = ascend_profiler.installed()
    return found is not None and found.by_environment


def _has(release: str, option: str) -> bool:
    own = numbers(release)
    return not own or own >= numbers(_versions.ADDED[option])


def _installed() -> str:
    """Return the version of whichever distribution brings the module `vllm`."""
    for name in _versions.DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    try:
        import vllm
    except ImportError:
        raise ConfigError(
            "vllm", "not installed here", "the vLLM that the engine is built with",
            "call this where the engine is built, or say installed='0.32.0'",
        ) from None  # fmt: skip
    return str(vllm.__version__)
