"""The quick way and the thorough one of a merge give the same events, whatever the layout and the clocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from packages.report.tests import golden
from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline import merge_step
from stepscope_report.timeline.merge import template
from stepscope_report.timeline.merge.mapping import Cut, FlowIds, Place, Tracks
from stepscope_report.timeline.merge.rewrite import Rewriter
from stepscope_report.timeline.model import Process, ProcessClock
from stepscope_report.timeline.readers.contract import Notes
from stepscope_report.timeline.readers.json_array import raw_elements
from stepscope_report.timeline.rows import Axis, Row

Event = dict[str, Any]
SECOND_NS = 1_000_000_000
AXIS = Axis(base_ns=1_745_000_000 * SECOND_NS, first=0, last=20_000_000 * SECOND_NS, behind=0)
INFO = ProcessInfo(role="actor", rank=0, world_size=None, host="a", pid=4242)
KINETO = """{{
    "ph": "{ph}",{id}
    "cat": "cpu_op",
    "name": {name},
    "pid": {pid},
    "tid": {tid},
    "ts": {ts},
    "dur": 8.135
    ,
    "args": {args}
  }}"""
OLDER = """{{
    "ph": "{ph}", {id}"cat": "kernel", "name": {name}, "pid": {pid}, "tid": {tid},
    "ts": {ts}, "dur": 31,
    "args": {args}
  }}"""
COMPACT = '{{"ph":"{ph}",{id}"name":{name},"pid":{pid},"tid":{tid},"ts":{ts},"args":{args}}}'
ODD = '{{"args": {args}, "ts" : {ts}, {id}"tid": {tid}, "pid":{pid}, "name": {name}, "ph": "{ph}"}}'

numbers = st.sampled_from(["4242", "0", "7", "1", "11506", '"7"', '"stream 7"', "10000000", "-1"])
names = st.sampled_from(["aten::mm", 'a "pid": 0, "tid": 7, "ts": 4', '"id": 5', "\\", "é", "\x01", "NaN"])
arguments = st.sampled_from([
    {}, {"pid": 0}, {"External id": 3}, {"id": 5}, {"ts": 1, "tid": 7}, {"x": {"ph": "X", "pid": 0, "ts": 5}},
])  # fmt: skip
digits = st.integers(1_000_000, 9_000_000_000)
times = st.one_of(
    st.builds("{}".format, digits),
    st.builds("{}.{:03}".format, digits, st.integers(0, 999)),
    st.builds("{}.{:03}".format, st.integers(4_443_469_000_000, 4_443_471_000_000), st.integers(0, 999)),
    st.sampled_from(["0", "-5", "1e9", "5.5", "1234567.25e1", '"77"', "1745556530409554.9"]),
)
WHOLE = Cut(None, None)
SHIFTS = [0, 7, 1_000, 5_000_000, 3 * SECOND_NS, -SECOND_NS, 7_889_238 * SECOND_NS]


def written(layout: str, **fields: object) -> str:
    number = fields["id"]
    text = "" if number is None else ("\n    " if layout is KINETO else "") + f'"id": {number},'
    if layout is COMPACT:
        text = text.replace(" ", "")
    return layout.format(**{**fields, "id": text})


@st.composite
def traces(draw: st.DrawFn) -> list[str]:
    """Some events: most of one layout and kind, so that they often go the quick way together."""
    layout = draw(st.sampled_from([KINETO, OLDER, COMPACT, ODD]))
    usual: Event = {
        "ph": draw(st.sampled_from("XisfBE")),
        "pid": draw(st.sampled_from(["4242", "0", "11506"])),
        "tid": draw(st.sampled_from(["4242", "7"])),
        "ts": draw(times),
        "id": None,
        "name": '"aten::mm"',
        "args": "{}",
    }
    kinds: dict[str, st.SearchStrategy[object]] = {
        "ph": st.sampled_from("XisfBEbMC"),
        "pid": numbers,
        "tid": numbers,
        "ts": times,
        "id": st.sampled_from(["1", "57452", "0", "12345678901", '"0x10"', "9007199254740993"]),
        "name": names.map(json.dumps),
        "args": arguments.map(json.dumps),
    }
    texts = []
    for _ in range(draw(st.integers(1, 6))):
        changed = draw(st.sets(st.sampled_from(sorted(kinds)), max_size=2))
        texts.append(written(layout, **{**usual, **{kind: draw(kinds[kind]) for kind in sorted(changed)}}))
    return texts


def process(drift_ns: int) -> Process:
    clock = ProcessClock(
        alignment="measured", offset_ns=50, closing_offset_ns=50 + drift_ns, uncertainty_ns=1
    )
    opened_ns = AXIS.base_ns + 100 * SECOND_NS
    return Process(
        name="actor 0", info=INFO, owner=False, opened_ns=opened_ns, closed_ns=opened_ns + 10_000 * SECOND_NS,
        last_ns=opened_ns, clock=clock, spans=0, dropped=0, cost=None,
    )  # fmt: skip


class Rewritten(NamedTuple):
    events: list[Event]
    notes: dict[str, int | None]
    written: int
    names: list[str]


def rewritten(
    batches: list[list[str]],
    shift_ns: int,
    drift_ns: int | None,
    *,
    cut: Cut = WHOLE,
    thoroughly: bool = False,
) -> Rewritten:
    clock = None if drift_ns is None else process(drift_ns)
    row = Row(info=INFO, process=None, clock=clock, pid=4242)
    tracks, notes = Tracks([4242]), Notes()
    base_ns = AXIS.base_ns + shift_ns
    rewriter = Rewriter(row, Place(row, base_ns, AXIS), FlowIds(3, 8), tracks, cut, notes)
    elements: list[Event] = []
    for events in batches:
        array = f"[{f',{chr(10)}'.join(events)}]".encode()
        text = rewriter.thoroughly(raw_elements(array)) if thoroughly else rewriter.rewrite(array)
        elements += json.loads(b"".join((b"[", text, b"]")), parse_float=Decimal)
    return Rewritten(elements, notes.counts, rewriter.written, sorted(map(str, tracks.take_unnamed())))


def both_ways(batches: list[list[str]], shift_ns: int = 0, drift_ns: int | None = None) -> Rewritten:
    """Return what the quick way gives; the thorough one gives the same."""
    quick = rewritten(batches, shift_ns, drift_ns)
    thorough = rewritten(batches, shift_ns, drift_ns, thoroughly=True)
    assert quick._replace(events=[]) == thorough._replace(events=[])
    assert list(map(canonical, quick.events)) == list(map(canonical, thorough.events))
    return quick


def canonical(event: Event) -> Event:
    return {**event, "ts": Decimal(event["ts"])} if "ts" in event else event


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(traces(), st.sampled_from(SHIFTS), st.sampled_from([None, None, 0, 12_345]))
def test_both_ways_to_rewrite_give_the_same_events(
    events: list[str], shift_ns: int, drift_ns: int | None
) -> None:
    both_ways([events], shift_ns, drift_ns)


PLAIN: Event = {
    "ph": "X", "pid": "4242", "tid": "4242", "ts": "4443469590446.220", "id": None, "name": '"k"',
    "args": "{}",
}  # fmt: skip


@pytest.mark.parametrize("shift_ns", SHIFTS)
@pytest.mark.parametrize("layout", [KINETO, OLDER, COMPACT])
def test_what_kineto_writes_goes_the_quick_way(
    layout: str, shift_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Event] = [
        {},
        {"pid": "0", "tid": "7"},
        {"pid": "1", "tid": "7"},
        {"ph": "s", "id": "57452"},
        {"tid": "4250"},
    ]
    events = [like(layout, **kind) for kind in kinds for _ in range(50)]
    if layout is COMPACT:
        events = [event.replace(".220", "") for event in events]
    both_ways([events], shift_ns)

    def refuse(*_: object) -> None:
        raise AssertionError("an event went the thorough way")

    monkeypatch.setattr(Rewriter, "_one", refuse)
    if not (layout is COMPACT and shift_ns % 1000):
        events_out = rewritten([events], shift_ns, None).events
        assert {event["pid"] for event in events_out} == {4242}
        assert len({event["tid"] for event in events_out}) == 4


def like(layout: str = OLDER, **kind: object) -> str:
    return written(layout, **{**PLAIN, **kind})


def plans(layout: str) -> list[list[str]]:
    """Return events that do not fit a plan, each in a batch of its own behind one that was learned from."""
    odd: list[Event] = [
        {"pid": "0", "tid": "4242"}, {"pid": "4242", "tid": "7"}, {"pid": "77", "tid": "78"},
        {"ph": "s", "id": "12345678901234"}, {"ph": "s", "id": '"0x10"'}, {"ts": "443.5"},
        {"ts": "44434695904.46"}, {"ts": "4443469590446.2204"}, {"args": '{"pid": 0, "tid": 7}'},
        {"args": '{"id": 5}'}, {"args": '{"ts": 4443469590446.220}'}, {"ph": "C"}, {"ph": "M"},
    ]  # fmt: skip
    of_gpu = {"pid": "0", "tid": "7"}
    usual: list[Event] = [{}, of_gpu, {"ph": "s", "id": "57452"}, {"ph": "f", "id": "57452", **of_gpu}]
    learned = [like(layout, **kind) for kind in usual] * 20
    behind = [[[*learned, like(layout, **kind), *learned], learned] for kind in odd]
    return [learned, *(batch for batches in behind for batch in batches)]


def many_seconds(seconds: int) -> list[list[str]]:
    def of(at: int) -> str:
        return like(ts=f"{3_605_057_436_108 + at * 1_000_000}.407")

    return [[of(at % seconds) for at in range(60)], [of(0)] * 60, [of(at) for at in range(seconds + 2)]]


def escaped(key: str, number: str, rest: str, argument: str) -> list[list[str]]:
    """Return a key that is written with escapes, behind which an argument looks like it.

    All other checks agree: one field is not replaced, and one argument is.
    """
    hidden = rf'{{"ph": "X", "\u00{ord(key[0]):x}{key[1:]}": {number}, "name": "k", {rest}"args": {{}}}}'
    usual = [like(ts="1000000", id="5", pid="0", tid="7")] * 30
    return [usual, [*usual, hidden, like(ts="1000000", args=argument)], usual]


def odd_id(number: str) -> list[list[str]]:
    usual = [like(ph="s", id="5")] * 30
    return [usual, [*usual, like(ph="s", id=number)], usual]


def odd_arguments(args: str) -> list[list[str]]:
    """Arguments may look like metadata, or a file's first events seem to end in them."""
    return [[like(args=args), like(), like(args=args)] * (1 if len(args) > 1000 else 30)]


LOOKALIKES: dict[str, list[list[str]]] = {
    "plans of Kineto's layout": plans(KINETO),
    "plans of the older layout": plans(OLDER),
    "an id that is spelled otherwise and looks changed": [[
        '{"ph":"X","name":"aten::mm","pid":4242,"tid":4242,"ts":1000000,"args":{"id": 5}}',
        '{"ph":"X","id":57452,"name":"aten::mm","pid":4242,"tid":4242,"ts":1000000,"args":{}}',
    ]],
    **{f"{seconds} s": many_seconds(seconds) for seconds in (1, 3, 15, 40)},
    "an escaped id": escaped("id", "57452", '"pid": 4242, "tid": 4242, "ts": 1000000, ', '{"id": 5}'),
    "an escaped pid": escaped("pid", "4242", '"tid": 7, "ts": 1000000, ', '{"pid": 0, "tid": 7, "a": 1}'),
    **{
        f"id {number}": odd_id(number)
        for number in ("-0", "-1", "5e3", "5.0", "12345678901234567890", '"5"', "null")
    },
    "arguments like metadata": odd_arguments('{"ph": "M"}'),
    "arguments like counters": odd_arguments('{"a": [{"ph": "C"}, {"x": 1}]}'),
    "long arguments": odd_arguments(f'{{"a": {json.dumps([{}] * 30_000)}}}'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOKALIKES)
def test_what_looks_like_that_which_a_plan_was_made_of_is_rewritten_as_thoroughly(case: str) -> None:
    for shift_ns in (*SHIFTS, -3_601_057 * SECOND_NS, 86_400 * SECOND_NS):
        both_ways(LOOKALIKES[case], shift_ns)


@pytest.mark.parametrize("odd", [{"tid": "0"}, {"pid": "0", "tid": "4242"}])
def test_a_thread_behind_slices_that_cross_has_the_same_number_both_ways(odd: Event) -> None:
    """The quick way gives all threads of a batch their tracks before any slice has a further line."""
    times_us = [*range(1_000_000, 1_060_000, 1000), 2_000_000, 2_000_015]
    both_ways([[*(like(ts=f"{us}.000") for us in times_us), like(ts="3000000.000", **odd)]])


def test_a_thread_whose_number_another_row_has_taken_is_not_taken_for_it() -> None:
    streams, threads = ([like(KINETO, pid=pid, tid="7")] * 60 for pid in ("0", "4242"))  # in a container, say
    assert len({event["tid"] for event in both_ways([streams, threads]).events}) == 2


def test_a_selection_of_time_leaves_whole_batches_to_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [written(KINETO, **PLAIN)] * 50
    cut = Cut(4443469590446_000, 4443469590447_000)
    monkeypatch.setattr(Rewriter, "_one", None)
    assert len(rewritten([inside], 0, None, cut=cut).events) == 50


def test_metadata_that_a_writer_gives_again_and_again_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = '{"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "t"}}'
    label = '{"ph": "M", "name": "process_labels", "pid": 9, "tid": 0, "args": {"labels": "MTIA 9"}}'
    looked_at: list[object] = []
    look = Rewriter._metadata

    def looking(self: Rewriter, fields: dict[str, Any]) -> bool:
        looked_at.append(fields)
        return look(self, fields)

    monkeypatch.setattr(Rewriter, "_metadata", looking)
    events_out = rewritten([[name, label] * 100], 0, None).events
    assert [event["args"]["name"] for event in events_out] == ["t"] + ["MTIA 9 t"] * 99
    assert len(looked_at) < 5


metadata = st.sampled_from(
    [
        '{"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "MTIA 9"}}',
        '{"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "t"}}',
        '{"ph": "M", "name": "thread_name", "pid": 8, "tid": 1, "ts": 5.5, "args": {"name": "Spans"}}',
        '{"ph": "C", "name": "load", "pid": 9, "tid": 0, "ts": 1000000, "args": {"load": 1}}',
        written(KINETO, **PLAIN),
    ]
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(metadata, min_size=1, max_size=4), st.integers(1, 40), st.lists(metadata)),
        min_size=1,
        max_size=5,
    )
)
def test_metadata_that_come_in_turns_are_what_each_of_them_would_be(
    cycles: list[tuple[list[str], int, list[str]]],
) -> None:
    batches = [cycle * times + rest for cycle, times, rest in cycles for _ in range(2)]
    both_ways(batches)


def test_turns_that_are_no_json_are_not_taken_for_metadata() -> None:
    name = '{"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "t"}}'
    good = f"[{','.join([name] * 40)}]".encode()
    row = Row(info=INFO, process=None, clock=None, pid=4242)
    rewriter = Rewriter(row, Place(row, 0, AXIS), FlowIds(3, 8), Tracks([4242]), WHOLE, Notes())
    for bad in (good.replace(b"},{", b"}{"), good.replace(b"},{", b"},,{"), good[:-1] + b",]"):
        rewriter.rewrite(good)
        assert rewriter.written % 40 == 0
        with pytest.raises(msgspec.DecodeError):
            rewriter.rewrite(bad)
        rewriter.rewrite(good)


def test_events_between_metadata_go_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name = '{"ph": "M", "name": "thread_name", "pid": 4242, "tid": 4242, "args": {"name": "t"}}'
    events = [name, name, *[written(KINETO, **PLAIN)] * 50, name]
    both_ways([events])
    one, seen = Rewriter._one, list[bytes]()

    def looking(self: Rewriter, raw: msgspec.Raw) -> bytes | None:
        seen.append(bytes(raw))
        return one(self, raw)

    monkeypatch.setattr(Rewriter, "_one", looking)
    rewritten([events], 0, None)
    assert seen == [name.encode()] * 3


# Searches of a merge: both finders give the same text, and a mistake of one costs time and no event.


few = st.binary().map(lambda drawn: bytes(b'"t: 1,\xc3\xa9'[byte % 8] for byte in drawn))
pieces = st.one_of(
    few, st.binary(), st.sampled_from([b'"ts": 17', b'"id": ', b"\x87", b"\xff" * 70, b"x" * 3000])
)


@pytest.mark.slow
@pytest.mark.parametrize("split", [template.split, bytes.split], ids=["installed", "bytes.split"])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(between=st.lists(pieces, max_size=12), old=pieces.filter(len), new=few)
@example(between=[b"5\x84\t\x8cp", b"\xde" * 60, b"\x87"], old=b"\x87", new=b"")
def test_what_is_replaced_is_what_python_replaces(
    split: Callable[[bytes, bytes], Sequence[bytes]], between: list[bytes], old: bytes, new: bytes
) -> None:
    with patch.object(template, "split", split):
        for text in (b"".join(between), old.join(between)):
            assert template._replaced(text, old, new) == (text.replace(old, new), text.count(old))


@pytest.mark.parametrize("mistake", ["one is missed", "one is invented"])
@pytest.mark.parametrize("shift_ns", [0, 7, -SECOND_NS, 86_400 * SECOND_NS])
def test_a_mistake_in_the_search_costs_time_and_no_event(
    shift_ns: int, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [{}, {"pid": "0", "tid": "7"}, {"ph": "s", "id": "57452"}]
    batch = [like(**kind) for kind in kinds] * 20
    thorough = rewritten([batch, batch], shift_ns, None, thoroughly=True)
    calls, wrong = count(), -1

    def mistaken(text: bytes, old: bytes) -> list[bytes]:
        parts = text.split(old)
        if next(calls) == wrong and len(parts) > 2:
            if mistake == "one is missed":
                parts[1:3] = [old.join(parts[1:3])]
            else:
                parts[-1:] = [parts[-1][:9], parts[-1][9 + len(old) :]]
        return parts

    monkeypatch.setattr(template, "split", mistaken)
    for wrong in range(30):
        calls = count()
        quick = rewritten([batch, batch], shift_ns, None)
        assert list(map(canonical, quick.events)) == list(map(canonical, thorough.events)), wrong
    assert next(calls) < wrong


@pytest.mark.parametrize("name", golden.steps())
def test_both_finders_write_the_same_timeline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_step(golden.steps()[name], to=tmp_path / "installed.json.gz")
    monkeypatch.setattr(template, "split", bytes.split)
    merge_step(golden.steps()[name], to=tmp_path / "python.json.gz")
    assert (tmp_path / "installed.json.gz").read_bytes() == (tmp_path / "python.json.gz").read_bytes()
