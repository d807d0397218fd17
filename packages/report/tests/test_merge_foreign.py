"""Events of other tools: nothing of them changes in a merge but pid, tid, ids and the base of their time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.steps import timeline_of
from packages.report.tests.traces import put
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.timeline import Merged, Selection, merge_step
from stepscope_report.timeline.merge.mapping import FlowIds

Event = dict[str, Any]
RENAMED = ("pid", "tid", "id", "id2", "bind_id")
AT_US = OPENED_NS // 1000
"""The capture's opening, in the us of a trace whose base is 0."""
_TIMED = "XsfibeBECnP"

TORCH = """
import sys, torch
from torch.profiler import profile
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
with profile() as profiler:
    for _ in range(40):
        with torch.profiler.record_function('step "\\u00e9" {"pid": 1, "tid": 2, "ts": 3}'):
            model(torch.ones(4, 8)).sum().backward()
profiler.export_chrome_trace(sys.argv[1])
"""


def merged_of(
    tmp_path: Path, content: bytes, *, opened_ns: int = OPENED_NS, selection: Selection | None = None
) -> tuple[Merged, list[Event]]:
    """One actor's trace, merged; and what became of its events."""
    folder = StepFolder(tmp_path)
    actor = folder.process("actor", 0, owner=True, skew_ns=opened_ns - OPENED_NS)
    actor.close(1_000_000_000)
    put(folder, "traces/actor/t.json", actor, content)
    step = folder.write()
    merged = merge_step(step, selection=selection or Selection())
    return merged, timed(timeline_of(step)["traceEvents"])


def timed(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["ph"] in _TIMED]


def assert_unchanged(before: list[Event], after: list[Event]) -> None:
    """All that is not renamed is equal; renaming confuses nothing; one shift is common to all times."""
    assert len(before) == len(after)
    threads, ids, shifts = set(), set(), set()
    for old, new in zip(before, after, strict=True):
        assert list(old) == [key for key in new if key in old or key not in ("pid", "tid")]
        kept = {key: value for key, value in old.items() if key not in (*RENAMED, "ts")}
        assert {key: new[key] for key in kept} == kept
        threads.add((str(old.get("pid")), str(old.get("tid")), new["pid"], new["tid"]))
        shifts.add(Decimal(new["ts"]) - Decimal(old["ts"]))
        ids |= {(repr(old[key]), repr(new[key])) for key in ("id", "bind_id") if key in old}
        assert all(0 < new[key] < 1 << 32 for key in ("pid", "tid"))
    assert len(shifts) <= 1
    assert len({old[:2] for old in threads}) == len({new[2:] for new in threads}) == len(threads)
    assert len({old for old, _ in ids}) == len({new for _, new in ids}) == len(ids)


def test_a_trace_of_torch_keeps_every_field_of_every_event(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "torch.json"
    subprocess.run([sys.executable, "-c", TORCH, str(path)], check=True, capture_output=True)
    content = path.read_bytes()
    original = json.loads(content, parse_float=Decimal)
    before = timed(original["traceEvents"])
    base_ns = original["baseTimeNanoseconds"]
    opened_ns = base_ns + int(before[0]["ts"] * 1000)
    merged, after = merged_of(tmp_path / "quick", content, opened_ns=opened_ns)
    assert merged.problems == ()
    assert_unchanged(before, after)
    assert {"X", "s", "f", "i"} <= {event["ph"] for event in after}
    for old, new in zip(before, after, strict=True):
        assert base_ns + old["ts"] * 1000 == merged.base_ns + new["ts"] * 1000
    # Limits that leave nothing out make every event go the thorough way: the result is the same.
    everything = Selection(from_ms=-1e6, to_ms=1e6)
    assert merged_of(tmp_path / "slow", content, opened_ns=opened_ns, selection=everything)[1] == after


def event(**fields: object) -> Event:
    return {"ph": "X", "name": "k", "pid": 1, "tid": 2, "ts": AT_US, "dur": 1, **fields}


LAYOUTS: dict[str, str] = {
    "Kineto of 2021": f"""{{"traceEvents": [
      {{"name": "process_name", "ph": "M", "ts": {AT_US}, "pid": 25721, "tid": 0,
        "args": {{"name": "python"}}}},
      {{"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 25721, "tid": "25721",
        "ts": {AT_US}, "dur": 12, "args": {{"Device": 25721, "Input dims": [[1, 2], []]}}}},
      {{"ph": "X", "cat": "Kernel", "name": "void gemm<float, 128>(int*)", "pid": 0, "tid": "stream 7",
        "ts": {AT_US}.5, "dur": 3, "args": {{"queued": 0, "device": 0, "stream": 7}}}},
      {{"ph": "s", "id": 8, "pid": 25721, "tid": 25721, "ts": {AT_US}, "cat": "async", "name": "launch"}},
      {{"ph": "f", "id": 8, "pid": 0, "tid": "stream 7", "ts": {AT_US}, "cat": "async",
        "name": "launch", "bp": "e"}}
    ], "baseTimeNanoseconds": 0}}""",
    "pids as strings": json.dumps(
        {"baseTimeNanoseconds": 0, "traceEvents": [event(pid="25721"), event(pid="Spans", tid="Profiler")]}
    ),
    "another order": json.dumps(
        {"baseTimeNanoseconds": "0", "traceEvents": [dict(reversed(event(n=at).items())) for at in range(9)]}
    ),
    "an array alone": json.dumps([event(), event(name="b")]).replace(
        "[", '{"baseTimeNanoseconds":0,"traceEvents":[', 1
    )
    + "}",
    "events inside of arguments": json.dumps(
        {
            "baseTimeNanoseconds": 0,
            "traceEvents": [
                event(args={"calls": [event(), event()], "pid": 5}),
                event(args={"id": 4, "ts": 1}),
                *([event()] * 5),
                {"args": event(), **event()},
            ],
        }
    ),
    "text that looks like fields": json.dumps(
        {
            "baseTimeNanoseconds": 0,
            "traceEvents": [event(name='"pid": 1, "tid": 2, "ts": 3}, {"ph": "X"')] * 3,
        }
    ),
    "all digits that there are": f"""{{"baseTimeNanoseconds": 0, "traceEvents": [
      {{"ph":"X","name":"a","pid":1,"tid":2,"ts":{AT_US}.1234567,"dur":1.00000001}},
      {{"ph":"X","name":"b","pid":1,"tid":2,"ts":{AT_US}.1234567e0,"dur":1E-3}},
      {{"ph":"X","name":"c","pid":1,"tid":2,"ts":{AT_US}.1234567,"dur":0,"args":{{"big":123456789012345678901234567890}}}}
    ]}}""",
    "ids of all kinds": json.dumps(
        {
            "baseTimeNanoseconds": 0,
            "traceEvents": [
                event(ph="b", id="0x10"),
                event(ph="e", id=16),
                event(ph="n", id=(1 << 53) + 1),
                event(ph="n", id=(1 << 53) + 2),
                event(ph="n", id=-1),
                event(ph="s", id=10**30),
                event(bind_id="0x10", flow_out=True),
                event(ph="b", id="request é"),
            ],
        }
    ),
    "spaces everywhere": json.dumps(
        {"traceEvents": [event(), event()], "baseTimeNanoseconds": 0}, indent=7, separators=(" , ", "  :  ")
    ),
    "no pid, no tid": json.dumps(
        {"baseTimeNanoseconds": 0, "traceEvents": [{"ph": "i", "name": "mark", "ts": AT_US, "s": "g"}]}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_keeps_every_field_of_every_event(tmp_path: Path, layout: str) -> None:
    content = LAYOUTS[layout].encode()
    merged, after = merged_of(tmp_path, content)
    assert merged.problems == ()
    assert_unchanged(timed(json.loads(content, parse_float=Decimal)["traceEvents"]), after)


def test_local_ids_of_two_processes_in_one_file_stay_apart(tmp_path: Path) -> None:
    events = [event(ph="b", pid=pid, id2={"local": "0x1"}) for pid in (1, 2, 1)]
    content = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": events}).encode()
    first, second, third = (e["id2"]["local"] for e in merged_of(tmp_path, content)[1])
    assert first == third != second


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.one_of(st.integers(-5, 1 << 70), st.text(max_size=5))), unique=True
    )
)
def test_ids_of_all_files_stay_apart_and_exact_in_a_double(pairs: list[tuple[int, int | str]]) -> None:
    files = {file: FlowIds(file, 5) for file in range(1, 6)}
    texts = [(files[file], msgspec.json.encode(value)) for file, value in pairs if isinstance(value, str)]
    texts += [(files[file], b"%d" % value) for file, value in pairs if isinstance(value, int)]
    numbers = [ids.number(text) for ids, text in texts]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 1 << 53 for number in numbers)
    assert numbers == [ids.number(text) for ids, text in texts]
