"""Settings of a framework, or of an engine, that advice may name.

Only listed settings are kept, because a whole configuration may hold secrets
(docs/decisions/0035-settings-that-advice-names.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal, TypeAlias, TypeGuard

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
"""Effects that a setting may have, whatever its name."""
KNOBS: Mapping[Knob, str] = {
    "agent_workers": "processes that run agents",
    "async_rollout": "the rollout of the next step runs beside the training",
    "balance_batch": "all ranks get equal work",
    "balance_requests": "a router gives requests to the replica that has fewer",
    "checkpointing": "activations are computed again rather than kept",
    "colocated": "rollout and training have the same devices",
    "cuda_graphs": "the engine replays graphs of kernels",
    "data_parallel": "data-parallel engines of a replica",
    "dynamic_batch": "micro-batches are filled by tokens",
    "fast_weights": "weights go from device to device",
    "kv_memory": "part of a device's memory for the engine",
    "max_requests": "requests that an engine serves at once",
    "micro_batch": "samples of a micro-batch",
    "micro_tokens": "tokens of a micro-batch",
    "mixed_prefill": "prompts are read in passes that write tokens too",
    "overlap_gradients": "communication runs beside computation",
    "oversampling": "prompts that are begun for a batch",
    "partial_rollout": "the training begins without the last trajectories, which go on later",
    "prefix_caching": "prompts that begin alike are read once",
    "replicas": "inference engines",
    "response_length": "tokens of an answer, at most",
    "reward_workers": "processes that compute rewards",
    "rollout_batch": "prompts of a batch",
    "rollout_devices": "devices of all inference engines together",
    "tensor_parallel": "devices of an inference engine",
    "tool_pool": "tools that run at once",
    "trajectories": "trajectories or requests in flight",
    "weight_bucket": "size of the pieces in which weights move",
}
"""{knob: description of its setting}, for docs/reference/settings.md."""
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
"""Knobs that are switches. The other knobs are numbers, except `colocated`, which is a fact."""
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
    """Name of the setting in the framework: `actor_rollout_ref.rollout.max_num_seqs`."""
    value: bool | int | float | str | None = None
    """The present value, or None if the setting is unset."""
    better: bool | str | None = None
    """The value that turns a switch on, if the switch is off; else None."""


class FrameworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one framework or engine, in one process. At most one for each knob."""

    framework: str
    version: str | None = None
    engine: bool = False
    """True for an inference engine. A framework above the engine has settings for the same effects, under
    users' names."""
    settings: tuple[Setting, ...] = ()
