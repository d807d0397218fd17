"""Use of Ray's object store, against objects of a known size."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from packages.core.tests.runs import SPANS_ALONE, spans_alone
from stepscope import capture
from stepscope._recording.counters.load import ray_store
from stepscope.backends.counters import CounterSource
from stepscope.engines.metrics import FINISHED, EngineMetrics
from stepscope.engines.ray import ProfilerFactory, RayRollout
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.timeline import load_step

MB = 1 << 20


pytestmark = pytest.mark.usefixtures("ray_cluster")


class Engine(FakeEngine):
    """A fake engine that knows how many iterations it ran."""

    ran = 0

    async def generate(self, iterations: int) -> None:
        await super().generate(iterations)
        self.ran += iterations


class Counting(FakeEngineProfiler):
    def counters(self) -> Sequence[CounterSource]:
        engine = cast(Engine, self.engine)
        metrics = EngineMetrics(lambda: {FINISHED: float(engine.ran)}, "replica 0", blocks=False)
        return metrics.sources()


class Rollout:
    """An actor that knows nothing of stepscope."""

    def __init__(self) -> None:
        self.engine = Engine()

    def generate(self, iterations: int) -> None:
        asyncio.run(self.engine.generate(iterations))


def test_the_engine_of_an_actor_is_sampled_in_the_actor(tmp_path: Path, remote: Callable[..., Any]) -> None:
    config = spans_alone(tmp_path, roles={"rollout": {"ranks": "all"}, **SPANS_ALONE})
    actor = remote(Rollout)
    for step in (1, 2):  # in the first one its process may begin after its engine, or before
        rollout = RayRollout(actor, engine=cast(ProfilerFactory, Counting), attribute="engine")
        with capture(step, workers={}, engines=[rollout], config=config):
            ray.get(actor.generate.remote(3))
        timeline = load_step(tmp_path / f"step_{step:06d}")
        (counter,) = [item for item in timeline.counters if item.name == FINISHED]
        assert timeline.processes[counter.process].info.role == "rollout"
        # Not the growth: on a busy machine the thread takes its first sample late.
        assert counter.values[-1] == 3 * step


def test_the_store_grows_by_the_objects_that_are_put() -> None:
    (source,) = ray_store()
    before = source.sample()[""]
    objects = [ray.put(b"x" * (20 * MB)) for _ in range(3)]
    deadline = time.monotonic() + 30
    while (grown := source.sample()[""] - before) < 59 * MB and time.monotonic() < deadline:
        time.sleep(0.1)  # the head of the cluster hears of it within about a second
    assert grown == pytest.approx(60 * MB, rel=0.05)
    del objects


def test_a_forked_child_asks_nothing_on_its_parents_connection() -> None:
    (source,) = ray_store()
    assert source.sample()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler never gets its turn
        signal.alarm(20)
        os._exit(len(source.sample()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert source.sample()  # Ray answers the parent on
