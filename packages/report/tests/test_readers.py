"""Files that packages' readers bring into a timeline, and readers that do not work.

Above 400 lines in one file, because all of it is told with the same reader of lines.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.steps import MS, timeline_of
from packages.report.tests.traces import put
from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report.testing import ReaderConformance
from stepscope_report.timeline import Merged, Selection, load_step, load_traces, merge_step
from stepscope_report.timeline.activity.traces import place_traces, read_all
from stepscope_report.timeline.clocks import NOT_NEAR
from stepscope_report.timeline.readers import (
    Claim,
    Counter,
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
from stepscope_report.timeline.readers.contract import GROUP, Readers
from stepscope_report.timeline.trace_files import find_traces

Json = dict[str, Any]
STREAM = Track(track=7, name="Stream 7", sort=3)
TAGGED: dict[str, type[Event]] = {kind.__name__: kind for kind in (Track, Slice, Instant, Counter, Flow)}


def line(event: Event) -> bytes:
    return msgspec.json.encode([type(event).__name__, event]) + b"\n"


class Lines:
    """A recording of one JSON line for each event, behind a line with its origin."""

    def __init__(self, path: Path, notes: Notes) -> None:
        first, *self._rest = path.read_bytes().split(b"\n")
        try:
            self.origin = msgspec.json.decode(first, type=Origin)
        except msgspec.DecodeError as error:
            raise RecordError(f"no origin in its first line ({error})") from error
        self._notes = notes

    def events(self) -> Iterator[Event]:
        for text in self._rest[:-1]:
            kind, fields = msgspec.json.decode(text, type=tuple[str, msgspec.Raw])
            yield msgspec.json.decode(fields, type=TAGGED[kind])
        if self._rest[-1:] != [b""]:
            self._notes.file("cut off: its last line does not end")

    def close(self) -> None:
        pass


class LinesReader:
    name = "lines"

    def claims(self, file: FoundFile) -> Claim | None:
        return Claim() if file.path.suffix == ".lines" else None

    def open(self, file: FoundFile, notes: Notes) -> Lines:
        return Lines(file.path, notes)


def slices(*pairs: tuple[str, int], track: int = 7) -> list[Event]:
    return [Slice(track=track, name=name, start_ns=OPENED_NS + at, dur_ns=1500) for name, at in pairs]


class TestLinesReader(ReaderConformance):
    @pytest.fixture
    def reader(self) -> Reader:
        return LinesReader()

    def write(self, folder: Path) -> Path:
        path = folder / "t.lines"
        events = [STREAM, *slices(("a", 5), ("b", 9))]
        path.write_bytes(msgspec.json.encode(Origin(clock="realtime")) + b"\n" + b"".join(map(line, events)))
        return path


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register readers under `stepscope.readers`, by name: as if packages had brought them."""

    def registered(**readers: object) -> None:
        class Registered(EntryPoint):
            def load(self) -> Any:
                made = readers[self.name]
                if isinstance(made, Exception):
                    raise made
                return lambda: made

        points = [
            Registered(name=name, value=f"{name}:Reader", group="stepscope.readers") for name in readers
        ]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)

    return registered


@pytest.fixture
def folder(tmp_path: Path, install: Install) -> StepFolder:
    """Return a trainer and an actor on one host, for 100 ms; and a reader of lines."""
    install(lines=LinesReader())
    made = StepFolder(tmp_path)
    for process in (made.process("trainer", owner=True), made.process("actor", 0)):
        process.close(100 * MS)
    return made


def actor(folder: StepFolder) -> FakeProcess:
    return folder.processes[1]


def recorded(
    folder: StepFolder,
    events: list[Event],
    origin: Origin | None = None,
    *,
    name: str = "t.lines",
    kind: str = "lines",
    process: FakeProcess | None = None,
    anchor: ClockAnchor | None = None,
    content: bytes | None = None,
) -> Path:
    """Return a file of lines that the actor recorded."""
    head = msgspec.json.encode(origin or Origin(clock="realtime")) + b"\n"
    text = head + b"".join(map(line, events)) if content is None else content
    by, sidecar = process or actor(folder), {"opened": anchor}
    return put(folder, f"traces/actor/{name}", by, text, sidecar=sidecar, kind=kind, tool="t", role="actor")


def merged(folder: StepFolder, **selection: Any) -> tuple[Merged, list[Json]]:
    path = folder.write()
    result = merge_step(path, selection=Selection(**selection))
    events = timeline_of(path)["traceEvents"]
    return result, [event for event in events if event.get("cat") != "critical path"]


def at_ns(result: Merged, event: Json) -> int:
    """Since the opening."""
    return int(Decimal(event["ts"]) * 1000) + result.base_ns - OPENED_NS


def of(events: list[Json], *phases: str) -> list[Json]:
    return [event for event in events if event["ph"] in phases]


def tracks(events: list[Json]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}


def what(result: Merged) -> list[str]:
    return [problem.what for problem in result.problems]


def test_what_a_reader_gives_stands_in_the_row_of_its_process_at_its_time(folder: StepFolder) -> None:
    actor(folder).span("update", 0, 9 * MS)
    events: list[Event] = [
        STREAM,
        Slice(
            track=7, name="gemm", start_ns=OPENED_NS + MS + 1, dur_ns=1501, category="kernel", args={"n": 1}
        ),
        Instant(track=7, name="mark", at_ns=OPENED_NS + 2 * MS),
        Counter(track=7, name="HBM", at_ns=OPENED_NS + 3 * MS, values={"bytes": 5}),
    ]
    recorded(folder, events)
    result, shown = merged(folder)
    assert result.problems == ()
    update, gemm = of(shown, "X")
    assert (gemm["name"], gemm["cat"], gemm["args"], gemm["dur"]) == (
        "gemm", "kernel", {"n": 1}, Decimal("1.501"),
    )  # fmt: skip
    assert gemm["pid"] == update["pid"]
    assert tracks(shown)[gemm["tid"]] == "Stream 7"
    (mark,), (counter,) = of(shown, "i"), of(shown, "C")
    assert [at_ns(result, e) for e in (gemm, mark, counter)] == [MS + 1, 2 * MS, 3 * MS]
    assert (counter["name"], counter["args"]) == ("HBM", {"bytes": 5})
    assert [(file.file, file.events) for file in result.files] == [("traces/actor/t.lines", 3)]


def test_flow_ids_of_any_size_join_their_two_ends_and_stay_apart_between_files(folder: StepFolder) -> None:
    for name in ("a.lines", "b.lines"):
        ends = [(1 << 60, "start"), (1 << 60, "end"), ((1 << 60) + 1, "start"), ("HostToDevice1", "start")]
        flows = [Flow(track=7, at_ns=OPENED_NS + MS, id=flow, point=point) for flow, point in ends]  # type: ignore[arg-type] # literals in a list
        recorded(folder, [STREAM, *slices(("gemm", MS)), *flows], name=name)
    result, events = merged(folder)
    assert result.problems == ()
    for phase, count in (("s", 6), ("f", 2)):
        ids = [event["id"] for event in of(events, phase)]
        assert len(set(ids)) == count
        assert all(0 < number < 1 << 53 for number in ids)
    assert {e["id"] for e in of(events, "f")} < {e["id"] for e in of(events, "s")}


def test_slices_that_overlap_are_drawn_as_several_lines(folder: StepFolder) -> None:
    track = Track(track=1, name="NVTX", overlapping=True)
    times = [(0, 10), (5, 15), (7, 8), (10, 12)]
    events = [Slice(track=1, name="r", start_ns=OPENED_NS + s, dur_ns=e - s) for s, e in times]
    recorded(folder, [track, *events])
    _, shown = merged(folder)
    lines = [tracks(shown)[event["tid"]] for event in of(shown, "X")]
    assert lines == ["NVTX", "NVTX (2)", "NVTX", "NVTX"]


@pytest.mark.parametrize("clock", ["monotonic", "monotonic_raw"])
def test_times_of_another_clock_are_placed_by_the_sidecars_anchor(folder: StepFolder, clock: str) -> None:
    anchor = ClockAnchor(wall_ns=OPENED_NS, mono_ns=1000, raw_ns=900)
    origin = msgspec.convert({"clock": clock}, Origin)
    start_ns = (1000 if clock == "monotonic" else 900) + MS
    recorded(folder, [STREAM, Slice(track=7, name="k", start_ns=start_ns, dur_ns=1)], origin, anchor=anchor)
    result, events = merged(folder)
    (event,) = of(events, "X")
    assert at_ns(result, event) == MS
    assert result.problems == ()


def test_a_recording_whose_clock_nobody_knows_is_unaligned_with_its_reason(folder: StepFolder) -> None:
    recorded(folder, [STREAM, *slices(("k", 5))], Origin(clock="unknown", why="no session start"))
    recorded(folder, [STREAM, *slices(("k", 5))], Origin(clock="monotonic_raw"), name="u.lines")
    result, _ = merged(folder)
    reasons = sorted(str(row.reason) for row in result.rows if row.alignment == "unaligned")
    raw, missing = map(str, reasons)
    assert "CLOCK_MONOTONIC_RAW" in raw
    assert missing == "no session start"


def test_every_process_in_a_recording_has_its_own_row(folder: StepFolder) -> None:
    other = folder.process("actor", 1)
    other.close(100 * MS)
    pids = (actor(folder).info.pid, other.info.pid, 77)
    declared = [Track(track=n, name="stream", pid=pid) for n, pid in enumerate(pids)]
    drawn = [event for n in range(3) for event in slices((f"k{n}", MS), track=n)]
    recorded(folder, [*declared, *drawn], Origin(clock="realtime", processes=pids))
    result, events = merged(folder)
    names = {row.pid: row.name for row in result.rows}
    shown = {event["name"]: names[event["pid"]] for event in of(events, "X")}
    assert shown == {"k0": "actor 0", "k1": "actor 1", "k2": "actor"}
    assert [file.events for file in result.files] == [1, 1, 1]
    assert {event["name"] for event in of(merged(folder, ranks=frozenset({1}))[1], "X")} == {"k1", "k2"}


def test_from_to_and_the_limit_on_size_hold_for_readers_too(folder: StepFolder) -> None:
    recorded(folder, [STREAM, *slices(("early", MS), ("in", 5 * MS), ("late", 9 * MS))])
    result, events = merged(folder, from_ms=4, to_ms=6)
    assert [event["name"] for event in of(events, "X")] == ["in"]
    assert [what.partition(": ")[2][:2] for what in result.left_out] == ["2 "]
    many = [(f"k{at * 7919 % 100_003}", at * 1000) for at in range(60_000)]
    recorded(folder, [STREAM, *slices(*many)])
    result, _ = merged(folder, max_mb=0.3)
    assert (folder.layout.timeline).stat().st_size <= 300_000
    assert 1000 < result.events < 60_000
    assert "for its size" in result.left_out[0]


def test_what_cannot_be_shown_is_counted(folder: StepFolder) -> None:
    far = Slice(track=7, name="then", start_ns=1, dur_ns=1)
    recorded(folder, [STREAM, far, *slices(("gemm", MS))])
    result, _ = merged(folder)
    assert [(p.file, p.what, p.events) for p in result.problems] == [("traces/actor/t.lines", NOT_NEAR, 1)]


class Raising(LinesReader):
    """Fails at one point of its life."""

    def __init__(self, when: str) -> None:
        self.when = when

    def claims(self, file: FoundFile) -> Claim | None:
        if self.when == "claims":
            raise OSError("no luck")
        return super().claims(file)

    def open(self, file: FoundFile, notes: Notes) -> Lines:
        if self.when == "open":
            raise ZeroDivisionError
        return Faulty(file.path, notes, self.when)


class Faulty(Lines):
    def __init__(self, path: Path, notes: Notes, when: str) -> None:
        super().__init__(path, notes)
        self.when = when

    def events(self) -> Iterator[Event]:
        yield from super().events()
        wrong: dict[str, Any] = {
            "undeclared": slices(("k", 1), track=99)[0],
            "float": Slice(track=7, name="k", start_ns=0.5, dur_ns=1),  # type: ignore[arg-type] # the fault
            "process": Track(track=8, name="k", pid=3),
            "type": {"ph": "X"},
        }
        if self.when in wrong:
            yield wrong[self.when]
        raise ValueError("bad row 3")


@pytest.mark.parametrize(
    ("when", "message", "shown"),
    [
        ("claims", "reader 'lines' failed when asked about it: OSError: no luck", []),
        ("open", "left out: reader 'lines' failed: ZeroDivisionError", []),
        ("events", "reader 'lines' failed: ValueError: bad row 3; what it gave before is used", ["gemm"]),
        ("undeclared", "reader 'lines' failed: KeyError: 99", ["gemm"]),
        ("float", "reader 'lines' failed: ValueError: times are ints in ns", ["gemm"]),
        ("process", "reader 'lines' failed: ValueError: track 'k' is of process 3", ["gemm"]),
        ("type", "reader 'lines' failed: AttributeError", ["gemm"]),
    ],
)
def test_a_reader_that_fails_costs_its_file_and_is_named(
    folder: StepFolder, install: Install, when: str, message: str, shown: list[str]
) -> None:
    install(lines=Raising(when))
    actor(folder).span("update", 0, 9 * MS)
    recorded(folder, [STREAM, *slices(("gemm", MS))])
    result, events = merged(folder)
    (problem,) = result.problems
    assert problem.file == "traces/actor/t.lines"
    assert problem.what.startswith(message)
    assert [event["name"] for event in of(events, "X")] == ["update", *shown]
    if when not in ("open", "float", "type"):  # a report says it otherwise, or can use these
        timeline = load_step(folder.layout.root)
        (problem,) = (*timeline.problems, *load_traces(folder.layout.root, timeline).problems)
        assert problem.what.startswith(message)


def test_a_recording_that_was_read_and_cannot_be_placed_is_named(
    folder: StepFolder, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lines=LinesReader())
    actor(folder).span("update", 0, 9 * MS)
    recorded(folder, [STREAM, *slices(("gemm", MS))])
    path = folder.write()
    timeline = load_step(path)
    files = find_traces(folder.layout, timeline.run_id)
    contents = read_all(files.traces)
    (folder.layout.traces / "actor" / "t.lines").unlink()
    (problem,) = place_traces(files, contents, timeline).problems
    assert (problem.file, problem.what[:9]) == ("traces/actor/t.lines", "left out:")


@pytest.mark.parametrize(
    "broken", [ImportError("no module named acl"), object()], ids=["import", "no reader"]
)
def test_a_reader_that_cannot_be_loaded_is_named_and_the_others_work(
    folder: StepFolder, install: Install, broken: object
) -> None:
    install(lines=LinesReader(), broken=broken)
    recorded(folder, [STREAM, *slices(("gemm", MS))])
    result, events = merged(folder)
    assert len(of(events, "X")) == 1
    (problem,) = result.problems
    assert problem.file == "stepscope.readers: broken"
    assert "named acl" in problem.what or "lacks claims, open" in problem.what


def test_a_file_that_its_reader_refuses_is_left_out_with_the_reason(folder: StepFolder) -> None:
    recorded(folder, [], content=b"[]")
    result, _ = merged(folder)
    assert "no origin" in what(result)[0]


class Folder(LinesReader):
    """Knows a folder of files, of which one is a trace."""

    def claims(self, file: FoundFile) -> Claim | None:
        if file.kind != "folder":
            return None
        if file.path.suffix == ".lines":
            return Claim()
        why = "export it as lines" if file.path.suffix == ".db" else None
        return Claim(read=False, why=why)


def test_a_sidecar_of_a_folder_speaks_for_all_files_in_it(folder: StepFolder, install: Install) -> None:
    install(folder=Folder())
    made = recorded(folder, [STREAM, *slices(("gemm", MS))], name="out", kind="folder")
    content = made.read_bytes()
    made.unlink()
    (made / "deep").mkdir(parents=True)
    for name in ("deep/t.lines", "deep/info.json", "big.db"):
        (made / name).write_bytes(content)
    result, events = merged(folder)
    assert [event["name"] for event in of(events, "X")] == ["gemm"]
    assert result.problems == ()
    assert [Path(what.partition(": ")[0]).name for what in result.left_out] == ["big.db"]
    assert [row.name for row in result.rows] == ["actor 0"]


def test_the_sidecar_of_what_a_file_was_made_from_speaks_for_it(folder: StepFolder) -> None:
    made = recorded(folder, [STREAM, *slices(("gemm", MS))], name="t.raw", kind="raw")
    made.with_suffix(".lines").write_bytes(made.read_bytes())
    result, _ = merged(folder)
    assert [row.name for row in result.rows] == ["actor 0"]
    assert [what.partition(": ")[0] for what in result.left_out] == ["traces/actor/t.raw"]
    assert result.problems == ()


def test_a_reader_interrupted_by_the_user_interrupts_the_merge(folder: StepFolder, install: Install) -> None:
    class Interrupted(LinesReader):
        def open(self, file: FoundFile, notes: Notes) -> Lines:
            raise KeyboardInterrupt

    install(lines=Interrupted())
    recorded(folder, [])
    with pytest.raises(KeyboardInterrupt):
        merged(folder)


def test_the_processes_of_one_unaligned_recording_keep_their_times_to_each_other(folder: StepFolder) -> None:
    pids = (actor(folder).info.pid, 77)
    declared = [Track(track=n, name="stream", pid=pid) for n, pid in enumerate(pids)]
    drawn = [Slice(track=n, name=f"k{n}", start_ns=1_000_000_000 - n * 400 * MS, dur_ns=1) for n in range(2)]
    recorded(folder, [*declared, *drawn], Origin(clock="unknown", processes=pids))
    result, events = merged(folder)
    first, second = of(events, "X")
    assert at_ns(result, first) - at_ns(result, second) == 400 * MS
    assert len({row.shift_ns for row in result.rows}) == 1


def test_a_reader_is_found_when_its_package_comes_and_gone_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    days = itertools.count(1)

    def missed() -> list[str]:
        """The readers that are registered, and cannot be imported. What comes next comes on another day."""
        files = [problem.file for problem in Readers().problems]
        os.utime(site, (day := next(days) * 86_400, day))
        return files

    assert missed() == []
    package = site / "some_reader-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: some-reader\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\nlines = some_reader_that_is_not_there:Lines\n")
    assert missed() == [f"{GROUP}: lines"]
    shutil.rmtree(package)
    assert missed() == []
