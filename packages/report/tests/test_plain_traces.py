"""Reports and timelines of traces that stepscope did not write."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope_report.cli import run
from stepscope_report.timeline.plain import read_plain
from stepscope_report.timeline.trace_files import named

BASE_NS = 1_700_000_000_000_000_000
RECORDED = Path(__file__).parent / "recorded_engines"
GOLDEN = Path(__file__).parent / "data"


def kernel(name: str, start_us: float, dur_us: float, stream: int = 7) -> dict[str, object]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": dur_us,
        "args": {"device": 0, "stream": stream},
    }  # fmt: skip


def trace(
    path: Path,
    events: Iterable[dict[str, object]],
    *,
    rank: int | None = None,
    base_ns: int | None = BASE_NS,
    pid: int = 100,
) -> Path:
    own = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": pid, "tid": pid, "ts": 0.0, "dur": 5.0}
    fields: dict[str, object] = {"schemaVersion": 1}
    if rank is not None:
        fields["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}
    if base_ns is not None:
        fields["baseTimeNanoseconds"] = base_ns
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**fields, "traceEvents": [own, *events]}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def ranks_of(folder: Path) -> list[int | None]:
    return [process.info.rank for process in read_plain([folder]).timeline.processes]


def test_a_folder_of_traces_is_reported_by_rank(tmp_path: Path, command: Command) -> None:
    gemm, reduce = kernel("gemm", 10, 100), kernel("ncclDevKernel_AllReduce", 60, 100, stream=8)
    trace(tmp_path / "a.pt.trace.json", [gemm, reduce], rank=1)
    trace(tmp_path / "b.pt.trace.json.gz", [gemm], rank=0, pid=101)
    report = command("report", tmp_path, "--json").json
    assert [process["name"] for process in report["processes"]] == ["rank 0", "rank 1"]
    rows = {row["process"]: row for row in report["traces"]["devices"]}
    assert (rows["rank 0"]["busy_ns"], rows["rank 1"]["busy_ns"]) == (100_000, 150_000)
    assert rows["rank 1"]["exposed_ns"] == 50_000


def test_files_that_only_their_names_tell_apart_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(tmp_path / "old.json", [kernel("gemm", 0, 10)], pid=100)
    trace(tmp_path / "new.json", [kernel("gemm", 0, 20)], pid=101)
    assert run(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trace", "pid", "101", "new.json", "2", "20.0", "us"] in lines
    assert ["trace", "pid", "100", "old.json", "2", "10.0", "us"] in lines
    assert "new.json" in (tmp_path / "page.html").read_text()


def test_nothing_is_written_beside_the_traces(tmp_path: Path, command: Command) -> None:
    path = trace(tmp_path / "theirs" / "rank0.json", [kernel("gemm", 0, 10)])
    command("report", path.parent)
    assert "--output" in command("merge", path.parent, code=2).err
    assert [file.name for file in path.parent.iterdir()] == ["rank0.json"]


def test_the_page_and_the_timeline_go_where_output_says(tmp_path: Path) -> None:
    path = trace(tmp_path / "theirs" / "rank0.json", [kernel("gemm", 0, 10)])
    page, merged = tmp_path / "page.html", tmp_path / "merged.json.gz"
    assert run(["report", str(path), "--output", str(page)]) == 0
    assert run(["merge", str(path), "--output", str(merged)]) == 0
    assert "no spans of" in page.read_text()
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    assert {"gemm", "aten::mm"} <= {event["name"] for event in events}


OF_NPU = "host-a_71_20260822172424123_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"
NAMES: dict[str, dict[str, object]] = {
    # verl's profiler
    "actor_train_step3_rank1-of-2_tp0-dp1_pid71_20261128190354123.json.gz": {
        "role": "actor", "stage": "train", "step": 3, "rank": 1, "world_size": 2, "pid": 71,
    },
    "ref_compute-ref-log-prob_step3_rank0-of-2_pid72_20261128190354123_mb0-3.json.gz": {
        "role": "ref", "stage": "compute-ref-log-prob", "step": 3, "rank": 0, "world_size": 2, "pid": 72,
    },
    "step3_rank1-of-2_pid73_20261128190354123_part1.json.gz": {
        "step": 3, "rank": 1, "world_size": 2, "pid": 73,
    },
    "agent_loop_rollout_replica_1/host_vllm_rank0.json.gz": {"role": "rollout", "rank": 0, "replica": 1},
    "rollout-replica4-globalrank8_dp0_pp0_tp1-rank-1.1764.pt.trace.json.gz": {
        "role": "rollout", "rank": 1, "replica": 4,
    },
    "actor_compute_log_prob_step2_rank0-of-8_tp0-pp0_1111_1700000000.json": {
        "role": "actor", "stage": "compute_log_prob", "step": 2, "rank": 0, "world_size": 8, "pid": 1111,
    },
    # verl's NPU profiler
    f"3/actor_update/{OF_NPU}": {"role": "actor", "stage": "update", "step": 3, "pid": 71},
    f"ref_compute_log_prob/{OF_NPU}": {"role": "ref", "stage": "compute_log_prob", "pid": 71},
    f"12/train_batch/{OF_NPU}": {"stage": "train_batch", "step": 12, "pid": 71},
    f"outputs/npu/{OF_NPU}": {},  # the user's own
    # NeMo RL
    "logs/nsight/dtensor_policy_worker_2:5_4711.sqlite": {
        "role": "actor", "pid": 4711, "steps": range(2, 5),
    },
    "logs/nsight/vllm_generation_worker_2:3_4712.sqlite": {
        "role": "rollout", "step": 2, "pid": 4712,
    },
    "logs/nsight/trtllm_async_generation_worker_2:5_4713.sqlite": {
        "role": "rollout", "pid": 4713, "steps": range(2, 5),
    },
    "logs/nsight/dtensor_policy_worker_4714.sqlite": {"role": "actor", "pid": 4714},
    # torchtitan, accelerate of TRL and transformers, SGLang, torch
    "iteration_10/rank3_trace.json.gz": {"step": 10, "rank": 3},
    "profile_2.json": {"rank": 2},
    "1764.5-TP-1-EXTEND.trace.json.gz": {"stage": "prefill"},
    "1764.5-TP-0-DP-1-decode.trace.json.gz": {"stage": "decode"},
    "rank3.pt.trace.json": {"rank": 3},
    "dp0_pp0_tp1_dcp0_ep0_rank5.1795446809679130966.pt.trace.json.gz": {"rank": 5},
    "prof_start_1_end_2_rank-7.json.gz": {"rank": 7},
    "profile_trace_rank_0.json.gz": {"rank": 0},
    "step_4/rank1/trace.json": {"step": 4, "rank": 1},
    "prank4.json": {},
    "train.json": {},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_frameworks_tell_what_is_in_them(name: str) -> None:
    of_name = named(name)
    alone = () if of_name.step is None else range(of_name.step, of_name.step + 1)
    facts = {fact: told for fact, told in of_name._asdict().items() if told not in (None, range(0), alone)}
    assert facts == NAMES[name]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("1764.5-TP-1-EXTEND.trace.json.gz", 1), ("1700000000.1-TP-1.trace.json.gz", 1),
        ("1700000000.1-TP-0-DP-1.trace.json.gz", None), ("1764.5-TP-0-DP-1-decode.trace.json.gz", None),
    ],
)  # fmt: skip
def test_the_rank_of_an_engine_without_further_parallelism_is_its_tensor_rank(
    tmp_path: Path, name: str, rank: int | None
) -> None:
    trace(tmp_path / name, [])
    assert ranks_of(tmp_path) == [rank]


def test_what_a_name_tells_is_said_of_the_process(tmp_path: Path, command: Command) -> None:
    name = "actor_train_step3_rank1-of-2_tp0-dp1_pid71_20261128190354123.json.gz"
    trace(tmp_path / name, [])
    (row,) = command("report", tmp_path, "--json").json["traces"]["traces"]
    (info,) = (process.info for process in read_plain([tmp_path]).timeline.processes)
    assert (info.role, info.rank, info.world_size, info.replica) == ("actor", 1, 2, None)
    assert (row["stage"], row["step"]) == ("train", 3)


def test_actors_and_engines_of_one_rank_are_processes_of_their_own(tmp_path: Path, command: Command) -> None:
    """In verl's folders, rank 0 of an actor and rank 0 of a rollout engine stand side by side."""
    trace(tmp_path / "actor_train_step3_rank0-of-1_pid71_20261128190354123.json.gz", [], pid=71)
    trace(tmp_path / "agent_loop_rollout_replica_0" / "vllm-rank-0.json.gz", [], pid=72)
    names = [process["name"] for process in command("report", tmp_path, "--json").json["processes"]]
    assert names == ["actor 0", "rollout 0"]


def test_ranks_of_two_replicas_have_the_replica_in_their_names(tmp_path: Path, command: Command) -> None:
    for replica in range(2):
        trace(tmp_path / f"agent_loop_rollout_replica_{replica}" / "vllm_rank0.json", [], pid=71 + replica)
    names = [process["name"] for process in command("report", tmp_path, "--json").json["processes"]]
    assert names == ["rollout 0 of replica 0", "rollout 0 of replica 1"]


def test_the_rank_in_the_trace_counts_more_than_that_in_the_name(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", [], rank=4)
    assert ranks_of(tmp_path) == [4]


def test_traces_stand_apart_by_their_bases(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", [kernel("gemm", 0, 10)])
    trace(tmp_path / "rank1.json", [kernel("gemm", 0, 10)], base_ns=BASE_NS + 1_000_000)
    timeline = read_plain([tmp_path]).timeline
    first, second = timeline.processes
    assert second.opened_ns - first.opened_ns == 1_000_000
    assert timeline.window.wall_ns == 1_010_000


def test_a_trace_without_a_base_is_unaligned(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [kernel("gemm", 0, 10)])
    trace(tmp_path / "rank1.json", [kernel("gemm", 0, 10)], base_ns=None)
    assert "no baseTimeNanoseconds" in " ".join(command("report", tmp_path, code=3).out.split())


def test_one_trace_without_a_host_needs_no_clock(tmp_path: Path, command: Command) -> None:
    def notes() -> list[object]:
        processes = command("report", tmp_path, "--json").json["processes"]
        return [process["clock"]["note"] for process in processes]

    trace(tmp_path / "rank0.json", [kernel("gemm", 0, 10)])
    assert notes() == [None]
    trace(tmp_path / "rank1.json", [kernel("gemm", 0, 10)], rank=1)
    assert None not in notes()


def test_one_trace_without_a_base_needs_no_clock(tmp_path: Path, command: Command) -> None:
    path = trace(tmp_path / "rank0.json", [kernel("gemm", 0, 10)], base_ns=None)
    report = command("report", path, "--json").json
    assert [row["process"] for row in report["traces"]["devices"]] == ["rank 0"]
    assert [row["name"] for row in report["processes"]] == ["rank 0"]


def test_a_timeline_named_json_is_no_gzip(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [kernel("gemm", 0, 10)])
    command("merge", tmp_path / "rank0.json", "--output", tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {"gemm", "aten::mm"} <= {event["name"] for event in events}


def test_what_is_no_trace_is_named(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "et.json"
    for schema in ('"schema": "1.1.0-chakra.0.0.4"', '"schema": "1.0.1", "name": "execution_graph"'):
        path.write_text(f'{{{schema}, "nodes": []}}')
        for option in ((), ("-o", tmp_path / "page.html"), ("--step-mark", "step")):
            assert "Chakra" in command("report", path, *option, code=2).err
    path.write_text("hello")
    assert "no trace" in command("report", path, code=2).err


def test_no_html_asks_for_what_is_so(tmp_path: Path, command: Command) -> None:
    command("report", trace(tmp_path / "rank0.json", []), "--no-html")
    assert "--html" in command("report", tmp_path, "--html", code=2).err


def test_a_trace_of_absolute_times_is_aligned_without_a_base(tmp_path: Path, command: Command) -> None:
    at_us = BASE_NS / 1000
    for rank in range(2):
        events = [kernel("gemm", at_us + 1000 * rank + 100 * number, 10) for number in range(9)]
        path = trace(tmp_path / f"rank{rank}.json", [], base_ns=None)
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    report = command("report", tmp_path, "--json").json
    assert [process["name"] for process in report["processes"]] == ["rank 0", "rank 1"]
    assert report["window_ns"] == pytest.approx(1_810_000, abs=500)  # a double of us since 1970


@pytest.mark.parametrize("base_ns", [None, 0, 7_000_000_000])
def test_a_clock_before_2000_aligns_no_rank(tmp_path: Path, command: Command, base_ns: int | None) -> None:
    """The late rank of two is not made up from times that begin with each recording."""
    for rank in range(2):
        calls = [nccl("a", number, 100.0 * number + 50 * rank, 100.0 * number + 60) for number in range(9)]
        trace(tmp_path / f"rank{rank}.json", calls, rank=rank, base_ns=base_ns)
    traces = command("report", tmp_path, "--json", code=3).json["traces"]
    assert [bool(row["unaligned"]) for row in traces["traces"]] == [True, True]
    assert not traces["stragglers"]


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [])
    (tmp_path / "config.json").write_text('{"hidden": 4}')
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    unread = command("report", tmp_path, "--json").json["traces"]["unread"]
    assert [what.split(": ")[0] for what in unread] == ["config.json", "empty.json"]


def test_a_damaged_trace_is_trouble(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [])
    (tmp_path / "rank1.pt.trace.json.gz").write_bytes(b"")
    (problem,) = command("report", tmp_path, "--json", code=3).json["traces"]["problems"]
    assert problem["file"].startswith("rank1.")


def test_a_folder_without_a_trace_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.json").write_text('{"hidden": 4}')
    assert "no captured step" in command("report", tmp_path, code=2).err


def test_two_processes_without_a_device_are_named(tmp_path: Path, command: Command) -> None:
    for rank in range(2):
        trace(tmp_path / f"{rank}.json", [], rank=rank, pid=100 + rank)
    assert "rank 0 and rank 1: " in command("report", tmp_path).out


def test_a_collective_of_no_named_group_has_no_group(tmp_path: Path, command: Command) -> None:
    for rank in range(2):
        reduce = kernel("ncclDevKernel_AllReduce", 60, 100)
        args = {"device": 0, "stream": 7, "Collective name": "allreduce"}
        trace(tmp_path / f"{rank}.json", [{**reduce, "args": args}], rank=rank, pid=100 + rank)
    assert {
        row["collective"] for row in command("report", tmp_path, "--json").json["traces"]["stragglers"]
    } == {"allreduce"}


def test_a_command_that_needs_spans_names_the_one_that_reads_traces(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [])
    assert f"`stepscope report {tmp_path}` reads its traces." in command("what-if", tmp_path, code=2).err


def test_options_that_need_spans_are_refused(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.json", [])
    assert "--run" in command("report", tmp_path, "--run", "mine", code=2).err


@pytest.mark.parametrize("engine", ["vllm-dp/step_000001", "vllm-tp/step_000005", "sglang-dp/step_000001"])
def test_folders_of_real_engines_are_read_without_sidecars(
    engine: str, tmp_path: Path, command: Command
) -> None:
    traces = RECORDED / engine / "traces" / "rollout" / "replica0"
    for file in traces.glob("*.json.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    engines = command("report", tmp_path, "--json").json["engines"]
    assert engines
    assert all(engine["iterations"] for engine in engines)


def test_a_trace_is_known_behind_long_metadata(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank0.json", [])
    text = path.read_text().replace('{"schemaVersion": 1', '{"metadata": "' + "x" * 100_000 + '"', 1)
    path.write_text(text)
    assert ranks_of(tmp_path) == [0]


def nccl(group: str, number: int, start_us: float, end_us: float) -> dict[str, object]:
    made = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start_us, end_us - start_us, 20)
    about = {"Collective name": "allreduce", "Process Group Name": group, "Process Group Ranks": "[0, 1]"}
    return made | {"args": {**about, "Seq": number, "In msg nelems": 8}}


def test_the_rank_that_enters_a_collective_last_is_the_one_that_others_wait_for(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are group a, 2 and 3 group b; rank 0 did not record the first call of its group."""
    chance = random.Random(3)
    late = {rank: [chance.randrange(50) for _ in range(40)] for rank in range(4)}
    calls: dict[int, dict[int, tuple[int, int]]] = {rank: {} for rank in late}
    for number in range(40):
        for members in ((0, 1), (2, 3)):
            entered = {rank: 1000 * number + late[rank][number] for rank in members}
            ended = max(entered.values()) + 10
            for rank, start in entered.items():
                if (rank, number) != (0, 0):
                    calls[rank][number] = (start, ended)
    for rank, made in calls.items():
        events = [nccl("ab"[rank // 2], number, *times) for number, times in made.items()]
        trace(tmp_path / f"rank{rank}.json", events, rank=rank, pid=100 + rank)
    report = command("report", tmp_path, "--json").json
    rows = {row["rank"]: row for row in report["traces"]["stragglers"]}
    for rank, row in rows.items():
        other = rank ^ 1
        common = calls[rank].keys() & calls[other].keys()
        both = [(calls[rank][number][0], calls[other][number][0]) for number in common]
        assert row["collective"] == f"allreduce, group {'ab'[rank // 2]}"
        assert row["calls"] == len(both) == (39 if rank < 2 else 40)
        assert row["last"] == sum(own > theirs for own, theirs in both)
        assert row["others_waited_ns"] == 1000 * sum(max(0, own - theirs) for own, theirs in both)
        assert row["waited_ns"] == 1000 * sum(max(0, theirs - own) for own, theirs in both)
    monkeypatch.setattr("stepscope_report.sections.traces.DRAWN", 3)
    assert "Stragglers in collectives" in command("report", tmp_path, "--output", tmp_path / "page.html").out
    assert "3 of 4 rows" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("later_ns", [600_000_000_000, 137_000], ids=["later", "at the same time"])
def test_collectives_of_two_runs_are_not_matched(tmp_path: Path, command: Command, later_ns: int) -> None:
    """Both runs have ranks 0 and 1 in a group of the same name, and calls of the same numbers."""
    chance = random.Random(5)
    for number, job in enumerate("ab"):
        for rank in range(2):
            late = chance.randrange(20, 40) if rank else 0
            calls = [nccl("0", call, 300.0 * call + late, 300.0 * call + 60) for call in range(40)]
            base_ns = BASE_NS + number * later_ns
            trace(
                tmp_path / job / f"rank{rank}.json",
                calls,
                rank=rank,
                base_ns=base_ns,
                pid=100 * number + rank + 1,
            )
    alone = [
        row
        for job in "ab"
        for row in command("report", tmp_path / job, "--json").json["traces"]["stragglers"]
    ]
    both = command("report", tmp_path / "a", tmp_path / "b", "--json").json["traces"]["stragglers"]
    waits = [sorted((row["rank"], row["calls"], row["waited_ns"]) for row in rows) for rows in (alone, both)]
    assert waits[0] == waits[1]
    assert len(both) == 4


def test_hosts_of_two_runs_do_not_align_each_other(tmp_path: Path) -> None:
    for number in range(2):
        calls = [nccl("0", call, 300.0 * call, 300.0 * call + 60) for call in range(40)]
        path = trace(
            tmp_path / f"{number}.json", calls, rank=number, base_ns=BASE_NS + number * 900_000_000_000
        )
        path.write_text(path.read_text().replace('{"schema', f'{{"host_name": "node-{number}", "schema', 1))
    first, second = read_plain([tmp_path]).timeline.processes
    assert second.opened_ns - first.opened_ns == 900_000_000_000


def test_memory_of_a_trace_is_its_highest(tmp_path: Path, command: Command) -> None:
    events = [
        {"ph": "i", "name": "[memory]", "pid": 0, "tid": 0, "ts": at, "s": "t",
         "args": {"Total Allocated": held, "Total Reserved": 4096, "Device Type": 1, "Device Id": 0}}
        for at, held in enumerate((100, 300, 200))
    ]  # fmt: skip
    trace(tmp_path / "rank0.json", events, rank=0)
    (row,) = command("report", tmp_path, "--json").json["traces"]["memory"]
    assert (row["device"], row["allocated_bytes"], row["reserved_bytes"]) == ("cuda:0", 300, 4096)


def test_an_archive_holds_untouched_traces_and_their_places_in_time(tmp_path: Path, command: Command) -> None:
    """The places are those of the merged timeline. The manifest is as Perfetto describes its version 1."""
    for rank in range(2):
        own, base_ns = [kernel(f"gemm{rank}", 40, 10)], BASE_NS + rank * 5_000_000
        trace(tmp_path / "in" / f"rank{rank}.json.gz", own, rank=rank, pid=100 + rank, base_ns=base_ns)
    trace(tmp_path / "in" / "rank2.json", [], rank=2, pid=102, base_ns=None)
    output = tmp_path / "traces.tar"
    written = command("merge", tmp_path / "in", "--archive", "--output", output, "--json", code=3).json
    command("merge", tmp_path / "in", "--output", tmp_path / "merged.json", code=3)
    merged = {
        event.get("name"): event
        for event in json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    }
    with tarfile.open(output) as archive:
        assert not any(member.pax_headers for member in archive)  # which Perfetto leaves out or refuses
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert list(members) == [
        "perfetto_manifest.json", "stepscope.json", "rank0.json.gz", "rank1.json.gz", "rank2.json",
    ]  # fmt: skip
    text = members["perfetto_manifest.json"]
    assert text.startswith(b'{"perfetto_manifest"')  # by which Perfetto knows it
    manifest = json.loads(text)["perfetto_manifest"]
    files = {file["path"]: file for file in manifest["files"]}
    assert (manifest["version"], list(files)) == (1, list(members)[1:])
    assert [name for name, file in files.items() if "clocks" in file] == ["rank0.json.gz", "rank1.json.gz"]
    for rank in range(2):
        name = f"rank{rank}.json.gz"
        assert members[name] == (tmp_path / "in" / name).read_bytes()
        clocks = files[name]["clocks"]
        assert clocks["sync_to"] == {"file": "stepscope.json"}
        assert 40_000 + clocks["offset_ns"] == round(merged[f"gemm{rank}"]["ts"] * 1000)
    assert [file["machine"]["name"] for file in manifest["files"]] == [
        "stepscope",
        "rank 0",
        "rank 1",
        "rank 2 (unaligned)",
    ]
    assert any(problem["file"] == "rank2.json" for problem in written["problems"])
