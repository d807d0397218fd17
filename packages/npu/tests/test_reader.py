"""Tests of the readers of analysed recordings. Device rows in these files are invented, and named `fake_*`.

This file is long, because both forms of a recording must give the same events.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.npu.tests.real.cann.fake_msprof import write_database, write_json
from packages.report.tests.damage import damage
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_npu._layers import layer_category
from stepscope_npu._reader import DatabaseReader, TraceViewReader
from stepscope_npu._trace_view import nanoseconds
from stepscope_report.testing import ReaderConformance
from stepscope_report.timeline import merge_step
from stepscope_report.timeline.readers import (
    Claim,
    Counter,
    Event,
    Flow,
    FoundFile,
    Instant,
    Notes,
    Reader,
    Slice,
    Track,
)

AT = 1_750_000_000_000_000_000
PID, THREAD = 4711, 4712
RANGES = [
    (AT + 1_000, AT + 901_001, THREAD, "default", "actor.update"),
    (AT + 2_001, AT + 950_003, THREAD, "default", "ref.log_prob"),  # overlaps the first
]


def recording(folder: Path) -> Path:
    """Make and return the output folder of an analysed recording."""
    output = folder / "capture_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True, exist_ok=True)
    return output


class TestTraceView(ReaderConformance):
    @pytest.fixture
    def reader(self) -> Reader:
        return TraceViewReader()

    def write(self, folder: Path) -> Path:
        return write_trace_view(folder)

    def test_layers_are_known_by_their_names_and_events_keep_their_nanoseconds(
        self, reader: Reader, tmp_path: Path
    ) -> None:
        events, _ = self.read(reader, self.write(tmp_path))
        tracks = {event.track: event.name for event in events if isinstance(event, Track)}
        read_back = [
            (tracks[event.track], event.name, event.category, event.start_ns - AT, event.dur_ns)
            for event in events
            if isinstance(event, Slice) and event.name != "AscendCL@launch"
        ]
        assert read_back == [
            (f"thread {PID}", "aten::mm", "cpu_op", 1_501, 20_250),
            ("Python GC thread 1", "GC", "GC", 3_000, 1_000),
            ("NPU 0 stream 0", "fake_kernel_0", "kernel", 451_000, 450_001),
            ("NPU 0 Overlap Analysis Computing", "Computing", None, 451_000, 450_001),
            ("NPU 0 stream 0", "fake_kernel_1", "kernel", 476_002, 474_001),
            ("NPU 0 Overlap Analysis Computing", "Computing", None, 476_002, 474_001),
            (f"mstx thread {THREAD}", "actor.update", "user_annotation", 1_000, 900_001),
            (f"mstx thread {THREAD}", "ref.log_prob", "user_annotation", 2_001, 948_002),
        ]

    def test_counters_and_arrows_are_read_whatever_the_size_of_their_ids(
        self, reader: Reader, tmp_path: Path
    ) -> None:
        events, _ = self.read(reader, self.write(tmp_path))
        [counter] = [event for event in events if isinstance(event, Counter)]
        assert (counter.name, counter.values) == ("NPU 0 AI Core Freq", {"MHz": 1650})
        flows = [(event.id, event.point) for event in events if isinstance(event, Flow)]
        assert (f"async_npu:{2**60 + 1}", "start") in flows
        assert (f"async_npu:{2**60 + 1}", "end") in flows


def write_trace_view(folder: Path) -> Path:
    path = recording(folder) / "trace_view.json"
    write_json(path, PID, "python", RANGES)
    events = json.loads(path.read_text())
    python = {"pid": PID, "tid": PID}
    large = {"cat": "async_npu", "name": "async_npu", "id": 2**60 + 1}
    above = 43767511 << 32
    before = [  # events that come before the names of their layers
        {
            **python,
            "ph": "X",
            "name": "aten::mm",
            "ts": f"{AT // 1000 + 1}.501",
            "dur": 20.25,
            "cat": "cpu_op",
        },
        {
            "ph": "X",
            "name": "GC",
            "pid": -1,
            "tid": 1,
            "ts": f"{AT // 1000 + 3}.000",
            "dur": 1.0,
            "cat": "GC",
        },
        {**python, **large, "ph": "s", "ts": f"{AT // 1000 + 1}.501"},
    ]
    behind = [
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "Python"}},
        {"ph": "M", "name": "thread_name", **python, "args": {"name": f"Thread {PID}"}},
        {"ph": "M", "name": "process_name", "pid": -1, "tid": 0, "args": {"name": "Python GC"}},
        {"ph": "M", "name": "process_name", "pid": above, "tid": 0, "args": {"name": "AI Core Freq"}},
        {"ph": "M", "name": "process_labels", "pid": above, "tid": 0, "args": {"labels": "NPU 0"}},
        {
            "ph": "C",
            "name": "AI Core Freq",
            "pid": above,
            "tid": 0,
            "ts": f"{AT // 1000}.000",
            "args": {"MHz": 1650},
        },
        {**python, **large, "ph": "f", "bp": "e", "ts": f"{AT // 1000 + 9}.000"},
    ]
    path.write_text(json.dumps([*before, *events, *behind]))
    return path


class TestDatabase(ReaderConformance):
    @pytest.fixture
    def reader(self) -> Reader:
        return DatabaseReader()

    def write(self, folder: Path) -> Path:
        return write_db(folder)

    def test_operators_calls_tasks_and_ranges_are_read_and_linked(
        self, reader: Reader, tmp_path: Path
    ) -> None:
        events, _ = self.read(reader, self.write(tmp_path))
        tracks = {event.track: event.name for event in events if isinstance(event, Track)}
        read_back = [
            (tracks[event.track], event.name, event.category, event.start_ns - AT, event.dur_ns)
            for event in events
            if isinstance(event, Slice)
        ]
        assert read_back == [
            ("Profiler steps", "ProfilerStep#0", None, 0, 1_000_000),
            (f"thread {PID}", "aten::mm", "cpu_op", 1_501, 20_250),
            (f"mstx thread {THREAD}", "actor.update", "user_annotation", 1_000, 900_001),
            (f"mstx thread {THREAD}", "ref.log_prob", "user_annotation", 2_001, 948_002),
            (f"CANN thread {THREAD}", "launch", "cuda_runtime", 1_000, 1_000),
            (f"CANN thread {THREAD}", "launch", "cuda_runtime", 2_001, 1_000),
            ("NPU 0 stream 0", "fake_kernel_0", "kernel", 451_000, 450_001),
            ("NPU 0 stream 0", "fake_kernel_1", "kernel", 476_002, 474_001),
            ("Communication group_1", "fake_all", "communication", 5_000, 1_000),
            (f"Python GC thread {PID}", "GC", "GC", 3_000, 1_000),
        ]
        flows = [(event.id, event.point, event.at_ns - AT) for event in events if isinstance(event, Flow)]
        assert sorted(flows) == [
            (0, "end", 451_000),
            (0, "start", 1_000),
            (1, "end", 476_002),
            (1, "start", 2_001),
        ]

    def test_a_table_without_times_costs_itself(self, reader: Reader, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        with closing(sqlite3.connect(path)) as database:
            database.execute("ALTER TABLE TASK RENAME COLUMN startNs TO began")
            database.commit()
        events, notes = self.read(reader, path)
        assert ["startNs and endNs" in note for note in notes] == [True]
        assert any(isinstance(event, Slice) for event in events)


def write_db(folder: Path) -> Path:
    path = recording(folder) / "ascend_pytorch_profiler_0.db"
    path.unlink(missing_ok=True)
    write_database(path, PID, RANGES)
    tid = PID << 32 | PID
    with closing(sqlite3.connect(path)) as database:
        run = database.execute
        run("CREATE TABLE STEP_TIME (id INTEGER, startNs INTEGER, endNs INTEGER)")
        run("INSERT INTO STEP_TIME VALUES (0, ?, ?)", (AT, AT + 1_000_000))
        run("CREATE TABLE PYTORCH_API (type INT, startNs TEXT, endNs TEXT, globalTid INT, name INT)")
        run("INSERT INTO STRING_IDS VALUES (268435456, 'aten::mm'), (900, 'group_1'), (901, 'fake_all')")
        run(
            "INSERT INTO PYTORCH_API VALUES (50001, ?, ?, ?, 268435456)",
            (str(AT + 1_501), str(AT + 21_751), tid),
        )
        run("CREATE TABLE COMMUNICATION_OP (groupName INT, opName INT, endNs INT, startNs INT)")
        run("INSERT INTO COMMUNICATION_OP VALUES (900, 901, ?, ?)", (AT + 6_000, AT + 5_000))
        run("CREATE TABLE GC_RECORD (startNs INTEGER, endNs INTEGER, globalTid INTEGER)")
        run("INSERT INTO GC_RECORD VALUES (?, ?, ?)", (AT + 3_000, AT + 4_000, tid))
        database.commit()
    return path


# Which file is read.


def found_file(path: Path, sidecar: Sidecar | None = None) -> FoundFile:
    return FoundFile(path=path, name=f"traces/actor/{path.name}", sidecar=sidecar)


def test_of_two_exports_that_say_the_same_one_is_read(tmp_path: Path) -> None:
    database, view = write_db(tmp_path), write_trace_view(tmp_path)
    assert DatabaseReader().claims(found_file(database)) == Claim(read=False)
    assert TraceViewReader().claims(found_file(view)) == Claim()


def test_of_several_databases_of_a_recording_the_newest_is_read(tmp_path: Path) -> None:
    first = write_db(tmp_path)
    second = first.with_name("ascend_pytorch_profiler.db")  # by an analysis that did not know the rank
    shutil.copy(first, second)
    os.utime(first, ns=(AT, AT))
    claims = [DatabaseReader().claims(found_file(path)) for path in (first, second)]
    assert claims == [Claim(read=False), Claim(read=True)]
    nested = first.parent.parent / "PROF_1" / "msprof_20250615120000.db"
    assert DatabaseReader().claims(found_file(nested)) is None
    (first.parent.parent / "trace_view.json").touch()
    assert DatabaseReader().claims(found_file(second)) == Claim(read=False)


def test_v14_a_trainers_database_and_an_engines_text_are_both_read(tmp_path: Path) -> None:
    database, view = write_db(tmp_path / "trainer"), write_trace_view(tmp_path / "engine")
    assert DatabaseReader().claims(found_file(database)) == Claim()
    assert TraceViewReader().claims(found_file(view)) == Claim()


def test_a_recording_that_is_not_analysed_is_named_once_with_the_fix(tmp_path: Path) -> None:
    folder = tmp_path / "capture_ascend_pt"
    paths = [
        folder / name
        for name in ("profiler_info_3.json", "FRAMEWORK/torch.op_range", "PROF_1/host/info.json")
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    claims = [TraceViewReader().claims(found_file(path)) for path in paths]
    assert [claim is not None and claim.read for claim in claims] == [False, False, False]
    [why] = [claim.why for claim in claims if claim is not None and claim.why is not None]
    assert "`stepscope analyse`" in why
    write_trace_view(tmp_path)
    assert TraceViewReader().claims(found_file(paths[0])) == Claim(read=False)


# Times.


def test_a_time_is_text_with_nanoseconds_and_no_float() -> None:
    assert nanoseconds(b'"1704161511420306.491"') == 1704161511420306491
    assert nanoseconds(b'"1704161511420306"') == 1704161511420306000
    assert nanoseconds(b"1704161511420306.4") == 1704161511420306400
    assert nanoseconds(b'"1704161511420306.49199"') == 1704161511420306491
    assert nanoseconds(b'"soon"') is None
    assert nanoseconds(b"") is None


def sidecar() -> Sidecar:
    """Return the sidecar of a process in which RAW and MONOTONIC have drifted 250 ms apart since boot."""
    artifact = Artifact(
        path="traces/actor/x_ascend_pt",
        kind="npu_recording",
        tool="npu",
        role="actor",
        host="h",
        size_bytes=1,
    )
    opened = ClockAnchor(wall_ns=AT, mono_ns=5_000_000_000, raw_ns=4_750_000_000)
    return Sidecar(step=2, run_id="r", artifact=artifact, process=None, opened=opened, closed=opened)


def first_operator(reader: Reader, path: Path, sidecar: Sidecar | None) -> int:
    with closing(reader.open(found_file(path, sidecar), Notes())) as read:
        events: list[Event] = list(read.events())
    return next(event.start_ns for event in events if isinstance(event, Slice) and event.name == "aten::mm")


def host_alone(folder: Path) -> Path:
    path = recording(folder) / "trace_view.json"
    python = {"pid": PID, "tid": PID}
    early = AT - 250_000_000  # where torch_npu places an event that began at AT
    events = [
        {"ph": "X", "name": "aten::mm", **python, "ts": f"{early // 1000}.000", "dur": 1.0, "cat": "cpu_op"},
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "Python"}},
    ]
    path.write_text(json.dumps(events))
    ended = {"end_info": {"collectionTimeEnd": AT + 1_000, "MonotonicTimeEnd": 5_000_001_000}}
    (path.parents[1] / "profiler_info.json").write_text(json.dumps(ended))
    return path


def test_without_data_of_cann_torch_npu_is_early_and_the_sidecar_corrects_it(tmp_path: Path) -> None:
    path = host_alone(tmp_path)
    assert first_operator(TraceViewReader(), path, sidecar()) == AT
    assert first_operator(TraceViewReader(), path, None) == AT - 250_000_000


def host_database(folder: Path, *, task: bool) -> Path:
    """Write the event of `host_alone` as a database with few columns, in an unusual order."""
    path = host_alone(folder).with_name("ascend_pytorch_profiler.db")
    early = AT - 250_000_000
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE STRING_IDS (value TEXT, id INTEGER)")
        database.execute("INSERT INTO STRING_IDS VALUES ('aten::mm', 1)")
        database.execute("CREATE TABLE PYTORCH_API (name INTEGER, endNs TEXT, startNs TEXT)")
        database.execute("INSERT INTO PYTORCH_API VALUES (1, ?, ?)", (str(early + 1_000), str(early)))
        if task:
            database.execute("CREATE TABLE TASK (endNs INTEGER, startNs INTEGER)")
            database.execute("INSERT INTO TASK VALUES (?, ?)", (AT + 10, AT))
    return path


@pytest.mark.parametrize("task", [False, True])
def test_a_database_is_corrected_unless_cann_has_recorded_any_of_it(tmp_path: Path, task: bool) -> None:
    path = host_database(tmp_path, task=task)
    assert first_operator(DatabaseReader(), path, sidecar()) == (AT - 250_000_000 if task else AT)
    assert first_operator(DatabaseReader(), path, None) == AT - 250_000_000


def test_marks_are_instants_of_threads_whose_numbers_need_more_than_16_bits(tmp_path: Path) -> None:
    path = recording(tmp_path) / "ascend_pytorch_profiler.db"
    thread = (1 << 22) + 3  # above the largest thread number of Linux
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE STRING_IDS (id INTEGER, value TEXT)")
        database.execute("INSERT INTO STRING_IDS VALUES (1, 'loaded')")
        columns = "startNs INTEGER, endNs INTEGER, eventType INTEGER, message INTEGER, globalTid INTEGER"
        database.execute(f"CREATE TABLE MSTX_EVENTS ({columns})")
        for kind in range(4):
            row = (AT + kind, AT + kind, kind, 1, PID << 32 | thread)
            database.execute("INSERT INTO MSTX_EVENTS VALUES (?, ?, ?, ?, ?)", row)
    with closing(DatabaseReader().open(found_file(path), Notes())) as read:
        track, *events = read.events()
    assert isinstance(track, Track)
    assert track.name == f"mstx thread {thread}"
    assert [type(event) for event in events] == [Instant, Slice, Slice, Instant]


def test_columns_that_a_producer_leaves_out_are_unknown_and_cost_no_row(tmp_path: Path) -> None:
    with closing(DatabaseReader().open(found_file(host_database(tmp_path, task=True)), Notes())) as read:
        events = list(read.events())
    assert [event.name for event in events if isinstance(event, Track)] == [
        "thread unknown",
        "NPU None stream None",
    ]
    assert [(e.name, e.category, e.dur_ns) for e in events if isinstance(e, Slice)] == [
        ("aten::mm", None, 1_000),
        ("(no name)", None, 10),
    ]


def test_waits_and_events_on_a_device_are_no_kernels() -> None:
    kinds = (
        "AI_CORE",
        "MIX_AIC",
        "FFTS_PLUS",
        "Other",
        "EVENT_WAIT_SQE",
        "NOTIFY_WAIT",
        "SDMA_SQE",
        "HCCL",
        None,
    )
    assert [layer_category(kind) for kind in kinds] == [
        "kernel", "kernel", "kernel", "kernel", None, None, "gpu_memcpy", "communication", None,
    ]  # fmt: skip


# A step with GPU and NPU roles.


def test_a_step_with_gpu_and_npu_roles_is_one_timeline(tmp_path: Path) -> None:
    step = StepFolder(tmp_path)
    actor, ref = step.process("actor", 0, owner=True), step.process("ref", 0)
    for process in (actor, ref):
        process.span("work", 1_000_000, 2_000_000)
        process.close(3_000_000)
    root = step.write()
    kernel = {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1200.0, "dur": 300.0}
    torch_trace = {"baseTimeNanoseconds": OPENED_NS, "traceEvents": [kernel]}
    put(root, "traces/actor/gpu.json", "torch_trace", actor, json.dumps(torch_trace))
    output = recording(root / "traces" / "ref")
    start = OPENED_NS + 1_200_000
    marked = [(start, start + 600_000, 1, "default", "ref.work")]
    write_json(output / "trace_view.json", 4711, "python", marked)
    put(root, "traces/ref/capture_ascend_pt", "npu_recording", ref, None)
    merged = merge_step(root)
    assert merged.problems == ()
    assert merged.left_out == ()
    events = json.loads(gzip.decompress((root / "timeline.json.gz").read_bytes()))["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    wanted = ("gemm", "fake_kernel_0", "ref.work")
    slices = {event["name"]: event for event in events if event["ph"] == "X" and event["name"] in wanted}
    assert {name: rows[event["pid"]] for name, event in slices.items()} == {
        "gemm": "actor 0",
        "fake_kernel_0": "ref 0",
        "ref.work": "ref 0",
    }
    at = {name: round(event["ts"] * 1000) for name, event in slices.items()}
    assert at["ref.work"] == at["gemm"]
    assert at["fake_kernel_0"] == at["gemm"] + 300_000


def put(root: Path, name: str, kind: str, process: FakeProcess, text: str | None) -> None:
    """Write a sidecar for the trace `name`, and the trace itself unless `text` is None."""
    path, info = root / name, process.info
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.write_text(text)
    artifact = Artifact(
        path=name, kind=kind, tool="t", role=info.role, rank=0, host=info.host, pid=info.pid, size_bytes=1
    )
    sidecar = Sidecar(
        step=2, run_id="run1", artifact=artifact, process=info.key, opened=process.anchor(0), closed=None
    )
    sidecar_of(path).write_bytes(msgspec.json.encode(sidecar))


# A merge of damaged recordings ends, and names what it left out.


MS = 1_000_000
MARKED = [(OPENED_NS + MS, OPENED_NS + 2 * MS, 1, "default", "actor.work")]
FOLDERS = 40 if settings().max_examples == 100 else settings().max_examples
"""The number of damaged folders to try. A Hypothesis profile may set another number."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a step with two analysed recordings: `trace_view.json` and a database."""
    folder = StepFolder(tmp_path_factory.mktemp("whole"))
    process = folder.process("actor", 0, owner=True)
    process.span("work", MS, 20 * MS)
    process.close(30 * MS)
    step = folder.write()
    for name in ("view_ascend_pt", "database_ascend_pt"):
        output = step / "traces" / "actor" / name / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        ended = {"end_info": {"collectionTimeEnd": OPENED_NS, "MonotonicTimeEnd": 5}}
        (output.parent / "profiler_info_0.json").write_text(json.dumps(ended))
        if name.startswith("view"):
            write_json(output / "trace_view.json", 4711, "python", MARKED)
        else:
            write_database(output / "ascend_pytorch_profiler_0.db", 4711, MARKED)
        info = process.info
        artifact = Artifact(
            path=f"traces/actor/{name}", kind="npu_recording", tool="npu", role=info.role, rank=0,
            host=info.host, pid=info.pid, size_bytes=1,
        )  # fmt: skip
        sidecar = Sidecar(
            step=2, run_id="run1", artifact=artifact, process=info.key, opened=process.anchor(0), closed=None
        )
        sidecar_of(output.parent).write_bytes(msgspec.json.encode(sidecar))
    return step


def test_a_whole_step_is_merged(whole: Path, tmp_path: Path) -> None:
    merged = merge_step(shutil.copytree(whole, tmp_path / "step_000002"))
    assert merged.problems == ()


@pytest.mark.slow
@given(random=st.randoms(use_true_random=False))
@settings(max_examples=FOLDERS)
def test_a_damaged_recording_ends_no_merge(whole: Path, random: Random) -> None:
    with tempfile.TemporaryDirectory() as above:
        step = Path(shutil.copytree(whole, Path(above, "step_000002")))
        files = sorted(path for path in (step / "traces").rglob("*") if path.is_file())
        for path in random.sample(files, random.choice((1, 1, 2))):
            damage(path, random, Path(above, "secret.json"))
        merge_step(step)
