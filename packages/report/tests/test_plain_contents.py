"""Devices, steps and collectives in traces of others, and doubts about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.test_plain_traces import BASE_NS, kernel, trace
from stepscope_report.timeline.activity.content_reader import OF_NO_TIME
from stepscope_report.timeline.activity.doubts import (
    EARLY,
    LOST,
    NO_SIZES,
    OVERRUN,
    SHARED_NUMBER,
    UNRECORDED,
    UNSYNCED,
)
from stepscope_report.timeline.plain import OF_OTHERS


def test_a_merged_timeline_is_read_back_by_process(tmp_path: Path, command: Command) -> None:
    for rank in range(2):
        events = [launched(100.0 * n, 20 + 30 * rank, n) | {"pid": rank} for n in range(30)]
        mark = {
            "ph": "X", "cat": "user_annotation", "name": "layer", "pid": 100, "tid": 100, "ts": 5, "dur": 9,
        }  # fmt: skip
        trace(tmp_path / "in" / f"rank{rank}.json", [mark, *events], rank=rank, pid=100 + rank)
    command("merge", tmp_path / "in", "--output", tmp_path / "timeline.json.gz")
    tables = [
        command("report", path, "--json").json for path in (tmp_path / "in", tmp_path / "timeline.json.gz")
    ]
    assert tables[0]["traces"]["operators"] == tables[1]["traces"]["operators"]
    busy = [
        [(row["process"], row["device"], row["busy_ns"]) for row in table["traces"]["devices"]]
        for table in tables
    ]
    assert busy[0] == busy[1] == [("rank 0", "GPU 0", 600_000), ("rank 1", "GPU 0", 1_500_000)]
    merged = command("merge", tmp_path / "timeline.json.gz", "--output", tmp_path / "again.json", code=1)
    assert "merged already" in merged.err


ENDS = {"": True, ",\n": True, "]": True, ', {"ph": "X", "na': False}


@pytest.mark.parametrize(("end", "whole"), ENDS.items())
def test_a_list_of_events_alone_need_not_end(tmp_path: Path, command: Command, end: str, whole: bool) -> None:
    events = [json.dumps(kernel("gemm", BASE_NS / 1000 + at, 10)) for at in range(3)]
    (tmp_path / "rank0.json").write_text("[\n" + ",\n".join(events) + end)
    report = command("report", tmp_path, "--json", code=0 if whole else 3).json
    assert [row["count"] for row in report["traces"]["operators"]] == [3]


def test_steps_of_the_profiler_have_rows_and_the_slowest_says_what_grew(
    tmp_path: Path, command: Command
) -> None:
    """Step 7 loads for 500 us more. A kernel runs over the end of each step."""
    events, at, expected = [], 100.0, []
    for number in range(3, 12):
        loading = 700 if number == 7 else 200
        about = {"ph": "X", "cat": "user_annotation", "pid": 100, "tid": 100}
        ranges = [
            (f"ProfilerStep#{number}", 0, loading + 600),
            ("enumerate(DataLoader)#it.__next__", 10, loading),
            ("Optimizer.step#SGD.step", loading + 400, 150),
        ]
        events += [{**about, "name": name, "ts": at + start, "dur": dur} for name, start, dur in ranges]
        events.append(kernel("gemm", at + loading + 50, 300))
        events.append(kernel("ncclDevKernel_AllReduce", at + loading + 300, 100, stream=8))
        events.append(kernel("gemm", at + loading + 580, 40))
        expected.append([number, loading + 600, 370 + 20 * (number > 3), 50, loading, 150])
        at += loading + 600
    trace(tmp_path / "rank0.json", events, rank=0)
    rows = command("report", tmp_path, "--json").json["traces"]["steps"]
    fields = ("step", "dur_ns", "busy_ns", "exposed_ns", "loading_ns", "optimizer_ns")
    found = [[row[field] // (1 if field == "step" else 1000) for field in fields] for row in rows]
    assert found == expected
    assert all(row["idle_ns"] == row["dur_ns"] - row["busy_ns"] for row in rows)
    said = " ".join(command("report", tmp_path).out.split())
    assert re.search("step 7, 500 us .* 500 us", said)


def test_collectives_of_nccls_profiler_are_rows(tmp_path: Path, command: Command) -> None:
    """Pairs of asynchronous events in a list that does not end, of 16 ranks, with times of an own clock."""
    lines = []
    for number in range(640):
        pair = {"name": "AllReduce", "cat": "COLL", "id": number, "pid": number % 16, "tid": 1}
        lines.append(json.dumps({**pair, "ph": "b", "ts": 10.0 * number, "args": {"SeqNum": number // 16}}))
        lines.append(json.dumps({**pair, "ph": "e", "ts": 10.0 * number + 7}))
    (tmp_path / "nccl.json").write_text("[\n" + "".join(line + ",\n" for line in lines))
    tables = command("report", tmp_path, "--json").json["traces"]
    (row,) = tables["operators"]
    assert (row["name"], row["kind"], row["count"], row["total_ns"]) == (
        "AllReduce", "communication", 640, 4_480_000,
    )  # fmt: skip
    assert (tables["without_device"], tables["problems"]) == ([], [])


def launch(start_us: float, number: int, name: str = "cudaLaunchKernel") -> dict[str, object]:
    about = {"cat": "cuda_runtime", "name": name, "args": {"correlation": number}}
    return {"ph": "X", **about, "pid": 100, "tid": 100, "ts": start_us, "dur": 5.0}


def launched(start_us: float, dur_us: float, number: int, node: int = 0) -> dict[str, object]:
    about = {"device": 0, "stream": 7, "correlation": number, "graph node id": node}
    return kernel("gemm", start_us, dur_us) | {"args": about}


def waited(start_us: float) -> dict[str, object]:
    args = {"cuda_sync_kind": "Stream Sync", "stream": 7, "device": 0}
    about = {"cat": "cuda_sync", "name": "Stream Synchronize", "pid": 0, "tid": 7, "args": args}
    return {"ph": "X", **about, "ts": start_us, "dur": 2.0}


DOUBTS: dict[str, list[dict[str, Any]]] = {
    LOST: [
        *(launch(100.0 * n, n) for n in range(200)),
        *(launched(100.0 * n + 10, 80, n) for n in range(120, 200)),
    ],
    "lost graphs": [
        *(launch(1000.0 * n, n, "cudaGraphLaunch") for n in range(100)),
        *(launched(1000.0 * n + 10 + 45 * at, 44, n, at + 1) for n in (0, 50) for at in range(20)),
    ],
    EARLY: [
        *(launch(100.0 * n + 500, n) for n in range(50)),
        *(launched(100.0 * n, 80, n) for n in range(50)),
    ],
    OVERRUN: [
        *(launch(100.0 * n, n) for n in range(100)),
        *(launched(100.0 * n + 20, 5000 if n % 10 == 0 else 60, n) for n in range(100)),
    ],
    UNSYNCED: [
        *(launch(100.0 * n, n) for n in range(100)),
        *(launched(100.0 * n + 20, 60, n) for n in range(100)),
        *(waited(100.0 * n + 50) for n in range(0, 100, 20)),
        *(waited(100.0 * n + 90) for n in range(0, 100, 20)),
    ],
}


COUNTS = {LOST: 120, "lost graphs": 98, EARLY: 50, OVERRUN: 10, UNSYNCED: 5}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_a_profiler_lost_or_timed_wrong_is_counted(tmp_path: Path, command: Command, doubt: str) -> None:
    """As public reports describe it. The numbers are those of what was written."""
    trace(tmp_path / "rank0.json", DOUBTS[doubt])
    report = command("report", tmp_path, "--json", code=3).json
    (problem,) = report["traces"]["problems"]
    assert report["advice"] == []  # gaps of such a trace are no evidence
    assert all(row["doubted"] for row in (*report["traces"]["devices"], *report["gaps"]))
    assert (problem["what"], problem["events"]) == (LOST if doubt == "lost graphs" else doubt, COUNTS[doubt])
    assert f"({COUNTS[doubt]} events)" in " ".join(command("report", tmp_path, code=3).out.split())


@pytest.mark.parametrize("cat", ["cpu_op", "python_function", "cuda_runtime", "kernel"])
def test_a_file_in_which_no_time_of_a_kind_can_be_right_is_read(
    tmp_path: Path, command: Command, cat: str
) -> None:
    wrong = {"ph": "X", "cat": cat, "name": "wrong", "pid": 100, "tid": 100, "dur": -1.0, "args": {}}
    sound = [kernel("gemm", 10, 80)] if cat != "kernel" else []
    fields = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS}
    events = [*sound, *({**wrong, "ts": 100.0 * number} for number in range(3))]
    (tmp_path / "rank0.json").write_text(json.dumps({**fields, "traceEvents": events}))
    (problem,) = command("report", tmp_path, "--json", code=3).json["traces"]["problems"]
    assert (problem["what"], problem["events"]) == (OF_NO_TIME, 3)


@pytest.mark.parametrize("bounds", [("Begin", "End"), ("Begin",), ("End",)])
def test_launches_that_a_stream_puts_into_a_graph_are_not_lost(
    tmp_path: Path, command: Command, bounds: tuple[str, ...]
) -> None:
    """A recording may begin or end within the capture of the stream."""
    times = {"Begin": 1000.0, "End": 3000.0}
    events = [
        *(launch(times[bound], -1, f"cudaStream{bound}Capture_v10000") for bound in bounds),
        *(launch(1010.0 + 10 * n, n) for n in range(100)),
        launch(4000 if "End" in bounds else 900, 100),
        launched(4010 if "End" in bounds else 910, 50, 100),
    ]
    trace(tmp_path / "rank0.json", events)
    assert command("report", tmp_path, "--json").json["traces"]["problems"] == []


def test_buffers_of_cupti_in_another_order_are_no_doubt(tmp_path: Path, command: Command) -> None:
    kernels = [launched(100.0 * n + 20, 60, n) for n in range(100)]
    launches = [launch(100.0 * n, n) for n in range(100)]
    trace(tmp_path / "rank0.json", [*launches, *kernels[60:], *kernels[:60]])
    assert command("report", tmp_path, "--json").json["traces"]["problems"] == []


@pytest.mark.parametrize(
    ("doubt", "rule"), [(EARLY, "_check_gpu_kernel_causality"), (UNSYNCED, "_check_stream_sync_overlap")]
)
def test_torchs_own_validator_doubts_the_same_times(tmp_path: Path, doubt: str, rule: str) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch before 2.12")
    events = [
        event | {"args": event["args"] | {"External id": event["args"].get("correlation", -1)}}
        for event in DOUBTS[doubt]
    ]
    _, violations = validator.validate_trace(str(trace(tmp_path / "rank0.json", events)))
    assert {violation.rule_name for violation in violations} == {rule}


def on_host(cat: str, name: str, start_us: float, **args: object) -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": start_us, "dur": 2.0, "args": args,
    }  # fmt: skip


def waits_for(start_us: float, record: int, kind: str = "Stream Wait Event") -> dict[str, Any]:
    args = {"cuda_sync_kind": kind, "wait_on_cuda_event_record_corr_id": record, "stream": 7, "device": 0}
    return on_host("cuda_sync", kind, start_us, **args)


def records(start_us: float, number: int) -> dict[str, Any]:
    return on_host("cuda_runtime", "cudaEventRecord", start_us, correlation=number)


SIZES = {
    "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8,
    "Group size": 2,
}  # fmt: skip
BACKWARD = "autograd::engine::evaluate_function: {}Backward0"
UNLINKED: dict[str, tuple[str, int, list[dict[str, Any]]]] = {
    "_check_stream_wait_corr_id_populated": (
        UNRECORDED, 40,
        [waits_for(9.0 * n, -1, ("Event Sync", "Stream Wait Event")[n % 2]) for n in range(40)],
    ),
    "_check_stream_wait_corr_id_in_past": (
        UNRECORDED, 30,
        [
            *(records(100.0 * n + (0 if n < 20 else 90), n) for n in range(40)),  # half of them late
            *(waits_for(100.0 * n + 50, n) for n in range(50)),  # and ten without a record
        ],
    ),
    "_check_nccl_metadata": (
        NO_SIZES, 5,
        [
            on_host("cpu_op", "record_param_comms", 10.0 * n, **dict([*SIZES.items()][: 5 - (n % 4 == 0)]))
            for n in range(20)
        ],
    ),
    "_check_backward_seq_id_uniqueness": (
        SHARED_NUMBER, 25,
        [
            on_host("cpu_op", BACKWARD.format(name), at * 10.0, **{"Sequence number": 1 + at % 50})
            for name, several in (("Mm", 100), ("Add", 25))
            for at in range(several)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("rule", UNLINKED)
def test_links_are_doubted_as_torchs_own_validator_does(
    tmp_path: Path, command: Command, rule: str, shapes: bool
) -> None:
    """No time depends on them: numbers carry no mark."""
    doubt, number, events = UNLINKED[rule]
    if shapes:
        events = [event | {"args": event["args"] | {"Input Dims": [[2]]}} for event in events]
    file = trace(tmp_path / "rank0.json", [*events, launch(1, 9000), launched(10, 50, 9000)])
    report = command("report", tmp_path, "--json", code=3).json
    problems = {problem["what"]: problem["events"] for problem in report["traces"]["problems"]}
    assert problems == {doubt: number}
    assert not any(row["doubted"] for row in report["traces"]["devices"])
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch before 2.12")
    violations = [violation.rule_name for violation in validator.validate_trace(str(file))[1]]
    assert violations == [rule] * number


def test_a_sound_trace_has_no_doubt(tmp_path: Path, command: Command) -> None:
    """Kernels may begin early, nodes of a graph run side by side, and the last kernels come too late."""
    events = [
        *(launch(100.0 * n, n) for n in range(110)),
        *(launched(100.0 * n + 10, 102, n) for n in range(100)),
        launch(20_000, 500, "cudaGraphLaunch"),
        *(launched(20_010.0 + at, 500, 500, at + 1) for at in range(20)),
    ]
    trace(tmp_path / "rank0.json", events)
    assert command("report", tmp_path, "--json").json["traces"]["problems"] == []


def test_a_gpu_of_the_host_is_no_call_to_it(tmp_path: Path, command: Command) -> None:
    path = trace(tmp_path / "rank0.json", [])
    listed = '{"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "schema'
    path.write_text(path.read_text().replace('{"schema', listed, 1))
    (row,) = command("report", tmp_path, "--json").json["traces"]["without_device"]
    assert "CUPTI" not in row["cause"]
    trace(path, [launch(1, 1)])
    (row,) = command("report", tmp_path, "--json").json["traces"]["without_device"]
    assert "CUPTI" in row["cause"]


def test_operators_that_touch_in_absolute_times_are_beside_each_other(
    tmp_path: Path, command: Command
) -> None:
    """Kineto before 2024 wrote whole us since 1970."""
    about = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "dur": 10}
    events = [about | {"ts": 1_661_938_466_265_032 + 10 * number} for number in range(20)]
    path = trace(tmp_path / "rank0.json", [], base_ns=None)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    report = command("report", tmp_path, "--json").json
    assert report["opened_ns"] == 1_661_938_466_265_032_000
    (row,) = report["traces"]["traces"]
    assert row["operators_ns"] == 200_000


def test_a_trace_of_absolute_times_is_read_to_the_ns(tmp_path: Path, command: Command) -> None:
    """A float has multiples of 0.25 us of a time since 1970."""

    def reported(since_us: int) -> Any:
        events = ",".join(
            json.dumps(kernel("gemm", 0, 10.011)).replace('"ts": 0', f'"ts": {since_us + 11 * n}.{n:03}')
            for n in range(1000)
        )
        path = trace(tmp_path / "rank0.json", [], base_ns=None)
        path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{events}]}}')
        return command("report", tmp_path, "--json").json

    exact, near_zero = reported(1_712_195_495_505_582), reported(1_712_000_000_000_001)
    (device,) = exact["traces"]["devices"]
    assert device["busy_ns"] == pytest.approx(10_011_000, abs=100)
    assert device["span_ns"] == pytest.approx(999 * 11_001 + 10_011, abs=1)
    assert exact["opened_ns"] == 1_712_195_495_505_582_000
    assert abs(near_zero["opened_ns"] - 1_712_000_000_000_001_000) < 300


def test_events_of_another_profiler_are_merged_and_not_reported(tmp_path: Path, command: Command) -> None:
    """JAX writes slices without a category, and an empty event at the end."""
    path, timeline = tmp_path / "vm.trace.json", tmp_path / "timeline.json"
    dot = {"ph": "X", "name": "dot.3", "pid": 7, "tid": 8, "ts": 1.5, "dur": 2.5}
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": [dot, {}]}))
    traces = command("report", path, "--json", code=3).json["traces"]
    assert [problem["what"] for problem in traces["problems"]] == [OF_OTHERS]
    command("merge", path, "-o", timeline, code=3)
    assert "dot.3" in timeline.read_text()


def test_a_device_is_the_one_that_its_kernels_name(tmp_path: Path, command: Command) -> None:
    """A file of merged ranks has pids of its own."""
    trace(tmp_path / "rank0.json", [launched(1, 5, 1) | {"pid": 100_000_001}])
    assert [row["device"] for row in command("report", tmp_path, "--json").json["traces"]["devices"]] == [
        "GPU 0"
    ]


@pytest.mark.parametrize(
    ("label", "runtime", "name"),
    [
        ({"labels": "MTIA 3"}, "mtia_runtime", "MTIA 3"),
        ({"labels": "GPU 3"}, "cuda_runtime", "GPU 3"),
        ({"labels": "GPU 3"}, "xpu_runtime", "XPU 3"),
        ({"labels": "CPU"}, "cuda_runtime", "GPU 3"),
        ({"labels": 7}, "cuda_runtime", "GPU 3"),
        (None, "cuda_runtime", "GPU 3"),
    ],
)
def test_a_device_has_the_name_that_the_trace_gives_it(
    tmp_path: Path, command: Command, label: object, runtime: str, name: str
) -> None:
    said = {"ph": "M", "name": "process_labels", "pid": 3, "tid": 0, "args": label}
    events = [
        said,
        kernel("gemm", 10, 5) | {"pid": 3, "args": {"device": 3}},
        launch(1, 1) | {"cat": runtime},
    ]
    trace(tmp_path / "rank0.json", events)
    printed = command("report", tmp_path, "--json").json["traces"]
    assert [row["device"] for row in printed["devices"]] == [name]
    assert printed["problems"] == []


def test_a_timeline_names_devices_as_their_traces_do(tmp_path: Path, command: Command) -> None:
    """Kernels of MTIA name no device, and a timeline has the process' pid for theirs."""
    events: list[dict[str, Any]] = []
    for device in (3, 4):
        events += [
            {
                "ph": "M",
                "name": "process_labels",
                "pid": device,
                "tid": 0,
                "args": {"labels": f"MTIA {device}"},
            },
            {"ph": "M", "name": "thread_name", "pid": device, "tid": 9, "args": {"name": "Stream 1 "}},
            kernel("merge", 10, 5 * device) | {"pid": device, "tid": 9, "cat": "mtia_ccp_events", "args": {}},
        ]
    timeline = tmp_path / "timeline.json.gz"
    command("merge", trace(tmp_path / "rank0.json", events), "-o", timeline)
    rows = command("report", timeline, "--json").json["traces"]["devices"]
    assert [(row["device"], row["busy_ns"]) for row in rows] == [("MTIA 3", 15_000), ("MTIA 4", 20_000)]


def test_a_stream_that_waits_for_another_does_not_keep_its_device_busy(
    tmp_path: Path, command: Command
) -> None:
    def on_mtia(name: str, start: int, dur: int, stream: int) -> dict[str, object]:
        return kernel(name, start, dur) | {"cat": "mtia_ccp_events", "tid": stream}

    events = [
        on_mtia("event_wait", 0, 90, 2),
        on_mtia("merge", 100, 20, 2),
        on_mtia("event_record", 120, 5, 2),
    ]
    trace(tmp_path / "rank0.json", [*events, on_mtia("merge", 60, 20, 1)])
    printed = command("report", tmp_path, "--json").json["traces"]
    (device,) = printed["devices"]
    assert (device["busy_ns"], device["recorded_ns"]) == (40_000, 125_000)
    kinds = {row["name"]: (row["kind"], row["count"], row["total_ns"]) for row in printed["operators"]}
    assert kinds["event_wait"] == ("sync", 1, 90_000)
    assert kinds["event_record"] == ("sync", 1, 5000)
    assert kinds["merge"] == ("compute", 2, 40_000)
    assert "event_wait" not in command("report", tmp_path, "--brief").out


def test_a_variable_names_further_collectives(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(tmp_path / "rank0.json", [kernel("my_ring_exchange", 0, 10), kernel("gemm", 20, 30)])

    def communication_ns() -> list[int]:
        rows = command("report", tmp_path, "--json").json["traces"]["devices"]
        return [row["communication_ns"] for row in rows]

    assert communication_ns() == [0]
    monkeypatch.setenv("STEPSCOPE_COLLECTIVE_KERNELS", "my_ring|other")
    assert communication_ns() == [10_000]
    monkeypatch.setenv("STEPSCOPE_COLLECTIVE_KERNELS", "(")
    assert "STEPSCOPE_COLLECTIVE_KERNELS" in command("report", tmp_path, code=2).err


BANDWIDTHS = {
    # What NCCL's Inspector prints of its own calls, in its README: size, time in us, both bandwidths.
    "allreduce": (17_179_869_184, 61_974, 277.210914, 485.119099, 8),
    # nccl-tests: of 8 ranks, (n-1)/n of the algorithm bandwidth; a broadcast has no factor.
    "_allgather_base": (8_000_000_000, 40_000, 200.0, 175.0, 8),
    "reduce_scatter_tensor_coalesced": (8_000_000_000, 40_000, 200.0, 175.0, 8),
    "all_to_all": (8_000_000_000, 40_000, 200.0, 175.0, 8),
    "broadcast": (8_000_000_000, 40_000, 200.0, 200.0, 8),
}


@pytest.mark.parametrize("op", BANDWIDTHS)
def test_bandwidths_of_collectives_are_nccls(tmp_path: Path, command: Command, op: str) -> None:
    total, us, algorithm, bus, ranks = BANDWIDTHS[op]
    gathers = "gather" in op
    args = {
        "Collective name": op, "In msg nelems": total // 2 // (ranks if gathers else 1),
        "Out msg nelems": total // 2 // (1 if gathers else ranks), "Group size": ranks, "dtype": "BFloat16",
        "Process Group Name": "3", "Process Group Ranks": str([*range(ranks)]), "stream": 7, "device": 0,
    }  # fmt: skip
    calls = [kernel("ncclDevKernel", 100_000.0 * n, us * (2 if n else 1)) | {"args": args} for n in range(2)]
    trace(tmp_path / "rank0.json", calls, rank=0)
    (row,) = command("report", tmp_path, "--json").json["collectives"]
    assert (row["bytes"], row["ranks"], row["calls"], row["reach"]) == (total, ranks, 2, None)
    assert (row["algorithm_gbs"], row["bus_gbs"]) == pytest.approx((algorithm, bus), rel=1e-6)
    assert row["mean_bus_gbs"] == pytest.approx(bus / 1.5, rel=1e-6)
