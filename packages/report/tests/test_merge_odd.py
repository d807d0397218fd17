"""Steps with traces as they come: careless text, impossible times, ranks that two processes claim."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.steps import MS, timeline_of
from packages.report.tests.traces import put
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Sidecar
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report.timeline import Merged, merge_step
from stepscope_report.timeline.clocks import NOT_NEAR

AT_US = OPENED_NS // 1000
Event = dict[str, Any]


def kernel(at_us: object = AT_US, **more: Any) -> Event:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 1, "tid": 2, "ts": at_us, "dur": 1, **more}


def step(tmp_path: Path) -> tuple[StepFolder, FakeProcess]:
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).close(100 * MS)
    actor = folder.process("actor", 0)
    actor.close(100 * MS)
    return folder, actor


def trace(
    folder: StepFolder,
    process: FakeProcess | None,
    events: list[Event] | bytes,
    *,
    name: str = "t.json",
    **fields: object,
) -> Path:
    """`process` None: without a sidecar."""
    body = events if isinstance(events, bytes) else json.dumps({**fields, "traceEvents": events}).encode()
    by: dict[str, Any] = {} if process else {"host": "h"}
    path = put(folder, f"traces/actor/{name}", process, body, role="actor", **by)
    if process is None:
        sidecar_of(path).unlink()
    return path


def merged(folder: StepFolder) -> tuple[Merged, list[Event]]:
    path = folder.write()
    result = merge_step(path)
    return result, [event for event in timeline_of(path)["traceEvents"] if event["ph"] != "M"]


def problems(result: Merged) -> dict[str, int | None]:
    return {problem.what: problem.events for problem in result.problems}


@pytest.mark.parametrize("ts", ["NaN", "-Infinity", "null", '"soon"', "1e400", "-5", "0", "12345678"])
def test_an_impossible_time_costs_its_event_and_is_counted(tmp_path: Path, ts: str) -> None:
    folder, actor = step(tmp_path)
    text = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [kernel(name="odd"), kernel(name="good")]})
    trace(folder, actor, text.encode().replace(b"%d" % AT_US, ts.encode(), 1))
    result, events = merged(folder)
    assert [event["name"] for event in events] == ["good"]
    assert problems(result)[NOT_NEAR] == 1


def test_a_pid_and_a_tid_above_2_to_53_become_exact_numbers(tmp_path: Path) -> None:
    folder, actor = step(tmp_path)
    large = (1 << 53) + 1
    kernels = [kernel(pid=large, tid=large + 1), kernel(pid=large + 1, tid=large + 1), kernel(pid=-1, tid=-1)]
    trace(folder, actor, kernels, baseTimeNanoseconds=0)
    result, events = merged(folder)
    assert result.problems == ()
    assert len({(event["pid"], event["tid"]) for event in events}) == 3
    assert all(0 < event[key] < 1 << 32 for event in events for key in ("pid", "tid"))


def test_a_rank_that_two_processes_claim_is_named_and_both_are_shown(tmp_path: Path) -> None:
    folder, actor = step(tmp_path)
    again = folder.process("actor", 0)
    other = folder.process("ref", 0)
    for process in (actor, again, other):
        process.close(100 * MS)
        process.span("work", 0, MS)
    result, _ = merged(folder)
    assert [row.name for row in result.rows] == ["ref 0", "actor 0 pid 1001", "actor 0 pid 1002"]
    (problem,) = result.problems
    assert problem.file == "actor rank 0"
    assert re.findall(r"pid (\d+) on host-a", problem.what) == ["1001", "1002"]


def test_the_worker_of_an_engine_may_have_the_rank_of_the_actor_that_holds_the_engine(tmp_path: Path) -> None:
    folder, _ = step(tmp_path)
    actor = folder.process("rollout", 0, replica=0)
    actor.span("decode", 0, MS)
    actor.close(100 * MS)
    path = tmp_path
    for pid in (7000, 7001):
        path = trace(folder, actor, [kernel()], name=f"engine{pid}.json", baseTimeNanoseconds=0)
        sidecar = msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar)
        worker = msgspec.structs.replace(sidecar.artifact, pid=pid, replica=0)
        described = msgspec.structs.replace(sidecar, artifact=worker, process=None)
        sidecar_of(path).write_bytes(msgspec.json.encode(described))
    (problem,) = merged(folder)[0].problems  # two workers of one rank contradict each other all the same
    assert re.findall(r"pid (\d+) on host-a", problem.what) == ["7000", "7001"]
    path.unlink()
    sidecar_of(path).unlink()
    assert merged(folder)[0].problems == ()


def test_a_trace_without_a_sidecar_is_shown_by_what_it_says_itself(tmp_path: Path) -> None:
    folder, _ = step(tmp_path)
    head = {"baseTimeNanoseconds": 0, "host_name": "host-a", "distributedInfo": {"rank": 3, "world_size": 8}}
    trace(folder, None, json.dumps({**head, "traceEvents": [kernel()]}).encode())
    result, events = merged(folder)
    assert len(events) == 1
    assert [(row.name, row.rank, row.alignment) for row in result.rows] == [("actor 3", 3, "same host")]
    (what,) = problems(result)
    assert what.startswith("no sidecar: ")


@pytest.mark.parametrize("since_us", [0, 5_000_000])
def test_what_has_no_base_is_never_inside_the_step_unless_its_own_clock_says_so(
    tmp_path: Path, since_us: int
) -> None:
    folder, actor = step(tmp_path)
    trace(folder, actor, [kernel(since_us + 1000), kernel(since_us + 8000)])
    result, events = merged(folder)
    (row,) = result.rows
    assert row.alignment == "unaligned"
    end_ns = result.window_ns[1] - result.base_ns
    assert all(event["ts"] * 1000 >= end_ns + 1_000_000_000 for event in events)
    assert events[1]["ts"] - events[0]["ts"] == 7000
    first_ns = result.base_ns + round(events[0]["ts"] * 1000)
    assert abs(first_ns - (since_us + 1000) * 1000 - row.shift_ns) <= 1000  # what was added is said


def test_times_since_1970_need_no_base(tmp_path: Path) -> None:
    """Kineto before 2024 wrote them so. An event of another day is left out all the same."""
    folder, actor = step(tmp_path)
    trace(folder, actor, [kernel(AT_US - 9 * 86_400_000_000), kernel(AT_US + 5)])
    result, (event,) = merged(folder)
    assert result.rows[0].alignment == "same host"
    assert result.base_ns + round(event["ts"] * 1000) == (AT_US + 5) * 1000
    assert problems(result)[NOT_NEAR] == 1
