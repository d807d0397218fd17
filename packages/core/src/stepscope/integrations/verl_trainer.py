"""verl's `global_profiler` as the configuration of a PPO trainer's process, where its tool is `stepscope`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import wrapt
from omegaconf import OmegaConf

from stepscope._recording.capture import configure
from stepscope._recording.process import failures
from stepscope.config import ProfileConfig, resolve
from stepscope.errors import ours
from stepscope.integrations import verl_job
from stepscope.integrations.verl_profiler import AS_TORCH, TOOL

if TYPE_CHECKING:
    from types import ModuleType

    from omegaconf import DictConfig

_SPANS_ALONE: Mapping[str, object] = {"*": {"profiler": "off", "engine": {"profiler": "off"}}}


def extend(trainer: ModuleType) -> None:
    """Let each PPO trainer of verl's module take steps, ranks, roles and options from its configuration."""
    name = "PPOTrainer" if hasattr(trainer, "PPOTrainer") else "RayPPOTrainer"
    wrapt.wrap_function_wrapper(trainer, f"{name}.__init__", _make_trainer)


def _make_trainer(
    make: Callable[..., None], trainer: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    make(*args, **kwargs)
    if OmegaConf.select(trainer.config, "global_profiler.tool") == TOOL:
        config = configure.configure(read_config(trainer.config))
        try:
            verl_job.publish(config)
        except ours() as error:  # its workers get it with the first capture, which is late for an engine
            failures.note("publishing the configuration for verl's workers", error)


def read_config(config: DictConfig) -> ProfileConfig:
    """Return a configuration of verl's, with the preset `verl`: the whole step is captured.

    verl's values take the place of a file: the environment lies over them. If verl enables the profiler of no
    role, spans are recorded and no profiler runs.

    Args:
        config: What verl's trainer gets.

    Raises:
        ConfigError: as `ProfileConfig.from_verl`.
    """
    tree = _as_torch(OmegaConf.to_container(config, resolve=True))
    overall = tree["global_profiler"]
    steps, overall["steps"] = overall.get("steps") or [], []
    verls = ProfileConfig.from_verl(tree)
    any_enabled = verls.roles != ProfileConfig().roles
    roles = verls.to_mapping()["roles"] if any_enabled else _SPANS_ALONE
    return resolve({**verls.to_mapping(), "steps": steps, "roles": roles, "instrument": ["verl"]})


def _as_torch(tree: Any) -> Any:
    """Return the tree with the tool's blocks as blocks of the tool `torch`."""
    if not isinstance(tree, dict):
        return tree
    block = {**tree, **AS_TORCH} if tree.get("tool") == TOOL else tree
    return {name: _as_torch(value) for name, value in block.items()}
