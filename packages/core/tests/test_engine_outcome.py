"""The manifest's verdict on a replica: whole, idle, noted, or cut short."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from stepscope import ProfileConfig, capture
from stepscope.files.manifest.records import IDLE, Expectation, of_engine
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
    manifest = cap.result.manifest()
    assert manifest is not None
    (replica,) = (item for part in manifest.processes for item in part.expected if item.kind == "engine")
    assert (replica.state, replica.idle, len(replica.notes)) == ("ok", True, 1)
    cap.result.raise_for_missing()
