"""The manifest's verdict on a replica: whole, idle, noted, or cut short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from packages.core.tests.runs import manifest_of
from stepscope import ProfileConfig, capture
from stepscope.backends.counters import CounterSource
from stepscope.engines import waiting
from stepscope.engines.metrics import RUNNING, EngineMetrics
from stepscope.files.manifest import IDLE, Expectation, of_engine
from stepscope.files.sidecar import Artifact
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

WHOLE = Artifact(
    path="traces/rollout/replica0/a.json.gz",
    kind="torch_trace",
    tool="sglang",
    role="rollout",
    replica=0,
    host="h",
    size_bytes=1,
    iterations=9,
    iterations_asked=50,
    ended="capture",
)


def outcome(*artifacts: Artifact) -> Expectation:
    return of_engine("replica 0", artifacts, {})


def test_fewer_iterations_than_asked_for_are_a_note_and_no_trouble() -> None:
    replica = outcome(msgspec.structs.replace(WHOLE, note="9 of 50"))
    assert (replica.state, replica.notes, replica.idle) == ("ok", ("9 of 50",), False)


def test_a_recording_that_somebody_else_cut_short_is_partial() -> None:
    replica = outcome(msgspec.structs.replace(WHOLE, ended="others", truncated="8 of 16; it ran 8 more"))
    assert replica.state == "partial"
    assert str(replica.reason).startswith("8 of 16; ")


def test_a_stop_of_somebody_else_that_cost_nothing_is_no_trouble() -> None:
    assert outcome(msgspec.structs.replace(WHOLE, ended="others", note="none ran")).state == "ok"


def test_a_replica_whose_files_hold_no_iteration_was_idle() -> None:
    replica = outcome(msgspec.structs.replace(WHOLE, iterations=0, ended="capture"))
    assert (replica.state, replica.idle) == ("ok", True)


def test_a_file_that_names_no_iterations_says_nothing_of_idleness() -> None:
    assert not outcome(msgspec.structs.replace(WHOLE, iterations=None)).idle


class Idle(FakeEngineProfiler):
    """Ran nothing, and leaves no file."""

    async def stop(self) -> list[Artifact]:
        await super().stop()
        return []

    @property
    def ignored(self) -> Mapping[str, str]:
        return {IDLE: "the engine ran nothing"}


async def test_an_engine_that_ran_nothing_is_whole_without_a_file(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path, steps="1")
    async with capture(1, engines=Idle(FakeEngine()), config=config) as cap:
        pass
    manifest = manifest_of(cap.result)
    (replica,) = (item for part in manifest.processes for item in part.expected if item.kind == "engine")
    assert (replica.state, replica.idle, len(replica.notes)) == ("ok", True, 1)
    cap.result.raise_for_missing()


class Busy(FakeEngineProfiler):
    """Its requests grow by one at each look, up to a number; None shows no number."""

    def __init__(self, engine: FakeEngine, most: int | None) -> None:
        super().__init__(engine)
        self.most = most
        self.running = 0

    def counters(self) -> Sequence[CounterSource]:
        return EngineMetrics(self.read, "replica 0", blocks=False).sources()

    def read(self) -> dict[str, float]:
        if self.most is None:
            return {}
        self.running = min(self.running + 1, self.most)
        return {RUNNING: self.running}


@pytest.mark.parametrize(
    ("most", "state", "said"),
    [
        (9, "ok", None),
        (3, "ok", "the window never opened: at most 3 requests ran at once, 5 asked for"),
        (None, "failed", "iterations.running is 5, and this engine does not show how many requests run"),
    ],
)
async def test_a_window_opens_when_so_many_requests_run_and_else_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, state: str, said: str | None
) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.001)
    roles = {"rollout": {"ranks": "all", "engine": {"iterations": {"running": 5}}}}
    config = ProfileConfig(save_path=tmp_path, steps="1", roles=roles, counters={"hz": 0})
    engine = FakeEngine()
    profiler = Busy(engine, most)
    async with capture(1, engines=profiler, config=config) as cap:
        until = time.monotonic() + 20
        while profiler.running < 3 and most is not None:
            assert time.monotonic() < until
            await asyncio.sleep(0.001)
        while most == 9 and not engine.recordings:
            assert time.monotonic() < until
            await asyncio.sleep(0.001)
    manifest = manifest_of(cap.result)
    (replica,) = (item for part in manifest.processes for item in part.expected if item.kind == "engine")
    assert (replica.state, bool(replica.artifacts)) == (state, said is None)
    assert said is None or said in " ".join((*replica.notes, replica.reason or ""))
    assert engine.recordings == {}
