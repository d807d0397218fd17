"""Reports of recordings that no stepscope wrote, against sweeps over the intervals that were written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.test_plain_traces import ranks_of
from packages.report.tests.test_reader_nsys import KERNEL, PID, STRINGS, kernel, tables, write

OTHER = 4712
NAMES = {1: "gemm<float>", 5: "attention", 6: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"}
Interval = tuple[int, int]
Kind = tuple[int, int, str]
"""(pid, device, work)."""


def length_ns(*groups: Iterable[Interval]) -> int:
    """Return the length of a union: how many ns lie in an interval, step by step over sorted bounds."""
    bounds = sorted(
        (at, step) for group in groups for start, end in group for at, step in ((start, 1), (end, -1))
    )
    total = depth = last = 0
    for at, step in bounds:
        total += at - last if depth else 0
        depth, last = depth + step, at
    return total


def random_work() -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[Kind, list[Interval]]]:
    """Return kernels and copies of two processes on two devices, and their intervals."""
    chance = random.Random(7)
    kernels, copies = [], []
    intervals: dict[Kind, list[Interval]] = {}
    for at in range(600):
        pid, device = chance.choice(((PID, 0), (OTHER, 1)))
        start, dur, name = chance.randrange(200_000), chance.randrange(1, 3000), chance.choice((1, 5, 6, 0))
        row = kernel(name, start, start + dur, at, pid, deviceId=device, streamId=chance.randrange(3))
        work = {0: "memory", 6: "communication"}.get(name, "compute")
        intervals.setdefault((pid, device, work), []).append((start, start + dur))
        if name:
            kernels.append(row)
        else:
            kept = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
            copies.append({**{key: row[key] for key in kept}, "bytes": 8, "copyKind": 1})
    return kernels, copies, intervals


def check_devices(devices: Iterable[Mapping[str, Any]], intervals: Mapping[Kind, list[Interval]]) -> None:
    """Compare each row of a report with a sweep."""
    rows = {row["device"]: row for row in devices}
    for pid, device in ((PID, 0), (OTHER, 1)):
        compute, communication, memory = (
            intervals[pid, device, work] for work in ("compute", "communication", "memory")
        )
        row = rows[f"GPU {device}"]
        assert (row["compute_ns"], row["communication_ns"]) == (length_ns(compute), length_ns(communication))
        assert row["exposed_ns"] == length_ns(compute, communication) - length_ns(compute)
        assert row["busy_ns"] == length_ns(compute, communication, memory)
        assert row["memory_ns"] == length_ns(memory)


def test_a_report_of_an_nsys_export_has_the_times_of_a_sweep(tmp_path: Path, command: Command) -> None:
    kernels, copies, intervals = random_work()
    rows = tables() | {KERNEL: kernels, "CUPTI_ACTIVITY_KIND_MEMCPY": copies}
    rows["StringIds"] = [{"id": number, "value": name} for number, name in (STRINGS | NAMES).items()]
    del rows["CUPTI_ACTIVITY_KIND_MEMSET"]
    write(tmp_path / "report.sqlite", rows)
    report = command("report", tmp_path, "--json").json
    check_devices(report["traces"]["devices"], intervals)
    times = {row["name"]: (row["count"], row["total_ns"]) for row in report["traces"]["operators"]}
    for number, name in NAMES.items():
        taken = [row["end"] - row["start"] for row in kernels if row["demangledName"] == number]
        assert times[name] == (len(taken), sum(taken))
    assert {(row["host"], row["pid"]) for row in report["processes"]} == {("host-a", PID), ("host-a", OTHER)}
    merged = command("merge", tmp_path, "--json", "--output", tmp_path / "merged.json.gz").json
    assert {row["native_pid"] for row in merged["rows"]} == {PID, OTHER}
    assert sum(file["events"] for file in merged["files"]) >= len(kernels) + len(copies)


@pytest.mark.parametrize(("severity", "doubted"), [(2, False), (3, True)])
def test_a_warning_of_nsys_puts_no_time_in_doubt(
    tmp_path: Path, command: Command, severity: int, doubted: bool
) -> None:
    """Most exports have one, such as that no OpenGL was recorded."""
    diagnosis = {"timestamp": 1, "severity": severity, "text": "No NVTX events collected", "globalPid": None}
    write(tmp_path / "report.sqlite", tables() | {"DIAGNOSTIC_EVENT": [diagnosis]})
    report = command("report", tmp_path, "--json", code=3).json
    rows = [*report["traces"]["devices"], *report["labels"]]
    assert {row["doubted"] for row in rows} == {doubted}
    assert len(report["traces"]["problems"]) == 1


@pytest.mark.parametrize(
    "line",
    [
        {"Type": 79, "CudaEvent": {"startNs": "2", "endNs": "3"}},
        {"data": ["", "gemm"]},
        {"type": "String", "id": "1", "value": "gemm"},
    ],
)
def test_nsys_json_is_named_with_the_export_to_make(
    tmp_path: Path, command: Command, line: dict[str, Any]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(line) + "\n")
    assert "export --type sqlite" in " ".join(command("report", tmp_path, code=1).err.split())


def test_a_report_that_only_nsys_reads_is_named_with_what_to_run(tmp_path: Path, command: Command) -> None:
    (tmp_path / "report.nsys-rep").write_bytes(b"opaque")
    assert "--type sqlite" in " ".join(command("report", tmp_path, code=1).err.split())


def test_a_folder_may_name_the_rank(tmp_path: Path) -> None:
    write(tmp_path / "rank_3" / "report.sqlite", tables())
    assert ranks_of(tmp_path) == [3]
