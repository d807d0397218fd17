"""CUDA's memory in the report, from snapshots shaped as torch documents them, without a device."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.steps import MS, close, printed, reported
from packages.report.tests.traces import put as put_file
from stepscope.backends.cuda_memory import LISTED, summarise
from stepscope.files.cuda_memory import OOM_SUMMARY, SUMMARY, MemorySummary
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report.html.step_page import render_step
from stepscope_report.timeline import load_step, merge_step

FORWARD, BACKWARD = "train/forward.py:41 forward", "train/backward.py:41 backward"

MB = 1_000_000
OPENED_US = OPENED_NS // 1000


def frames(*own: str) -> list[dict[str, Any]]:
    """torch's own first, as the innermost."""
    torch = {"filename": "/site/torch/nn/functional.py", "line": 7, "name": "linear"}
    return [torch, *({"filename": f"/code/train/{name}.py", "line": 41, "name": name} for name in own)]


def event(action: str, addr: int, mb: int, at_ms: int, *own: str) -> dict[str, Any]:
    return {
        "action": action, "addr": addr, "size": mb * MB, "stream": 0, "time_us": OPENED_US + at_ms * 1000,
        "frames": frames(*own),
    }  # fmt: skip


def snapshot() -> dict[str, Any]:
    """100 MB of weights before; 300 MB of activations and 50 MB of gradients at 30 ms; 120 MB at the end."""
    trace = [
        event("segment_alloc", 1 << 20, 400, 9),
        event("alloc", 1, 200, 10, "forward"),
        event("alloc", 2, 100, 12, "forward"),
        event("alloc", 3, 50, 30, "backward"),
        event("free_requested", 1, 200, 31, "backward"),
        event("free_completed", 1, 200, 31, "backward"),
        event("free_requested", 2, 100, 32, "backward"),
        event("free_completed", 2, 100, 32, "backward"),
        event("free_requested", 3, 50, 33, "backward"),
        event("alloc", 1, 20, 34, "optimizer"),
        event("segment_free", 1 << 20, 100, 35),
    ]
    blocks = [
        {"address": 9, "size": 100 * MB, "state": "active_allocated", "frames": []},
        {"address": 1, "size": 20 * MB, "state": "active_allocated", "frames": frames("optimizer")},
        {"address": 3, "size": 50 * MB, "state": "active_awaiting_free", "frames": []},
        {"address": 5, "size": 80 * MB, "state": "inactive", "frames": []},
    ]
    segment = {"device": 0, "address": 0, "total_size": 500 * MB, "stream": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [trace, []]}


def test_the_most_is_found_with_what_was_there_before_the_recording() -> None:
    (device,) = summarise(snapshot(), 1000).devices
    assert (device.peak_bytes, device.before_bytes, device.end_bytes) == (450 * MB, 100 * MB, 120 * MB)
    assert device.peak_us == OPENED_US + 30_000
    assert (device.peak_reserved_bytes, device.end_reserved_bytes) == (600 * MB, 500 * MB)
    assert [block.bytes // MB for block in device.blocks] == [200, 100, 50]
    assert not device.cut


def test_a_line_is_the_innermost_that_is_not_torchs_own() -> None:
    (device,) = summarise(snapshot(), 1000).devices
    assert device.frames == (FORWARD, BACKWARD)


def test_without_stacks_and_times_the_sizes_are_there() -> None:
    made = snapshot()
    for event in made["device_traces"][0]:
        del event["frames"], event["time_us"]
    (device,) = summarise(made, 1000).devices
    assert device.peak_bytes == 450 * MB
    assert {(block.at_us, block.where) for block in device.blocks} == {(None, -1)}


def test_a_full_history_is_said_to_be_cut() -> None:
    (device,) = summarise(snapshot(), 11).devices
    assert device.cut


def test_a_device_whose_memory_did_not_change_is_as_full_as_at_the_end() -> None:
    made = snapshot()
    made["device_traces"] = []
    (device,) = summarise(made, 1000).devices
    assert (device.peak_bytes, device.peak_us, device.before_bytes) == (120 * MB, None, 120 * MB)


def test_small_blocks_beyond_the_largest_are_summed_up() -> None:
    trace = [event("alloc", number, 1, 10) for number in range(LISTED + 5)]
    (device,) = summarise({"segments": [], "device_traces": [trace]}, 10**6).devices
    assert (len(device.blocks), device.other_blocks, device.other_bytes) == (LISTED, 5, 5 * MB)


def test_what_an_allocation_failed_for_is_kept() -> None:
    made = snapshot()
    made["device_traces"][0].append({"action": "oom", "size": 900 * MB, "device_free": 5, "frames": []})
    (device,) = summarise(made, 1000).devices
    assert (device.ooms, device.oom_bytes) == (1, 900 * MB)


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(KeyError):
        summarise({"error": "the snapshot failed"}, 10)


def put(folder: StepFolder, process: FakeProcess, data: bytes, kind: str = SUMMARY) -> None:
    name = f"traces/{process.info.role}/capture_{kind}.json.gz"
    put_file(folder, name, process, gzip.compress(data), kind=kind, tool="cuda_memory", rank=0)


def a_step(path: Path, *, skew_ns: int = 0) -> tuple[StepFolder, FakeProcess]:
    """Return a step in which the forward runs from 5 to 20 ms inside of the update, which ends at 40."""
    folder = StepFolder(path)
    driver, actor = (
        folder.process("trainer", owner=True), folder.process("actor", 0, host="host-b", skew_ns=skew_ns),
    )  # fmt: skip
    driver.measures(actor, 0)
    update = actor.span("update_actor", 0, 40 * MS)
    actor.span("forward", 5 * MS, 20 * MS, parent=update)
    close(folder, 50 * MS)
    folder.write()
    return folder, actor


def shifted(summary: MemorySummary, us: int) -> bytes:
    """As recorded by a clock that is ahead."""
    plain = msgspec.to_builtins(summary)
    for device in plain["devices"]:
        device["peak_us"] += us
        device["blocks"] = [[size, at_us + us, where] for size, at_us, where in device["blocks"]]
    return msgspec.json.encode(plain)


@pytest.mark.parametrize("skew_ns", [0, 11_560 * MS])
def test_what_held_the_memory_is_said_by_stage_and_line(tmp_path: Path, skew_ns: int) -> None:
    folder, actor = a_step(tmp_path, skew_ns=skew_ns)
    put(folder, actor, shifted(summarise(snapshot(), 1000), skew_ns // 1000))
    (row,) = reported(folder, traces=True).cuda_memory
    assert (row.process, row.device, row.allocated_bytes, row.at_ns) == (
        "actor 0", "cuda:0", 450 * MB, 30 * MS,
    )  # fmt: skip
    assert [(holder.stage, holder.where, holder.bytes // MB) for holder in row.holders] == [
        ("actor forward", FORWARD, 300),
        ("actor update_actor", BACKWARD, 50),
    ]
    assert (
        row.before_bytes + row.other_bytes + sum(holder.bytes for holder in row.holders)
        == row.allocated_bytes
    )


def test_the_tables_and_the_page_show_it(tmp_path: Path) -> None:
    folder, actor = a_step(tmp_path)
    made = snapshot()
    made["device_traces"][0].append({"action": "oom", "size": 900 * MB, "device_free": 5, "frames": []})
    put(folder, actor, msgspec.json.encode(summarise(made, 11)), OOM_SUMMARY)
    step = reported(folder, traces=True)
    for output in (printed(step, 200), render_step(load_step(folder.layout.root), step)):
        assert re.search("Held then: .* cuda:0, ", output)
        assert re.search("memory .* 900 MB", output)
        assert "history was full" in output
        assert "train/forward.py:41" in output
        assert "before the recording" in output


def test_a_summary_is_no_trace_of_the_timeline(tmp_path: Path) -> None:
    folder, actor = a_step(tmp_path)
    put(folder, actor, msgspec.json.encode(summarise(snapshot(), 1000)))
    merged = merge_step(folder.layout.root)
    assert (merged.files, merged.problems) == ((), ())


@pytest.mark.parametrize("data", [b"", b"{", b'{"devices": [{"device": "x"}]}'])
def test_a_broken_summary_is_named_and_costs_itself(tmp_path: Path, data: bytes) -> None:
    folder, actor = a_step(tmp_path)
    put(folder, actor, data)
    step = reported(folder, traces=True)
    assert step.cuda_memory == ()
    assert step.traces is not None
    assert [problem.file for problem in step.traces.problems] == [
        "traces/actor/capture_cuda_memory_summary.json.gz"
    ]
