"""Captures that are opened at the same moment: one opens, the others are refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import at_once, spans_alone
from stepscope import Capture, ProfileConfig, capture
from stepscope._recording.capture import capture as captures
from stepscope._recording.fanout.messages import StartRequest, StopRequest
from stepscope._recording.fanout.worker_side import start_worker, stop_worker
from stepscope._recording.process import identity
from stepscope._recording.session import activation
from stepscope._recording.session.activation import Claim
from stepscope._recording.session.session import Session
from stepscope._recording.spans import slot
from stepscope.errors import CaptureError, CaptureOpenError

THREADS = 8
ROUNDS = 40


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path / "run", control={"requests": False})


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    assert slot.session() is None
    assert captures.opened() is None


@pytest.mark.parametrize(
    "opened_by",
    [Capture.open, lambda cap: asyncio.run(cap.aopen())],
    ids=["threads", "event loops"],
)
def test_of_captures_that_open_at_the_same_moment_one_opens(
    config: ProfileConfig, opened_by: Callable[[Capture], Capture]
) -> None:
    for number in range(ROUNDS):
        opened: list[Capture] = []
        refused: list[str] = []

        def attempt(
            thread: int, first: int = number * THREADS, opened: list[Capture] = opened,
            refused: list[str] = refused,
        ) -> None:  # fmt: skip
            try:
                opened.append(opened_by(capture(first + thread, config=config)))
            except CaptureOpenError as error:
                refused.append(str(error))

        at_once(THREADS, attempt)
        assert len(opened) == 1
        assert len(refused) == THREADS - 1
        assert slot.active is not None
        assert slot.active.step == opened[0].step
        opened[0].close()


def test_one_capture_that_threads_open_at_the_same_moment_opens_once(config: ProfileConfig) -> None:
    for step in range(ROUNDS):
        cap = capture(step, config=config)
        outcomes: list[str] = []

        def attempt(_: int, cap: Capture = cap, outcomes: list[str] = outcomes) -> None:
            try:
                cap.open()
                outcomes.append("open")
            except CaptureError:
                outcomes.append("refused")

        at_once(THREADS, attempt)
        assert outcomes.count("open") == 1
        cap.close()


def test_a_process_is_a_driver_or_a_worker_and_not_both_at_once(config: ProfileConfig) -> None:
    for number in range(ROUNDS):
        opened: list[Capture] = []
        began: list[str] = []

        def attempt(
            thread: int, step: int = number, opened: list[Capture] = opened, began: list[str] = began
        ) -> None:
            if thread % 2:
                name = f"{step}/{thread}"
                answer = start_worker(
                    StartRequest(capture_id=name, run_id="r", step=step, config=config, role="actor")
                )
                if answer.refused is None:
                    began.append(name)
                return
            try:
                opened.append(capture(step, config=config).open())
            except CaptureOpenError:
                pass

        at_once(THREADS, attempt)
        assert len(opened) + len(began) == 1
        for cap in opened:
            cap.close()
        for name in began:
            assert stop_worker(StopRequest(capture_id=name))


def test_a_worker_that_is_stopped_while_it_starts_does_not_stay_open(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_while_stopped(session: Session) -> None:
        assert not stop_worker(StopRequest(capture_id="c"))
        opening(session)

    opening = Session.open_files
    monkeypatch.setattr(Session, "open_files", open_while_stopped)
    answer = start_worker(StartRequest(capture_id="c", run_id="r", step=1, config=config, role="actor"))
    assert "before it began" in str(answer.refused)
    assert slot.session() is None
    monkeypatch.undo()
    with capture(2, config=config):  # the process is free
        pass


def test_a_capture_that_cannot_open_leaves_the_process_free(config: ProfileConfig) -> None:
    with pytest.raises(Exception, match="workers"):
        capture(1, workers=[object()], config=config).open()  # type: ignore[list-item]  # refused
    with capture(2, config=config) as cap:
        pass
    assert cap.result.problems() == []


def test_a_claim_that_another_thread_frees_meanwhile_is_freed_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(dict[str, Claim]):
        def get(self, key: str, default: object = None) -> Any:
            standing = super().get(key)
            self.pop(key, None)  # the other one, right behind the look
            return standing

    monkeypatch.setattr(activation, "_held", Interrupted())
    claim = Claim(1)
    assert claim.take() is None
    claim.free()
    assert activation.holder() is None


def test_threads_that_ask_for_the_id_of_the_run_at_once_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that listens for requests asks on a thread of its own, beside the first capture."""
    monkeypatch.delenv("STEPSCOPE_RUN_ID", raising=False)
    monkeypatch.setattr(identity, "_of_ray_job", lambda: None)
    for _ in range(ROUNDS):
        monkeypatch.setattr(identity, "_ids", {})
        ids: list[str] = []

        def ask(_: int, ids: list[str] = ids) -> None:
            ids.append(identity.run_id())

        at_once(THREADS, ask)
        assert set(ids) == {identity.run_id()}
