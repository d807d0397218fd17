"""Time to start and stop a capture on 2, 8 and 32 Ray actors: all at once, as stepscope does, or one by one.

The time is ms from the first request to the last answer. The actors record spans, so a start and a stop open
and close their files. `idle` actors do nothing else. `slow` actors are in a method for another 50 ms when the
request comes: one by one these waits add up, all at once they do not.

`--actors 256` starts and stops this number of idle actors instead, and also prints the slowest actor's time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from _measure import Measured, header, interleaved, parser, table, verdict

from stepscope import ProfileConfig
from stepscope._recording.fanout.messages import StartRequest, StopRequest, WorkerOutcome
from stepscope._recording.fanout.ray_fleet import RayFleet, Worker, fleet_of

SIZES = (2, 8, 32)
MANY_ROUNDS = 6
ROUNDS = 9
SLOW_S = 0.05
DEADLINE_S = 60.0
AT_ONCE, ONE_BY_ONE = "at once", "one by one"


class Actor:
    def work(self, seconds: float) -> None:
        time.sleep(seconds)  # runs when the capture's request comes


class Bench:
    """Captures on the actors. Each capture has the next step number."""

    def __init__(self, actors: Sequence[Any], config: ProfileConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.actors = actors
        self.config = config
        self.loop = loop
        self.steps = itertools.count()
        self.starts: dict[str, list[float]] = {}
        """{contender: ms of each start without the stop}."""
        self.answers: list[float] = []
        """ms until each actor's answer, in the latest call on all actors."""

    def contender(self, size: int, slow_s: float, at_once: bool) -> Callable[[], float]:
        name = name_of(size, slow_s, at_once)
        self.starts[name] = []

        def measured() -> float:
            start_ms, stop_ms = self.loop.run_until_complete(self.capture(size, slow_s, at_once))
            self.starts[name].append(start_ms)
            return start_ms + stop_ms

        return measured

    async def capture(self, size: int, slow_s: float, at_once: bool) -> tuple[float, float]:
        actors = self.actors[:size]
        fleet = fleet_of(list(actors))
        assert fleet is not None
        start = StartRequest(
            capture_id=secrets.token_hex(8), run_id="bench", step=next(self.steps), config=self.config
        )
        stop = StopRequest(capture_id=start.capture_id)
        began = time.perf_counter()
        await self.call_all(fleet, slow_s, at_once, partial(started, start))
        opened = time.perf_counter()
        await self.call_all(fleet, slow_s, at_once, partial(stopped, stop))
        closed = time.perf_counter()
        return (opened - began) * 1e3, (closed - opened) * 1e3

    async def call_all(
        self, fleet: RayFleet, slow_s: float, at_once: bool, call: Callable[[Worker], Any]
    ) -> None:
        async def one(worker: Worker, actor: Any) -> WorkerOutcome:
            if slow_s:
                actor.work.remote(slow_s)
            began = time.perf_counter()
            outcome: WorkerOutcome = await call(worker)
            self.answers.append((time.perf_counter() - began) * 1e3)
            return outcome

        self.answers.clear()
        pairs = zip(fleet.workers, self.actors, strict=False)
        if at_once:
            outcomes = await asyncio.gather(*(one(*pair) for pair in pairs))
        else:
            outcomes = [await one(*pair) for pair in pairs]
        assert all(outcome.state == "ok" for outcome in outcomes), outcomes


def many(bench: Bench, rounds: int) -> None:
    """Print the time of a start on all actors, and the time of the slowest actor."""
    size = len(bench.actors)
    config, step = bench.config, bench.steps
    everything, slowest, plain = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        ray.get([actor.work.remote(0) for actor in bench.actors])
        plain.append((time.perf_counter() - began) * 1e3)
        start = StartRequest(capture_id=secrets.token_hex(8), run_id="bench", step=next(step), config=config)
        fleet = fleet_of(list(bench.actors))
        assert fleet is not None
        began = time.perf_counter()
        opening = bench.call_all(fleet, 0.0, True, partial(started, start))
        bench.loop.run_until_complete(opening)
        everything.append((time.perf_counter() - began) * 1e3)
        slowest.append(max(bench.answers))
        stop = StopRequest(capture_id=start.capture_id)
        bench.loop.run_until_complete(bench.call_all(fleet, 0.0, True, partial(stopped, stop)))
    table(
        [f"{size} idle actors, ms", "a call of each", "start", "the slowest"],
        [["", *(f"{statistics.median(values):.0f}" for values in (plain, everything, slowest))]],
    )
    ratio = statistics.median(one / other for one, other in zip(everything, slowest, strict=True))
    verdict(f"a start on {size} actors, of the slowest", ratio, 1.2, "x")


def started(start: StartRequest, worker: Worker) -> Any:
    return worker.start(start, DEADLINE_S)


def stopped(stop: StopRequest, worker: Worker) -> Any:
    return worker.stop(stop, DEADLINE_S)


def name_of(size: int, slow_s: float, at_once: bool) -> str:
    return f"{size} {'slow' if slow_s else 'idle'} {AT_ONCE if at_once else ONE_BY_ONE}"


def report(results: Measured, starts: dict[str, list[float]], sizes: Sequence[int]) -> None:
    rows = []
    for slow_s, size in itertools.product((0.0, SLOW_S), sizes):
        names = [name_of(size, slow_s, at_once) for at_once in (True, False)]
        both = [statistics.median(results[name]) for name in names]
        start = [statistics.median(starts[name]) for name in names]
        rows.append(
            [
                f"{size} {'slow' if slow_s else 'idle'} actors",
                *(
                    f"{start_ms:.1f} + {total_ms - start_ms:.1f}"
                    for start_ms, total_ms in zip(start, both, strict=True)
                ),
                f"{both[1] / both[0]:.1f}x",
            ]
        )
    table(["start + stop, ms", AT_ONCE, ONE_BY_ONE, "less"], rows)
    most, least = max(sizes), min(sizes)
    total = {(s, a): statistics.median(results[name_of(s, SLOW_S, a)]) for s in sizes for a in (True, False)}
    verdict(
        f"{most} slow actors: less than one by one",
        total[most, False] / total[most, True],
        4,
        "x",
        at_least=True,
    )
    growth = total[most, True] / total[least, True]
    verdict(f"from {least} to {most} slow actors the time grows by", growth, most / least / 4, "x")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--actors", type=int, metavar="N", help="ask N idle actors at once instead")
    given = options.parse_args()
    quick, number = given.quick, given.actors
    header("capture start and stop on Ray actors", "stepscope", "ray")
    sizes = SIZES[:2] if quick else SIZES
    folder = tempfile.mkdtemp()
    rays = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    loop = asyncio.new_event_loop()
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=rays
    )
    try:
        remote: Any = ray.remote(Actor)
        actors = [remote.options(num_cpus=0).remote() for _ in range(number or max(sizes))]
        ray.get([actor.work.remote(0) for actor in actors])
        config = ProfileConfig(save_path=folder, steps=["every:1"], roles={"*": {"profiler": "off"}})
        bench = Bench(actors, config, loop)
        if number:
            many(bench, MANY_ROUNDS)
            return
        contenders = {
            name_of(size, slow_s, at_once): bench.contender(size, slow_s, at_once)
            for size, slow_s, at_once in itertools.product(sizes, (0.0, SLOW_S), (True, False))
        }
        report(interleaved(contenders, 3 if quick else ROUNDS), bench.starts, sizes)
    finally:
        loop.close()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(rays, ignore_errors=True)


if __name__ == "__main__":
    main()
