"""Configurations of other projects, recognised by their keys, and the way to use stepscope with each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from stepscope.errors import ConfigError


class _Project(NamedTuple):
    name: str
    fix: str


_VERL = _Project("verl", "pass it to ProfileConfig.from_verl, and the result to configure")
_TITAN = _Project(
    "torchtitan",
    "write `steps: every:50` for profile_freq = 50, and list under `instrument`: "
    "{module: torchtitan.train, name: Trainer.train_step, step: around, number: self.step} "
    "(from 0.3 on in torchtitan.trainer)",
)
_TRANSFORMERS = _Project(
    "transformers or TRL",
    "`stepscope run --preset trl --steps 2 train.py` for TRL, or "
    "callbacks=[StepscopeCallback(steps=[2])] of stepscope.integrations.transformers",
)
_ACCELERATE = _Project(
    "accelerate",
    "write its options under `torch` (record_shapes, with_stack, profile_memory, schedule); the functions of "
    "TRL are in the preset trl",
)
_TITAN_KEYS = {"enable_profiling", "profile_freq", "save_traces_folder", "enable_memory_snapshot"}
_TRANSFORMERS_KEYS = {
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "learning_rate", "model_name_or_path",
}  # fmt: skip
_ACCELERATE_KEYS = {"profile_kwargs", "schedule_option", "output_trace_dir"}
_TITAN_TABLE = re.compile(rb"^\[profiling\]\s*(#.*)?$", re.MULTILINE)


def refuse_foreign(data: Mapping[str, object], field: str) -> None:
    """Check that the top level of `data` is not another project's configuration.

    Raises:
        ConfigError: `data` is of another project. The error names it and the way to use stepscope with it.
    """
    project = _project_of(data)
    if project is not None:
        raise _error(field, project)


def refuse_foreign_text(text: bytes, field: str) -> None:
    """Check that a file that is no YAML is not torchtitan's TOML.

    Raises:
        ConfigError: `text` is such a file.
    """
    if _TITAN_TABLE.search(text):
        raise _error(field, _TITAN)


def _project_of(data: Mapping[str, object]) -> _Project | None:
    if {"global_profiler", "actor_rollout_ref"} & data.keys():
        return _VERL
    trainer, profiling = data.get("trainer"), data.get("profiling")
    if "profiler" in data and isinstance(trainer, Mapping) and "profile_interval" in trainer:
        return _VERL
    if isinstance(profiling, Mapping) and _TITAN_KEYS & profiling.keys():
        return _TITAN
    if _ACCELERATE_KEYS & data.keys():
        return _ACCELERATE
    return _TRANSFORMERS if len(_TRANSFORMERS_KEYS & data.keys()) > 1 else None


def _error(field: str, project: _Project) -> ConfigError:
    allowed = "stepscope's own settings: steps, save_path, tool..."
    return ConfigError(field, f"a configuration of {project.name}", allowed, project.fix)
