"""Tests of one capture of one engine: the cause of its end, starts that stay armed, and its files.

This file has more than 500 lines, because all tests use one engine in memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_sglang import FakeManager, OldManager, ProfileReq, asked, recorded

from stepscope.engines.protocol import EngineCapture, Iterations
from stepscope.errors import EngineError
from stepscope.files.layout import sidecar_of
from stepscope.files.manifest import IDLE
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.engine_conformance import files_below
from stepscope_sglang import SglangProfiler
from stepscope_sglang._capture import opening, session


def options_of(artifact: Artifact, capture: EngineCapture) -> dict[str, object]:
    file = sidecar_of(Path(capture.step_dir, artifact.path))
    return dict(msgspec.json.decode(file.read_bytes(), type=Sidecar).options)


@pytest.fixture(params=[FakeManager, OldManager])
def kind(request: pytest.FixtureRequest) -> type[FakeManager]:
    chosen: type[FakeManager] = request.param
    return chosen


# Causes of a recording's end.


async def test_a_capture_that_sglang_ended_itself_is_not_stopped_again(
    kind: type[FakeManager], tmp_path: Path
) -> None:
    manager, capture = kind(), asked(tmp_path, iterations=Iterations(count=3))
    (artifact,) = await recorded(manager, capture, 10)
    assert manager.asked == ["start"]
    assert artifact.truncated is None
    options = options_of(artifact, capture)
    assert (options["ended"], options["prefill_iterations"], options["decode_iterations"]) == (
        "by itself",
        1,
        2,
    )


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_exactly_as_many_iterations_are_recorded_as_were_asked_for(
    kind: type[FakeManager], tmp_path: Path, count: int
) -> None:
    capture = asked(tmp_path, iterations=Iterations(count=count))
    (artifact,) = await recorded(kind(), capture, 10)
    options = options_of(artifact, capture)
    assert int(str(options["prefill_iterations"])) + int(str(options["decode_iterations"])) == count


async def test_a_count_that_is_not_reached_is_stopped_and_noted(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(count=50))
    (artifact,) = await recorded(manager, capture, 4)
    assert manager.asked == ["start", "stop"]
    assert (artifact.iterations, artifact.iterations_asked, artifact.ended) == (4, 50, "capture")
    assert str(artifact.note).startswith("4 of 50 ")
    assert artifact.truncated is None
    assert not manager.recording


@pytest.mark.parametrize(
    ("has_plugin", "count", "after", "truncated", "note"),
    [
        (True, None, 5, ["8", "5"], None),
        (True, 16, 5, ["8", "16", "5"], None),
        (True, None, 0, None, ["8"]),  # a stop after the last iteration cuts nothing off
        (False, None, 5, ["8"], None),  # the number of iterations after the stop is unknown
    ],
)
async def test_a_recording_that_somebody_else_stops_between_two_generations_is_cut_short(
    tmp_path: Path,
    has_plugin: bool,
    count: int | None,
    after: int,
    truncated: list[str] | None,
    note: list[str] | None,
) -> None:
    manager = FakeManager()
    manager.has_plugin = has_plugin
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path, iterations=Iterations(count=count)))
    await manager.generate(8)
    await manager.stop_profile()
    if after:
        await manager.generate(after)
    (artifact,) = await profiler.stop()
    assert (artifact.iterations, artifact.ended) == (8, "others")
    told = (artifact.truncated, artifact.note)
    assert [text and re.findall(r"\d+", text) for text in told] == [truncated, note]


async def test_what_sglang_writes_inside_the_capture_is_a_stall(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    (artifact,) = await recorded(FakeManager(), asked(tmp_path, iterations=Iterations(count=3)), 8)
    (stall,) = artifact.stalls
    assert (stall.doing, stall.source) == ("writing", "stamps")
    assert before_ns <= stall.start_ns <= stall.end_ns <= time.time_ns()


async def test_without_the_plugin_a_stall_ends_when_the_file_is_whole(tmp_path: Path) -> None:
    manager = FakeManager()
    manager.has_plugin = False
    (artifact,) = await recorded(manager, asked(tmp_path, iterations=Iterations(count=3)), 8)
    (stall,) = artifact.stalls
    whole_ns = os.stat(os.path.join(asked(tmp_path).step_dir, artifact.path)).st_mtime_ns
    assert (stall.doing, stall.source, stall.end_ns) == ("writing", "file", whole_ns)


# Faults that a later version of verl's profiler had: a stop that was never called, windows of at least two
# passes, an assertion if the profiler was already running.


@pytest.mark.parametrize("by_stage", [False, True])
@pytest.mark.parametrize("count", [None, 1, 50])
@pytest.mark.parametrize("start", [0, 1])
async def test_the_stop_is_reached_whatever_the_window(
    tmp_path: Path, start: int, count: int | None, by_stage: bool
) -> None:
    if start and by_stage:
        return  # refused: test_a_refused_window_is_refused_before_the_engine_hears_of_it
    manager = FakeManager()
    capture = asked(tmp_path, iterations=Iterations(start=start, count=count), by_stage=by_stage)
    assert await recorded(manager, capture, 4)
    assert not manager.recording
    assert not manager.armed
    assert manager.asked.count("stop") == (0 if count == 1 else 1)


@pytest.mark.parametrize("by_stage", [False, True])
async def test_a_window_of_one_pass_is_not_widened_to_two(tmp_path: Path, by_stage: bool) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(count=1), by_stage=by_stage)
    artifacts = await recorded(manager, capture, 5)
    assert manager.schedulers[0].request.num_steps == 1
    passes = [
        sum(int(str(options_of(artifact, capture)[f"{stage}_iterations"])) for stage in ("prefill", "decode"))
        for artifact in artifacts
    ]
    assert passes == ([1, 1] if by_stage else [1])


@pytest.mark.parametrize(
    "changes",
    [
        {"iterations": Iterations(start=1), "extra": {"start_step": "soon"}},
        {"activities": ("cuda",)},
    ],
    ids=str,
)
async def test_a_refused_window_is_refused_before_the_engine_hears_of_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    manager = FakeManager()
    profiler = SglangProfiler(manager)
    with pytest.raises(EngineError, match="Fix: "):
        await profiler.start(asked(tmp_path, **changes))
    assert manager.asked == []
    assert await profiler.stop() == []


@pytest.mark.parametrize("passes", [0, 5])
async def test_stages_are_recorded_although_a_later_start_was_asked_for(tmp_path: Path, passes: int) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(start=1, count=3), by_stage=True)
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    await manager.generate(passes)
    artifacts = await profiler.stop()
    assert {artifact.stage for artifact in artifacts} == ({"prefill", "decode"} if passes else set())
    assert set(profiler.ignored) == ({"iterations.start"} if passes else {"iterations.start", "idle"})
    assert not manager.armed


async def test_without_a_count_our_stop_ends_it(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path)
    (artifact,) = await recorded(manager, capture, 4)
    assert manager.asked == ["start", "stop"]
    assert options_of(artifact, capture)["ended"] == "stopped"


async def test_the_first_passes_of_a_capture_are_left_out(kind: type[FakeManager], tmp_path: Path) -> None:
    manager, capture = kind(), asked(tmp_path, iterations=Iterations(start=2, count=3))
    await manager.generate(7)
    (artifact,) = await recorded(manager, capture, 10)
    options = options_of(artifact, capture)
    assert options["start_step"] == 10
    assert (options["prefill_iterations"], options["decode_iterations"]) == (0, 3)
    assert not artifact.ignored


async def test_a_later_start_that_was_not_reached_says_so_and_leaves_nothing_armed(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(start=5))
    with pytest.raises(EngineError, match="the first 5"):
        await recorded(manager, capture, 5)
    assert not manager.armed
    assert not manager.recording


async def test_passes_that_overtake_a_later_start_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(start=2))
    start = manager.start_profile

    async def slow(req: ProfileReq | None = None) -> None:
        await manager.generate(4)  # other requests, after the scheduler was asked for its count
        await start(req)

    monkeypatch.setattr(manager, "start_profile", slow)
    (artifact,) = await recorded(manager, capture, 4)
    assert "pass 4 while" in artifact.ignored["iterations.start"]


@pytest.mark.parametrize("error", [EngineError("gone"), TypeError("no such answer")])
async def test_a_count_that_cannot_be_asked_for_after_the_start_keeps_the_recording_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    manager, capture = FakeManager(), asked(tmp_path, iterations=Iterations(start=2))
    start = manager.start_profile

    async def gone() -> list[dict[str, int]]:
        raise error

    async def then_silent(req: ProfileReq | None = None) -> None:
        await start(req)
        monkeypatch.setattr(manager, "get_internal_state", gone)

    monkeypatch.setattr(manager, "start_profile", then_silent)
    (artifact,) = await recorded(manager, capture, 4)
    assert f"is not known: {type(error).__name__}" in artifact.ignored["iterations.start"]


async def test_a_later_start_on_an_engine_without_the_plugin_is_refused(tmp_path: Path) -> None:
    manager = FakeManager()
    manager.has_plugin = False
    with pytest.raises(EngineError, match="to nobody"):
        await recorded(manager, asked(tmp_path, iterations=Iterations(start=2)), 4)
    assert manager.asked == []


@pytest.mark.parametrize("iterations", [Iterations(), Iterations(count=50)])
async def test_the_later_ranks_of_a_pipeline_are_waited_for(tmp_path: Path, iterations: Iterations) -> None:
    manager = FakeManager(pp=2)
    manager.lag_s = 0.3
    artifacts = await recorded(manager, asked(tmp_path, iterations=iterations), 4)
    assert [artifact.rank for artifact in artifacts] == [0, 1]
    assert not manager.lost
    assert not any(artifact.ignored for artifact in artifacts)


async def test_a_folder_that_is_cleared_in_stays_until_the_whole_pipeline_has_written(tmp_path: Path) -> None:
    manager = FakeManager(pp=2)
    manager.lag_s = 0.3
    assert await recorded(manager, asked(tmp_path), 0) == []
    assert not manager.recording
    assert not manager.lost
    assert not files_below(str(tmp_path))


async def test_a_pipeline_without_the_plugin_is_recorded_and_the_log_says_once_what_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_warned", set())
    manager = FakeManager(pp=2)
    assert len(await recorded(manager, asked(tmp_path), 4)) == 2
    assert not caplog.records
    manager.has_plugin = False
    for step in (2, 3):
        assert len(await recorded(manager, asked(tmp_path, step=step), 4)) == 2
    (record,) = caplog.records
    assert "of this pipeline" in record.getMessage()
    assert "stepscope-rollout-sglang" in record.getMessage()


class Busy(FakeManager):
    """A manager that runs a pass after a stop that came before any pass. The armed recording then
    begins, and the next start goes on in its folder.
    """

    async def start_profile(self, req: ProfileReq | None = None) -> None:
        if "stop" in self.asked:
            await self.generate(1)
        await super().start_profile(req)


async def test_what_begins_behind_a_stop_is_waited_for_in_the_whole_pipeline(tmp_path: Path) -> None:
    manager = Busy(pp=2)
    manager.lag_s = 0.3
    artifacts = await recorded(manager, asked(tmp_path), 0)
    assert [artifact.rank for artifact in artifacts] == [0, 1]
    assert not manager.recording
    assert not manager.lost
    assert not await asyncio.to_thread(lambda: list(tmp_path.rglob(".sglang-*")))


async def test_a_pipeline_rank_that_writes_nothing_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_PIPELINE_S", 0.1)
    manager = FakeManager(pp=2)
    manager.lag_s = 3600
    (artifact,) = await recorded(manager, asked(tmp_path), 4)
    assert artifact.ignored["files"].startswith("1 of 2 ranks")
    assert len(await asyncio.to_thread(lambda: list(tmp_path.rglob(".sglang-*")))) == 1


async def test_an_idle_engine_is_whole_without_a_file_and_nothing_is_left_armed(
    kind: type[FakeManager], tmp_path: Path
) -> None:
    manager = kind()
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path))
    assert await profiler.stop() == []
    assert "no forward pass" in profiler.ignored[IDLE]
    assert not manager.armed
    await manager.generate(3)
    assert not manager.recording
    assert not files_below(str(tmp_path)), "and no file"


async def test_an_exception_in_the_capture_leaves_no_profiler_running(tmp_path: Path) -> None:
    manager = FakeManager()
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path, iterations=Iterations(count=100)))
    with pytest.raises(ZeroDivisionError):
        try:
            await manager.generate(2)
            raise ZeroDivisionError
        finally:
            await profiler.stop()
    assert not manager.recording
    assert not manager.armed


async def test_a_profile_that_somebody_else_runs_is_an_error_and_is_left_alone(tmp_path: Path) -> None:
    manager = FakeManager()
    await manager.start_profile()
    await manager.generate(2)
    with pytest.raises(EngineError, match="not for us"):
        await recorded(manager, asked(tmp_path), 2)
    assert manager.schedulers[0].recording == ["EXTEND", "DECODE"]
    assert not files_below(str(tmp_path))


async def test_time_that_is_up_ends_the_recording_and_the_file_says_so(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path, seconds=1000.0)
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    await manager.generate(2)
    watchdog = profiler._watchdog
    assert watchdog is not None
    watchdog.function()
    await asyncio.wrap_future(profiler._thread.submit(lambda: None))
    await asyncio.wrap_future(profiler._thread.submit(lambda: None))
    assert not manager.recording
    await manager.generate(2)
    (artifact,) = await profiler.stop()
    assert "1000 s" in str(artifact.truncated)
    assert manager.asked == ["start", "stop"]


async def test_a_capture_that_is_dropped_after_its_stop_failed_says_so_at_once_and_is_stopped_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is a pipeline, whose schedulers still record for the capture."""
    manager = FakeManager(pp=2)
    profiler = SglangProfiler(manager, replica=0)
    await profiler.start(asked(tmp_path, name="given up"))
    await manager.generate(2)
    (given_up,) = profiler._sessions

    def no_answer() -> None:
        raise EngineError("no answer")

    def expire_and_drop() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(given_up.target, "stop", no_answer)
            given_up.expire("open for more than 5 s")
        given_up.drop()

    with pytest.raises(EngineError, match="no answer"):
        await asyncio.wait_for(asyncio.wrap_future(profiler._thread.submit(expire_and_drop)), 60)
    assert manager.asked == ["start"]
    artifacts = await recorded(manager, asked(tmp_path, name="next", step=2), 2)
    assert [artifact.path.count("next") for artifact in artifacts] == [1, 1]
    assert not manager.recording
    assert not [path for path in files_below(str(tmp_path)) if "given" in path.name]


# Stages.


async def test_stages_have_files_of_their_own(kind: type[FakeManager], tmp_path: Path) -> None:
    manager, capture = kind(tp=2), asked(tmp_path, by_stage=True, iterations=Iterations(count=2))
    artifacts = await recorded(manager, capture, 9)
    assert sorted((artifact.stage, artifact.rank) for artifact in artifacts) == [
        ("decode", 0), ("decode", 1), ("prefill", 0), ("prefill", 1),
    ]  # fmt: skip
    assert manager.asked == ["start"]  # both stages are complete: SGLang ended them itself
    decode = [options_of(artifact, capture) for artifact in artifacts if artifact.stage == "decode"]
    assert [options["decode_iterations"] for options in decode] == [2, 2]


async def test_stages_without_a_count_are_told_apart_too(kind: type[FakeManager], tmp_path: Path) -> None:
    artifacts = await recorded(kind(), asked(tmp_path, by_stage=True), 6)
    assert sorted(artifact.stage or "" for artifact in artifacts) == ["decode", "prefill"]


async def test_a_decode_capture_that_is_stopped_is_still_decode_and_noted(tmp_path: Path) -> None:
    capture = asked(tmp_path, by_stage=True, iterations=Iterations(count=20))
    artifacts = {artifact.stage: artifact for artifact in await recorded(FakeManager(), capture, 6)}
    assert str(artifacts["decode"].note).startswith("5 of 20 decode ")
    assert str(artifacts["prefill"].note).startswith("1 of 20 prefill ")


async def test_prefill_that_sglang_leaves_out_when_decoding_begins_is_told(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path, by_stage=True, iterations=Iterations(count=3))
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    for _ in range(2):
        await manager.generate(3)
    await profiler.stop()
    told = profiler.ignored["iterations.count"]
    assert re.findall(r"\d+", told) == ["1", "3", "2"]


@pytest.mark.parametrize("iterations", [0, 1])
async def test_a_stage_that_never_came_is_not_left_armed(tmp_path: Path, iterations: int) -> None:
    manager = FakeManager()
    capture = asked(tmp_path, by_stage=True, iterations=Iterations(count=5))
    if iterations:
        (artifact,) = await recorded(manager, capture, iterations)
        assert artifact.stage == "prefill"
    else:
        assert await recorded(manager, capture, iterations) == []
    assert not manager.armed
    await manager.generate(5)
    assert not manager.recording


async def test_a_file_that_holds_both_stages_is_called_neither(tmp_path: Path) -> None:
    # A request comes during decoding, and SGLang gives the decode trace the name of a prefill trace.
    manager, profiler = FakeManager(), None
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path, by_stage=True, iterations=Iterations(count=2)))
    for mode in ("EXTEND", "DECODE", "EXTEND", "EXTEND", "DECODE"):
        await manager.generate(1, mode)
    (artifact,) = await profiler.stop()
    assert artifact.stage is None
    assert "2 prefill" not in profiler.ignored["by_stage"]
    assert "1 prefill and 1 decode" in profiler.ignored["by_stage"]


# Ranks.


async def test_ranks_are_global_and_count_the_replicas_before(tmp_path: Path) -> None:
    manager = FakeManager(tp=2, pp=2)
    artifacts = await recorded(manager, asked(tmp_path, replica=2), 3)
    assert sorted(artifact.rank or 0 for artifact in artifacts) == [8, 9, 10, 11]
    assert {tuple((artifact.topology or {}).items()) for artifact in artifacts if artifact.rank == 10} == {
        (("tp", 0), ("pp", 1))
    }


async def test_only_the_ranks_that_were_asked_for_leave_files(tmp_path: Path) -> None:
    capture = asked(tmp_path, replica=1, ranks=(4, 6))
    artifacts = await recorded(FakeManager(tp=4), capture, 3)
    assert sorted(artifact.rank or 0 for artifact in artifacts) == [4, 6]
    assert len(files_below(capture.step_dir)) == 4  # two traces and two sidecars


async def test_data_parallel_ranks_follow_each_other(tmp_path: Path) -> None:
    artifacts = await recorded(FakeManager(tp=2, dp=2), asked(tmp_path), 3)
    places = {artifact.rank: artifact.topology for artifact in artifacts}
    assert places == {
        0: {"tp": 0, "dp": 0},
        1: {"tp": 1, "dp": 0},
        2: {"tp": 0, "dp": 1},
        3: {"tp": 1, "dp": 1},
    }


async def test_an_idle_data_parallel_rank_is_named_and_not_left_armed(tmp_path: Path) -> None:
    manager = FakeManager(dp=2)
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path))
    await manager.generate(3, only=0)
    (artifact,) = await profiler.stop()
    assert artifact.rank == 0
    assert "1 of 2 ranks" in profiler.ignored["files"]
    assert not manager.armed
    await manager.generate(2)
    assert not manager.recording


async def test_a_busy_rank_behind_an_idle_first_one_is_recorded(tmp_path: Path) -> None:
    manager = FakeManager(dp=2)
    profiler = SglangProfiler(manager)
    await profiler.start(asked(tmp_path))
    await manager.generate(3, only=1)
    (artifact,) = await profiler.stop()  # only the first rank's answer is known, and that rank refuses
    assert artifact.rank == 1


# Files.


async def test_the_merged_file_is_told_from_the_ranks_own(tmp_path: Path) -> None:
    artifacts = await recorded(FakeManager(tp=2), asked(tmp_path, merge=True), 3)
    assert sorted((artifact.kind, artifact.rank) for artifact in artifacts if artifact.rank is not None) == [
        ("torch_trace", 0), ("torch_trace", 1),
    ]  # fmt: skip
    (merged,) = [artifact for artifact in artifacts if artifact.kind == "merged_trace"]
    assert merged.rank is None
    assert merged.topology is None


def test_a_capture_leaves_nothing_but_its_files_and_their_sidecars(
    kind: type[FakeManager], tmp_path: Path
) -> None:
    capture = asked(tmp_path)
    (artifact,) = asyncio.run(recorded(kind(), capture, 3))
    name = Path(artifact.path).name
    assert sorted(path.name for path in Path(capture.out_dir).iterdir()) == [name, f"{name}.meta.json"]
    assert name.startswith(capture.name)
    assert artifact.pid == 4711


async def test_a_folder_that_cannot_be_written_is_refused_before_the_engine_hears_of_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    manager = FakeManager()
    with pytest.raises(EngineError, match="Fix: a save_path"):
        await recorded(manager, asked(tmp_path, out_dir=str(tmp_path / "file" / "folder")), 2)
    assert manager.asked == []


async def test_a_file_that_is_cut_off_is_kept_and_said_to_be(tmp_path: Path) -> None:
    manager, capture = FakeManager(), asked(tmp_path)
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    await manager.generate(2)
    write = manager.schedulers[0]._write

    def cut_off(modes: list[str], stage: str) -> None:
        write(modes, stage)
        (path,) = Path(str(manager.schedulers[0].request.output_dir)).iterdir()
        path.write_bytes(path.read_bytes()[:-20])

    manager.schedulers[0]._write = cut_off  # type: ignore[method-assign]  # killed while writing
    profiler._sessions[0].patience_s = 0.0
    (artifact,) = await profiler.stop()
    assert "not finish" in str(artifact.truncated)


def test_the_sidecar_says_what_the_engine_is_and_what_it_was_told(tmp_path: Path) -> None:
    capture = asked(tmp_path, record_shapes=True, iterations=Iterations(count=2))
    (artifact,) = asyncio.run(recorded(FakeManager(), capture, 5))
    options = options_of(artifact, capture)
    told = {name: options[name] for name in ("device", "tp_size", "record_shapes", "num_steps", "activities")}
    assert told == {"device": "cpu", "tp_size": 1, "record_shapes": True, "num_steps": 2, "activities": "CPU"}
    assert json.dumps(options)
