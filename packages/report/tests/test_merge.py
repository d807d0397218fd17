"""Steps merged into one timeline: rows, positions, names, arrows, and what narrows them.

Above 400 lines in one file, because all of it reads timelines with the same few functions.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from packages.report.tests.pictures import rl_step
from packages.report.tests.steps import MS, timeline_of
from packages.report.tests.traces import put
from stepscope.files.layout import sidecar_of
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report.cli.app import app
from stepscope_report.timeline import Merged, Selection, load_step, merge_step
from stepscope_report.timeline.clocks import MARGIN_NS
from stepscope_report.timeline.merge.write import TimelineFile

BASE_NS = OPENED_NS - 7_889_238_000_000_000 // 2
"""The zero of times in traces: like Kineto's, months before the step."""
Event = dict[str, Any]


def ts(at_ns: int, base_ns: int = BASE_NS) -> msgspec.Raw:
    """Return a `ts` as torch writes it, of a unix time."""
    return msgspec.Raw(b"%d.%03d" % divmod(at_ns - base_ns, 1000))


def kernel(name: str, at_ns: int, pid: object = 77, tid: object = 7, **more: object) -> Event:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": pid, "tid": tid, "ts": ts(OPENED_NS + at_ns),
        "dur": 1.5, **more,
    }  # fmt: skip


def trace(
    folder: StepFolder,
    process: FakeProcess | None,
    events: list[Event] | bytes,
    *,
    name: str = "t.json",
    base_ns: int | None = BASE_NS,
    sidecar: bool = True,
    role: str = "actor",
    host: str | None = None,
) -> Path:
    """Return a trace in the step's folder, by one of its processes or by a stranger."""
    base = {} if base_ns is None else {"baseTimeNanoseconds": base_ns}
    content = events if isinstance(events, bytes) else msgspec.json.encode({**base, "traceEvents": events})
    by: dict[str, Any] = {"role": role} if process is not None else {"role": role, "host": host or "host-a"}
    path = put(folder, f"traces/{role}/{name}", process, content, **by)
    if not sidecar:
        sidecar_of(path).unlink()
    return path


def read(path: Path) -> dict[str, Any]:
    return timeline_of(path)


def events_of(path: Path, *phases: str) -> list[Event]:
    """Return all events but those of the critical path, which repeats spans."""
    events = (event for event in read(path)["traceEvents"] if event.get("cat") != "critical path")
    return [event for event in events if event["ph"] in (phases or "XsfibeBECn")]


def since_opening_ns(path: Path, name: str) -> list[int]:
    """Return the starts of events of this name, ns after the capture opened."""
    base_ns = read(path)["baseTimeNanoseconds"]
    return [
        int(Decimal(event["ts"]) * 1000) + base_ns - OPENED_NS
        for event in events_of(path)
        if event["name"] == name
    ]


def problems(merged: Merged) -> list[tuple[str, int | None]]:
    return [(problem.what, problem.events) for problem in merged.problems]


def names(path: Path, kind: str) -> dict[int, str]:
    """Return the names of processes by pid, or of threads by tid."""
    key = "pid" if kind == "process" else "tid"
    return {
        event[key]: event["args"]["name"] for event in events_of(path, "M") if event["name"] == f"{kind}_name"
    }


def two(tmp_path: Path) -> tuple[StepFolder, FakeProcess, FakeProcess]:
    """Return a driver and an actor on one host, both closed after 100 ms."""
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    actor = folder.process("actor", 0)
    for process in (driver, actor):
        process.close(100 * MS)
    return folder, driver, actor


def test_rows_stand_from_the_driver_down_to_the_critic(folder: StepFolder) -> None:
    roles = ["zoo", "critic", "actor", "ref", "reward", "rollout", "agent_loop", "trainer"]
    for role in roles:
        folder.process(role, owner=role == "trainer").span("work", 0, MS)
    folder.process("actor", 1).span("work", 0, MS)
    path = folder.write()
    merged = merge_step(path)
    order = ["trainer", "agent_loop", "rollout", "reward", "ref", "actor", "actor 1", "critic", "zoo"]
    assert [row.name for row in merged.rows] == order
    assert [row.pid for row in merged.rows] == [row.native_pid for row in merged.rows]
    places = {
        e["pid"]: e["args"]["sort_index"] for e in events_of(path, "M") if e["name"] == "process_sort_index"
    }
    assert sorted(places, key=places.__getitem__) == [row.pid for row in merged.rows]
    shown = names(path, "process")
    assert [shown[row.pid] for row in merged.rows] == order


def test_a_skew_of_11_seconds_between_hosts_is_taken_out_of_traces_too(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    skew_ns = 11_560 * MS + 123
    actor = folder.process("actor", 0, host="host-b", skew_ns=skew_ns)
    driver.measures(actor, 0, uncertainty_ns=40_000)
    driver.measures(actor, 100 * MS, uncertainty_ns=40_000)
    for process in (driver, actor):
        process.close(100 * MS)
    actor.span("update", 2 * MS, 5 * MS)
    trace(folder, actor, [kernel("gemm", 3 * MS + skew_ns)])
    engine = [kernel("decode", 4 * MS + skew_ns)]
    trace(folder, None, engine, name="engine.json", role="rollout", host="host-b")
    path = folder.write()
    merged = merge_step(path)
    assert since_opening_ns(path, "update") == [2 * MS]
    assert since_opening_ns(path, "gemm") == [3 * MS]
    assert since_opening_ns(path, "decode") == [4 * MS]  # an engine's worker has the clock of its host
    assert {row.name: row.uncertainty_ns for row in merged.rows}["actor 0"] == pytest.approx(40_000, abs=50)
    assert merged.problems == ()


def test_a_drift_between_hosts_is_interpolated_in_traces_as_in_spans(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    lasted = 300_000 * MS
    actor = folder.process("actor", 0, host="host-b", skew_ns=11_560 * MS, drift_ppm=200)
    driver.measures(actor, 0)
    driver.measures(actor, lasted)
    for process in (driver, actor):
        process.close(lasted)
    half = lasted // 2
    actor.span("update", half, half + MS)
    trace(folder, actor, [kernel("gemm", actor.wall_ns(half) - OPENED_NS)])
    path = folder.write()
    merge_step(path)
    (update,), (gemm,) = since_opening_ns(path, "update"), since_opening_ns(path, "gemm")
    merge_step(path, selection=Selection(from_ms=0))  # the thorough way
    assert since_opening_ns(path, "gemm") == [gemm]
    assert abs(update - half) <= 1
    assert abs(gemm - half) <= 1


def test_a_trace_with_a_clock_of_its_own_is_on_a_track_marked_unaligned(tmp_path: Path) -> None:
    first_ns = -OPENED_NS + 1_000 * MS
    folder, driver, actor = two(tmp_path)
    driver.span("step", 0, 100 * MS)
    events = [
        {**kernel("old", 0), "ts": ts(OPENED_NS + first_ns, 0)},
        {**kernel("later", 0), "ts": ts(OPENED_NS + first_ns + 7 * MS, 0)},
    ]
    trace(folder, actor, events, base_ns=None)
    path = folder.write()
    merged = merge_step(path)
    row = merged.rows[-1]
    assert (row.name, row.alignment) == ("actor 0 (unaligned)", "unaligned")
    assert "no baseTimeNanoseconds" in (row.reason or "")
    assert [problem.what for problem in merged.problems] == [f"unaligned: {row.reason}"]
    labels = [e["args"]["labels"] for e in events_of(path, "M") if e["name"] == "process_labels"]
    assert f"unaligned: {row.reason}" in labels[-1]
    (old,), (later,) = since_opening_ns(path, "old"), since_opening_ns(path, "later")
    assert later - old == 7 * MS
    assert old > 100 * MS  # behind the step, where nobody takes it for aligned


def test_a_process_whose_clock_was_never_measured_is_marked_unaligned(tmp_path: Path) -> None:
    folder, driver, _ = two(tmp_path)
    driver.span("step", 0, 100 * MS)
    stranger = folder.process("critic", 0, host="host-z", skew_ns=90 * MARGIN_NS)
    stranger.span("update", MS, 2 * MS)
    trace(folder, stranger, [kernel("gemm", 90 * MARGIN_NS + MS + 5)], role="critic")
    path = folder.write()
    merged = merge_step(path)
    assert [(row.name, row.alignment) for row in merged.rows] == [
        ("trainer", "owner"),
        ("critic 0 (unaligned)", "unaligned"),
    ]
    (update,), (gemm,) = since_opening_ns(path, "update"), since_opening_ns(path, "gemm")
    assert gemm - update == 5
    assert update > 100 * MS


def test_concurrent_trajectories_take_as_few_lanes_as_overlap(tmp_path: Path) -> None:
    folder, driver, _ = two(tmp_path)
    rollout = driver.span("rollout", 0, 90 * MS)
    for number, (start, end) in enumerate([(0, 30), (10, 40), (30, 60), (41, 80)]):
        root = driver.span("trajectory", start * MS, end * MS, parent=rollout, trajectory=f"t{number}")
        driver.span("turn", start * MS + 1, start * MS + 5, parent=root, trajectory=f"t{number}", turn=0)
    path = folder.write()
    merge_step(path)
    lanes = {e["args"]["trajectory"]: e["tid"] for e in events_of(path, "X") if e["name"] == "trajectory"}
    turns = {e["args"]["trajectory"]: e["tid"] for e in events_of(path, "X") if e["name"] == "turn"}
    assert turns == lanes
    assert lanes["t0"] == lanes["t2"] != lanes["t1"] == lanes["t3"]
    rows = set(names(path, "thread").values())
    assert rows == {"critical path", "spans", "trajectories 1 of 2", "trajectories 2 of 2"}


def test_an_arrow_leads_from_a_turn_to_the_call_in_the_engine(tmp_path: Path) -> None:
    folder, driver, _ = two(tmp_path)
    turn = driver.span("turn", MS, 9 * MS, trajectory="t0", turn=0)
    engine = folder.process("rollout", 0)
    engine.span("generate", 2 * MS, 8 * MS, link=driver.link(turn), trajectory="t0")
    path = folder.write()
    merge_step(path)
    start, end = events_of(path, "s", "f")
    assert start["id"] == end["id"]
    spans = {event["name"]: event for event in events_of(path, "X")}
    for arrow, name in ((start, "turn"), (end, "generate")):
        assert [arrow[key] for key in ("pid", "tid", "ts")] == [
            spans[name][key] for key in ("pid", "tid", "ts")
        ]


def test_pids_tids_and_flows_of_many_files_never_meet(folder: StepFolder) -> None:
    folder.process("trainer", owner=True)
    for rank in range(3):
        actor = folder.process("actor", rank)
        flow = {"pid": 77, "tid": 7, "ts": ts(OPENED_NS + MS), "cat": "ac2g", "name": "ac2g"}
        events = [kernel("gemm", MS), {"ph": "s", "id": 5, **flow}, {"ph": "f", "id": 5, "bp": "e", **flow}]
        trace(folder, actor, events, name=f"{rank}.json")
    path = folder.write()
    merge_step(path)
    merged = events_of(path)
    assert len({event["pid"] for event in merged}) == 3
    assert all(0 < event[key] < 1 << 32 for event in merged for key in ("pid", "tid"))
    ids = Counter(event["id"] for event in merged if "id" in event)
    assert sorted(ids.values()) == [2, 2, 2]
    assert all(number < 1 << 53 for number in ids)


def test_devices_are_tracks_of_their_process_and_carry_their_name(tmp_path: Path) -> None:
    folder, _, actor = two(tmp_path)
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "args": {"name": "thread 77 (python)"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        kernel("op", MS, 77, 77),
        kernel("gemm", MS, 0, 7),
        kernel("unnamed", MS, 0, "stream 9"),
    ]
    trace(folder, actor, events)
    path = folder.write()
    merge_step(path)
    named = names(path, "thread")
    tracks = {e["name"]: named[e["tid"]] for e in events_of(path, "X")}
    assert tracks == {"op": "thread 77 (python)", "gemm": "GPU 0 stream 7", "unnamed": "GPU 0 stream 9"}
    assert len({e["pid"] for e in events_of(path)}) == 1
    assert list(names(path, "process").values()) == ["actor 0"]


def test_every_track_has_a_name_and_none_is_thread_0_which_takes_none_in_perfetto(tmp_path: Path) -> None:
    folder, _, actor = two(tmp_path)
    events: list[Event] = [
        {"ph": "M", "name": "process_labels", "pid": 2, "tid": 0, "args": {"labels": "GPU 2"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 0, "args": {"name": "stream 0 "}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": ""}},
        kernel("gemm", MS, 2, 0),
        kernel("op", MS, 77, 5),
        kernel("negative", MS, 77, -5),
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": ts(OPENED_NS + MS)},
    ]
    trace(folder, actor, events)
    path = folder.write()
    merge_step(path)
    named = names(path, "thread")
    tracks = {e["name"]: named[e["tid"]] for e in events_of(path, "X", "i")}
    assert tracks == {
        "gemm": "GPU 2 stream 0", "op": "thread 5", "negative": "thread -5", "Record Window End": "no thread",
    }  # fmt: skip
    assert 0 not in {e["tid"] for e in events_of(path, "X", "i")}


@pytest.mark.parametrize(("days", "taken"), [(50, True), (51, False), (52, False), (60, True), (103, False)])
def test_a_base_from_which_perfetto_would_lose_a_nanosecond_is_not_taken(
    tmp_path: Path, days: int, taken: bool
) -> None:
    folder, _, actor = two(tmp_path)
    base_ns = OPENED_NS - days * 86_400 * 1000 * MS
    event = {**kernel("op", MS), "ts": ts(OPENED_NS + MS, base_ns)}
    trace(folder, actor, [event], base_ns=base_ns)
    path = folder.write()
    assert (merge_step(path).base_ns == base_ns) == taken
    assert since_opening_ns(path, "op") == [MS]
    us = Decimal(next(e["ts"] for e in events_of(path, "X") if e["name"] == "op"))
    assert int(float(us) * 1000.0 + 0.5) == us * 1000


@pytest.mark.parametrize("thread", [{}, {"tid": 0}])
def test_counters_of_two_devices_stay_apart(tmp_path: Path, thread: Event) -> None:
    folder, _, actor = two(tmp_path)
    counters: list[Event] = [
        {"ph": "C", "name": "memory", "pid": pid, **thread, "ts": ts(OPENED_NS + MS), "args": {"bytes": pid}}
        for pid in (0, 1)
    ]
    trace(folder, actor, counters)
    path = folder.write()
    merge_step(path)
    of_devices = events_of(path, "C")
    assert [event["args"]["bytes"] for event in of_devices] == [0, 1]
    assert len({event["pid"] for event in of_devices}) == 2
    assert {event["pid"] for event in of_devices} <= names(path, "process").keys()


def test_roles_and_ranks_narrow_it_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    folder, driver, actor = two(tmp_path)
    driver.span("rollout", 0, MS)
    driver.span("score", MS, 2 * MS, role="reward")
    actor.span("update", 0, MS)
    trace(folder, actor, [kernel("gemm", MS)])
    path = folder.write()

    def shown(**selection: Any) -> set[str]:
        merged = merge_step(path, selection=Selection(**selection))
        assert read(path)["stepscope"]["selection"] == json.loads(msgspec.json.encode(merged.selection))
        assert read(path)["stepscope"]["left_out"] == list(merged.left_out)
        return {event["name"] for event in events_of(path, "X")}

    assert shown() == {"rollout", "score", "update", "gemm"}
    assert shown(roles=("act*",)) == {"update", "gemm"}
    assert shown(roles=("reward",)) == {"score"}
    assert shown(ranks=(range(1, 2),)) == {"rollout", "score"}
    (other,) = merge_step(path, selection=Selection(ranks=(range(1, 2),))).left_out
    assert other.startswith("traces/actor/t.json: ")


def test_from_and_to_keep_what_overlaps(tmp_path: Path) -> None:
    folder, driver, actor = two(tmp_path)
    for stage, start, end in (("before", 0, 9), ("into", 5, 15), ("inside", 12, 13), ("after", 21, 30)):
        driver.span(stage, start * MS, end * MS)
    times = (("early", 9, 1.5), ("long", 9, 2000), ("k", 15, 1.5), ("late", 21, 1.5))
    trace(folder, actor, [kernel(name, at * MS, dur=dur) for name, at, dur in times])
    path = folder.write()
    merged = merge_step(path, selection=Selection(from_ms=10, to_ms=20))
    assert {event["name"] for event in events_of(path, "X")} == {"into", "inside", "long", "k"}
    spans, traces = merged.left_out
    assert spans.startswith("2 spans outside ")
    assert traces.startswith("traces/actor/t.json: 2 ")


@pytest.mark.slow
def test_a_limit_on_size_is_kept_and_every_file_gets_its_share(folder: StepFolder) -> None:
    folder.process("trainer", owner=True).span("step", 0, MS)
    for rank in range(2):
        events = [kernel(f"k{(at * 7919) % 100003}", at * 1000) for at in range(60_000)]
        trace(folder, folder.process("actor", rank), events, name=f"{rank}.json")
    path = folder.write()
    merged = merge_step(path, selection=Selection(max_mb=0.8))
    assert (path / "timeline.json.gz").stat().st_size <= 800_000
    assert [file.events > 10_000 for file in merged.files] == [True, True]
    assert all("for its size" in line for line in merged.left_out)
    assert len(merged.left_out) == 2
    assert "step" in {event["name"] for event in events_of(path, "X")}


def test_what_nobody_reads_is_named_and_is_no_defect(tmp_path: Path) -> None:
    folder, _, actor = two(tmp_path)
    trace(folder, actor, b"pickle", name="memory.pickle")
    merged = merge_step(folder.write())
    (what,) = merged.left_out
    assert what.partition(": ")[0].endswith("/memory.pickle")
    assert what.endswith(" torch_trace")
    assert merged.problems == ()


def test_the_file_of_before_stays_when_a_merge_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, actor = two(tmp_path)
    trace(folder, actor, [kernel("gemm", MS)])
    path = folder.write()
    merge_step(path)
    before = (path / "timeline.json.gz").read_bytes()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    def interrupt(_: int) -> None:
        if list(path.glob(".timeline*")):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        merge_step(path, on_read=interrupt)
    assert (path / "timeline.json.gz").read_bytes() == before
    assert not list(path.glob(".timeline*"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stepscope-merge")]


def test_a_disk_that_is_full_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, actor = two(tmp_path)
    trace(folder, actor, [kernel("gemm", MS)])
    path = folder.write()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TimelineFile, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        merge_step(path)
    assert not list(path.glob(".timeline*"))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    folder, _, actor = two(tmp_path)
    block = b",\n".join(msgspec.json.encode(kernel("aten::mm", at * 1000)) for at in range(10_000))
    path = trace(folder, actor, b"", name="big.json.gz")
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"baseTimeNanoseconds": %d, "traceEvents": [' % BASE_NS)
        for _ in range(100_000_000 // len(block)):
            file.write(block + b",\n")
        file.write(block + b"]}")
    # Not ru_maxrss: that of a new process begins with what its parent had.
    program = (
        "import re, sys\n"
        "peak_kb = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak_kb()\n"
        "from stepscope_report.timeline import merge_step\n"
        "print(merge_step(sys.argv[1]).events, peak_kb() - before)\n"
    )
    command = [sys.executable, "-c", program, str(folder.write())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    events, grown_kb = map(int, done.stdout.split())
    assert events > 800_000
    assert grown_kb < 64_000


@pytest.mark.slow
def test_a_merge_takes_little_more_memory_than_the_spans_it_reads(tmp_path: Path) -> None:
    """A merge once held the events of a whole row: more than the spans themselves."""
    folder, driver, _ = two(tmp_path)
    for number in range(15_000):
        driver.span("turn", number, number + 1, trajectory=f"t{number // 4}", attrs={"tokens": number})
    step = folder.write()
    merge_step(step)  # imports, and what a process keeps
    (step / "timeline.json.gz").unlink()
    tracemalloc.start()
    try:
        timeline = load_step(step)
        _, peak_of_load = tracemalloc.get_traced_memory()
        del timeline
        tracemalloc.reset_peak()
        merge_step(step)
        _, peak_of_merge = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_of_merge < 1.5 * peak_of_load


def test_too_many_events_for_a_browser_are_told_with_a_smaller_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = str(rl_step(tmp_path, ranks=1).write())
    assert "--max-mb 200" not in CliRunner().invoke(app, ["merge", step]).output
    monkeypatch.setattr("stepscope_report.cli.merge.EVENTS", 3)
    output = CliRunner().invoke(app, ["merge", step]).output
    assert f"stepscope merge {step} --max-mb 200" in " ".join(output.split())


def test_the_traces_of_all_stages_of_a_process_share_its_row_and_its_threads(tmp_path: Path) -> None:
    folder, _, actor = two(tmp_path)
    for name in ("a", "b"):
        trace(folder, actor, [kernel(name, MS)], name=f"{name}.json")
    path = folder.write()
    merge_step(path)
    first, second = events_of(path, "X")
    assert (first["pid"], first["tid"]) == (second["pid"], second["tid"])
