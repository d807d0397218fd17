"""The block `stepscope` of a Hydra configuration: `+stepscope.steps=[2]` on the command line.

This module adds the config group `stepscope`: `+stepscope=default` adds every setting with its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from stepscope.config import ProfileConfig, resolve
from stepscope.errors import ConfigError

try:
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf
except ImportError as error:
    message = "stepscope.integrations.hydra needs hydra. Fix: pip install hydra-core"
    raise ImportError(message) from error

ConfigStore.instance().store(group="stepscope", name="default", node=ProfileConfig().to_mapping())


def config_from_hydra(cfg: Mapping[str, object]) -> ProfileConfig:
    """Return the configuration from the block `stepscope` of `cfg`, for `stepscope.configure`.

    The block replaces the configuration file. The environment overrides the block. Without a block, only the
    environment is used.

    Args:
        cfg: The whole configuration, as `hydra.main` passes it to the decorated function.

    Raises:
        ConfigError: as `stepscope.configure`; also if the block is not a mapping.
    """
    block = cfg.get("stepscope")
    if OmegaConf.is_config(block):
        block = OmegaConf.to_container(block, resolve=True)
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError("stepscope", block, "a mapping of settings", "write +stepscope.steps=[2]")
    return resolve(cast("Mapping[str, object] | None", block))
