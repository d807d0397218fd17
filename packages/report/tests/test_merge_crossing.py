"""Slices of a thread that overlap without nesting, of which Perfetto shows the first alone."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.report.tests.test_plain_traces import BASE_NS
from stepscope_report.timeline import Merged
from stepscope_report.timeline.merge.merge import plain_source, write_merge


def merged(folder: Path, events: list[dict[str, Any]]) -> tuple[Merged, list[dict[str, Any]]]:
    path = folder / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    result = write_merge(plain_source([path]), folder / "timeline.json.gz")
    return result, json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]


def times_ns(event: dict[str, Any]) -> tuple[int, int]:
    return round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)


def lost(events: list[dict[str, Any]]) -> int:
    """Return how many slices a viewer with one line a thread drops: each that ends behind an open one."""
    ends: dict[Any, list[int]] = {}
    dropped = 0
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        start_ns, end_ns = times_ns(event)
        running = ends.setdefault((event["pid"], event["tid"]), [])
        while running and running[-1] <= start_ns:
            running.pop()
        if running and end_ns > running[-1]:
            dropped += 1
        else:
            running.append(end_ns)
    return dropped


def slices(events: list[dict[str, Any]]) -> Counter[Any]:
    whole = (event for event in events if event["ph"] == "X")
    return Counter((event["name"], event["args"]["at"], event["dur"]) for event in whole)


ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "any": lambda event: 0,
    "by start": lambda event: event["ts"],
    "by end": lambda event: (event["ts"] + event["dur"], -event["ts"]),
    "in runs": lambda event: (event["name"], event["ts"], -event["dur"]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_each_slice_nests_on_its_line_and_none_is_lost_or_moved(tmp_path: Path, order: str) -> None:
    chance = random.Random(order)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "ts": 0, "args": {"name": "thread 8 (python)"}}
    ]
    for number in range(3000):
        start = chance.randrange(200_000) / 8
        times = {"ts": start, "dur": chance.randrange(1, 40) / 8, "args": {"at": start}}
        thread = {"pid": 7, "tid": chance.choice((8, 9))}
        events.append({"ph": "X", "cat": "cpu_op", "name": f"op{number % 9}", **thread, **times})
        if number % 50 == 0:
            mark = {"ph": "i", "name": "mark", "pid": 7, "tid": 8, "ts": start, "dur": 0, "s": "t"}
            events.append(mark)
    events[1:] = sorted(events[1:], key=ORDERS[order])
    result, written = merged(tmp_path, events)
    assert lost(events) > 100
    assert lost(written) == 0
    assert slices(written) == slices(events)
    first = min(event["ts"] for event in written if event["ph"] == "X") - min(e["ts"] for e in events[1:])
    assert all(e["ts"] - first == pytest.approx(e["args"]["at"], abs=1e-3) for e in written if e["ph"] == "X")
    assert result.files[0].crossing > 100
    names = {e["tid"]: e["args"]["name"] for e in written if e["name"] == "thread_name"}
    assert {"thread 8 (python)", "thread 8 (python) (2)", "thread 9 (2)"} <= set(names.values())


@pytest.mark.parametrize("order", ORDERS)
def test_slices_that_nest_stay_on_their_thread(tmp_path: Path, order: str) -> None:
    chance = random.Random(order)
    whole = [(10_000, 9000), (10_000, 9000), (19_000, 5), (19_005, 700), (19_005, 0)]
    for start, dur in whole:  # and calls in each, which touch
        if dur > 8:
            whole += [(start, dur // 2), (start + dur // 2, dur - dur // 2), (start, 0)]
    chance.shuffle(whole)
    events: list[dict[str, Any]] = [
        {"ph": "X", "name": f"op{at % 9}", "pid": 7, "tid": 8, "ts": ts, "dur": dur, "args": {}}
        for at, (ts, dur) in enumerate(((start / 1000, dur / 1000) for start, dur in whole))
    ]
    assert lost(events) == 0
    assert len(events) > 3000
    result, written = merged(tmp_path, sorted(events, key=ORDERS[order]))
    assert result.files[0].crossing == 0
    assert len({event["tid"] for event in written if event["ph"] == "X"}) == 1


@pytest.mark.parametrize("dispatch", [False, True])
def test_no_range_of_real_torch_is_lost(tmp_path: Path, dispatch: bool) -> None:
    events = ranges_of_torch(tmp_path, dispatch)
    result, written = merged(tmp_path, events)
    assert lost(events) >= 6
    assert lost(written) == 0
    assert result.files[0].crossing >= 6
    ranges = [event for event in written if event["name"] == "layer"]
    assert len(ranges) == 6
    assert len({event["tid"] for event in ranges}) == 1


def ranges_of_torch(folder: Path, dispatch: bool) -> list[dict[str, Any]]:
    """Return a trace of six ranges, with Python's calls, or below a mode that sees every operator."""
    from contextlib import nullcontext

    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=not dispatch
    ) as profiler:
        mode: Any = Seen if dispatch else nullcontext
        for _ in range(6):
            with mode(), torch.profiler.record_function("layer"):
                torch.ones(8).sum()
    path = folder / "torch.json"
    profiler.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
