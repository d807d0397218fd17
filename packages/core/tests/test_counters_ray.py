"""Use of Ray's object store, against objects of a known size."""

from __future__ import annotations

import time

import pytest
import ray

from stepscope.recording.counters.ray_store import ray_store

MB = 1 << 20


pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_the_store_grows_by_the_objects_that_are_put() -> None:
    (source,) = ray_store()
    before = source.sample()[""]
    objects = [ray.put(b"x" * (20 * MB)) for _ in range(3)]
    deadline = time.monotonic() + 30
    while (grown := source.sample()[""] - before) < 59 * MB and time.monotonic() < deadline:
        time.sleep(0.1)  # the head of the cluster hears of it within about a second
    assert grown == pytest.approx(60 * MB, rel=0.05)
    del objects
