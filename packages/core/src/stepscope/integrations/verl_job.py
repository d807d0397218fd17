"""The configuration of verl in a Ray job, for those of its processes that start once it is known.

It stands in the key-value store of Ray's control service, which all nodes reach. Ray is imported already
wherever these functions have something to do.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from stepscope.config import ProfileConfig

_NAMESPACE = "stepscope"


def publish(config: ProfileConfig) -> None:
    """Let the processes that this job starts from now on find `config`. Nothing happens without Ray."""
    key = _key()
    if key is not None:
        from ray.experimental import internal_kv

        value = msgspec.json.encode(config.to_mapping())
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def published() -> ProfileConfig | None:
    """Return the configuration that a process of this job published; None if none did."""
    key = _key()
    if key is None:
        return None
    from ray.experimental import internal_kv

    value: Any = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return None if value is None else ProfileConfig.from_mapping(msgspec.json.decode(value))


def _key() -> bytes | None:
    """Return the key of this job; None if this process is not connected to Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return f"configuration of {ray.get_runtime_context().get_job_id()}".encode()
