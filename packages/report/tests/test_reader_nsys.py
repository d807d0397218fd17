"""SQLite exports of Nsight Systems, made as its documentation describes them.

`real/test_nsys.py` has exports of a real nsys.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.steps import MS, timeline_of
from packages.report.tests.traces import put
from stepscope.files.sidecar import NSYS_RANGES
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.plain import Plain
from stepscope_report.testing import ReaderConformance
from stepscope_report.timeline import Merged, merge_step
from stepscope_report.timeline.plain import read_plain
from stepscope_report.timeline.readers import Claim, FoundFile, Reader
from stepscope_report.timeline.readers.nsys import BACKWARDS, NEVER_ENDED, NO_RANGES, NO_TIME, NsysReader

SESSION_NS = OPENED_NS - 500 * MS
"""Start of the nsys session, the zero of all times in the file."""
PID, OTHER = 4711, 4712
WORKER, COPIED = "thread 4712 (worker)", "Memcpy Host-to-Device"
Json = dict[str, Any]
Rows = dict[str, list[dict[str, Any]]]


def since(at_ns: int) -> int:
    """Return a time in the file, of one that counts from the capture's opening."""
    return at_ns + OPENED_NS - SESSION_NS


def process(pid: int) -> int:
    """Return a serialized process id, of VM 1."""
    return 1 << 48 | pid << 24


def thread(pid: int, tid: int) -> int:
    return process(pid) | tid


def kernel(name: int, start: int, end: int, correlation: int, pid: int = PID, **more: Any) -> dict[str, Any]:
    return {
        "start": since(start), "end": since(end), "deviceId": 0, "contextId": 1, "streamId": 7,
        "correlationId": correlation, "globalPid": process(pid), "demangledName": name, "shortName": name,
        "gridX": 2, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1,
        "registersPerThread": 32, "dynamicSharedMemory": 48, **more,
    }  # fmt: skip


def call(name: int, start: int, end: int, correlation: int, pid: int = PID, **more: Any) -> dict[str, Any]:
    return {
        "start": since(start), "end": since(end), "globalTid": thread(pid, pid + 1), "nameId": name,
        "correlationId": correlation, "returnValue": 0, **more,
    }  # fmt: skip


def nvtx(text: str | None, start: int, end: int | None, kind: int = 59, **more: Any) -> dict[str, Any]:
    return {
        "start": since(start), "end": None if end is None else since(end), "eventType": kind, "text": text,
        "textId": None, "globalTid": thread(PID, PID + 1), "domainId": 0, **more,
    }  # fmt: skip


STRINGS = {1: "gemm<float>", 2: "cudaLaunchKernel", 3: "cudaMemcpyAsync", 4: "worker", 5: "attention"}
KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def tables() -> Rows:
    """One process: a call, the kernel that it launched, and the range around it."""
    copied = {
        "start": since(20), "end": since(30), "deviceId": 0, "contextId": 1, "streamId": 8,
        "correlationId": 12, "globalPid": process(PID), "bytes": 4096, "copyKind": 1,
    }  # fmt: skip
    cleared = {key: value for key, value in copied.items() if key != "copyKind"}
    return {
        "StringIds": [{"id": number, "value": value} for number, value in STRINGS.items()],
        "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": SESSION_NS, "utcTime": "x", "localTime": "x"}],
        "TARGET_INFO_SYSTEM_ENV": [{"name": "Hostname", "value": "host-a"}],
        "ThreadNames": [{"nameId": 4, "priority": 0, "globalTid": thread(PID, PID + 1)}],
        "ENUM_CUDA_MEMCPY_OPER": [{"id": 1, "name": "CUDA_MEMCPY_KIND_HTOD", "label": "Host-to-Device"}],
        KERNEL: [kernel(1, 5, 15, 11)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [copied],
        "CUPTI_ACTIVITY_KIND_MEMSET": [{**cleared, "value": 0, "correlationId": 13}],
        RUNTIME: [call(2, 1, 4, 11), call(3, 16, 18, 12)],
        "NVTX_EVENTS": [nvtx("actor.update", 0, 40), nvtx("mark", 3, None, 34)],
    }


def write(path: Path, content: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, rows in content.items():
            columns = dict.fromkeys(column for row in rows for column in row)
            key = {"id": "INTEGER PRIMARY KEY"} if table == "StringIds" else {}
            defined = ", ".join(f"{column} {key.get(column, '')}" for column in columns)
            database.execute(f"CREATE TABLE {table} ({defined})")
            marks = ", ".join("?" for _ in columns)
            database.executemany(
                f"INSERT INTO {table} VALUES ({marks})",
                ([row.get(column) for column in columns] for row in rows),
            )
        database.commit()
    return path


class TestNsysReader(ReaderConformance):
    @pytest.fixture
    def reader(self) -> Reader:
        return NsysReader()

    def write(self, folder: Path) -> Path:
        rows = tables()
        rows[KERNEL] = [kernel(1, at, at + 5, at) for at in range(1, 4000, 7)]
        rows[RUNTIME] = [call(2, at - 1, at, at) for at in range(1, 4000, 7)]
        return write(folder / "report.sqlite", rows)


@pytest.fixture
def folder(tmp_path: Path) -> StepFolder:
    """Return a trainer and an actor that nsys watched, on one host, for 100 ms."""
    made = StepFolder(tmp_path)
    made.process("trainer", owner=True).close(100 * MS)
    made.process("actor", 0, pid=PID).close(100 * MS)
    return made


def merged(folder: StepFolder, content: Rows, *, has_ranges: bool = False) -> tuple[Merged, list[Json]]:
    """Return the actor's report and its export, merged."""
    path = folder.layout.traces / "actor" / "report.nsys-rep"
    write(path.with_suffix(".sqlite"), content)
    put(
        folder, "traces/actor/report.nsys-rep", folder.processes[1], b"opaque", kind="nsys_report",
        tool="nsys", sidecar={"options": {NSYS_RANGES: has_ranges}},
    )  # fmt: skip
    step = folder.write()
    return merge_step(step), timeline_of(step)["traceEvents"]


def of(events: Iterable[Json], *phases: str) -> list[Json]:
    return [event for event in events if event["ph"] in phases]


def named(events: list[Json]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}


def at_ns(result: Merged, event: Json) -> int:
    return int(Decimal(event["ts"]) * 1000) + result.base_ns - OPENED_NS


def test_everything_stands_at_its_time_in_the_row_of_its_process(folder: StepFolder) -> None:
    result, events = merged(folder, tables())
    assert result.problems == ()
    assert result.left_out == ()
    assert [row.name for row in result.rows] == ["actor 0"]
    tracks = named(events)
    shown = {
        (e["name"], e["cat"]): (at_ns(result, e), int(e["dur"] * 1000), tracks[e["tid"]])
        for e in of(events, "X")
    }
    assert (
        shown
        == {
            ("actor.update", "user_annotation"): (0, 40, "NVTX thread 4712 (worker)"),
            ("cudaLaunchKernel", "cuda_runtime"): (1, 3, f"CUDA API {WORKER}"),
            ("gemm<float>", "kernel"): (5, 10, "GPU 0 stream 7"),
            ("cudaMemcpyAsync", "cuda_runtime"): (16, 2, f"CUDA API {WORKER}"),
            (COPIED, "gpu_memcpy"): (20, 10, "GPU 0 stream 8"),
            ("Memset", "gpu_memset"): (20, 10, "GPU 0 stream 8 (2)"),
        }
        or shown[("Memset", "gpu_memset")][2] == "GPU 0 stream 8"
    )
    (mark,) = of(events, "i")
    assert (mark["name"], at_ns(result, mark)) == ("mark", 3)
    (gemm,) = (event for event in of(events, "X") if event["cat"] == "kernel")
    assert gemm["args"] == {
        "device": 0, "context": 1, "stream": 7, "correlation": 11, "registers per thread": 32,
        "shared memory": 48, "grid": [2, 1, 1], "block": [128, 1, 1],
    }  # fmt: skip


def test_an_arrow_leads_from_a_call_to_what_it_launched_first(folder: StepFolder) -> None:
    rows = tables()
    # A graph: one call, many kernels. A kernel whose call is not there. A call that launched nothing.
    rows[KERNEL] = [kernel(1, 50, 60, 11), kernel(1, 70, 80, 11), kernel(1, 90, 95, 99)]
    rows[RUNTIME].append(call(2, 96, 97, 98))
    result, events = merged(folder, rows)
    arrows = [(event["ph"], at_ns(result, event)) for event in of(events, "s", "f")]
    assert sorted(arrows) == [("f", 20), ("f", 50), ("s", 1), ("s", 16)]
    starts, ends = ({event["id"] for event in of(events, phase)} for phase in "sf")
    assert starts == ends
    slices = {(event["tid"], event["ts"]) for event in of(events, "X")}
    assert {(event["tid"], event["ts"]) for event in of(events, "s", "f")} <= slices


def test_correlations_of_two_processes_are_not_mixed_up_and_each_has_its_row(folder: StepFolder) -> None:
    folder.process("actor", 1, pid=OTHER).close(100 * MS)
    rows = tables()
    rows[KERNEL].append(kernel(5, 6, 9, 11, OTHER, deviceId=1))
    rows[RUNTIME].append(call(2, 2, 3, 11, OTHER))
    result, events = merged(folder, rows)
    names = {row.pid: row.name for row in result.rows}
    kernels = [event for event in of(events, "X") if event["cat"] == "kernel"]
    assert {event["name"]: names[event["pid"]] for event in kernels} == {
        "gemm<float>": "actor 0",
        "attention": "actor 1",
    }
    ends = {
        event["pid"]: event["id"] for event in of(events, "f") if event["ts"] in [k["ts"] for k in kernels]
    }
    starts = {event["id"]: event["pid"] for event in of(events, "s")}
    assert len(set(ends.values())) == 2
    assert all(starts[number] == pid for pid, number in ends.items())


def test_a_kernel_without_a_process_has_that_of_the_only_call_with_its_correlation(
    folder: StepFolder,
) -> None:
    folder.process("actor", 1, pid=OTHER).close(100 * MS)
    rows = tables()
    rows[KERNEL].append(kernel(5, 6, 9, 77, OTHER, deviceId=1))
    rows[RUNTIME].append(call(2, 2, 3, 77, OTHER))
    for row in rows[KERNEL]:
        del row["globalPid"]
    result, events = merged(folder, rows)
    names = {row.pid: row.name for row in result.rows}
    kernels = [event for event in of(events, "X") if event["cat"] == "kernel"]
    assert {event["name"]: names[event["pid"]] for event in kernels} == {
        "gemm<float>": "actor 0", "attention": "actor 1",
    }  # fmt: skip
    assert result.problems == ()


def test_kinds_of_copies_are_known_to_exports_that_do_not_list_them(folder: StepFolder) -> None:
    rows = tables()
    (copy, *_) = rows["CUPTI_ACTIVITY_KIND_MEMCPY"]
    copy["copyKind"] = 1
    del rows["ENUM_CUDA_MEMCPY_OPER"]
    _, events = merged(folder, rows)
    assert "Memcpy Host-to-Device" in {event["name"] for event in of(events, "X")}


def test_an_export_without_a_session_start_is_unaligned(folder: StepFolder) -> None:
    rows = tables()
    del rows["TARGET_INFO_SESSION_START_TIME"]
    result, _ = merged(folder, rows)
    (row,) = result.rows
    assert row.alignment == "unaligned"
    assert "utcEpochNs" in str(row.reason)


@pytest.mark.parametrize("column", ["globalPid", "correlationId", "streamId", "demangledName", "gridX"])
def test_a_column_that_another_version_lacks_costs_what_it_says(folder: StepFolder, column: str) -> None:
    rows = tables()
    for row in rows[KERNEL]:
        del row[column]
    result, events = merged(folder, rows)
    assert result.problems == ()
    (gemm,) = (event for event in of(events, "X") if event["cat"] == "kernel")
    assert gemm["name"] == "gemm<float>"
    assert at_ns(result, gemm) == 5
    assert len(of(events, "s")) == (1 if column == "correlationId" else 2)


@pytest.mark.parametrize("table", sorted(tables()))
def test_a_table_that_is_not_there_is_no_defect(folder: StepFolder, table: str) -> None:
    rows = tables()
    if table == "StringIds":  # by which an export is known
        rows["StringIds"] = [{"id": 1000, "value": "no name"}]
    else:
        del rows[table]
    result, events = merged(folder, rows)
    assert [problem.what for problem in result.problems if "unaligned" not in problem.what] == []
    assert of(events, "X")


def test_ranges_of_two_domains_that_overlap_are_drawn_apart_and_nested_ones_together(
    folder: StepFolder,
) -> None:
    rows = tables()
    domain = {"start": since(0), "end": None, "eventType": 75, "text": "NCCL", "domainId": 3}
    registered = nvtx(None, 10, 50, domainId=3, textId=5)
    nested = [nvtx("outer", 0, 40), nvtx("inner", 5, 20)]
    rows["NVTX_EVENTS"] = [domain, *nested, registered, nvtx("job", 1, 90, 60)]
    _, events = merged(folder, rows)
    tracks = named(events)
    shown = {
        e["name"]: (tracks[e["tid"]], e.get("args")) for e in of(events, "X") if e["cat"] == "user_annotation"
    }
    assert shown == {
        "outer": ("NVTX thread 4712 (worker)", None),
        "inner": ("NVTX thread 4712 (worker)", None),
        "attention": ("NVTX thread 4712 (worker) (2)", {"domain": "NCCL"}),
        "job": ("NVTX ranges", None),
    }


def test_what_has_no_sound_time_is_counted(folder: StepFolder) -> None:
    rows = tables()
    rows[KERNEL] += [{**kernel(1, 0, 0, 1), "start": 0, "end": 0}, kernel(1, 9, 8, 2)]
    rows["NVTX_EVENTS"].append(nvtx("hangs", 7, None))
    result, events = merged(folder, rows)
    assert {(problem.what, problem.events) for problem in result.problems} == {
        (NO_TIME, 1),
        (BACKWARDS, 1),
        (NEVER_ENDED, 1),
    }
    assert "hangs" in [event["name"] for event in of(events, "i")]


def test_bad_utf8_in_a_name_is_replaced(folder: StepFolder) -> None:
    rows = tables()
    rows["NVTX_EVENTS"].append(nvtx("x", 50, 60))
    path = folder.layout.traces / "actor" / "report.sqlite"
    merged(folder, rows)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE NVTX_EVENTS SET text = CAST(x'61ff62' AS TEXT) WHERE text = 'x'")
        database.commit()
    merge_step(folder.layout.root)
    events = json.loads(gzip.decompress(folder.layout.timeline.read_bytes()))["traceEvents"]
    assert "a\ufffdb" in [event["name"] for event in events]


GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"


def test_a_graph_that_nsys_traced_as_a_whole_is_busy_time_of_its_gpu(folder: StepFolder) -> None:
    rows = tables()
    graph = kernel(1, 50, 90, 14, graphId=3, graphExecId=4)
    names = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphId")
    rows[GRAPH] = [{name: graph[name] for name in (*names, "graphExecId")}]
    rows[RUNTIME].append(call(2, 45, 48, 14))
    result, events = merged(folder, rows)
    (drawn,) = (event for event in of(events, "X") if event["name"] == "CUDA graph 3")
    assert (drawn["cat"], at_ns(result, drawn), int(drawn["dur"] * 1000)) == ("kernel", 50, 40)
    assert named(events)[drawn["tid"]] == "GPU 0 stream 7"
    assert sorted(at_ns(result, event) for event in of(events, "f")) == [5, 20, 50]


def no_device(path: Path, content: Rows) -> dict[str, str]:
    """Return {process: why its trace shows no device} of a report on one export."""
    tables = Plain(read_plain([write(path, content)])).to_json().traces
    return {name: row.cause for row in (tables.without_device if tables else ()) for name in row.processes}


def test_an_export_without_kernels_is_no_fault_of_another_profiler(tmp_path: Path) -> None:
    rows = tables()
    calls = rows[RUNTIME]
    rows = {name: own for name, own in rows.items() if not name.startswith("CUPTI") or name == RUNTIME}
    assert no_device(tmp_path / "alone.sqlite", rows) == {
        "trace": "nsys recorded calls to the device and no kernel"
    }
    both = tables()
    both[RUNTIME] = [*calls, call(2, 1, 4, 11, pid=PID + 7)]
    (why,) = no_device(tmp_path / "both.sqlite", both).values()
    assert why.startswith("the process ran no kernel")


def test_warnings_of_nsys_itself_are_problems_of_the_file(folder: StepFolder) -> None:
    rows = tables()
    rows["DIAGNOSTIC_EVENT"] = [
        {"timestamp": 1, "severity": severity, "text": f"text {severity}\nof nsys", "globalPid": None}
        for severity in range(5)
    ]
    result, _ = merged(folder, rows)
    texts = [problem.what.partition(": ")[2] for problem in result.problems]
    assert texts == [f"text {number} of nsys" for number in (2, 3)]


@pytest.mark.parametrize(
    ("events", "has_ranges", "lost"),
    [
        ([nvtx("mark", 3, None, 34)], True, True),
        ([], True, True),
        ([], False, False),
        ([nvtx("actor.update", 0, 40, 60)], True, False),
    ],
)
def test_a_window_that_lost_its_ranges_says_so(
    folder: StepFolder, events: list[Json], has_ranges: bool, lost: bool
) -> None:
    rows = {**tables(), "NVTX_EVENTS": events}
    if not events:
        del rows["NVTX_EVENTS"]
    result, _ = merged(folder, rows, has_ranges=has_ranges)
    assert [problem.what for problem in result.problems] == [NO_RANGES] * lost


def test_a_report_that_was_not_exported_is_named_with_what_to_do(folder: StepFolder) -> None:
    merged(folder, tables())
    (folder.layout.traces / "actor" / "report.sqlite").unlink()
    result = merge_step(folder.layout.root)
    fix = "nsys export --type sqlite report.nsys-rep"
    (what,) = result.left_out
    assert what.partition(": ")[0].endswith("/report.nsys-rep")
    assert what.endswith(fix)
    assert result.problems == ()


def test_a_database_of_another_tool_is_not_claimed(tmp_path: Path) -> None:
    path = write(tmp_path / "ascend.db", {"STRING_IDS": [{"id": 1, "value": "x"}], "TASK": [{"startNs": 1}]})
    assert NsysReader().claims(FoundFile(path=path, name="traces/a/ascend.db")) is None
    assert NsysReader().claims(FoundFile(path=write(tmp_path / "x", tables()), name="traces/a/x")) == Claim()
