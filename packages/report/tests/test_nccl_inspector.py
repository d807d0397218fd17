"""Files of NCCL's Inspector plugin, written as its source (plugins/profiler/inspector) writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from packages.report.tests.test_plain_traces import kernel, trace

DUMPED_US = 1_752_867_229_276_385
Bandwidths = tuple[float, float]


def bandwidths(op: str, size: int, us: int, ranks: int) -> Bandwidths:
    """Return what `inspectorComputeOpBw` computes: algorithm and bus bandwidth in GB/s."""
    gathers = op in ("AllGather", "AllGatherV", "ReduceScatter")
    factors = {"AllReduce": 2 * (ranks - 1) / ranks}
    factor = (ranks - 1) / ranks if gathers else factors.get(op, 1.0)
    algorithm = size * (ranks if gathers else 1) / 1e9 / (us / 1e6)
    return algorithm, algorithm * factor


def line(
    op: str, size: int, us: int, *, rank: int = 0, ranks: int = 8, nodes: int = 1, host: str = "node-1",
    pid: int = 438_776, group: str = "0xe62dedaa97644a", name: str = "unknown", sn: int = 1,
    source: str = "kernel_gpu", verbose: bool = False,
) -> str:  # fmt: skip
    kind = "p2p" if op in ("Send", "Recv") else "coll"
    peer = '"p2p_peer":1,' if kind == "p2p" else ""
    algorithm, bus = bandwidths(op, size, us, ranks)
    name = name.replace("/", "\\/")  # as `sanitizeJson` does
    trail = (
        f',"event_trace_sn":{{"{kind}_start_sn":1,"{kind}_stop_sn":2,"kernel_events":[{{"channel_id":0,'
        '"kernel_start_sn":3,"kernel_stop_sn":48,"kernel_record_sn":47}]},'
        f'"event_trace_ts":{{"{kind}_start_ts":{DUMPED_US - us},"{kind}_stop_ts":{DUMPED_US},'
        f'"kernel_events":[{{"channel_id":0,"kernel_start_ts":{DUMPED_US - us},'
        f'"kernel_stop_ts":{DUMPED_US},"kernel_record_ts":{DUMPED_US}}}]}}'
    )
    return (
        f'{{"header":{{"id":"{group}","comm_name":"{name}","rank":{rank},"n_ranks":{ranks},'
        f'"nnodes":{nodes}}},"metadata":{{"inspector_output_format_version":"v4.0","git_rev":"5067397c",'
        f'"rec_mechanism":"nccl_profiler_interface","dump_timestamp_us":{DUMPED_US},"hostname":"{host}",'
        f'"pid":{pid}}},"{kind}_perf":{{"{kind}":"{op}","{kind}_sn":{sn},{peer}'
        f'"{kind}_msg_size_bytes":{size},"{kind}_exec_time_us":{us},"{kind}_timing_source":"{source}",'
        f'"{kind}_algobw_gbs":{algorithm:f},"{kind}_busbw_gbs":{bus:f}{trail if verbose else ""}}}}}\n'
    )


def write(folder: Path, *lines: str, host: str = "node-1", pid: int = 438_776) -> Path:
    file = folder / f"{host}-pid{pid}.log"
    file.write_text("".join(lines))
    return file


KNOWN = {  # of its README: the size of one rank's part, time in us, both bandwidths
    "AllReduce": (17_179_869_184, 61_974, 277.210914, 485.119099),
    "ReduceScatter": (2_147_483_648, 41_057, 418.439467, 366.134533),
}


@pytest.mark.parametrize("op", KNOWN)
@pytest.mark.parametrize("verbose", [False, True])
def test_bandwidths_are_those_that_the_inspector_states(
    tmp_path: Path, command: Command, op: str, verbose: bool
) -> None:
    size, us, algorithm, bus = KNOWN[op]
    assert bandwidths(op, size, us, 8) == pytest.approx((algorithm, bus), rel=1e-6)
    write(tmp_path, line(op, size, us, verbose=verbose), line(op, size, us * 3, sn=2, verbose=verbose))
    (row,) = command("report", tmp_path, "--json").json["collectives"]
    assert (row["op"], row["ranks"], row["calls"], row["reach"]) == (op, 8, 2, "one host")
    assert (row["algorithm_gbs"], row["bus_gbs"]) == pytest.approx((algorithm, bus), rel=1e-6)
    assert row["mean_bus_gbs"] == pytest.approx(bus / 2, rel=1e-6)


def test_rows_tell_groups_hosts_and_nodes_apart(tmp_path: Path, command: Command) -> None:
    """Two hosts have two ranks each: a group within each host, slower on the second, and a group over
    both.
    """
    for at, host in enumerate(("node-1", "node-2")):
        for rank in range(2):
            within = line(
                "AllGather", 1 << 20, 100 * (at + 1), rank=rank, ranks=2, host=host, pid=rank + 1,
                group=f"0x{at}", name="tp/0",
            )  # fmt: skip
            world = line(
                "AllReduce", 1 << 20, 900, rank=2 * at + rank, ranks=4, nodes=2, host=host, pid=rank + 1
            )
            send = line("Send", 1 << 20, 50, ranks=4, nodes=2, host=host, pid=rank + 1)
            write(tmp_path, within, world, send, host=host, pid=rank + 1)
    rows = {
        (row["op"], row["group"]): row for row in command("report", tmp_path, "--json").json["collectives"]
    }
    whole = "0xe62dedaa97644a"
    assert {
        key: (row["host"], row["reach"], row["calls"], row["processes"]) for key, row in rows.items()
    } == {
        ("AllGather", "tp/0 0x0"): ("node-1", "one host", 2, 2),
        ("AllGather", "tp/0 0x1"): ("node-2", "one host", 2, 2),
        ("AllReduce", whole): (None, "several hosts", 4, 4),
        ("Send", whole): (None, "several hosts", 4, 4),
    }
    assert rows["AllGather", "tp/0 0x0"]["bus_gbs"] == 2 * rows["AllGather", "tp/0 0x1"]["bus_gbs"]
    out = command("report", tmp_path).out
    assert "node-2" in out
    assert "several" in out


def test_a_torn_last_line_is_counted_and_the_others_are_read(tmp_path: Path, command: Command) -> None:
    whole = [line("AllReduce", 1 << 20, 100, rank=rank, sn=at) for rank in range(8) for at in range(3)]
    write(tmp_path, *whole, line("AllReduce", 1 << 20, 100)[:217])
    report = command("report", tmp_path, "--json", code=3).json
    (row,) = report["collectives"]
    assert row["calls"] == len(whole)
    ((what, count),) = ((one["what"], one["events"]) for one in report["traces"]["problems"])
    assert ("no record" in what, count) == (True, 1)


def test_what_the_cpu_timed_is_a_doubt(tmp_path: Path, command: Command) -> None:
    write(tmp_path, line("AllReduce", 1 << 20, 100, source="kernel_cpu"), line("AllReduce", 1 << 20, 100))
    (problem,) = command("report", tmp_path, "--json", code=3).json["traces"]["problems"]
    assert ("on the CPU" in problem["what"], problem["events"]) == (True, 1)


def test_beside_traces_it_adds_no_time_and_no_process(tmp_path: Path, command: Command) -> None:
    """A trace of the same process, recorded hours before the Inspector wrote."""
    began = (DUMPED_US - 4 * 3_600_000_000) * 1000
    name = "node-1_438776.1752852829276385000.pt.trace.json"
    trace(tmp_path / name, [kernel("gemm", 0, 10)], base_ns=began, pid=438_776)
    alone = command("report", tmp_path, "--json").json
    write(tmp_path, line("AllReduce", 1 << 20, 100))
    both = command("report", tmp_path, "--json").json
    assert (both["window_ns"], both["opened_ns"]) == (alone["window_ns"], alone["opened_ns"])
    assert len(both["processes"]) == len(alone["processes"]) == 1
    assert len(both["collectives"]) == 1


def test_a_merge_says_that_it_has_no_times(tmp_path: Path, command: Command) -> None:
    trace(tmp_path / "rank0.pt.trace.json", [kernel("gemm", 0, 10)])
    write(tmp_path, line("AllReduce", 1 << 20, 100))
    result = command("merge", tmp_path, "--output", tmp_path / "timeline.json", code=3)
    assert "in reports alone" in " ".join(result.out.split())
