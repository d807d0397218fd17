"""Timelines in Perfetto's format, read back by its own definitions, and by the rules of its trace processor:
an end ends what began last on its track, and packets count in the order of their times, then of the file."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope.timeline import Selection, merge_step
from stepscope.timeline.perfetto import spill
from stepscope.timeline.perfetto.write import PerfettoFile

MS = 1_000_000
BASE_NS = OPENED_NS - 3600 * 1000 * MS
Event = dict[str, Any]


class Shown(NamedTuple):
    """A slice, or an instant of no duration, as the viewer would have it."""

    process: str
    track: str
    name: str
    category: str
    start_ns: int
    dur_ns: int
    args: str


class Read:
    """A trace, read back."""

    def __init__(self, content: bytes) -> None:
        self.trace: Any = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2").Trace()
        self.trace.ParseFromString(content)
        self.packets: list[Any] = list(self.trace.packet)
        self.descriptors = {
            p.track_descriptor.uuid: p.track_descriptor
            for p in self.packets
            if p.HasField("track_descriptor")
        }
        self.names: dict[str, dict[int, str]] = defaultdict(dict)
        for packet in self.packets:
            for kind in ("event_names", "event_categories", "debug_annotation_names"):
                for entry in getattr(packet.interned_data, kind):
                    self.names[kind][entry.iid] = entry.name
        self.slices: list[Shown] = []
        self.instants: list[Shown] = []
        self.counters: list[tuple[str, str, int, float]] = []
        self.arrows: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.unended = 0
        self._follow()

    def _follow(self) -> None:
        events = [p for p in self.packets if p.HasField("track_event")]
        assert [p.timestamp for p in events] == sorted(p.timestamp for p in events)
        open_slices: dict[int, list[Any]] = defaultdict(list)
        for packet in events:
            event = packet.track_event
            assert packet.trusted_packet_sequence_id == 1
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                self.arrows[flow].append((packet.timestamp, self._name(event)))
            if event.type == 1:
                open_slices[event.track_uuid].append(packet)
            elif event.type == 2:
                begun = open_slices[event.track_uuid].pop()
                self.slices.append(self._shown(begun, packet.timestamp - begun.timestamp))
            elif event.type == 3:
                self.instants.append(self._shown(packet, 0))
            else:
                field = event.WhichOneof("counter_value_field")
                process, track = self._where(event.track_uuid)
                self.counters.append((process, track, packet.timestamp, getattr(event, field)))
        self.unended = sum(map(len, open_slices.values()))

    def _shown(self, packet: Any, dur_ns: int) -> Shown:
        event = packet.track_event
        process, track = self._where(event.track_uuid)
        categories = [self.names["event_categories"][iid] for iid in event.category_iids]
        args = json.dumps({self._word(a): self._value(a) for a in event.debug_annotations}, sort_keys=True)
        return Shown(process, track, self._name(event), ",".join(categories), packet.timestamp, dur_ns, args)

    def _where(self, uuid: int) -> tuple[str, str]:
        """(process, track). A lane counts as the track that it is below."""
        found = self.descriptors[uuid]
        if found.HasField("thread"):
            return self.descriptors[found.thread.pid].process.process_name, found.thread.thread_name
        if found.HasField("process"):
            return found.process.process_name, ""
        above = self.descriptors[found.parent_uuid]
        if above.HasField("process"):
            return above.process.process_name, found.name
        process, track = self._where(found.parent_uuid)
        assert found.name.startswith(f"{track} (overlapping ")
        return process, track

    def _name(self, event: Any) -> str:
        return self.names["event_names"][event.name_iid] if event.name_iid else str(event.name)

    def _word(self, annotation: Any) -> str:
        return self.names["debug_annotation_names"][annotation.name_iid]

    def _value(self, annotation: Any) -> Any:
        if annotation.dict_entries:
            return {self._word(each): self._value(each) for each in annotation.dict_entries}
        if annotation.array_values:
            return [self._value(each) for each in annotation.array_values]
        field = annotation.WhichOneof("value")
        return None if field is None else getattr(annotation, field)


def written(batches: list[list[Event]], *, folder: Path) -> Read:
    sink = BytesIO()
    file = PerfettoFile(sink, BASE_NS, folder, compress=False)
    for batch in batches:
        file.objects(batch)
    file.finish({"format": 1})
    file.close()
    return Read(sink.getvalue())


def us(ns: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def slice_of(start: int, dur: int, **more: Any) -> Event:
    return {"ph": "X", "name": "k", "pid": 1, "tid": 5, "ts": us(start), "dur": us(dur), **more}


def meta(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def times(read: Read) -> list[tuple[str, int, int]]:
    return sorted((s.name, s.start_ns, s.dur_ns) for s in read.slices)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 12)), max_size=30))
@settings(deadline=None)
def test_every_slice_keeps_its_start_and_duration_however_they_overlap(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[int, int, int]]
) -> None:
    events = [
        slice_of(start, dur, tid=tid, name=f"{number}") for number, (tid, start, dur) in enumerate(found)
    ]
    read = written([events], folder=tmp_path_factory.getbasetemp())
    assert times(read) == sorted((f"{n}", start, dur) for n, (_, start, dur) in enumerate(found))
    assert read.unended == 0


def test_runs_on_the_disk_are_merged_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_RUN", 7)
    monkeypatch.setattr(spill, "_BLOCK", 2)
    wanted = [(f"{number}", (number * 7919) % 101, number % 5) for number in range(100)]
    read = written([[slice_of(s, d, name=n, tid=int(n)) for n, s, d in wanted]], folder=tmp_path)
    assert times(read) == sorted(wanted)
    assert list(tmp_path.iterdir()) == []


def test_processes_and_threads_have_their_names_their_places_and_labels(tmp_path: Path) -> None:
    events = [
        slice_of(1, 1),
        meta("process_name", 1, 0, name="actor 0"),
        meta("process_sort_index", 1, 0, sort_index=10),
        meta("process_labels", 1, 0, labels="host-a, pid 7"),
        meta("thread_name", 1, 5, name="spans"),
        meta("thread_sort_index", 1, 5, sort_index=-1_000_000),
    ]
    read = written([events], folder=tmp_path)
    process, thread = (read.descriptors[uuid] for uuid in (1, 1 << 32))
    assert (process.process.pid, process.process.process_name) == (1, "actor 0")
    assert list(process.process.process_labels) == ["host-a, pid 7"]
    assert process.process.legacy_sort_index == process.sibling_order_rank == 10
    assert (thread.thread.pid, thread.thread.tid, thread.thread.thread_name) == (1, 5, "spans")
    assert thread.thread.legacy_sort_index == thread.sibling_order_rank == -1_000_000
    assert read.descriptors[0].process_ordering == read.descriptors[0].thread_ordering == 1


def test_arguments_of_all_types_are_kept(tmp_path: Path) -> None:
    args = {
        "text": "é", "whole": -5, "large": 1 << 63, "huge": str(1 << 70), "part": 0.1, "yes": True,
        "list": [1, [2], "x"], "object": {"a": {"b": 1}}, "nothing": None,
    }  # fmt: skip
    read = written([[slice_of(1, 1, args=args, cat="cpu_op")]], folder=tmp_path)
    (shown,) = read.slices
    assert shown.category == "cpu_op"
    assert json.loads(shown.args) == {**args, "nothing": "null"}


def test_arguments_that_no_field_holds_are_kept_as_text_or_counted(tmp_path: Path) -> None:
    deep = b"[" * 900 + b"]" * 900
    file = PerfettoFile(sink := BytesIO(), BASE_NS, tmp_path, compress=False)
    head = b'{"ph":"X","name":"%b","pid":1,"tid":5,"ts":1,"dur":1,"args":{"x":%b}}'
    file.events(head % (b"huge", b"1e400") + b"," + head % (b"long", b"9" * 40))
    file.events(head % (b"deep", deep))
    file.events(b'{"ph":"C","name":"c","pid":1,"ts":1,"args":{"x":%b}}' % (b"9" * 400))
    file.finish({})
    file.close()
    shown = {each.name: json.loads(each.args) for each in Read(sink.getvalue()).slices}
    assert shown == {"huge": {"args": '{"x":1e400}'}, "long": {"x": "9" * 40}}
    assert file.left_out()[0].startswith("2 events of kind 'malformed'")


def test_an_arrow_is_at_the_slice_that_begins_there_or_at_a_mark_inside_of_it(tmp_path: Path) -> None:
    flow = {"pid": 1, "id": 7, "cat": "ac2g", "name": "launch"}
    events: list[Event] = [
        slice_of(10, 50, name="outer"),
        slice_of(10, 5, name="call"),
        slice_of(30, 9, name="kernel", tid=6),
        {"ph": "s", **flow, "tid": 5, "ts": us(10)},
        {"ph": "f", "bp": "e", **flow, "tid": 6, "ts": us(30)},
        {"ph": "s", **flow, "id": 8, "tid": 5, "ts": us(20)},
        {"ph": "f", "bp": "e", **flow, "id": 8, "tid": 6, "ts": us(35)},
    ]
    read = written([events], folder=tmp_path)
    assert sorted(read.arrows.values()) == [
        [(10, "call"), (30, "kernel")],
        [(20, "launch"), (35, "launch")],
    ]
    assert times(read) == [("call", 10, 5), ("kernel", 30, 9), ("outer", 10, 50)]


def test_flows_of_two_categories_with_one_id_stay_apart(tmp_path: Path) -> None:
    ends = [
        {"ph": phase, "id": 7, "cat": cat, "name": cat, "pid": 1, "tid": tid, "ts": us(tid)}
        for cat in ("ac2g", "fwdbwd")
        for phase, tid in (("s", 5), ("f", 6))
    ]
    read = written([[slice_of(5, 1), slice_of(6, 1, tid=6), *ends]], folder=tmp_path)
    assert [len(found) for found in read.arrows.values()] == [2, 2]


def test_counters_keep_every_value(tmp_path: Path) -> None:
    def counter(at: int, pid: int, **values: Any) -> Event:
        return {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": us(at), "args": values}

    named = [meta("process_name", pid, 0, name=f"p{pid}") for pid in (1, 2)]
    events = [counter(5, 1, bytes=1 << 40), counter(6, 1, bytes=0.5), counter(7, 2, used=1, free=-2, why="x")]
    read = written([named, events], folder=tmp_path)
    assert read.counters == [
        ("p1", "memory", 5, 1 << 40), ("p1", "memory", 6, 0.5), ("p2", "memory used", 7, 1),
        ("p2", "memory free", 7, -2),
    ]  # fmt: skip


def test_begin_and_end_events_and_asynchronous_ones_become_slices(tmp_path: Path) -> None:
    def event(phase: str, at: int, name: str, **more: Any) -> Event:
        return {"ph": phase, "name": name, "cat": "c", "pid": 1, "tid": 5, "ts": us(at), **more}

    events = [
        event("B", 1, "a"), event("B", 2, "b"), event("E", 4, "b"), event("E", 9, "a"),
        event("B", 20, "nothing"), event("E", 20, "nothing"),
        event("b", 3, "one", id=1), event("b", 4, "two", id=2), event("e", 8, "one", id=1),
        event("n", 7, "mark", id=2), event("e", 9, "two", id=2), event("i", 5, "here", s="t"), slice_of(0, 5),
    ]  # fmt: skip
    read = written([events], folder=tmp_path)
    assert times(read) == [
        ("a", 1, 8), ("b", 2, 2), ("k", 0, 5), ("nothing", 20, 0), ("one", 3, 5), ("two", 4, 5),
    ]  # fmt: skip
    assert sorted((shown.name, shown.start_ns) for shown in read.instants) == [("here", 5), ("mark", 7)]


def test_what_the_format_has_no_place_for_is_counted(tmp_path: Path) -> None:
    file = PerfettoFile(BytesIO(), BASE_NS, tmp_path, compress=False)
    odd = {"ph": "N", "name": "object", "pid": 1, "tid": 1, "ts": 1}
    file.objects([odd, odd, slice_of(1, 1), {**slice_of(1, 1), "pid": "x"}])
    file.close()
    assert file.left_out() == [
        "2 events of kind 'N', for which Perfetto's format has no place",
        "1 events of kind 'malformed', for which Perfetto's format has no place",
    ]


def test_the_trace_says_what_time_it_was(tmp_path: Path) -> None:
    read = written([[slice_of(1, 1)]], folder=tmp_path)
    (clocks,) = (p.clock_snapshot.clocks for p in read.packets if p.HasField("clock_snapshot"))
    assert {clock.clock_id: clock.timestamp for clock in clocks} == {6: 0, 1: BASE_NS}
    (said,) = (a for p in read.packets for a in p.trace_attributes.attribute)
    assert (said.key, json.loads(said.string_value)) == ("stepscope", {"format": 1})


TORCH = """
import sys, torch
from torch.profiler import profile
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
with profile(record_shapes=True, profile_memory=True) as profiler:
    for _ in range(40):
        model(torch.ones(4, 8)).sum().backward()
profiler.export_chrome_trace(sys.argv[1])
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with spans, arrows, and a trace of torch's."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("torch") / "trace.json"
    subprocess.run([sys.executable, "-c", TORCH, str(path)], check=True, capture_output=True)
    content = path.read_bytes()
    found = json.loads(content, parse_float=Decimal)
    opened_ns = found["baseTimeNanoseconds"] + int(found["traceEvents"][0]["ts"] * 1000)
    folder = StepFolder(tmp_path_factory.mktemp("run"))
    skew_ns = opened_ns - OPENED_NS
    driver = folder.process("trainer", owner=True, skew_ns=skew_ns)
    actor = folder.process("actor", 0, skew_ns=skew_ns)
    turn = driver.span("turn", MS, 9 * MS, trajectory="t0", turn=0)
    actor.span("update", 2 * MS, 8 * MS, link=driver.link(turn), attrs={"tokens": 7})
    for process in (driver, actor):
        process.close(1000 * MS)
    target = folder.layout.traces / "actor" / "t.json"
    target.parent.mkdir(parents=True)
    target.write_bytes(content)
    artifact = Artifact(
        path="traces/actor/t.json", kind="torch_trace", tool="torch", role="actor", rank=0, host="host-a",
        pid=actor.info.pid, size_bytes=len(content),
    )  # fmt: skip
    made = Sidecar(step=2, run_id="run1", artifact=artifact, process=actor.info.key, opened=None, closed=None)
    sidecar_of(target).write_bytes(msgspec.json.encode(made))
    return folder.write()


def test_a_step_holds_the_same_in_both_formats(step: Path) -> None:
    in_json = merge_step(step)
    in_perfetto = merge_step(step, to_format="perfetto")
    assert in_perfetto == in_json
    read = Read(gzip.decompress((step / "timeline.pftrace.gz").read_bytes()))
    found = json.loads(gzip.decompress((step / "timeline.json.gz").read_bytes()), parse_float=Decimal)
    events = found["traceEvents"]
    named = {
        kind: {e[key]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == f"{kind}_name"}
        for kind, key in (("process", "pid"), ("thread", "tid"))
    }
    wanted = Counter(
        (named["process"][e["pid"]], named["thread"][e["tid"]], e["name"], e["cat"], int(e["ts"] * 1000),
         int(e["dur"] * 1000), sorted(e.get("args", {})).__repr__())
        for e in events
        if e["ph"] == "X"
    )  # fmt: skip
    assert wanted == Counter((*shown[:6], sorted(json.loads(shown.args)).__repr__()) for shown in read.slices)
    assert read.unended == 0
    flows = Counter((e["cat"], e["id"]) for e in events if e["ph"] in "sf")
    assert sorted(len(each) for each in read.arrows.values()) == sorted(flows.values())
    assert Counter(len(each) for each in read.arrows.values())[2] > 10
    instants = sum(e["ph"] in "iI" for e in events)
    assert len([shown for shown in read.instants if shown.name not in ("fwdbwd", "ac2g")]) == instants


def test_a_plain_name_gives_a_plain_file_and_selections_hold(step: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.pftrace"
    merge_step(step, to_format="perfetto", to=target, selection=Selection(roles=("trainer",)))
    assert [(shown.process, shown.name) for shown in Read(target.read_bytes()).slices] == [
        ("trainer", "turn")
    ]
    merged = merge_step(step, to_format="perfetto", selection=Selection(max_mb=0.1))
    assert (step / "timeline.pftrace.gz").stat().st_size <= 100_000
    assert merged.events > 100


def test_memory_does_not_grow_with_the_events(tmp_path: Path) -> None:
    program = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "import msgspec\n"
        "from stepscope.timeline.perfetto.write import perfetto_file\n"
        "peak_kb = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "def batch(first):\n"
        '    return b\',\'.join(b\'{"ph":"X","name":"op%d","pid":1,"tid":%d,"ts":%d.5,"dur":1,'
        '"args":{"a":1}}\' % (at, at % 9, at) for at in range(first, first + 1000))\n'
        "with perfetto_file(Path(sys.argv[1]), 0) as file:\n"
        "    file.events(batch(0)); before = peak_kb()\n"
        "    for number in range(100): file.events(batch(number * 1000))\n"
        "    file.finish({})\n"
        "print(peak_kb() - before)\n"
    )
    target = tmp_path / "t.pftrace.gz"
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)], check=True, capture_output=True, text=True
    )
    assert target.stat().st_size > 400_000
    assert int(done.stdout) < 64_000
