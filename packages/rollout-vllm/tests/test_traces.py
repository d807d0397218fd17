"""Tests of an engine's files: whether they are complete, their ranks, and the names of captures."""

from __future__ import annotations

import gzip
import re
import threading
from pathlib import Path

import pytest

from stepscope_vllm._files import engine_folder, traces
from stepscope_vllm._files.engine_folder import prefix_of
from stepscope_vllm._files.traces import Layout, global_rank, topology

WHOLE = gzip.compress(b'{"host_name": "node7", "traceEvents": [' + b'{"ph": "X"},' * 5000 + b'{"ph": "X"}]}')


@pytest.mark.parametrize("size", [0, 5, len(WHOLE) // 2, len(WHOLE) - 1])
def test_a_gz_that_is_still_being_written_is_unfinished_wherever_it_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.pt.trace.json.gz"
    path.write_bytes(WHOLE[:size])
    assert traces.unfinished(path)


def test_a_file_that_is_seen_while_it_is_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.pt.trace.json.gz"
    path.write_bytes(WHOLE[:100])
    waiting = threading.Thread(target=traces.wait_until_complete, args=([path],))
    waiting.start()
    assert waiting.is_alive()
    path.write_bytes(WHOLE)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_trace_says_on_which_host_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "step_000001_r_rank3.17.pt.trace.json.gz"
    path.write_bytes(WHOLE)
    facts = traces.read(path)
    assert (facts.host, facts.rank) == ("node7", 3)


def a_trace(name: str, rank: int, world_size: int | None) -> traces.Trace:
    read = traces.Trace(Path(name), False, rank, world_size, None, None, None)
    return read._replace(dp=engine_folder.dp_of(name))


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "expected"),
    [
        ("s_dp0_pp0_tp1_dcp0_ep1_rank1", 1, 4, (9, {"tp": 1, "pp": 0, "dp": 0})),
        ("s_dp0_pp1_tp0_dcp0_ep2_rank2", 2, 4, (10, {"tp": 0, "pp": 1, "dp": 0})),
        ("s_dp1_pp1_tp1_dcp0_ep7_rank7", 7, 8, (23, {"tp": 1, "pp": 1, "dp": 1})),  # all engines in one world
        ("s_dp1_rank3", 3, 4, (23, {"tp": 1, "pp": 1, "dp": 1})),  # each engine in a world of its own
    ],
)
def test_tp_is_the_fastest_then_pp_then_dp(
    name: str, rank: int, world_size: int, expected: tuple[int, dict[str, int]]
) -> None:
    layout = Layout(tp=2, pp=2, dp=2 if "dp1" in name else 1, external=False)
    trace = a_trace(name, rank, world_size)
    assert (global_rank(trace, layout, 2), topology(trace, layout)) == expected


def test_prefill_context_parallel_stands_between_tp_and_pp() -> None:
    layout = Layout(tp=2, pp=2, dp=1, external=False, pcp=2)
    placed = [topology(a_trace("s", rank, 8), layout) for rank in range(8)]
    assert [tuple((at or {})[name] for name in ("pp", "pcp", "tp")) for at in placed] == [
        (pp, pcp, tp) for pp in range(2) for pcp in range(2) for tp in range(2)
    ]
    assert global_rank(a_trace("s", 3, 8), layout, 1) == 11


def kineto(*events: tuple[str, str]) -> bytes:
    """Return a trace with an event for each (category, name), as Kineto writes it."""
    return b",\n".join(
        f'{{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 1,\n    "ts": 1.000, '
        '"dur": 2.000,\n    "args": {}\n  }'.encode()
        for cat, name in events
    )


@pytest.mark.parametrize("before", [0, *range((1 << 20) - 420, (1 << 20) + 20, 11)])
def test_a_pass_counts_once_although_a_gpus_trace_has_it_twice(tmp_path: Path, before: int) -> None:
    """The file is read in chunks, and a chunk may end anywhere in an event."""
    passes = [
        "execute_context_1(8)_generation_0(0)",
        "execute_1_context_0(0)_generation_3(3)",
        "execute_context_0(0)_generation_0(0)",
        "execute_context_0(sq0sk0)_generation_12(sq12sk90)",
    ]
    events = kineto(*((cat, name) for name in passes for cat in ("user_annotation", "gpu_user_annotation")))
    path = tmp_path / "step_rank0.1.pt.trace.json"
    path.write_bytes(b'{"traceEvents": [' + b" " * before + events + b"]}")
    facts = traces.read(path)
    assert (facts.iterations, facts.empty) == (4, 1)


def test_traces_of_captured_cuda_graphs_beside_an_engines_traces_are_not_a_captures(tmp_path: Path) -> None:
    graphs = tmp_path / "capture_traces"
    graphs.mkdir()
    (graphs / "rank0.1.pt.trace.json.gz").touch()
    (tmp_path / "step_000002_run_rank0.2.pt.trace.json.gz").touch()
    assert engine_folder.listed(tmp_path) == {"step_000002_run_rank0.2.pt.trace.json.gz"}
    assert engine_folder.holder(tmp_path, "step_000003_") == tmp_path


# The prefix of a capture's files in vLLM, which accepts up to 128 characters of few kinds.


TAKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Prefixes that vLLM 0.32 accepts. It raises ValueError for any other prefix."""
LONG = f"step_000002_{'run-of-a-scheduler-with-much-to-say.' * 5}"


def test_a_name_that_vllm_takes_stays_as_it_is() -> None:
    assert prefix_of("step_000002_0e6789d8_replica1") == "step_000002_0e6789d8_replica1"


@pytest.mark.parametrize("name", ["", "_x", "step_000002_a/b c", "Schritt ä", LONG])
def test_whatever_a_run_is_called_vllm_takes_the_prefix(name: str) -> None:
    assert TAKEN.fullmatch(prefix_of(name))
    assert len(prefix_of(name)) <= 100


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{LONG}_replica0", f"{LONG}_replica1"),
        (f"{LONG}1", f"{LONG}2"),
        ("step_000002_a/b", "step_000002_a-b"),
    ],
)
def test_two_captures_that_differ_anywhere_share_no_prefix(one: str, other: str) -> None:
    """vLLM appends `_` and further words to a prefix."""
    assert not f"{prefix_of(one)}_".startswith(f"{prefix_of(other)}_")
    assert not f"{prefix_of(other)}_".startswith(f"{prefix_of(one)}_")
