"""A fake inference engine, which can be made to fail, and its profiler.

The profiler is an example for real adapters. It reserves the engine before the first await. A start that
fails or is cancelled stops every worker that had begun. Sidecars are written after their files are complete,
and disk work runs outside of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import (
    EngineCapture,
    EngineProfilerBase,
    Iterations,
    refuse_second_start,
)
from stepscope.errors import EngineError
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import Artifact

T = TypeVar("T")
_UNABLE = "the fake engine records iterations and nothing else"
_EXTRA = ("verbose",)


@dataclass
class Recording:
    """The recording of one worker of the engine."""

    window: Iterations
    seen: int = 0
    events: list[dict[str, object]] = field(default_factory=list)

    def iteration(self, began_ns: int, ended_ns: int) -> None:
        first, count = self.window.start, self.window.count
        if first <= self.seen and (count is None or self.seen < first + count):
            event: dict[str, object] = {"ph": "X", "name": f"iteration {self.seen}", "pid": 1, "tid": 1}
            self.events.append({**event, "ts": began_ns / 1000, "dur": (ended_ns - began_ns) / 1000})
        self.seen += 1


class FakeEngine:
    """An engine whose workers only count iterations. Set an attribute to make the next call fail or hang."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self.recordings: dict[int, Recording] = {}
        """{worker: its open recording}."""
        self.dead = False
        self.fails_to_start: int | None = None
        """Number of the worker whose start raises, or None."""
        self.hangs_on_start: int | None = None
        """Number of the worker that never answers a start, or None. Other workers answer."""
        self.hangs_on_stop: int | None = None

    async def generate(self, iterations: int) -> None:
        """Run `iterations` forward passes. Other tasks may run between passes."""
        for _ in range(iterations):
            began = time.time_ns()
            await asyncio.sleep(0)
            for recording in self.recordings.values():
                recording.iteration(began, time.time_ns())

    async def start_worker(self, worker: int, window: Iterations) -> None:
        await self._reach(worker == self.hangs_on_start)
        if worker == self.fails_to_start:
            raise RuntimeError(f"worker {worker} cannot start its profiler")
        self.recordings[worker] = Recording(window)

    async def stop_worker(self, worker: int) -> Recording:
        await self._reach(worker == self.hangs_on_stop)
        return self.recordings.pop(worker)

    def abort(self) -> None:
        """Stop all recordings and drop them."""
        self.recordings.clear()

    async def _reach(self, hangs: bool) -> None:
        if self.dead:
            raise ConnectionError("the engine process has died")
        if hangs:
            await asyncio.Event().wait()  # never set, so only a cancellation ends the wait
        await asyncio.sleep(0)


class FakeEngineProfiler(EngineProfilerBase):
    """Profiler of a `FakeEngine`. Passes `EngineConformance`."""

    def __init__(self, engine: FakeEngine, replica: int | None = None) -> None:
        super().__init__(replica)
        self.engine = engine
        self._workers = range(engine.workers)
        self._capture: EngineCapture | None = None
        self._opened: ClockAnchor | None = None

    @property
    def world_size(self) -> int:
        return self.engine.workers

    def check(self) -> None:
        if self.engine.dead:
            raise EngineError("the engine process has died. Fix: start the engine before the run")

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        _know(capture.extra)
        return _unable(capture)

    async def start(self, capture: EngineCapture) -> None:
        refuse_second_start(self._capture)
        _know(capture.extra)
        self._capture, self._ignored = capture, _unable(capture)
        try:
            await _all([self.engine.start_worker(worker, capture.iterations) for worker in self._workers])
        except BaseException as error:
            self._capture = None
            self.engine.abort()
            if isinstance(error, Exception):
                raise EngineError(f"the engine's profiler did not start: {error}") from error
            raise
        self._opened = read_anchor()

    async def stop(self) -> list[Artifact]:
        capture, self._capture = self._capture, None
        if capture is None:
            return []
        try:
            recordings = await _all([self.engine.stop_worker(worker) for worker in self._workers])
        except Exception as error:
            raise EngineError(f"the engine's profiler did not stop: {error}") from error
        finally:
            self.engine.abort()
        return await asyncio.to_thread(self._write, capture, recordings)

    def _write(self, capture: EngineCapture, recordings: Sequence[Recording]) -> list[Artifact]:
        folder = Path(capture.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        closed = read_anchor()
        artifacts = []
        for worker, recording in enumerate(recordings):
            if capture.ranks is not None and self._rank(capture, worker) not in capture.ranks:
                continue
            path = folder / f"{capture.name}_worker{worker}.json"
            trace = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": recording.events}
            path.write_bytes(msgspec.json.encode(trace))
            artifacts.append(
                publish(
                    path,
                    capture,
                    kind="torch_trace",
                    tool="fake",
                    rank=self._rank(capture, worker),
                    world_size=self.engine.workers,
                    opened=self._opened,
                    closed=closed,
                    ignored=self._ignored,
                )
            )
        return artifacts

    def _rank(self, capture: EngineCapture, worker: int) -> int:
        return capture.replica * self.engine.workers + worker


async def _all(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Wait until every call has ended. Return the results, or raise the first error."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]


def _know(extra: Mapping[str, object]) -> None:
    for option in extra:
        if option not in _EXTRA:
            raise EngineError(f"the fake engine has no option {option!r}; it has: {', '.join(_EXTRA)}")


def _unable(capture: EngineCapture) -> dict[str, str]:
    options = ("with_stack", "record_shapes", "profile_memory", "by_stage", "merge")
    return {option: _UNABLE for option in options if getattr(capture, option)}
