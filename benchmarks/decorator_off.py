"""Cost of a decorated call outside of captures, compared with a closure written by hand and with the peers.

The last table is about functions that `instrument` has wrapped: a tool, and a trajectory with a turn, which
have their id and number outside of captures, too.

Costs are ns of the calling thread's CPU time per call. The overhead is the cost over the bare method: the
median of the differences within rounds in which every contender runs once.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import _peers
from _measure import arguments, header, interleaved, median_over, table, verdict
from _peers import Peer

from stepscope import profile_step
from stepscope._recording.instrument.call_arguments import Condition
from stepscope._recording.instrument.calls import Timing, wrap

CALLS = 20_000
ANY_CALL = Condition({}, {})
ROUNDS = 31
on = False


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not on:
            return fn(*args, **kwargs)
        raise AssertionError("never on")

    return wrapper


def by_hand_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not on:
            return await fn(*args, **kwargs)
        raise AssertionError("never on")

    return wrapper


def by_hand_generator(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not on:
            return (yield from fn(*args, **kwargs))
        raise AssertionError("never on")

    return wrapper


def by_hand_item(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a generator, check for a capture before each item as stepscope does, and pass on sent values."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = fn(*args, **kwargs)
        sent = None
        try:
            while not on:
                sent = yield inner.send(sent)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("never on")

    return wrapper


def update(self: object, batch: int, lr: float = 1.0) -> int:
    return batch


async def aupdate(self: object, batch: int, lr: float = 1.0) -> int:
    return batch


def stream(self: object, items: int) -> Iterator[int]:
    for i in range(items):  # noqa: UP028 # the loop is the generator's work
        yield i


def call(method: Callable[..., Any], calls: int) -> None:
    for _ in repeat(None, calls):
        method(7)


def call_by_name(method: Callable[..., Any], calls: int) -> None:
    for _ in repeat(None, calls):
        method(batch=7, lr=0.5)


def call_async(method: Callable[..., Any], calls: int) -> None:
    for _ in repeat(None, calls):
        try:
            method(7).send(None)
        except StopIteration:  # the end of a coroutine
            pass


def iterate(method: Callable[..., Any], items: int) -> None:
    for _ in method(items):
        pass


def timed(drive: Callable[[Callable[..., Any], int], None], method: Callable[..., Any], calls: int) -> float:
    began = time.thread_time_ns()
    drive(method, calls)
    return (time.thread_time_ns() - began) / calls


def method_of(fn: Callable[..., Any], peer: Peer) -> Callable[..., Any]:
    """Return the decorated method, bound to an object with the attributes that the decorator needs."""
    worker = type("Worker", (), {"method": peer.decorate(fn)})()
    vars(worker).update(peer.attributes)
    bound: Callable[..., Any] = worker.method
    return bound


def compare(
    title: str,
    fn: Callable[..., Any],
    drive: Callable[[Callable[..., Any], int], None],
    contenders: dict[str, Peer],
    *,
    quick: bool,
) -> dict[str, tuple[float, float]]:
    """Print the table of one kind of call. Return {name: (ns per call, ns over the bare call)}."""
    calls = CALLS // 10 if quick else CALLS
    runs = {name: partial(timed, drive, method_of(fn, peer), calls) for name, peer in contenders.items()}
    results = interleaved(runs, ROUNDS // 3 if quick else ROUNDS)
    cost = {name: (statistics.median(results[name]), median_over(results, name, "bare")) for name in runs}
    ours, hand = cost["stepscope"][1], cost["by hand"][1]
    rows = [
        [name, f"{call_ns:.0f}", f"{over:.0f}", f"{over / ours:.1f}x", f"{over / hand:.2f}x"]
        for name, (call_ns, over) in cost.items()
    ]
    table([title, "ns/call", "overhead", "/ stepscope", "/ by hand"], rows)
    return cost


ENTRIES = {
    "a tool": Timing("env", None, None, ANY_CALL, "tool", tool="batch"),
    "a trajectory": Timing("agent_loop", None, None, ANY_CALL, "trajectory", ("batch",)),
    "a turn": Timing("agent_loop", None, None, ANY_CALL, "turn"),
}


def compare_entries(*, quick: bool) -> None:
    """Print the cost of calls that `instrument` has wrapped, for each kind of entry."""
    calls = CALLS // 10 if quick else CALLS
    peers = {
        "bare": Peer(lambda fn: fn),
        **{name: Peer(partial(wrap, timing=timing, target=name)) for name, timing in ENTRIES.items()},
    }
    runs = {name: partial(timed, call, method_of(update, peer), calls) for name, peer in peers.items()}
    results = interleaved(runs, ROUNDS // 3 if quick else ROUNDS)
    bare = statistics.median(results["bare"])
    rows = []
    for name in runs:
        call_ns = statistics.median(results[name])
        rows.append(
            [name, f"{call_ns:.0f}", f"{median_over(results, name, 'bare'):.0f}", f"{call_ns / bare:.1f}x"]
        )
    table(["instrument entry", "ns/call", "overhead", "/ bare"], rows)


def main() -> None:
    quick = arguments(__doc__).quick
    header("a decorated call while nothing is captured", "stepscope", "verl", "trl", "areal", "wrapt")
    peers = _peers.available(
        {
            "verl annotate, enable=False": _peers.verl_disabled,
            "TRL profiling_decorator": _peers.trl,
            "AReaL trace_perf": partial(_peers.areal, enabled=False),
            "wrapt": _peers.wrapt_off,
            "OpenTelemetry, no SDK": _peers.opentelemetry_off,
        }
    )
    print()
    bare, ours = Peer(lambda fn: fn), Peer(profile_step(role="actor"))
    for title, fn, drive, hand, others in (
        ("sync method", update, call, by_hand, peers),
        ("sync, by name", update, call_by_name, by_hand, peers),
        ("async method", aupdate, call_async, by_hand_async, peers),
        (
            "generator, per item",
            stream,
            iterate,
            by_hand_item,
            {"by hand, looking once": Peer(by_hand_generator)},
        ),
    ):
        contenders = {"bare": bare, "by hand": Peer(hand), "stepscope": ours, **others}
        cost = compare(title, fn, drive, contenders, quick=quick)
        if others is not peers:
            verdict(f"{title}, against by hand", cost["stepscope"][0] / cost["by hand"][0], 1.5, "x")
            print()
            continue
        verdict(f"{title}: call, against by hand", cost["stepscope"][0] / cost["by hand"][0], 1.15, "x")
        for name, goal in (("verl annotate, enable=False", 20), ("TRL profiling_decorator", 10)):
            if name in cost:
                ratio = cost[name][1] / cost["stepscope"][1]
                verdict(f"{title}: cheaper than {name}", ratio, goal, "x", at_least=True)
        print()
    compare_entries(quick=quick)


if __name__ == "__main__":
    main()
