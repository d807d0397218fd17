"""Use of Ray's object store, over the whole cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepscope._recording.process import ray_connection
from stepscope.backends.counters import CounterSource

_STORE = "object_store_memory"
"""Ray's name of the resource. Its available amount follows the bytes that objects occupy within about a
second."""


class ObjectStore(CounterSource):
    """Bytes that objects occupy in the shared memory of all nodes."""

    name = "Ray object store"
    unit = "B"
    interval_s = 2.0  # two calls to the cluster's head

    def sample(self) -> Mapping[str, float]:
        ray = ray_connection.connected()
        if ray is None:
            return {}
        whole = ray.cluster_resources().get(_STORE)
        if whole is None:
            return {}
        return {"": max(0.0, whole - ray.available_resources().get(_STORE, 0.0))}


def ray_store() -> Iterator[CounterSource]:
    """Yield the source. It has no values in a process that is not connected to a cluster."""
    yield ObjectStore()
