"""Collectives found in traces by searching their bytes: none is missed, none that proves nothing is taken."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from stepscope_report.timeline.clocks.collectives import Kind, Refused, Series, match, read_collectives
from stepscope_report.timeline.readers.blocks import BLOCK

Event = dict[str, Any]
GLOO = {"backend": "gloo", "pg_config": [{"pg_name": "0", "backend_config": "cpu:gloo", "ranks": [0, 1]}]}

BASE_NS = 1_700_000_000_000_000_000


def gloo(op: str, ts: float, dur: float = 10, **args: object) -> Event:
    return {
        "ph": "X", "cat": "user_annotation", "name": f"gloo:{op}", "pid": 1, "tid": 2, "ts": ts, "dur": dur,
        "args": args,
    }  # fmt: skip


def nccl(op: str, ts: float, dur: float = 10, **args: object) -> Event:
    arguments = {"stream": 7, "grid": [8, 1, 1], "Collective name": op, "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]", "In msg nelems": 5, **args}  # fmt: skip
    return {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_Sum", "pid": 0, "tid": 7, "ts": ts, "dur": dur,
        "args": arguments,
    }  # fmt: skip


def read(
    path: Path, events: list[Event], distributed: Event = GLOO, indent: int | None = None
) -> dict[Kind, Series | Refused]:
    trace = {"distributedInfo": distributed, "baseTimeNanoseconds": BASE_NS, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(trace, indent=indent).encode(), 1))
    return read_collectives("actor", [path])


def series(collectives: dict[Kind, Series | Refused]) -> Series:
    (one,) = collectives.values()
    assert isinstance(one, Series)
    return one


@pytest.mark.slow
@pytest.mark.parametrize("make", [gloo, nccl])
@pytest.mark.parametrize("indent", [None, 2], ids=["one line", "indented"])
@pytest.mark.parametrize("seed", range(3))
def test_wherever_blocks_end_no_collective_is_missed(
    tmp_path: Path, make: Any, indent: int | None, seed: int
) -> None:
    chance = random.Random(seed)
    op = "all_reduce" if make is gloo else "allreduce"
    events = []
    for number in range(2000):
        events.append(make(op, 100.0 * number))
        other = {
            "ph": "X",
            "name": "aten::mm",
            "ts": 100.0 * number,
            "args": {"x": "{" * chance.randrange(900)},
        }
        events.append(other)
    collective = series(read(tmp_path / "t.json.gz", events, indent=indent))
    assert collective.count == 2000
    assert sorted(times.entered_ns for times in collective.times.values()) == [
        BASE_NS + 100_000 * number for number in range(2000)
    ]
    assert len(json.dumps(events)) > 4 * BLOCK


def test_a_collective_whose_root_may_leave_at_once_is_not_taken(tmp_path: Path) -> None:
    events = [gloo("broadcast", 0), gloo("send", 50), nccl("broadcast", 100), nccl("all_to_allv", 200)]
    assert read(tmp_path / "t.json.gz", events) == {}


def test_a_kernel_that_names_no_collective_is_not_taken(tmp_path: Path) -> None:
    unnamed = nccl("allreduce", 0)
    del unnamed["args"]["Collective name"]
    called = {**nccl("allreduce", 0), "cat": "cpu_op", "name": "record_param_comms"}
    assert read(tmp_path / "t.json.gz", [unnamed, called]) == {}


def test_of_those_that_overlap_without_numbers_nobody_knows_which_came_first(tmp_path: Path) -> None:
    events = [
        gloo("all_reduce", 0),
        gloo("all_reduce", 100, 50),
        gloo("all_reduce", 120, 9),
        gloo("all_reduce", 300),
    ]
    collective = series(read(tmp_path / "t.json.gz", events))
    assert (collective.count, sorted(collective.times)) == (4, [0, 3])


def test_numbered_ones_are_matched_by_number_whatever_is_missing(tmp_path: Path) -> None:
    one = series(read(tmp_path / "a.json.gz", [nccl("allreduce", 10 * n, 5, Seq=n) for n in range(3, 9)]))
    other = series(read(tmp_path / "b.json.gz", [nccl("allreduce", 10 * n, 5, Seq=n) for n in range(5, 12)]))
    pairs = match(one, other)
    assert not isinstance(pairs, str)
    assert sorted(pairs) == [5, 6, 7, 8]
    assert all(theirs.entered_ns == own.entered_ns for theirs, own in pairs.values())


def test_sizes_that_differ_are_no_match(tmp_path: Path) -> None:
    one = series(read(tmp_path / "a.json.gz", [nccl("allreduce", 0), nccl("allreduce", 50)]))
    sizes = [nccl("allreduce", 0), nccl("allreduce", 50, **{"In msg nelems": 6})]
    other = series(read(tmp_path / "b.json.gz", sizes))
    assert str(match(one, other)).startswith("sizes differ")


def test_all_windows_of_a_process_count_as_one(tmp_path: Path) -> None:
    for name, first in (("b", 500.0), ("a", 0.0)):
        read(tmp_path / f"{name}.json.gz", [gloo("barrier", first), gloo("barrier", first + 100)])
    collective = series(read_collectives("actor", [tmp_path / "b.json.gz", tmp_path / "a.json.gz"]))
    assert [times.entered_ns for _, times in sorted(collective.times.items())] == [
        BASE_NS + us * 1000 for us in (0, 100, 500, 600)
    ]
