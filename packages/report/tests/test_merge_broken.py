"""Traces in every state that crashes, full disks and careless writers leave them in."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope_report.timeline.readers import json_array
from stepscope_report.timeline.readers.blocks import BLOCK
from stepscope_report.timeline.readers.chrome import ChromeTrace
from stepscope_report.timeline.readers.contract import Notes
from stepscope_report.timeline.readers.json_array import NO_JSON, REPAIRED, Elements, raw_elements

CUT = "cut off: its list of events does not end"
HEAD = '{"baseTimeNanoseconds": 7, "traceEvents": ['

SINCE = 1_700_000_000_000_000_005


def event(number: int, name: str = "k") -> str:
    head = f'{{"ph": "X", "name": "{name}{number}", "pid": 1, "tid": 2, "ts": {number}'
    return f'{head}, "args": {{"n": [{number}]}}}}'


GOOD = HEAD + ",\n".join(map(event, range(5))) + '], "traceName": "t"}'


def read(path: Path, content: bytes) -> tuple[list[str], dict[str, int | None]]:
    """Names of the events that were read, and what was noted."""
    path.write_bytes(content)
    trace = ChromeTrace(path)
    batches = [[json.loads(bytes(raw)) for raw in some] for some in trace.texts(raw_elements)]
    names = [event.get("name") for events in batches for event in events]
    return names, trace.notes.counts


def first(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def good(old: bytes, new: bytes) -> bytes:
    return GOOD.encode().replace(old, new)


def third(name: str) -> list[str]:
    return ["k0", "k1", name, "k3", "k4"]


WITHOUT = ["k0", "k1", "k3", "k4"]

BROKEN: dict[str, tuple[bytes, list[str], dict[str, int | None]]] = {
    "sound": (GOOD.encode(), first(5), {}),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), first(5), {}),
    "zero bytes": (b"", [], {"empty": None}),
    "no trace": (b'{"hello": 1}', [], {"left out: no trace events in it": None}),
    "no JSON": (b"\x80\x04 pickle", [], {"left out: no trace events in it": None}),
    "no events": (b'{"traceEvents": []}', [], {}),
    "half an event": (GOOD[: GOOD.index("k3")].encode(), first(3), {CUT: None, NO_JSON: 1}),
    "no end": (GOOD[: GOOD.index('], "traceName')].encode(), first(5), {CUT: None}),
    "comma at the end": ((HEAD + event(0) + ",]}").encode(), first(1), {}),
    "bad UTF-8": (good(b"k2", b"k\xff\xfe"), third("k\ufffd\ufffd"), {REPAIRED: 1}),
    "NaN": (good(b"[2]", b"[NaN, -Infinity, nan]"), first(5), {REPAIRED: 1}),
    "NaN in a name": (good(b"k2", b"NaN"), third("NaN"), {}),
    "line break in a name": (good(b"k2", b"a\nb"), third("a\nb"), {REPAIRED: 1}),
    "Windows path": (good(b"k2", rb"C:\\d\ew"), third("C:\\d\\ew"), {REPAIRED: 1}),
    "half a surrogate": (good(b"k2", rb"\ud800x"), third("\ufffdx"), {REPAIRED: 1}),
    "a pair of surrogates": (good(b"k2", rb"\ud83d\ude00"), third("😀"), {}),
    "a quote missing": (good(b'"k2"', b'"k2'), WITHOUT, {NO_JSON: 1}),
    "a brace missing": (good(b"[2]}}", b"[2]}"), WITHOUT, {NO_JSON: 1}),
    "a hole": (good(event(2).encode(), b"\0" * 40), WITHOUT, {NO_JSON: 1}),
    "deeply nested": (good(b"[2]", b"[" * 1_000_000 + b"]" * 1_000_000), WITHOUT, {NO_JSON: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_can_be_read_is_used_and_the_rest_is_counted(tmp_path: Path, case: str) -> None:
    content, names, notes = BROKEN[case]
    assert read(tmp_path / "t.json", content) == (names, notes)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cut", "checksum", "garbage behind", "garbage inside"])
def test_a_damaged_gzip_gives_what_was_whole(tmp_path: Path, case: str) -> None:
    random_names = random.Random(1)
    events = [event(random_names.randrange(10**9)) for _ in range(20_000)]
    packed = gzip.compress((HEAD + ",".join(events) + "]}").encode())
    damaged = {
        "cut": packed[: len(packed) // 2],
        "checksum": packed[:-8] + bytes(8),
        "garbage behind": packed + b"garbage",
        "garbage inside": packed[:100_000] + bytes(range(256)) * 8 + packed[102_048:],
    }[case]
    names, notes = read(tmp_path / "t.json.gz", damaged)
    assert any("cut off" in what or "damaged" in what for what in notes)
    whole = [json.loads(event)["name"] for event in events]
    assert names[:5000] == whole[:5000]
    if case in ("checksum", "garbage behind"):
        assert names == whole
    if case == "garbage inside":
        sound = zlib.decompressobj(31).decompress(packed[:100_000])
        assert len(names) >= sound.count(b"k") - 1  # nothing before the damage is lost


def test_a_wrong_checksum_in_one_of_many_members_loses_nothing(tmp_path: Path) -> None:
    content = (HEAD + ",".join(map(event, range(9))) + "]}").encode()
    members = [bytearray(gzip.compress(content[at : at + 99], mtime=0)) for at in range(0, len(content), 99)]
    members[-1][-6] ^= 1
    names, notes = read(tmp_path / "t.json.gz", b"".join(members))
    assert names == first(9)
    assert any("damaged" in what for what in notes)


def test_members_of_a_gzip_are_one_text(tmp_path: Path) -> None:
    content = GOOD.encode()
    packed = b"".join(gzip.compress(content[at : at + 100]) for at in range(0, len(content), 100))
    assert read(tmp_path / "t.json.gz", packed + bytes(512)) == (first(5), {})


def test_a_folder_and_an_absent_file_are_noted(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        trace = ChromeTrace(path)
        assert list(trace.texts(raw_elements)) == []
        assert "cannot be read" in "".join(trace.notes.counts)


@pytest.mark.parametrize("behind", [False, True])
def test_the_fields_are_read_wherever_they_stand(tmp_path: Path, behind: bool) -> None:
    base = f'"baseTimeNanoseconds": {SINCE}'
    fields = f'"distributedInfo": {{"rank": 3, "world_size": 8}}, {base}, "host_name": "h"'
    events = '"traceEvents": [' + ",".join(map(event, range(9999))) + "]"
    path = tmp_path / "t.json"
    path.write_text("{" + (f"{events}, {fields}" if behind else f"{fields}, {events}") + "}")
    head = ChromeTrace(path).fields()
    assert (head.base_ns, head.host) == (SINCE, "h")
    assert head.distributed is not None
    assert (head.distributed.rank, head.distributed.world_size) == (3, 8)


def test_fields_behind_arguments_that_look_like_events_are_found_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kineto of 2024 writes MTIA's: the last blocks are metadata, and the base stands behind them."""
    name = '{"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "MTIA 9"}}'
    fields = f'"INFO": ["one", "two"], "baseTimeNanoseconds": {SINCE}'
    path = tmp_path / "t.json"
    # Wherever the last blocks begin: at another place in the metadata each time.
    for more in range(0, len(name), 7):
        path.write_text(f'{{"traceEvents": [{" " * more}{", ".join([name] * 20_000)}], {fields}}}')
        scans: list[object] = []
        scan = ChromeTrace._scan

        def scanning(self: ChromeTrace, *given: Any) -> Any:
            scans.append(given)  # noqa: B023 # used in this turn
            return scan(self, *given)  # noqa: B023

        with monkeypatch.context() as seen:
            seen.setattr(ChromeTrace, "_scan", scanning)
            assert ChromeTrace(path).fields().base_ns == SINCE
        assert len(scans) == 1  # of the first block


@pytest.mark.parametrize("base", ["-1", '"soon"', "null", "1e300", "[]", "true", str(1 << 80)])
def test_a_base_that_is_no_time_is_none(tmp_path: Path, base: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"baseTimeNanoseconds": {base}, "host_name": "h", "traceEvents": []}}')
    assert ChromeTrace(path).fields().base_ns is None
    assert ChromeTrace(path).fields().host == "h"


def test_an_event_larger_than_a_block_is_read(tmp_path: Path) -> None:
    large = event(1, "x" * (3 * BLOCK))
    names, notes = read(tmp_path / "t.json", (HEAD + ",".join([event(0), large, event(2)]) + "]}").encode())
    assert ([len(name) for name in names], notes) == ([2, 3 * BLOCK + 1, 2], {})


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(0, 3), st.randoms(use_true_random=False))
def test_however_the_text_is_cut_into_blocks_the_elements_are_the_same(
    cuts: list[int], damage: int, chance: random.Random
) -> None:
    text = bytearray(GOOD[len(HEAD) :].encode())
    for _ in range(damage):
        text[chance.randrange(len(text))] = chance.randrange(256)

    def elements(blocks: list[bytes]) -> tuple[list[bytes], bytes | None]:
        reader = Elements(Notes(), raw_elements)
        elements = [bytes(raw) for block in blocks for batch in reader.feed(block) for raw in batch]
        elements += [bytes(raw) for batch in reader.end() for raw in batch]
        return elements, reader.trailer

    blocks, at = [], 0
    for length in cuts:
        blocks.append(bytes(text[at : at + length]))
        at += length
    whole, _ = elements([bytes(text)])
    pieces, _ = elements([*blocks, bytes(text[at:])])
    if not damage:
        assert whole == pieces
    assert all(json.loads(piece) is not ... for piece in pieces)


class Looked:
    """Count the bytes that the brackets, the JSON decoder and the repair of `json_array` look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        element, sound, mend = json_array._element, json_array._sound, json_array.mend

        def counted_element(text: bytes, at: int, limit: int) -> tuple[int, int | None, bool]:
            start, end, closed = element(text, at, limit)
            self.bytes += (limit if end is None else end) - at
            return start, end, closed

        def counted_sound(text: bytes, parse: Any) -> Any:
            self.bytes += len(text)
            return sound(text, parse)

        def counted_mend(text: bytes) -> bytes:
            self.bytes += len(text)
            return mend(text)

        monkeypatch.setattr(json_array, "_element", counted_element)
        monkeypatch.setattr(json_array, "_sound", counted_sound)
        monkeypatch.setattr(json_array, "mend", counted_mend)
        monkeypatch.setattr(json_array, "LONGEST", 1 << 16)


EVENTS = ",\n".join(map(event, range(20_000))).encode()
COSTLY = {
    "every quote of the names missing": EVENTS.replace(b'": "k', b'": k'),
    "one quote missing": EVENTS.replace(b'"k2"', b'"k2', 1),
    "one brace missing": EVENTS.replace(b"[2]}}", b"[2]}", 1),
    "every second brace missing": EVENTS.replace(b"}},\n", b"}},", 1).replace(b"]}}", b"]}"),
    "one brace too many": EVENTS.replace(b"[2]}}", b"[2]}}}", 1),
    "beginnings alone": b'{"ph": "X",' * 100_000,
    "ends alone": b'}, {"ph":' * 100_000,
    "braces": b"{" * 1_000_000,
    "brackets": b"[" * 1_000_000,
    "quotes": b'"' * 1_000_001,
    "strings": b'"a", ' * 200_000,
    "escapes": b'"' + b"\\" * 1_000_000,
    "numbers": b"1," * 500_000,
    "zeros": bytes(1_000_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COSTLY)
def test_damaged_text_is_looked_at_a_limited_number_of_times(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that grows with the square of the text would look at all of it hundreds of times."""
    text, looked = COSTLY[case], Looked(monkeypatch)
    reader = Elements(Notes(), raw_elements)
    for at in range(0, len(text), 1 << 12):
        for _ in reader.feed(text[at : at + (1 << 12)]):
            pass
    for _ in reader.end():
        pass
    parts = text.count(b'"ph"')
    assert looked.bytes < 16 * len(text) + 8 * json_array._SPARE * parts


def test_only_what_is_damaged_is_lost_behind_a_quote_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "LONGEST", 1 << 16)
    text = COSTLY["one quote missing"]
    reader = Elements(Notes(), raw_elements)
    batches = [reader.feed(text[at : at + (1 << 12)]) for at in range(0, len(text), 1 << 12)]
    names = [
        json.loads(bytes(raw))["name"] for batch in (*batches, reader.end()) for some in batch for raw in some
    ]
    assert names == [f"k{number}" for number in range(20_000) if number != 2]


def test_an_array_that_goes_on_without_events_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "LONGEST", 1 << 16)
    monkeypatch.setattr(json_array, "BARREN", 1 << 20)
    content = (HEAD + event(0) + ",").encode() + b" " * (3 << 20) + (event(1) + "]}").encode()
    names, notes = read(tmp_path / "t.json", content)
    assert names == first(1)
    assert any("without an event" in what for what in notes)


def test_gzip_that_inflates_without_measure_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope_report.timeline.readers.blocks._SMALL", 1 << 20)
    bomb = gzip.compress((HEAD + event(0) + ",").encode() + b" " * (20 << 20) + (event(1) + "]}").encode(), 9)
    names, notes = read(tmp_path / "t.json.gz", bomb)
    assert names == first(1)
    assert any("over 250 times" in what for what in notes)


@given(st.binary(max_size=300))
def test_no_bytes_at_all_make_it_raise(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(HEAD.encode() + content)
    assert all(ChromeTrace(path).texts(raw_elements))
    ChromeTrace(path).fields()
