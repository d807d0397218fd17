"""Tests of single layers of `trace_view.json` and of single tables of a database."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope_npu import _database, _operators
from stepscope_npu._reader import DatabaseReader, TraceViewReader
from stepscope_npu._window import Ranges
from stepscope_report.timeline.readers import (
    Claim,
    Event,
    Flow,
    FoundFile,
    Instant,
    Notes,
    Origin,
    Reader,
    Slice,
    Track,
)

Rows: TypeAlias = Sequence[tuple[object, ...]]
AT = 1_750_000_000_000_000_000
THREAD = 4711 << 32 | 4712
STRINGS = {1: "outer", 2: "inner", 3: "AI_CORE", 4: "default", 5: "hcom_allReduce"}


def read(
    reader: Reader, path: Path, sidecar: Sidecar | None = None
) -> tuple[list[Event], dict[str, int | None]]:
    notes = Notes()
    with closing(reader.open(FoundFile(path=path, name=path.name, sidecar=sidecar), notes)) as recording:
        return list(recording.events()), notes.counts


def slices(events: list[Event]) -> list[tuple[str, str | None, int]]:
    return [(event.name, event.category, event.start_ns - AT) for event in events if isinstance(event, Slice)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "capture_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    folder.mkdir(parents=True)
    return folder


def view(output: Path, layers: dict[int, str], *events: dict[str, object]) -> Path:
    """Write a trace with `layers` {pid: process_name} and `events`.

    An event without its own fields is a slice named `x` at 1 us in the first layer.
    """
    names = [{"ph": "M", "name": "process_name", "pid": p, "args": {"name": n}} for p, n in layers.items()]
    one: dict[str, object] = {
        "ph": "X",
        "name": "x",
        "pid": next(iter(layers)),
        "tid": 1,
        "ts": ts(1),
        "dur": 1.0,
    }
    path = output / "trace_view.json"
    path.write_text(json.dumps([*names, *({**one, **event} for event in events)]))
    return path


def ts(at_us: int) -> str:
    return f"{AT // 1000 + at_us}.000"


def database(output: Path, **tables: tuple[str, Rows]) -> Path:
    """Write a database with `tables` {name: (columns, rows)}."""
    path = output / "ascend_pytorch_profiler.db"
    with closing(sqlite3.connect(path)) as made, made:
        tables = {"STRING_IDS": ("id, value", list(STRINGS.items())), **tables}
        for table, (columns, rows) in tables.items():
            made.execute(f"CREATE TABLE {table} ({columns})")
            marks = ", ".join("?" * len(columns.split(",")))
            made.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    return path


# trace_view.json


def test_a_layer_says_what_its_events_are(output: Path) -> None:
    layers = {10: "CANN", 20: "Communication", 30: "HCCL", 40: "Overlap Analysis", 50: "Ascend Hardware"}
    tasks = [("copy", "SDMA_SQE"), ("SDMA", "SDMA"), ("AI_CORE", "AI_CORE"), ("MatMul", "AI_CORE")]
    path = view(
        output,
        layers,
        *({"pid": pid, "name": name} for pid, name in layers.items() if pid != 50),
        *({"pid": 50, "name": name, "args": {"Task Type": kind}} for name, kind in tasks),
        {"pid": 50, "name": "MindIE's", "cat": "cpu_op"},
    )
    events, _ = read(TraceViewReader(), path)
    assert [(name, category) for name, category, _ in slices(events)] == [
        ("CANN", "cuda_runtime"),
        ("Communication", "communication"),
        ("HCCL", "communication"),
        ("Overlap Analysis", None),
        ("copy", "gpu_memcpy"),
        ("SDMA", None),  # the first of two parts of a collective, which have no operator
        ("AI_CORE", None),
        ("MatMul", "kernel"),
        ("MindIE's", "kernel"),
    ]


def test_ranges_of_the_program_come_in_order_on_a_track_where_they_may_overlap(output: Path) -> None:
    ranged = {"args": {"event_type": "start/end", "domain": "default"}}
    later, sooner = {"name": "later", "ts": ts(5)}, {"name": "sooner", "ts": ts(2), "dur": 9.0}
    events, _ = read(
        TraceViewReader(), view(output, {10: "python"}, {**later, **ranged}, {**sooner, **ranged})
    )
    assert slices(events) == [("sooner", "user_annotation", 2_000), ("later", "user_annotation", 5_000)]
    assert [event.overlapping for event in events if isinstance(event, Track)] == [True]


def test_what_has_no_time_or_no_form_is_left_out_and_counted(output: Path) -> None:
    path = view(
        output, {10: "CANN"}, {"ts": "soon"}, {"dur": -1.0}, {"dur": "inf"}, {"ph": "s"}, {"ph": "?"},
        {"pid": "a"}, {"ph": "i", "name": "mark"},
    )  # fmt: skip
    events, left_out = read(TraceViewReader(), path)
    assert [event.name for event in events if not isinstance(event, Track)] == ["mark"]
    assert isinstance(events[-1], Instant)
    assert list(left_out.values()) == [3, 3]


# Databases


def test_operators_come_by_their_start_and_an_outer_one_before_its_inner(output: Path) -> None:
    rows: Rows = [
        (str(AT + 50), str(AT + 60), 2, THREAD, 50002),
        (str(AT + 7), str(AT + 8), 2, THREAD, 50001),
        (str(AT + 7), str(AT + 70), 1, THREAD, 50001),
    ]
    path = database(output, PYTORCH_API=("startNs TEXT, endNs TEXT, name, globalTid, type", rows))
    events, _ = read(DatabaseReader(), path)
    assert slices(events) == [("outer", "cpu_op", 7), ("inner", "cpu_op", 7), ("inner", "queue", 50)]


def test_what_waits_in_a_queue_may_overlap(output: Path) -> None:
    rows: Rows = [(str(AT), str(AT + 1), 1, THREAD, 50002)]
    path = database(output, PYTORCH_API=("startNs TEXT, endNs TEXT, name, globalTid, type", rows))
    [track] = [event for event in read(DatabaseReader(), path)[0] if isinstance(event, Track)]
    assert track.overlapping


def test_rows_that_end_before_they_begin_or_have_no_time_are_left_out_and_counted(output: Path) -> None:
    path = database(output, STEP_TIME=("id, startNs, endNs", [(0, AT, AT - 1), (1, None, AT), (2, AT, AT)]))
    events, left_out = read(DatabaseReader(), path)
    assert slices(events) == [("ProfilerStep#2", None, 0)]
    assert list(left_out.values()) == [1, 1]


def test_an_arrow_goes_from_the_first_call_to_the_first_task_of_a_connection(output: Path) -> None:
    calls: Rows = [(AT + 3, AT + 4, 1, THREAD, 77), (AT + 1, AT + 2, 1, THREAD, 77)]
    tasks: Rows = [(AT + 30, AT + 40, 0, 0, 3, 1, 77), (AT + 10, AT + 20, 0, 0, 3, 2, 77)]
    path = database(
        output,
        CANN_API=("startNs, endNs, name, globalTid, connectionId", calls),
        TASK=("startNs, endNs, deviceId, streamId, taskType, globalTaskId, connectionId", tasks),
    )
    flows = [event for event in read(DatabaseReader(), path)[0] if isinstance(event, Flow)]
    assert [(event.id, event.point, event.at_ns - AT) for event in flows] == [
        (77, "start", 1),
        (77, "end", 10),
    ]


def test_a_task_of_a_collective_has_its_name(output: Path) -> None:
    path = database(
        output,
        TASK=("startNs, endNs, taskType, globalTaskId", [(AT, AT + 1, 3, 9)]),
        COMMUNICATION_TASK_INFO=("name, globalTaskId", [(5, 9)]),
    )
    assert slices(read(DatabaseReader(), path)[0]) == [("hcom_allReduce", "communication", 0)]


def test_what_other_tables_list_is_not_counted_again_as_tasks(output: Path) -> None:
    """On a 910B, HCCL's kernels that wait are AI_CORE too, and a collective has a task for each part."""
    columns = "startNs, endNs, taskType, globalTaskId"
    tasks: Rows = [(AT + at, AT + at + 1, 3, at) for at in range(4)]  # 0: an operator; 1, 2: parts
    path = database(
        output,
        TASK=(columns, tasks),
        COMPUTE_TASK_INFO=("globalTaskId, name", [(0, 1)]),
        COMMUNICATION_TASK_INFO=("name, globalTaskId", [(5, 1), (5, 1)]),
        COMMUNICATION_SCHEDULE_TASK_INFO=("name, globalTaskId", [(5, 2)]),
        COMMUNICATION_OP=("opName, startNs, endNs", [(5, AT + 1, AT + 3)]),
    )
    events = [event for event in read(DatabaseReader(), path)[0] if isinstance(event, Slice)]
    task_type = STRINGS[3]
    assert [(event.name, event.category) for event in events] == [
        (STRINGS[1], "kernel"),
        (task_type, None),
        (task_type, None),
        (task_type, None),
        ("hcom_allReduce", "communication"),
    ]
    assert [(event.args or {}).get("Collective") for event in events[1:4]] == ["hcom_allReduce"] * 2 + [None]


def test_a_database_of_something_else_says_what_it_holds(output: Path) -> None:
    path = output.parent.parent / "msprof_20250615120000.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE AicoreTask (startNs INT)")
    assert DatabaseReader().claims(FoundFile(path=path, name=path.name)) == Claim()
    with pytest.raises(RecordError, match=r"STRING_IDS; .*: AicoreTask\."):
        DatabaseReader().open(FoundFile(path=path, name=path.name), Notes())


def test_a_range_has_its_domain(output: Path) -> None:
    path = database(
        output, MSTX_EVENTS=("startNs, endNs, eventType, message, domainId", [(AT, AT + 1, 2, 1, 4)])
    )
    [slice_] = [event for event in read(DatabaseReader(), path)[0] if isinstance(event, Slice)]
    assert slice_.args == {"domain": "default"}


def test_names_that_are_no_text_cost_their_letters_alone_and_few_are_kept_in_memory(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_database, "_NAMES", 1)
    rows: Rows = [(AT + at, AT + at, 1 + at % 2) for at in range(4)]
    path = database(output, PYTORCH_API=("startNs, endNs, name", rows))
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("UPDATE STRING_IDS SET value = CAST(x'ff61' AS TEXT) WHERE id = 2")
    recording = _database.Database(path, Notes(), 0, Origin(clock="realtime"))
    with closing(recording):
        assert [name for name, _, _ in slices(list(recording.events()))] == ["outer", "\ufffda"] * 2
        assert len(recording._names) == 1


def test_a_table_that_cannot_be_read_costs_itself(output: Path) -> None:
    """The table is a SQL view here, as a producer may write it, and reading it raises an error."""
    path = database(output, STEP_TIME=("id, startNs, endNs", [(2, AT, AT)]))
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE VIEW PYTORCH_API AS SELECT 0 AS startNs, json('{') AS endNs")
        made.execute(f"CREATE VIEW GC_RECORD AS SELECT {AT} AS startNs, {AT} AS endNs")
    events, notes = read(DatabaseReader(), path)
    assert [name for name, _, _ in slices(events)] == ["ProfilerStep#2", "GC"]
    assert [note.startswith("damaged: ") for note in notes] == [True]


def test_a_database_is_read_without_a_file_beside_it(output: Path) -> None:
    path = database(output)
    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode = WAL")
    with closing(
        DatabaseReader().open(FoundFile(path=path, name=path.name, sidecar=None), Notes())
    ) as recording:
        list(recording.events())
        assert list(output.iterdir()) == [path]


# Host times of recordings without CANN data


@pytest.fixture
def early() -> Sidecar:
    """The sidecar of a recording whose host events the analysis has placed 250 ms early."""
    artifact = Artifact(path="x", kind="npu_recording", tool="npu", role="actor", host="h", size_bytes=1)
    opened = ClockAnchor(wall_ns=AT, mono_ns=5_000_000_000, raw_ns=4_750_000_000)
    return Sidecar(step=2, run_id="r", artifact=artifact, process=None, opened=opened, closed=opened)


def ended(recording: Path) -> None:
    """Write `profiler_info.json` with the clocks that torch_npu writes at the stop."""
    content = {"end_info": {"collectionTimeEnd": AT, "MonotonicTimeEnd": 5_000_000_000}}
    (recording / "profiler_info.json").write_text(json.dumps(content))


def test_a_view_with_a_layer_of_cann_is_not_corrected(output: Path, early: Sidecar) -> None:
    ended(output.parent)
    for layers, shift in (({1: "Python"}, 250_000_000), ({1: "Python", 2: "CANN"}, 0)):
        [(_, _, at)] = slices(read(TraceViewReader(), view(output, layers, {}), early)[0])
        assert at == 1_000 + shift


@pytest.mark.parametrize("table", ["TASK", "CANN_API", "MSTX_EVENTS"])
def test_a_database_with_any_table_of_cann_is_not_corrected(output: Path, early: Sidecar, table: str) -> None:
    ended(output.parent)
    path = database(
        output, **{"STEP_TIME": ("id, startNs, endNs", [(0, AT, AT)]), table: ("startNs, endNs", [])}
    )
    assert slices(read(DatabaseReader(), path, early)[0]) == [("ProfilerStep#0", None, 0)]


@pytest.mark.parametrize("clocks", ["host/start_info", "device_0/start_info.0"])
def test_where_cann_left_a_reading_of_both_clocks_nothing_is_corrected(
    output: Path, early: Sidecar, clocks: str
) -> None:
    ended(output.parent)
    file = output.parent / "PROF_000001_1_X" / clocks
    file.parent.mkdir(parents=True)
    file.touch()
    assert slices(read(TraceViewReader(), view(output, {1: "Python"}, {}), early)[0])[0][2] == 1_000


def test_a_view_that_lies_in_no_recording_is_read_as_it_is(tmp_path: Path, early: Sidecar) -> None:
    ended(tmp_path)
    assert slices(read(TraceViewReader(), view(tmp_path, {1: "Python"}, {}), early)[0])[0][2] == 1_000


# mstx ranges by number, and threads that join a recording, without torch_npu.


class Mstx:
    """Stand-in for mstx, which numbers ranges from 1 on."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._numbers = itertools.count(1)

    def range_start(self, message: str) -> int:
        return next(self._numbers)

    def range_end(self, number: int) -> None:
        self.ended.append(number)


def test_ranges_that_are_open_at_the_end_are_closed_once_the_newest_first() -> None:
    mstx = Mstx()
    ranges = Ranges(mstx)
    with ranges.range("outer"), ranges.range("inner"):
        with ranges.range("over"):
            pass
        ranges.end_all()
        assert mstx.ended == [3, 2, 1]
    ranges.end_all()
    assert mstx.ended == [3, 2, 1]


FLAGS = {"record_shapes": True, "profile_memory": False, "with_modules": True, "with_stack": False}


def test_a_thread_that_cannot_leave_is_said_in_the_log_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("100000")

    # Stands for torch_npu: the calls by which a thread joins and leaves a recording.
    profile = SimpleNamespace(enable_profiler_in_child_thread=lambda **_: None)
    torch_npu: Any = SimpleNamespace(
        version="9",
        profiler=SimpleNamespace(profile=profile),
        interface=SimpleNamespace(_stop_profiler=fail),
    )
    monkeypatch.setattr(_operators, "running", lambda on_this_thread: True)
    _operators.join(torch_npu, FLAGS)
    _operators.leave(torch_npu)
    _operators.forget()
    assert ["MainThread: 100000" in message for message in caplog.messages] == [True]
