"""Rows that do not depend on each other, and the one gzip file that they are written to."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests.steps import MS
from packages.report.tests.traces import add_trace, event, kernel, op
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import remove_abandoned
from stepscope.testing.steps import StepFolder
from stepscope_report.timeline import Selection, bytes_to_read, merge_step
from stepscope_report.timeline.merge.mapping import Tracks
from stepscope_report.timeline.merge.write import TimelineFile
from stepscope_report.timeline.rows import Row


def step(tmp_path: Path) -> Path:
    """Four ranks: operators, kernels of two devices, counters, flows; no clock, damage, an odd name."""
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).close(100 * MS)
    for rank in range(4):
        actor = folder.process("actor", rank, host="host-b" if rank == 3 else "host-a")
        actor.span("update_actor", 2 * MS, 5 * MS)
        actor.close(100 * MS)
        events = [op("aten::mm", 1000 + rank, 5), kernel("gemm", 2000, 3), kernel("gemm", 2001, 3, device=1)]
        flow = {**event("ac2g", "ac2g", 2000, 0), "ph": "s", "id": 7}
        counters = [{**event("load", "c", 2000 + at, 0, pid), "ph": "C"} for at, pid in enumerate((1, 0, 9))]
        add_trace(folder, actor, [*events, flow, *counters, event("odd", "x", 3000, 1, 5, "stream 7")])
        add_trace(folder, actor, [op("aten::add", 4000, 5, tid=0)], name="more", baseTimeNanoseconds=None)
    path = folder.write()
    first, *_ = (path / "traces" / "actor").glob("more*.gz")
    os.link(first, os.fsencode(first.parent) + b"/no utf-8 \xff.json.gz")
    broken = sorted((path / "traces" / "actor").glob("trace*.gz"))[2]
    broken.write_bytes(broken.read_bytes()[:-30])
    return path


def lines(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


def test_two_merges_write_the_same_bytes(tmp_path: Path) -> None:
    path = step(tmp_path)
    read: list[int] = []
    first = merge_step(path, on_read=read.append)
    before = (path / "timeline.json.gz").read_bytes()
    assert sum(read) == bytes_to_read(path)
    assert merge_step(path) == first
    assert (path / "timeline.json.gz").read_bytes() == before


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_events_of_a_rows_traces_are_the_same_without_the_other_rows(tmp_path: Path, rank: int) -> None:
    path = step(tmp_path)
    merge_step(path)
    together = set(lines(path / "timeline.json.gz"))
    merge_step(path, selection=Selection(ranks=(range(rank, rank + 1),)), to=tmp_path / "alone.json.gz")
    alone = [line for line in lines(tmp_path / "alone.json.gz") if b"aten::" in line or b"gemm" in line]
    assert len(alone) > 2
    assert set(alone) <= together


def test_a_rows_counters_get_the_same_pids_whatever_other_rows_have() -> None:
    info = ProcessInfo(role="actor", rank=0, world_size=None, host="host-a", pid=1)
    rows = [Row(info=info, process=None, clock=None, pid=place, place=place) for place in (1, 2)]
    both = Tracks([1, 2])
    alone = [Tracks([1, 2]) for _ in rows]
    together = [[both.counters(row, str(pid)) for pid in range(2100)] for row in rows]
    assert together == [
        [tracks.counters(row, str(pid)) for pid in range(2100)]
        for tracks, row in zip(alone, rows, strict=True)
    ]
    assert max(map(max, together)) < 1 << 31


def test_a_folder_whose_name_is_no_utf_8_gets_its_timeline(tmp_path: Path) -> None:
    path = step(tmp_path)
    merge_step(path)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    merge_step(path, to=folder / "timeline.json.gz")
    assert lines(folder / "timeline.json.gz") == lines(path / "timeline.json.gz")


def test_a_pipe_or_a_link_at_the_timelines_place_is_replaced(tmp_path: Path) -> None:
    path = step(tmp_path)
    expected = merge_step(path)
    target = path / "timeline.json.gz"
    before = target.read_bytes()
    target.unlink()
    os.mkfifo(target)
    assert merge_step(path) == expected
    target.unlink()
    target.symlink_to("/proc/self/mem")
    assert merge_step(path) == expected
    assert target.read_bytes() == before
    assert not target.is_symlink()


def test_what_a_killed_merge_leaves_is_known_as_abandoned(tmp_path: Path) -> None:
    path = step(tmp_path)
    code = (
        "import os, signal, sys; from stepscope_report.timeline import merge_step\n"
        "from stepscope_report.timeline.merge.write import TimelineFile\n"
        "TimelineFile.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "merge_step(sys.argv[1])"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    left = set(path.glob(".timeline*"))
    assert len(left) == 1
    assert set(remove_abandoned(path)) == left


texts = st.lists(st.binary(min_size=1, max_size=400).map(lambda part: part * 40), max_size=4)


@given(st.lists(st.tuples(st.booleans(), texts), max_size=5))
def test_the_file_is_one_gzip_member_whenever_it_is_flushed(parts: list[tuple[bool, list[bytes]]]) -> None:
    sink = io.BytesIO()
    file = TimelineFile(sink, 7)
    for flush, batch in parts:
        for text in batch:
            file.events(text)
        if flush:
            assert file.flush() == len(sink.getvalue())
    file.finish({})
    member = zlib.decompressobj(31)
    content = member.decompress(sink.getvalue())
    assert member.eof
    assert not member.unused_data
    events = b",\n".join(text for _, batch in parts for text in batch)
    assert content.split(b"[\n", 1)[1] == events + b'\n],"stepscope":{}}\n'


@pytest.mark.parametrize("depth", [100, *range(930, 990), 5000])
def test_an_event_of_many_brackets_is_counted_where_it_cannot_be_read(tmp_path: Path, depth: int) -> None:
    made = StepFolder(tmp_path)
    made.process("trainer", owner=True).close(100_000_000)
    trace = add_trace(made, made.processes[0], [op("aten::mm", 1000, 5)])
    path = made.write()
    deep = b'"traceEvents": [{"ph": "X", "ts": 1e7, "args": {"x": %b%b}}, ' % (b"[" * depth, b"]" * depth)
    trace.write_bytes(gzip.compress(gzip.decompress(trace.read_bytes()).replace(b'"traceEvents": [', deep)))
    merged = merge_step(path)
    lost = sum(problem.events or 0 for problem in merged.problems)
    assert merged.events + lost == 2  # how deep a Python reads differs
    assert depth > 100 or lost == 0
