"""Cost of a span during a capture, compared with AReaL's, OpenTelemetry's and torch's record_function.

Three costs of a decorated call that does nothing, over the bare call, in ns:
  code     CPU time of the thread whose code is recorded
  wall     wall time in this thread, which includes time in which other threads hold the GIL
  process  CPU time of the whole process until every span is written
The spans come in bursts, as fast as the loop makes them, and are written between the bursts. Async functions
are awaited by a coroutine.

`the least in Python` is the minimum for any recorder in Python: for each call one object, a context variable
set to it and reset, two readings of the clock and one append, without parent, thread, error or file.

The last table is an agent loop: concurrent coroutines, each a trajectory of three turns with one span. Its
costs are CPU time of the whole process, including the writing. In the last column the garbage collector is
on, which also visits the loop's own objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import _peers
from _measure import Measured, arguments, header, interleaved, table, verdict
from _peers import Peer

from stepscope import ProfileConfig, capture, profile_step, span, trajectory, turn
from stepscope._recording.recorder import standing
from stepscope._recording.spans import slot
from stepscope._recording.spans.log import SpanLog

BURST = 1_000
FLOOD = 20_000
"""Spans of a burst that is faster than any writer. They wait in new memory, so each costs more."""
ROUNDS = 41
TURNS = 3
GOAL_NS = 1000
OURS = "stepscope profile_step"
FLOOR = "the least in Python"


def update(batch: int) -> int:
    return batch


async def aupdate(batch: int) -> int:
    return batch


def call(fn: Callable[..., Any], calls: int) -> None:
    for _ in repeat(None, calls):
        fn(7)


def call_async(fn: Callable[..., Any], calls: int) -> None:
    try:
        awaited(fn, calls).send(None)
    except StopIteration:  # the end of a coroutine
        pass


async def awaited(fn: Callable[..., Any], calls: int) -> None:
    for _ in repeat(None, calls):
        await fn(7)


class Capturing:
    """stepscope's spans in an open capture. At the end of a round, this thread writes them, as AReaL's does.

    A wait for the writing thread would be a sleep, after which a core is slow for a while.
    """

    def __init__(self) -> None:
        self.made = 0

    def peer(self, decorate: _peers.Decorator) -> Peer:
        return Peer(decorate, finish=self.written)

    def written(self, spans: int) -> None:
        self.made += spans
        session = slot.active
        assert session is not None
        spans_log = session.log
        assert isinstance(spans_log, SpanLog)
        with spans_log._writing:
            spans_log._write_pending()
        assert spans_log.written == self.made


def with_span(fn: Callable[..., Any]) -> Callable[..., Any]:
    def inner(batch: int) -> Any:
        with span("update", role="actor"):
            return fn(batch)

    return inner


Costs: TypeAlias = tuple[float, float, float]
Rollout: TypeAlias = Callable[[int], Coroutine[Any, Any, None]]


def timed(
    drive: Callable[..., None], fn: Callable[..., Any], peer: Peer, calls: int, kept: list[Costs]
) -> float:
    process, wall, code = time.process_time_ns(), time.perf_counter_ns(), time.thread_time_ns()
    drive(fn, calls)
    code, wall = time.thread_time_ns() - code, time.perf_counter_ns() - wall
    peer.finish(calls)
    process = time.process_time_ns() - process
    kept.append((code / calls, wall / calls, process / calls))
    return code / calls


def compare(
    title: str,
    fn: Callable[..., Any],
    drive: Callable[..., None],
    peers: dict[str, Peer],
    calls: int,
    rounds: int,
) -> dict[str, Costs]:
    """Print the table of one kind of call. Return {name: (code, wall, process)} in ns over the bare call."""
    kept: dict[str, list[Costs]] = {name: [] for name in peers}
    runs = {
        name: partial(timed, drive, peer.decorate(fn), peer, calls, kept[name])
        for name, peer in peers.items()
    }
    interleaved(runs, rounds)
    bare = [statistics.median(column) for column in zip(*kept["bare"], strict=True)]
    cost: dict[str, Costs] = {}
    for name, measured in kept.items():
        code, wall, process = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        cost[name] = (code - bare[0], wall - bare[1], process - bare[2])
    ours = cost[OURS]
    rows = [
        [name, *(f"{ns:.0f}" for ns in costs), f"{costs[0] / ours[0]:.1f}x", f"{costs[2] / ours[2]:.1f}x"]
        for name, costs in cost.items()
        if name != "bare"
    ]
    table([f"{title}, ns a span", "code", "wall", "process", "code/ours", "process/ours"], rows)
    return cost


def judge(title: str, cost: dict[str, Costs], peers: dict[str, Peer]) -> None:
    code = cost[OURS][0]
    verdict(f"{title}: a span costs the recorded code", code, GOAL_NS, " ns")
    for name in cost.keys() & peers.keys():
        verdict(f"{title}: cheaper than {name}", cost[name][0] / code, 1, "x", at_least=True)
    print()


async def bare_rollout(number: int) -> None:
    for _ in range(2 * TURNS):
        await asyncio.sleep(0)


async def rollout(number: int) -> None:
    with trajectory(f"t{number}"):
        for index in range(TURNS):
            with turn(index):
                await asyncio.sleep(0)
                with span("generate", role="rollout"):
                    await asyncio.sleep(0)


async def rollouts(kind: Rollout, number: int) -> None:
    await asyncio.gather(*map(kind, range(number)))


class AgentLoop:
    """The agent loop, with or without spans, in a captured step, a recorded step, or outside of both."""

    def __init__(
        self, kind: Callable[[int], Coroutine[Any, Any, None]], number: int, **settings: Any
    ) -> None:
        self.kind = kind
        self.number = number
        self.config = ProfileConfig.from_mapping(settings) if settings else None
        self.steps = itertools.count()

    def run(self) -> float:
        """Run the loop, and return the CPU ns of the process per span."""
        standing.stop()
        began = time.process_time_ns()
        with contextlib.ExitStack() as stack:
            if self.config is not None:
                stack.enter_context(capture(next(self.steps), config=self.config))
            asyncio.run(rollouts(self.kind, self.number))
        return (time.process_time_ns() - began) / (self.number * (1 + 2 * TURNS))


def over_bare(results: Measured) -> dict[str, float]:
    bare = statistics.median(results["bare"])
    return {name: statistics.median(values) - bare for name, values in results.items()}


def agent_loop(folder: str, number: int, rounds: int) -> None:
    common = {"counters": "off", "control": {"requests": False}}
    captured = {"save_path": f"{folder}/captured", "steps": "every:1", "roles": {"*": {"profiler": "off"}}}
    recorded = {"save_path": f"{folder}/recorded", "record": "spans", "recorder": {"triggers": []}}
    loops = {
        "bare": AgentLoop(bare_rollout, number),
        "off": AgentLoop(rollout, number),
        "recorder": AgentLoop(rollout, number, **common, **recorded),
        "captured": AgentLoop(rollout, number, **common, **captured),
    }
    runs = {name: loop.run for name, loop in loops.items()}
    cost = over_bare(interleaved(runs, rounds))
    collected = over_bare(interleaved(runs, rounds, collector=True))
    rows = [[name, f"{ns:.0f}", f"{collected[name]:.0f}"] for name, ns in cost.items() if name != "bare"]
    table([f"{number:,} trajectories in flight, ns of CPU a span", "process", "with the collector"], rows)
    verdict("agent loop: a span that is captured", cost["captured"], 3000, " ns")
    verdict("agent loop: a span while nothing is recorded", cost["off"], 500, " ns")


def main() -> None:
    quick = arguments(__doc__).quick
    header("a span while capturing", "stepscope", "areal", "opentelemetry-sdk", "torch")
    peers = _peers.available(
        {
            "AReaL trace_perf": partial(_peers.areal, enabled=True),
            "OpenTelemetry SDK": _peers.opentelemetry_sdk,
            "torch record_function, no profiler": _peers.record_function,
        }
    )
    print()
    async_peers = {name: peer for name, peer in peers.items() if "record_function" not in name}
    capturing, rounds = Capturing(), ROUNDS // 5 if quick else ROUNDS
    bare, decorated = Peer(lambda fn: fn), capturing.peer(profile_step(role="actor"))
    inside = {"stepscope span()": capturing.peer(with_span)}
    records: deque[_peers.Record] = deque()
    floor = {FLOOR: Peer(partial(_peers.least, records), finish=lambda _: records.clear())}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        config = ProfileConfig(save_path=folder, steps="every:1", roles={"*": {"profiler": "off"}})
        with capture(1, config=config):
            both = {"bare": bare, OURS: decorated}
            cost = compare("sync", update, call, {**both, **inside, **floor, **peers}, BURST, rounds)
            print(f"        sync: {cost[OURS][0] / cost[FLOOR][0]:.1f}x {FLOOR}")
            judge("sync", cost, peers)
            cost = compare("async", aupdate, call_async, {**both, **async_peers}, BURST, rounds)
            judge("async", cost, peers)
            compare("sync, a flood", update, call, {**both, **inside, **peers}, FLOOD, rounds // 5)
        agent_loop(folder, 2_000 if quick else 20_000, 3 if quick else 7)


if __name__ == "__main__":
    main()
