"""Tests of the names and contents of SGLang's files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from fake_sglang import trace

from stepscope_sglang._capture.publishing import rank_of
from stepscope_sglang._driving.target import EngineFacts, facts_of
from stepscope_sglang._files.capture_folder import Content, TraceName, parse_name, read

COMPLETE = Content(complete=True)
EVERY = {"tp": 3, "dp": 1, "pp": 2, "ep": 3}


def an_engine(**settings: object) -> EngineFacts:
    return facts_of({"device": "cuda", **settings}, version="0.5.23", options=frozenset())


def named(**at: int) -> TraceName:
    return TraceName(kind="torch_trace", topology=at, stage=None)


@pytest.mark.parametrize(
    ("name", "kind", "topology", "stage"),
    [
        ("1795301144.66-TP-0.trace.json.gz", "torch_trace", {"tp": 0}, None),
        (
            "a-1-TP-3-DP-1-PP-2-EP-3-EXTEND.trace.json.gz",
            "torch_trace",
            {"tp": 3, "dp": 1, "pp": 2, "ep": 3},
            "prefill",
        ),
        ("1-TP-12-DECODE.trace.json.gz", "torch_trace", {"tp": 12}, "decode"),
        ("run-TP-9-of-mine-TP-1.trace.json.gz", "torch_trace", {"tp": 1}, None),
        ("1-TP-0-decode.trace.json.gz", "torch_trace", {"tp": 0}, "decode"),
        ("1-TP-0-memory-EXTEND.pickle", "cuda_memory_snapshot", {"tp": 0}, "prefill"),
        ("rpd-1.5-TP-2.trace.json.gz", "torch_trace", {"tp": 2}, None),
        ("merged-run-7.trace.json.gz", "merged_trace", {}, None),
    ],
)
def test_a_name_says_the_place_and_the_stage(
    name: str, kind: str, topology: dict[str, int], stage: str | None
) -> None:
    facts = parse_name(name)
    assert facts is not None
    assert (facts.kind, facts.topology, facts.stage) == (kind, topology, stage)


@pytest.mark.parametrize("name", ["server.log", "1.trace.json.gz", "TP-0.json", "probe"])
def test_other_files_are_not_ours(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("engine", "at", "replica", "rank"),
    [
        ({}, {"tp": 0}, 0, 0),
        ({}, {"tp": 0}, 3, 3),
        ({"tp_size": 4}, {"tp": 2}, 1, 6),
        ({"tp_size": 2, "pp_size": 2}, {"tp": 1, "pp": 1}, 0, 3),
        ({"tp_size": 2, "pp_size": 2}, {"tp": 1}, 0, None),
        ({"tp_size": 2, "dp_size": 2}, {"tp": 1, "dp": 1}, 1, 7),
        ({"tp_size": 2, "dp_size": 2}, {"tp": 1}, 0, None),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, {"tp": 3, "dp": 1}, 1, 7),
        ({"tp_size": 4, "ep_size": 4}, {"tp": 3, "ep": 3}, 0, 3),
        ({"tp_size": 2}, {"tp": 2}, 0, None),
        ({}, {}, 0, None),
    ],
)
def test_a_rank_is_known_or_none(
    engine: dict[str, object], at: dict[str, int], replica: int, rank: int | None
) -> None:
    assert rank_of(named(**at), COMPLETE, an_engine(**engine), replica) == rank


def test_a_name_and_a_content_that_disagree_say_nothing() -> None:
    content = Content(complete=True, rank=0)
    assert rank_of(named(tp=1), content, an_engine(tp_size=2), 0) is None


def test_a_trace_says_its_rank_its_process_and_its_forward_passes(tmp_path: Path) -> None:
    file = trace("x-TP-0.trace.json.gz", tmp_path, modes={"EXTEND": 2, "DECODE": 5})
    content = read(file)
    wanted = Content(complete=True, rank=0, pid=4711, prefills=2, decodes=5, window=content.window)
    assert content == wanted
    assert content.window is not None


def test_passes_are_counted_once_wherever_a_block_ends(tmp_path: Path) -> None:
    file = trace("x-TP-0.trace.json.gz", tmp_path, modes={"DECODE": 60_000})
    assert read(file).decodes == 60_000


@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, -1])
def test_a_trace_that_is_cut_off_is_not_complete(tmp_path: Path, keep: float) -> None:
    file = trace("x-TP-0.trace.json.gz", tmp_path, modes={"DECODE": 1000})
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep) if 0 < keep < 1 else int(keep)])
    assert not read(file).complete


def test_what_is_no_trace_is_not_complete(tmp_path: Path) -> None:
    file = tmp_path / "x-TP-0.trace.json.gz"
    file.write_bytes(b"no gzip at all")
    assert not read(file).complete


@pytest.mark.parametrize("before", [0, *range((1 << 20) - 420, (1 << 20) + 20, 11)])
def test_a_pass_counts_once_although_a_gpus_trace_has_it_twice(tmp_path: Path, before: int) -> None:
    """The file is read in chunks, and a chunk may end anywhere in an event."""
    names = ["step[EXTEND bs=4 toks=32]", "step[DECODE bs=4]", "step[DECODE bs=3]", "step[IDLE bs=0]"]
    events = ", ".join(
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}}'
        for name in names
        for cat in ("user_annotation", "gpu_user_annotation")
    )
    path = tmp_path / "run-TP-0.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * before + events.encode() + b"]}", 1))
    content = read(path)
    assert (content.complete, content.prefills, content.decodes) == (True, 1, 2)
