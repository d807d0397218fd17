"""Settings of a framework, or of an engine, that advice may name.

Only settings that somebody listed are kept: a whole configuration may hold secrets
(docs/decisions/0035-settings-that-advice-names.md).
"""

from __future__ import annotations

from math import isfinite
from typing import Literal, TypeAlias, TypeGuard, get_args

import msgspec

Knob: TypeAlias = Literal[
    "agent_workers",
    "async_rollout",
    "balance_batch",
    "balance_requests",
    "checkpointing",
    "colocated",
    "cuda_graphs",
    "data_parallel",
    "dynamic_batch",
    "fast_weights",
    "kv_memory",
    "max_requests",
    "micro_batch",
    "micro_tokens",
    "mixed_prefill",
    "overlap_gradients",
    "oversampling",
    "partial_rollout",
    "prefix_caching",
    "replicas",
    "response_length",
    "reward_workers",
    "rollout_batch",
    "rollout_devices",
    "tensor_parallel",
    "tool_pool",
    "trajectories",
    "weight_bucket",
]
"""Things that a setting changes, whatever its name. docs/settings.md lists the rules that turn them."""
KNOBS: tuple[str, ...] = get_args(Knob)
SWITCHES = frozenset(
    {
        "async_rollout",
        "balance_batch",
        "balance_requests",
        "checkpointing",
        "cuda_graphs",
        "dynamic_batch",
        "fast_weights",
        "mixed_prefill",
        "overlap_gradients",
        "partial_rollout",
        "prefix_caching",
    }
)
"""Knobs that are on or off. The others are numbers, and `colocated` is a fact."""
Value: TypeAlias = bool | int | float | str | None
Named: TypeAlias = tuple[str, Value] | tuple[str, Value, bool | str]
"""(name, value), or (name, value, the value that turns a switch on)."""


def is_number(value: object) -> TypeGuard[bool | int | float | None]:
    """Return whether a value is a finite number, a boolean or None: such a value is no secret."""
    return value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value))


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a run."""

    knob: str
    """One of `KNOBS`."""
    name: str
    """Its name in the framework: `actor_rollout_ref.rollout.max_num_seqs`."""
    value: bool | int | float | str | None = None
    """None: it is unset."""
    better: bool | str | None = None
    """Of a switch that is off: the value that turns it on."""


class FrameworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one framework or engine, in one process. At most one for each knob."""

    framework: str
    version: str | None = None
    engine: bool = False
    """True for an inference engine. A framework above it names the same things as its users set them."""
    settings: tuple[Setting, ...] = ()
