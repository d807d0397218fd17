"""Counters and latest passes of this process' engines, which the flight recorder keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from stepscope._recording.counters.sampler import Sampler, Tick
from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope.backends.counters import CounterSource
from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler, EngineProfilerBase, load_engine, local_engines
from stepscope.engines.local_engines import registered
from stepscope.engines.metrics import FINISHED, GENERATION_TOKENS, PROMPT_TOKENS, RUNNING, UNFINISHED, WAITING
from stepscope.errors import ours
from stepscope.files.counters import KV_CACHE
from stepscope.files.passes import PassFile
from stepscope.files.states import EngineState

SAMPLE_S = 2.0
"""Time between two samples of an engine. It is long, because a server needs 10 ms for each sample."""
_ENGINE = "replica "
_PROGRESS = (FINISHED, GENERATION_TOKENS, PROMPT_TOKENS)
"""Counters that grow while an engine makes progress."""


class EngineQueues:
    """The engines that the flight recorder samples."""

    def __init__(self, sampler: Sampler, config: ProfileConfig) -> None:
        self._sampler = sampler
        self._config = config
        self._known: set[str] = set()
        self._keepers: list[Callable[[], EngineProfilerBase | None]] = []
        """Functions that return the profiler of an engine that can keep its passes, or None once the engine
        is deleted."""
        self._unasked: list[Callable[[], EngineProfilerBase | None]] = []
        """Functions of `_keepers` whose engines have not been asked yet to keep their passes."""
        self._asking: threading.Thread | None = None
        """The latest thread that asks engines to keep their passes, or None."""

    def add(self, profiler: EngineProfiler) -> None:
        """Sample an engine from now on; an engine in another process is sampled there. A replica is added
        only once.
        """
        name = f"{_ENGINE}{profiler.replica or 0}"
        if name not in self._known:
            self._known.add(name)
            self._sampler.add(name, partial(_sources, profiler))
            if isinstance(profiler, EngineProfilerBase):
                profiler.sample_apart()
                if type(profiler).keep_passes is not EngineProfilerBase.keep_passes:
                    keeper = profiler.weakly()
                    self._keepers.append(keeper)
                    self._unasked.append(keeper)

    def watch(self) -> None:
        """From now on, also add engines that `instrument` entries find, and engines that other processes
        drive.
        """
        self._sampler.add("engines", lambda: [_Finder(self, self._config)])

    def keep_passes(self) -> None:
        """Ask each engine to keep its latest passes. This is done on a separate thread, because an engine
        that hangs does not answer.
        """
        if not self._unasked or (self._asking is not None and self._asking.is_alive()):
            return
        match = self._config.role("rollout")
        if match is None or not match[1].engine.passes or not match[1].engine.profiler:
            return
        self._asking = threading.Thread(target=self._ask, name="stepscope-keep-passes", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        for keeper in tuple(self._unasked):
            try:
                profiler = keeper()
                if profiler is not None and not profiler.keep_passes(self._config.recorder.memory_mb):
                    continue
            except ours() as error:
                failures.note("keeping an engine's passes for the flight recorder", error)
            self._unasked.remove(keeper)

    def passes(self, start_ns: int) -> Iterator[tuple[int, list[PassFile] | str]]:
        """Yield the number of each replica with its passes since `start_ns` (unix ns), or with the reason why
        there are none. May block.
        """
        for keeper in self._keepers:
            profiler = keeper()
            if profiler is None:
                continue
            try:
                yield profiler.replica or 0, profiler.kept_passes(start_ns)
            except ours() as error:
                yield profiler.replica or 0, describe(error)


def _sources(profiler: EngineProfiler) -> Iterable[CounterSource]:
    return [_Slower(source) for source in profiler.counters()]


class _Slower(CounterSource):
    """A counter that is sampled every `SAMPLE_S` instead of at each tick."""

    interval_s = SAMPLE_S

    def __init__(self, source: CounterSource) -> None:
        self.name, self.unit, self.kind, self.scope = source.name, source.unit, source.kind, source.scope
        self._source = source

    def sample(self) -> Mapping[str, float]:
        return self._source.sample()

    def close(self) -> None:
        self._source.close()


class _Finder(CounterSource):
    """A counter without values, which looks for engines of this process on the sampling thread."""

    name = "engines"
    unit = ""
    interval_s = SAMPLE_S

    def __init__(self, queues: EngineQueues, config: ProfileConfig) -> None:
        self._queues = queues
        self._config = config
        self._seen: set[int | str] = set()
        """Ids of engines, and URLs of servers, that have been added."""

    def sample(self) -> Mapping[str, float]:
        for adapter, engine, replica in registered():
            key = engine if isinstance(engine, str) else id(engine)
            if key not in self._seen:
                self._seen.add(key)
                self._add(adapter, engine, replica or 0)
        for profiler in local_engines.seated():
            self._queues.add(profiler)
        self._queues.keep_passes()
        return {}

    def _add(self, adapter: str, engine: object, replica: int) -> None:
        try:
            factory = load_engine(adapter)
            if isinstance(engine, str):
                profiler = factory.serving(engine if "://" in engine else f"http://{engine}", self._config)
                profiler.replica = replica
                self._queues.add(profiler)
            elif factory.recognises(engine):
                self._queues.add(factory(engine, replica))
        except ours() as error:
            failures.note("sampling an engine for the flight recorder", error)


def engine_states(sampler: Sampler | None, now_ns: int) -> Iterator[EngineState]:
    """Yield the state of each sampled engine at `now_ns` (CLOCK_MONOTONIC)."""
    if sampler is None:
        return
    series = [item for item in tuple(sampler.series) if item.of.startswith(_ENGINE)]
    ticks = sampler.between(0, now_ns)[::-1]
    for name in sorted({item.of for item in series}):
        numbers = {item.name: item.series for item in series if item.of == name}
        known = [tick for tick in ticks if not tick.values.keys().isdisjoint(numbers.values())]
        if known:
            yield _state(name, numbers, known, now_ns)


def _state(name: str, numbers: Mapping[str, int], ticks: Sequence[Tick], now_ns: int) -> EngineState:
    """Return the state of an engine from the ticks that have values of this engine, the latest tick first."""

    def value(tick: Tick, counter: str) -> float | None:
        number = numbers.get(counter)
        return None if number is None else tick.values.get(number)

    def requests(tick: Tick) -> float:
        queued = (value(tick, RUNNING) or 0.0) + (value(tick, WAITING) or 0.0)
        return max(queued, value(tick, UNFINISHED) or 0.0)

    def progress(tick: Tick) -> tuple[float | None, ...]:
        totals = tuple(value(tick, counter) for counter in _PROGRESS)
        return totals if any(total is not None for total in totals) else (value(tick, UNFINISHED),)

    last = ticks[0]
    still = last
    for tick in ticks:
        if not requests(tick) or progress(tick) != progress(last):
            break
        still = tick
    return EngineState(
        name=name,
        sampled_ns=now_ns - last.at_ns,
        still_ns=now_ns - still.at_ns if requests(last) else None,
        requests=round(requests(last)),
        running=value(last, RUNNING),
        waiting=value(last, WAITING),
        kv_percent=value(last, KV_CACHE),
    )
