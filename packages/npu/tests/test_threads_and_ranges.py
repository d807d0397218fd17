"""mstx ranges by their numbers, and threads that have joined a recording, without any torch_npu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope_npu import _operators, _recordings
from stepscope_npu._window import Ranges


class Mstx:
    """Numbers ranges as torch_npu does: from 1 on, 0 where nothing records one."""

    def __init__(self) -> None:
        self.records = True
        self.ended: list[int] = []
        self._numbers = itertools.count(1)

    def range_start(self, message: str) -> int:
        return next(self._numbers) if self.records else 0

    def range_end(self, number: int) -> None:
        self.ended.append(number)


def test_a_range_that_nothing_records_is_not_ended_either() -> None:
    mstx = Mstx()
    mstx.records = False
    with Ranges(mstx).range("actor.update"):
        pass
    assert mstx.ended == []


def test_ranges_that_are_open_at_the_end_are_closed_once_the_newest_first() -> None:
    mstx = Mstx()
    ranges = Ranges(mstx)
    with ranges.range("outer"), ranges.range("inner"):
        with ranges.range("over"):
            pass
        ranges.end_all()
        assert mstx.ended == [3, 2, 1]
    ranges.end_all()
    assert mstx.ended == [3, 2, 1]


class TorchNpu:
    """As much of one as a thread needs to join a recording and to leave it."""

    version = "9"

    def __init__(self) -> None:
        self.recorded = self.takes = False
        self.asked: list[dict[str, bool]] = []
        self.stops = 0
        profile = SimpleNamespace(enable_profiler_in_child_thread=self._join)
        self.profiler = SimpleNamespace(profile=profile)
        self.interface = SimpleNamespace(_stop_profiler=self._stop)

    def _join(self, **flags: bool) -> None:
        self.asked.append(flags)
        self.recorded = self.takes

    def _stop(self) -> None:
        self.stops += 1
        self.recorded = False


FLAGS = {"record_shapes": True, "profile_memory": False, "with_modules": True, "with_stack": False}


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = TorchNpu()
    made.takes = True
    monkeypatch.setattr(_operators, "running", lambda on_this_thread: made.recorded)
    yield made
    _operators.forget()


def test_a_thread_asks_for_what_its_window_records_with_each_operator(torch_npu: Any) -> None:
    assert _operators.join(torch_npu, FLAGS) is None
    assert torch_npu.asked == [{"record_shapes": True, "profile_memory": False}]


def test_a_thread_that_was_not_taken_is_told_so(torch_npu: Any) -> None:
    torch_npu.takes = False
    assert "this thread" in str(_operators.join(torch_npu, FLAGS))


def test_a_thread_leaves_once(torch_npu: Any) -> None:
    _operators.join(torch_npu, FLAGS)
    _operators.leave(torch_npu)
    torch_npu.recorded = True  # by a profiler of other code
    _operators.leave(torch_npu)
    assert torch_npu.stops == 1


def test_a_thread_that_never_joined_does_not_stop_what_records_it(torch_npu: Any) -> None:
    torch_npu.recorded = True
    _operators.leave(torch_npu)
    assert torch_npu.stops == 0


def test_a_thread_that_is_recorded_no_longer_stops_nothing(torch_npu: Any) -> None:
    _operators.join(torch_npu, FLAGS)
    torch_npu.recorded = False  # its window's end has taken it out
    _operators.leave(torch_npu)
    assert torch_npu.stops == 0


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_thread_stays_while_anything_records_since_its_leaving_would_end_that(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    _operators.join(torch_npu, FLAGS)
    with monkeypatch.context() as busy:
        if whose == "ours":
            PROCESS_LOCK.acquire("the NPU recording in step 7")
        else:
            busy.setattr(_recordings, "theirs_open", True)
        _operators.leave(torch_npu)
        PROCESS_LOCK.release()
        assert torch_npu.stops == 0
    _operators.leave(torch_npu)
    assert torch_npu.stops == 1


def test_a_thread_that_cannot_leave_is_said_in_the_log_and_no_error(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("100000")

    _operators.join(torch_npu, FLAGS)
    monkeypatch.setattr(torch_npu.interface, "_stop_profiler", fail)
    _operators.leave(torch_npu)
    assert ["MainThread: 100000" in message for message in caplog.messages] == [True]
