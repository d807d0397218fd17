"""The table of what the child of a fork forgets."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from stepscope._recording.process import failures, fork
from stepscope._recording.spans.span import thread


def test_a_child_forgets_in_the_order_of_the_table_and_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    calls: list[str] = []
    broken = "exporter"

    def forget(name: str) -> None:
        calls.append(name)
        if name == broken:
            raise OSError("its own trouble")

    for name in fork.TABLE:
        monkeypatch.setitem(fork.TABLE, name, partial(forget, name))
    fork._in_child()
    assert calls == list(fork.TABLE)
    assert f"forgetting the {broken} of the parent process" in failures._noted


def test_what_is_not_in_the_table_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"fork\.TABLE: .*exporter"):
        fork.forgets("my state", lambda: None)


def test_the_spans_of_a_forked_child_are_of_its_own_thread() -> None:
    assert thread.id == os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = {thread.id, fork.native_id_of(threading.main_thread()), threading.get_native_id()}
        os.write(writer, f"{same == {os.getpid()}}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "True"
