"""Reports of torch_npu folders that were recorded without stepscope, compared with a sweep of the intervals.

The content of the folders is invented.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from packages.npu.tests.real.cann.fake_msprof import us
from packages.report.tests.commands import Command
from packages.report.tests.test_plain_recordings import length_ns
from stepscope_report.cli import run

AT = 1_750_000_000_000_000_000
Interval = tuple[int, int]


PARTS = ("Notify Wait", "SDMA", "Write Value", "AI_CORE")
"""Task types of the parts of a collective, as in a real recording. The last is HCCL's kernel that waits."""


class Work(NamedTuple):
    compute: list[Interval]
    copies: list[Interval]
    communication: list[Interval]

    def parts(self) -> list[tuple[Interval, str]]:
        """Return the tasks that a device runs for the collectives. A report counts none of them as work."""
        return [(interval, kind) for interval in self.communication for kind in PARTS]


def random_work(seed: int) -> Work:
    chance = random.Random(seed)

    def intervals(count: int) -> list[Interval]:
        starts = sorted(AT + chance.randrange(300_000) for _ in range(count))
        return [(start, start + chance.randrange(1, 3000)) for start in starts]

    return Work(intervals(200), intervals(20), intervals(40))


def folder_of(root: Path, rank: int) -> Path:
    """Make and return the output folder of an analysed recording, named as torch_npu does."""
    folder = root / f"host-a_{700 + rank}_20250615120000123_ascend_pt"
    (folder / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True)
    (folder / f"profiler_info_{rank}.json").write_text("{}")
    return folder / "ASCEND_PROFILER_OUTPUT"


def write_text(folder: Path, work: Work) -> None:
    names = {
        1: ("Ascend Hardware", {3: "Stream 3"}),
        2: ("Communication", {0: "Group 0 Communication", 1: "Plane 0"}),
    }
    events: list[dict[str, object]] = []
    for pid, (layer, threads) in names.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": layer}})
        events.append(
            {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": "NPU 0"}}
        )
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
            for tid, thread in threads.items()
        ]

    def slices(pid: int, tid: int, name: str, intervals: list[Interval], kind: str | None = None) -> None:
        for start, end in intervals:
            event = {
                "ph": "X",
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": us(start),
                "dur": (end - start) / 1000,
            }
            events.append(event | ({"args": {"Task Type": kind}} if kind is not None else {}))

    slices(1, 3, "MatMul", work.compute, "AI_CORE")
    slices(1, 3, "copy", work.copies, "MEMCPY_ASYNC")
    slices(2, 0, "hcom_allReduce__1_0_1", work.communication)
    slices(2, 1, "Notify Wait", [(AT, AT + 500_000)])  # a part of a collective: not counted
    for interval, kind in work.parts():
        slices(1, 4, kind, [interval], kind)
    (folder / "trace_view.json").write_text(json.dumps(events))


def write_database(folder: Path, work: Work, rank: int) -> None:
    with closing(sqlite3.connect(folder / f"ascend_pytorch_profiler_{rank}.db")) as database, database:
        run_ = database.execute
        run_("CREATE TABLE STRING_IDS (id INTEGER, value TEXT)")
        texts = ("AI_CORE", "MEMCPY_ASYNC", "MatMul", "hcom_allReduce__1_0_1", "group", *PARTS)
        database.executemany("INSERT INTO STRING_IDS VALUES (?, ?)", enumerate(texts))
        run_("CREATE TABLE RANK_DEVICE_MAP (rankId INTEGER, deviceId INTEGER)")
        run_("INSERT INTO RANK_DEVICE_MAP VALUES (?, 0)", (rank,))
        run_(
            "CREATE TABLE TASK"
            " (startNs INT, endNs INT, deviceId INT, streamId INT, taskType INT, globalTaskId INT)"
        )
        run_("CREATE TABLE COMPUTE_TASK_INFO (globalTaskId INT, name INT)")
        run_("CREATE TABLE COMMUNICATION_OP (startNs INT, endNs INT, opName INT, groupName INT)")
        for at, (start, end) in enumerate(work.compute):
            run_("INSERT INTO TASK VALUES (?, ?, 0, 3, 0, ?)", (start, end, at))
            run_("INSERT INTO COMPUTE_TASK_INFO VALUES (?, 2)", (at,))
        for start, end in work.copies:
            run_("INSERT INTO TASK VALUES (?, ?, 0, 3, 1, NULL)", (start, end))
        for start, end in work.communication:
            run_("INSERT INTO COMMUNICATION_OP VALUES (?, ?, 3, 4)", (start, end))
        run_("CREATE TABLE COMMUNICATION_TASK_INFO (name INT, globalTaskId INT)")
        for at, ((start, end), kind) in enumerate(work.parts(), start=1000):
            run_("INSERT INTO TASK VALUES (?, ?, 0, 4, ?, ?)", (start, end, texts.index(kind), at))
            if kind != "AI_CORE":  # no table names the kernel that waits
                run_("INSERT INTO COMMUNICATION_TASK_INFO VALUES (3, ?)", (at,))


def test_a_report_of_folders_of_torch_npu_has_the_times_of_a_sweep(tmp_path: Path, command: Command) -> None:
    works = [random_work(seed) for seed in range(2)]
    write_text(folder_of(tmp_path, 0), works[0])
    write_database(folder_of(tmp_path, 1), works[1], 1)
    report = command("report", tmp_path, "--json").json
    rows = {row["rank"]: row for row in report["traces"]["devices"]}
    assert {rank: row["device"] for rank, row in rows.items()} == {0: "NPU 0", 1: "NPU 0"}
    assert {row["pid"] for row in report["processes"]} == {700, 701}
    for rank, (compute, copies, communication) in enumerate(works):
        row = rows[rank]
        assert (row["compute_ns"], row["memory_ns"]) == (length_ns(compute), length_ns(copies))
        assert row["communication_ns"] == length_ns(communication)
        assert row["exposed_ns"] == length_ns(compute, communication) - length_ns(compute)
        assert row["busy_ns"] == length_ns(compute, copies, communication)
    times = {row["name"]: (row["count"], row["total_ns"]) for row in report["traces"]["operators"]}
    both = [interval for work in works for interval in work.compute]
    assert times["MatMul"] == (len(both), sum(end - start for start, end in both))
    assert times["hcom_allReduce__1_0_1"][0] == sum(len(work.communication) for work in works)
    assert times.keys().isdisjoint(PARTS)
    assert run(["merge", str(tmp_path), "--output", str(tmp_path / "merged.json.gz")]) == 0


def test_a_raw_recording_of_others_is_named_with_the_fix(tmp_path: Path, command: Command) -> None:
    folder_of(tmp_path, 0)
    assert "not analysed" in " ".join(command("report", tmp_path, code=1).err.split())


def test_launches_of_a_text_recording_tell_what_was_queued(tmp_path: Path, command: Command) -> None:
    """A call in the CANN layer and its kernel have the same `connection_id`."""
    kernels = [(0, 10, 20), (5, 30, 40), (45, 60, 70)]
    names = [(1, "Ascend Hardware", "Stream 3"), (2, "CANN", "Thread 9")]
    events: list[dict[str, object]] = []
    for pid, layer, thread in names:
        for kind, name in (("process_name", layer), ("thread_name", thread)):
            events.append({"ph": "M", "name": kind, "pid": pid, "tid": 3, "args": {"name": name}})
    for number, (launch, start, end) in enumerate(kernels):
        for pid, name, begun, ended in ((2, "launch", launch, launch + 1), (1, "MatMul", start, end)):
            args = {"connection_id": number} | ({"Task Type": "AI_CORE"} if pid == 1 else {})
            ts, dur = us(AT + 1000 * begun), float(ended - begun)
            events.append({"ph": "X", "name": name, "pid": pid, "tid": 3, "ts": ts, "dur": dur, "args": args})
    (folder_of(tmp_path, 0) / "trace_view.json").write_text(json.dumps(events))
    rows = command("report", tmp_path, "--json").json["gaps"]
    found = {row["kind"]: row["total_ns"] for row in rows}
    assert (found["queued"], found["no operator"]) == (10_000, 20_000)
