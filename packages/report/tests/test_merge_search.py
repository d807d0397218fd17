"""Searches of a merge: both finders give the same text, and a mistake of one costs time and no event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from packages.report.tests import golden
from packages.report.tests.test_merge_rewrite import OLDER, PLAIN, SECOND_NS, canonical, rewritten, written
from stepscope_report.timeline import merge_step
from stepscope_report.timeline.merge import template

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
    batch = [written(OLDER, **{**PLAIN, **kind}) for kind in kinds] * 20
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
