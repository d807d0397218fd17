"""Large merges with the help of other processes: the same timeline, and nothing left behind."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from packages.core.tests.traces import add_trace, event, kernel, op
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.temporary import remove_abandoned
from stepscope.testing.steps import StepFolder
from stepscope.timeline import Merged, Selection, merge_bytes, merge_step
from stepscope.timeline.merge import earlier, workers
from stepscope.timeline.merge.tracks import Tracks
from stepscope.timeline.merge.workers import Workers, workers_for
from stepscope.timeline.merge.write import EventsFile, TimelineFile
from stepscope.timeline.step.rows import Row

MS = 1_000_000
MB = 1_000_000


def step(tmp_path: Path) -> Path:
    """Four ranks: operators, kernels of two devices, counters, flows; no clock, damage, an odd name."""
    folder = StepFolder(tmp_path)
    folder.process("trainer", owner=True).close(100 * MS)
    for rank in range(4):
        actor = folder.process("actor", rank, host="host-b" if rank == 3 else "host-a")
        actor.span("update_policy", 2 * MS, 5 * MS)
        actor.close(100 * MS)
        events = [op("aten::mm", 1000 + rank, 5), kernel("gemm", 2000, 3), kernel("gemm", 2001, 3, device=1)]
        flow = {**event("ac2g", "ac2g", 2000, 0), "ph": "s", "id": 7}
        counters = [{**event("load", "c", 2000 + at, 0, pid), "ph": "C"} for at, pid in enumerate((1, 0, 9))]
        add_trace(folder, actor, [*events, flow, *counters, event("odd", "x", 3000, 1, 5, "stream 7")])
        add_trace(folder, actor, [op("aten::add", 4000, 5, tid=0)], name="more", baseTimeNanoseconds=None)
    path = folder.write()
    some, *_ = (path / "traces" / "actor").glob("more*.gz")
    os.link(some, os.fsencode(some.parent) + b"/no utf-8 \xff.json.gz")
    broken = sorted((path / "traces" / "actor").glob("trace*.gz"))[2]
    broken.write_bytes(broken.read_bytes()[:-30])
    return path


def text(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more cores than we need, and no merge too small for them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(workers, "WORTH", 1)
    monkeypatch.setattr(earlier, "SETTLED_NS", 1 << 62)  # all is done by each merge


def started(monkeypatch: pytest.MonkeyPatch, then: Callable[[Workers], None]) -> list[Workers]:
    """Does that when a merge has started its workers."""
    seen: list[Workers] = []
    start = Workers.start

    def wrapped(self: Workers, count: int) -> None:
        start(self, count)
        seen.append(self)
        then(self)

    monkeypatch.setattr(Workers, "start", wrapped)
    return seen


def ended(self: Workers) -> None:
    assert [child.wait() for child in self._running] == [0, 0]


def alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Merged, bytes]:
    with monkeypatch.context() as few:
        few.setattr(workers, "MOST", 0)
        return merge_step(path), text(path / "timeline.json.gz")


@pytest.mark.usefixtures("idle")
def test_workers_make_the_timeline_that_one_process_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)
    seen = started(monkeypatch, ended)
    read: list[int] = []
    merged = merge_step(path, on_read=read.append)
    assert len(seen) == 1
    assert (merged, text(path / "timeline.json.gz")) == expected
    assert sum(read) == merge_bytes(path)
    assert not list(path.glob(".timeline*"))


@pytest.mark.usefixtures("idle")
def test_what_a_worker_did_not_end_is_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)

    def killed(self: Workers) -> None:
        ended(self)
        (self._folder / "2.json").unlink()
        (self._folder / "3.deflate").write_bytes(b"half")
        (self._folder / "3.json").unlink()

    started(monkeypatch, killed)
    read: list[int] = []
    assert (merge_step(path, on_read=read.append), text(path / "timeline.json.gz")) == expected
    assert sum(read) == merge_bytes(path)


@pytest.mark.usefixtures("idle")
def test_a_machine_that_starts_no_process_merges_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert (merge_step(path), text(path / "timeline.json.gz")) == expected


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("name", "value"), [("executable", None), ("executable", ""), ("frozen", True)])
def test_what_is_no_interpreter_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)
    seen = started(monkeypatch, lambda _: None)
    monkeypatch.setattr(sys, name, value, raising=False)
    assert (merge_step(path), text(path / "timeline.json.gz")) == expected
    assert seen[0]._running == []


@pytest.mark.usefixtures("idle")
def test_workers_do_without_what_is_no_text_in_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)
    started(monkeypatch, ended)
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    assert (merge_step(path), text(path / "timeline.json.gz")) == expected


@pytest.mark.usefixtures("idle")
def test_a_folder_whose_name_is_no_utf_8_gets_its_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    expected = alone(path, monkeypatch)
    started(monkeypatch, ended)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    merged = merge_step(path, to=folder / "timeline.json.gz")
    assert (merged, text(folder / "timeline.json.gz")) == expected


@pytest.mark.usefixtures("idle")
def test_what_is_in_the_timeline_takes_no_room_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    left: dict[str, int] = {}

    def half_done(self: Workers) -> None:
        ended(self)
        (self._folder / "2.json").unlink()

    def closing_it(self: Workers) -> None:
        left.update((each.name, each.stat().st_size) for each in self._folder.glob("*.deflate"))
        close(self)

    started(monkeypatch, half_done)
    close = Workers.close
    monkeypatch.setattr(Workers, "close", closing_it)
    merge_step(path)
    assert len(left) > 3
    assert set(left.values()) == {0}


def test_what_a_killed_merge_leaves_is_known_as_abandoned(tmp_path: Path) -> None:
    path = step(tmp_path)
    code = (
        "import os, signal, sys; from stepscope.timeline import merge_step\n"
        "from stepscope.timeline.merge import merge, workers\n"
        "merge.idle_cores = lambda: 2; workers.WORTH = 1\n"
        "workers.Workers.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "merge_step(sys.argv[1])"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    left = set(path.glob(".timeline*"))
    assert len(left) == 2
    assert set(remove_abandoned(path)) == left


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


@pytest.mark.usefixtures("idle")
def test_an_interrupted_merge_leaves_no_worker_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    merge_step(path)
    before = text(path / "timeline.json.gz")

    def interrupted(self: Workers) -> None:
        raise KeyboardInterrupt

    seen = started(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_step(path)
    assert [child.returncode is None for child in seen[0]._running] == [False, False]
    assert text(path / "timeline.json.gz") == before
    assert not list(path.glob(".timeline*"))


def test_a_worker_ends_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Workers] = []

    def stranger(self: Workers, count: int) -> None:
        self._given = msgspec.structs.replace(self._given, parent=1)
        start(self, count)
        assert [child.wait() for child in self._running] == [1, 1]
        assert not list(self._folder.glob("?.json"))
        seen.append(self)

    start = Workers.start
    path = step(tmp_path)
    monkeypatch.setattr(Workers, "start", stranger)
    monkeypatch.setattr("stepscope.timeline.merge.merge.idle_cores", lambda: 2)
    monkeypatch.setattr(workers, "WORTH", 1)
    assert merge_step(path).events > 20
    assert seen


@pytest.mark.usefixtures("idle")
def test_a_limit_on_size_and_perfettos_format_take_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    seen = started(monkeypatch, ended)
    merge_step(path, selection=Selection(max_mb=1))
    merge_step(path, to_format="perfetto")
    assert not seen


@pytest.mark.parametrize(
    ("sizes", "cores", "expected"),
    [
        ([50 * MB], 3, 0),
        ([1 * MB] * 8, 3, 0),
        ([5 * MB] * 8, 0, 0),
        ([5 * MB] * 8, 1, 1),
        ([5 * MB] * 8, 15, 2),
        ([9 * MB, 9 * MB], 15, 1),
        ([], 15, 0),
    ],
)
def test_workers_come_where_rows_wait_and_cores_idle(sizes: list[int], cores: int, expected: int) -> None:
    assert workers_for(sizes, cores) == expected


texts = st.lists(st.binary(min_size=1, max_size=400).map(lambda some: some * 40), max_size=4)


@given(st.lists(st.tuples(st.booleans(), texts), max_size=5))
def test_pieces_of_several_make_one_gzip_member(parts: list[tuple[bool, list[bytes]]]) -> None:
    sink = io.BytesIO()
    whole = TimelineFile(sink, 7)
    for apart, some in parts:
        if not apart:
            for each in some:
                whole.events(each)
            continue
        other = io.BytesIO()
        file = EventsFile(other)
        for each in some:
            file.events(each)
        piece = file.piece()
        other.seek(0)
        whole.append(piece, other)
    whole.finish({})
    given = b",\n".join(each for _, some in parts for each in some)
    member = zlib.decompressobj(31)
    found = member.decompress(sink.getvalue())
    assert member.eof
    assert not member.unused_data
    assert found.split(b"[\n", 1)[1] == given + b'\n],"stepscope":{},"stepscopeRows":[]}\n'
    assert isal_zlib.decompress(sink.getvalue(), 31) == gzip.decompress(sink.getvalue()) == found
