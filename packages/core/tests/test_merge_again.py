"""A merge of a step that has a timeline already: what has not changed is joined as it lies; no more."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.core.tests import test_reader_nsys as nsys
from packages.core.tests.test_merge_workers import ended, idle, started, step, text
from packages.core.tests.traces import add_trace, kernel, op, trace_text
from stepscope.cli import run
from stepscope.testing.steps import StepFolder
from stepscope.timeline import Merged, Selection, merge_step
from stepscope.timeline.merge import earlier
from stepscope.timeline.merge.earlier import Earlier
from stepscope.timeline.merge.write import EventsFile, Stored, TimelineFile, behind_events
from stepscope.timeline.readers.chrome import ChromeTrace

__all__ = ["idle"]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this moment count as old ones."""
    monkeypatch.setattr(earlier, "SETTLED_NS", 0)


def timeline(path: Path) -> Path:
    return path / "timeline.json.gz"


def events(path: Path) -> bytes:
    """And what stands in front of them."""
    return text(timeline(path)).partition(b'\n],"stepscope":')[0]


def anew(path: Path, **options: Any) -> tuple[Merged, bytes]:
    """As if there had been no timeline, which is there again then."""
    before = timeline(path).read_bytes()
    timeline(path).unlink()
    found = merge_step(path, **options), events(path)
    timeline(path).write_bytes(before)
    return found


def again(path: Path, **options: Any) -> tuple[int, Merged, bytes]:
    """(rows that were joined, what the merge says beside that, the events)."""
    merged = merge_step(path, **options)
    assert json.loads(text(timeline(path)))["stepscope"]["joined"] == merged.joined
    return merged.joined, msgspec.structs.replace(merged, joined=0), events(path)


def trace_of(path: Path, rank: int) -> Path:
    return sorted((path / "traces" / "actor").glob("trace*.gz"))[rank]


def test_a_second_merge_joins_what_the_first_one_wrote(tmp_path: Path) -> None:
    path = step(tmp_path)
    first = merge_step(path)
    assert first.joined == 0
    expected = (first, events(path))
    read: list[int] = []
    rows, *found = again(path, on_read=read.append)
    assert rows > 3
    assert tuple(found) == expected
    read_before: list[int] = []
    anew(path, on_read=read_before.append)
    assert sum(read) == sum(read_before)
    for _ in range(2):  # what was joined can be joined
        assert again(path) == (rows, *expected)


def test_a_late_trace_leaves_the_other_rows_as_they_are(tmp_path: Path) -> None:
    path = step(tmp_path)
    late = trace_of(path, 1)
    others = [each for each in late.parent.iterdir() if f"_{late.name.rsplit('_', 1)[-1]}" in each.name]
    assert late in others
    late.rename(tmp_path / late.name)
    merge_step(path)
    (tmp_path / late.name).rename(late)
    expected = anew(path)
    rows, *found = again(path)
    assert rows > 2
    assert tuple(found) == expected


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_row_whose_trace_has_changed_is_written_anew(tmp_path: Path, rank: int) -> None:
    path = step(tmp_path)
    merge_step(path)
    all_of = again(path)[0]
    changed = trace_of(path, rank)
    size, times = changed.stat().st_size, (changed.stat().st_atime_ns, changed.stat().st_mtime_ns)
    content = gzip.compress(trace_text([{"ph": "X", "pid": 1, "tid": 1, "ts": 5.0, "name": "other"}]))
    changed.write_bytes(content.ljust(size, b"\0"))
    os.utime(changed, ns=times)  # of the same size and time
    expected = anew(path)
    assert again(path) == (all_of - 1, *expected)
    assert b'"other"' in events(path)


def test_a_selection_joins_what_it_does_not_change(tmp_path: Path) -> None:
    path = step(tmp_path)
    merge_step(path)
    for selection, least in ((Selection(ranks=frozenset({0, 2})), 2), (Selection(from_ms=1, to_ms=50), 0)):
        expected = anew(path, selection=selection)
        rows, *found = again(path, selection=selection)
        assert tuple(found) == expected
        assert rows >= least if least else rows == 0
        merge_step(path)


def test_limits_other_formats_and_other_places(tmp_path: Path) -> None:
    path = step(tmp_path)
    merge_step(path)
    assert merge_step(path, selection=Selection(max_mb=1)).joined == 0
    assert merge_step(path).joined == 0  # what has a limit says nothing of rows
    expected = text(timeline(path))
    assert merge_step(path, to_format="perfetto").joined == 0
    merged = merge_step(path, to=tmp_path / "elsewhere.json.gz")
    assert merged.joined > 3
    assert (
        text(tmp_path / "elsewhere.json.gz").partition(b'"stepscope"')[0]
        == expected.partition(b'"stepscope"')[0]
    )


@pytest.mark.usefixtures("idle")
def test_what_workers_wrote_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "SETTLED_NS", 0)
    path = step(tmp_path)
    seen = started(monkeypatch, ended)
    expected = merge_step(path), events(path)
    assert len(seen) == 1
    rows, *found = again(path)
    assert rows > 3
    assert tuple(found) == expected


def test_files_that_may_still_change_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = step(tmp_path)
    monkeypatch.setattr(earlier, "SETTLED_NS", 3_600_000_000_000)
    merge_step(path)
    monkeypatch.setattr(earlier, "SETTLED_NS", 0)
    assert merge_step(path).joined == 0
    monkeypatch.setattr(earlier, "SETTLED_NS", 3_600_000_000_000)
    assert merge_step(path).joined == 0


@pytest.mark.parametrize("code", [None, "other"])
def test_another_stepscope_joins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    path = step(tmp_path)
    expected = merge_step(path), events(path)
    monkeypatch.setattr(earlier, "_code", lambda: code)
    assert again(path) == (0, *expected)


def test_a_row_that_a_reader_adds_to_is_written_anew(tmp_path: Path) -> None:
    made = StepFolder(tmp_path)
    trainer = made.process("trainer", owner=True)
    actor = made.process("actor", 0, pid=nsys.PID)
    for process in (trainer, actor):
        process.close(100_000_000)
        add_trace(made, process, [op("aten::mm", 1000, 5), kernel("gemm", 2000, 3)])
    nsys.merged(made, nsys.tables())
    path = made.layout.root
    expected = anew(path)
    assert again(path) == (1, *expected)


def test_the_command_says_what_was_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step(tmp_path)
    run(["merge", str(path)])
    assert "joined" not in capsys.readouterr().err
    run(["merge", str(path)])
    said = " ".join(capsys.readouterr().err.split())
    assert "processes have not changed since the last merge, and were joined as it wrote them" in said


def test_what_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = step(tmp_path)
    merge_step(path)
    expected = anew(path)
    timeline(path).unlink()
    trace, reading = trace_of(path, 1), ChromeTrace.texts

    def failing(self: ChromeTrace, *given: Any) -> Any:
        if self.path == trace:
            self.notes.file("cannot be read: Input/output error")
            return iter(())
        return reading(self, *given)

    with monkeypatch.context() as bad:
        bad.setattr(ChromeTrace, "texts", failing)
        assert any(problem.what.startswith("cannot be read") for problem in merge_step(path).problems)
    rows, *found = again(path)
    assert rows > 2
    assert tuple(found) == expected


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


def test_what_stands_in_the_way_is_no_timeline(tmp_path: Path) -> None:
    path = step(tmp_path)
    expected = merge_step(path), events(path)
    timeline(path).unlink()
    os.mkfifo(timeline(path))
    assert again(path) == (0, *expected)
    timeline(path).unlink()
    timeline(path).symlink_to("/proc/self/mem")  # opens, and cannot be read
    assert again(path) == (0, *expected)


def test_a_timeline_that_is_written_to_meanwhile_makes_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    merge_step(path)
    timeline(path).write_bytes(damaged(timeline(path).read_bytes())["a bit of a piece"])
    monkeypatch.setattr(Earlier, "_whole", lambda *_: True)  # it was when that was looked at
    before = sorted(path.iterdir())
    with pytest.raises(OSError, match="written to meanwhile"):
        merge_step(path)
    assert sorted(path.iterdir()) == before


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    stored = json.loads(gzip.decompress(content))["stepscopeRows"][0]["stored"]
    bit = stored["at"] + stored["size"] // 2
    return {
        "a bit of a piece": content[:bit] + bytes([content[bit] ^ 1]) + content[bit + 1 :],
        "cut off": content[:middle],
        "what is said of it": content[:24] + b"\0\0\0\0" + content[28:],
        "its end": content[:-40] + bytes(40),
        "the place of its end": content[:16] + b"\xff" * 8 + content[24:],
        "a place without an end": content[:16] + (100).to_bytes(8, "little") + content[24:],
        "of another writer": gzip.compress(gzip.decompress(content)),
        "of no one": b"no gzip",
        "empty": b"",
    }


DAMAGES = [
    "a bit of a piece",
    "cut off",
    "what is said of it",
    "its end",
    "the place of its end",
    "a place without an end",
    "of another writer",
    "of no one",
    "empty",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_nothing_is_taken_from_a_damaged_timeline(tmp_path: Path, how: str) -> None:
    path = step(tmp_path)
    expected = merge_step(path), events(path)
    all_of = again(path)[0]
    timeline(path).write_bytes(damaged(timeline(path).read_bytes())[how])
    rows, *found = again(path)
    assert tuple(found) == expected
    assert rows == (all_of - 1 if how == "a bit of a piece" else 0)
    gzip.decompress(timeline(path).read_bytes())  # with its checksum


def test_what_says_that_it_lies_elsewhere_is_not_believed(tmp_path: Path) -> None:
    path = step(tmp_path)
    expected = merge_step(path), events(path)
    content = timeline(path).read_bytes()
    said = json.loads(text(timeline(path)))["stepscopeRows"]
    assert len(said) > 3
    for change in ({"at": -5}, {"at": 1 << 62}, {"size": 1 << 62}, {"crc": 7}, {"at": "x"}):
        rows = [{**row, "stored": {**row["stored"], **change}} for row in said]
        behind = zlib.compressobj(wbits=-15)
        at = int.from_bytes(content[16:24], "little")
        tail = b'\n],"stepscope":{},"stepscopeRows":' + json.dumps(rows).encode() + b"}"
        crc = zlib.crc32(tail).to_bytes(4, "little")
        packed = behind.compress(tail) + behind.flush()
        timeline(path).write_bytes(content[:24] + crc + content[28:at] + packed)
        assert again(path) == (0, *expected)


texts = st.lists(st.binary(min_size=1, max_size=400).map(lambda some: some * 40), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["plain", "piece", "stored"]), texts), max_size=6))
def test_pieces_can_be_taken_into_another_timeline(parts: list[tuple[str, list[bytes]]]) -> None:
    def put(file: EventsFile, some: list[bytes]) -> None:
        for each in some:
            file.events(each)

    sink = io.BytesIO()
    whole = TimelineFile(sink, 7)
    stored: list[Stored | None] = []
    for how, some in parts:
        if how == "plain":
            put(whole, some)
            stored.append(None)
        elif how == "stored":
            stored.append(whole.stored(lambda some=some: put(whole, some))[1])  # type: ignore[misc]
        else:
            other = io.BytesIO()
            file = EventsFile(other)
            put(file, some)
            piece = file.piece()
            other.seek(0)
            stored.append(whole.append(piece, other))
    whole.rows.append("said")
    whole.finish({"a": 1})
    sink.seek(0)
    behind = behind_events(sink)
    assert behind is not None
    assert json.loads(behind) == {"stepscope": {"a": 1}, "stepscopeRows": ["said"]}

    joined = io.BytesIO()
    second = TimelineFile(joined, 7)
    for (_, some), where in zip(parts, stored, strict=True):
        if where is None or (where.follows and not second.follows):
            put(second, some)
        else:
            sink.seek(where.at)
            second.append(where.piece, sink, where.size, follows=where.follows)
    second.rows.append("said")
    second.finish({"a": 1})
    assert gzip.decompress(joined.getvalue()) == gzip.decompress(sink.getvalue())
