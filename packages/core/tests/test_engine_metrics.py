"""Metrics of engines as counters: what is read from a page, and when the engine is asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from stepscope import ProfileConfig, capture
from stepscope.backends.counters import CounterSource
from stepscope.engines.metrics import (
    FINISHED,
    HITS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    RUNNING,
    EngineMetrics,
    read_page,
)
from stepscope.files.counters import KV_CACHE
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.timeline import load_step

NAMES = {"vllm:running": RUNNING, "vllm:usage": KV_CACHE, "vllm:done_total": FINISHED}
PAGE = """# HELP vllm:running Number of requests.
# TYPE vllm:running gauge
vllm:running{engine="0",model_name="a } b"} 3.0
vllm:running{engine="1",model_name="a } b"} 1.0 1700000000
vllm:usage{engine="0"} 0.5
vllm:usage{engine="1"} 0.25
vllm:done_total 1.2e+03
vllm:running_more{engine="0"} 99
vllm:running{engine="2"} nonsense

"""


def test_engines_on_a_page_are_added_up_and_parts_are_averaged_in_percent() -> None:
    assert read_page(PAGE, NAMES) == {RUNNING: 4.0, KV_CACHE: 37.5, FINISHED: 1200.0}


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "vllm:running{", "\0\n{}\n# x"])
def test_what_is_no_page_has_no_counters(page: str) -> None:
    assert read_page(page, NAMES) == {}


class Engine:
    """Metrics that move on demand."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {RUNNING: 1}
        self.asked = 0
        self.answered = threading.Event()

    def read(self) -> Mapping[str, float]:
        self.asked += 1
        self.answered.set()
        if not self.now:
            raise OSError("the server is gone")
        return self.now


def sample(sources: list[CounterSource]) -> dict[str, float]:
    return {source.name: value for source in sources for value in source.sample().values()}


def test_the_first_sample_is_of_before_the_step_and_each_further_one_reads_once() -> None:
    engine = Engine()
    sources = list(EngineMetrics(engine.read, "replica 0", blocks=False).sources())
    engine.now = {RUNNING: 2}
    assert (sample(sources), engine.asked) == ({RUNNING: 1}, 1)
    assert (sample(sources), engine.asked) == ({RUNNING: 2}, 2)
    engine.now = {}
    assert sample(sources) == {}  # it does not answer: nothing is known, and nothing is raised


def test_the_hit_rate_is_that_of_the_tokens_since_the_sample_before() -> None:
    engine = Engine()
    engine.now = {PREFIX_QUERIES: 0, PREFIX_HITS: 0}
    sources = list(EngineMetrics(engine.read, "replica 0", blocks=False).sources())
    rates = [sample(sources).get(HITS)]
    for queries, hits in ((100, 10), (200, 85), (200, 85), (300, 85)):
        engine.now = {PREFIX_QUERIES: queries, PREFIX_HITS: hits}
        rates.append(sample(sources).get(HITS))
    assert rates == [None, 10, 75, None, 0]  # None where nothing was looked up


def test_a_server_is_asked_by_a_thread_that_ends_with_the_capture() -> None:
    engine = Engine()
    sources = EngineMetrics(engine.read, "replica 0", blocks=True).sources()
    assert engine.answered.wait(30)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "stepscope-engine-metrics"]
    sources[0].close()
    thread.join(30)
    assert not thread.is_alive()


class Counting(FakeEngineProfiler):
    """A fake engine that finishes a request at each reading."""

    def counters(self) -> list[CounterSource]:
        numbers = iter(range(10, 10_000))
        metrics = EngineMetrics(lambda: {FINISHED: float(next(numbers))}, "replica 0", blocks=False)
        return list(metrics.sources())


def test_a_capture_samples_the_engines_that_it_was_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    config = ProfileConfig(
        save_path=folder, steps=[1], roles={"rollout": {"ranks": "all"}, "*": {"profiler": "off"}}
    )
    with capture(1, engines=[Counting(FakeEngine())], config=config):
        pass
    (counter,) = [item for item in load_step(folder / "step_000001").counters if item.name == FINISHED]
    assert (counter.of, counter.kind, counter.values[0]) == ("replica 0", "total", 10.0)
    assert counter.values[-1] > 10  # the last sample is taken when the capture closes
