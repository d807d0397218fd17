"""The protocol `EngineProfiler`, as tests. Subclass `EngineConformance` and define the fixture
`make_profiler`:

    class TestMyEngine(EngineConformance):
        honours = frozenset({"iterations", "with_stack"})

        @pytest.fixture
        def make_profiler(self, my_engine):
            return lambda tmp_path, replica: MyProfiler(my_engine, replica)

        async def work(self, profiler, iterations):
            await profiler.engine.generate(iterations)

Override the methods under "Optional controls" if the engine allows it, or use a fake engine that fails on
demand. A test is skipped if it needs a control that is not overridden; the message names the control.

This file has more than 400 lines, because people read and copy the suite as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec
import pytest

from stepscope.engines.protocol import EngineCapture, EngineProfiler, Iterations
from stepscope.errors import EngineError
from stepscope.files import passes
from stepscope.files.layout import StepLayout, sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar

P = ParamSpec("P")
T = TypeVar("T")
MakeProfiler: TypeAlias = Callable[[Path, int], EngineProfiler]

_OPTIONS: Mapping[str, object] = {
    "with_stack": True,
    "record_shapes": True,
    "profile_memory": True,
    "iterations": Iterations(start=0, count=2),
    "by_stage": True,
    "merge": True,
}
"""{option that an engine may not support: a value that differs from the default}."""


def _on_the_loop(
    scenario: Callable[Concatenate[EngineConformance, P], Coroutine[None, None, None]],
) -> Callable[Concatenate[EngineConformance, P], None]:
    """Turn a coroutine into a test that runs it with `EngineConformance.run`."""

    @wraps(scenario)
    def test(suite: EngineConformance, /, *args: P.args, **kwargs: P.kwargs) -> None:
        suite.run(scenario(suite, *args, **kwargs))

    return test


class EngineConformance:
    """Tests of the protocol `EngineProfiler`. Every test leaves the engine idle."""

    honours: ClassVar[frozenset[str]] = frozenset()
    """The capture options that this engine supports. Other options, if requested, must be reported as
    ignored."""
    side_by_side: ClassVar[bool] = True
    """True if two replicas can record at once in this process."""
    any_loop: ClassVar[bool] = True
    """True if captures may come from different event loops; False if the engine is bound to one event
    loop."""
    quick_s: ClassVar[float] = 5.0
    """Longest duration of a call that must not wait for a deadline, such as a stop after the engine has
    died."""
    longest_block_s: ClassVar[float] = 0.5
    """Longest time that the event loop may be blocked. A noisy machine stays below this; a blocking call does
    not."""

    @pytest.fixture
    def make_profiler(self) -> MakeProfiler:
        """Return a function of (tmp_path, replica) that returns an idle profiler of a working engine.

        The tests call the function on an event loop.
        """
        raise NotImplementedError("override the fixture `make_profiler`")

    def run(self, scenario: Coroutine[None, None, T]) -> T:
        """Run the coroutine of one test. Override this for an engine that has its own event loop."""
        return asyncio.run(scenario)

    # Optional controls.

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        """Make the engine run this many iterations."""

    async def recording(self, profiler: EngineProfiler) -> bool | None:
        """Return whether any worker of the engine is recording, or None if unknown."""
        return None

    async def die(self, profiler: EngineProfiler) -> None:
        """Kill the engine."""
        raise NotImplementedError

    async def fail_halfway(self, profiler: EngineProfiler) -> None:
        """Make the next start fail in one worker after other workers have begun."""
        raise NotImplementedError

    async def hang_on_start(self, profiler: EngineProfiler) -> None:
        """Make the next start hang in one worker after other workers have begun."""
        raise NotImplementedError

    async def hang_on_stop(self, profiler: EngineProfiler) -> None:
        """Make the next stop hang in one worker."""
        raise NotImplementedError

    async def repair(self, profiler: EngineProfiler) -> None:
        """Undo `fail_halfway`, `hang_on_start` or `hang_on_stop`."""
        raise NotImplementedError

    # The contract.

    @_on_the_loop
    async def test_it_is_an_engine_profiler_and_its_check_passes(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 3)
        assert isinstance(profiler, EngineProfiler)
        assert profiler.replica == 3
        await asyncio.to_thread(profiler.check)

    def test_its_counters_can_be_sampled_and_closed(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        sources = make_profiler(tmp_path, 0).counters()
        sampled = [of for source in sources for of in source.sample()]
        for source in sources:
            source.close()
        assert all(of.startswith("replica 0") for of in sampled)

    @_on_the_loop
    async def test_artifacts_are_complete_when_stop_returns(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 1)
        capture = a_capture(tmp_path, step=2, replica=1)
        assert not files_below(capture.step_dir)
        artifacts = await self._record(profiler, capture)
        assert artifacts, "a capture with work in it has artifacts"
        for artifact in artifacts:
            assert_complete(artifact, capture)

    @_on_the_loop
    async def test_a_rank_is_stated_or_none_and_no_two_files_of_a_kind_share_one(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        artifacts = await self._record(make_profiler(tmp_path, 1), a_capture(tmp_path, replica=1))
        stated = [
            (artifact.kind, artifact.stage, artifact.rank)
            for artifact in artifacts
            if artifact.rank is not None
        ]
        assert all(type(rank) is int and rank >= 0 for _, _, rank in stated)
        assert len(stated) == len(set(stated)), "a rank that no engine stated was made up"

    @_on_the_loop
    async def test_stop_without_start_returns_nothing(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        assert await make_profiler(tmp_path, 0).stop() == []

    @_on_the_loop
    async def test_a_second_stop_returns_nothing(self, make_profiler: MakeProfiler, tmp_path: Path) -> None:
        profiler = make_profiler(tmp_path, 0)
        await self._record(profiler, a_capture(tmp_path))
        assert await profiler.stop() == []

    @_on_the_loop
    async def test_a_double_start_is_an_error_and_the_first_capture_survives_it(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        first, second = a_capture(tmp_path, step=1), a_capture(tmp_path, step=2)
        await profiler.start(first)
        await self.work(profiler, 2)
        with pytest.raises(EngineError):
            await profiler.start(second)
        await self.work(profiler, 2)
        artifacts = await profiler.stop()
        assert artifacts
        for artifact in artifacts:
            assert_complete(artifact, first)
        assert not files_below(second.step_dir)

    @_on_the_loop
    async def test_two_starts_at_once_are_one_capture_and_one_error(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        captures = [a_capture(tmp_path, step=1), a_capture(tmp_path, step=2)]
        starts = [profiler.start(capture) for capture in captures]
        results = await asyncio.gather(*starts, return_exceptions=True)
        assert [type(result) for result in results].count(type(None)) == 1
        assert isinstance(results[0] or results[1], EngineError)
        await self.work(profiler, 4)
        won = captures[0] if results[0] is None else captures[1]
        for artifact in await profiler.stop():
            assert_complete(artifact, won)

    @_on_the_loop
    async def test_two_captures_never_mix_their_files(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        first, second = a_capture(tmp_path, step=1), a_capture(tmp_path, step=2)
        early = await self._record(profiler, first)
        before = contents(first.step_dir)
        late = await self._record(profiler, second)
        assert early
        assert late
        assert contents(first.step_dir) == before, "a later capture changed the files of an earlier one"
        for artifact in late:
            assert_complete(artifact, second)

    @_on_the_loop
    async def test_two_captures_of_one_step_never_overwrite_each_other(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        first, second = a_capture(tmp_path, name="run-a"), a_capture(tmp_path, name="run-b")
        early = await self._record(profiler, first)
        before = contents(first.step_dir)
        late = await self._record(profiler, second)
        after = contents(first.step_dir)
        assert {name: after[name] for name in before} == before
        assert {artifact.path for artifact in early}.isdisjoint({artifact.path for artifact in late})

    @_on_the_loop
    async def test_two_replicas_of_one_step_never_mix_their_files(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        if not self.side_by_side:
            pytest.skip("one replica at a time can record in this process")
        profilers = [make_profiler(tmp_path, replica) for replica in (0, 1)]
        captures = [a_capture(tmp_path, replica=replica) for replica in (0, 1)]
        recorded = await asyncio.gather(*map(self._record, profilers, captures))
        for artifacts, capture in zip(recorded, captures, strict=True):
            for artifact in artifacts:
                assert_complete(artifact, capture)
        paths = [{artifact.path for artifact in artifacts} for artifacts in recorded]
        assert paths[0].isdisjoint(paths[1])

    def test_captures_may_come_from_different_event_loops(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        if not self.any_loop:
            pytest.skip("this engine is bound to one event loop")

        async def first() -> EngineProfiler:
            profiler = make_profiler(tmp_path, 0)
            assert await self._record(profiler, a_capture(tmp_path, step=1))
            return profiler

        profiler = self.run(first())
        assert self.run(self._record(profiler, a_capture(tmp_path, step=2)))

    @_on_the_loop
    async def test_its_passes_fit_their_requests_and_are_bounded(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 1)
        capture = msgspec.structs.replace(a_capture(tmp_path, replica=1), passes=2)
        noted = [one for one in await self._record(profiler, capture) if one.kind == passes.KIND]
        if not noted:
            pytest.skip("this engine notes no passes: see docs/requests.md")
        for artifact in noted:
            assert_complete(artifact, capture)
            file = passes.read_passes(Path(capture.step_dir) / artifact.path)
            assert (file.step, file.run_id, file.replica) == (capture.step, capture.run_id, capture.replica)
            assert len(file.passes.number) == 2
            assert file.dropped > 0
            assert sum(file.served.tokens) > 0

    @pytest.mark.parametrize("option", sorted(_OPTIONS))
    @_on_the_loop
    async def test_an_option_is_honoured_or_reported_as_ignored(
        self, make_profiler: MakeProfiler, tmp_path: Path, option: str
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        capture = msgspec.structs.replace(a_capture(tmp_path), **{option: _OPTIONS[option]})
        foretold = await asyncio.to_thread(profiler.check_capture, capture)
        await self._record(profiler, capture)
        assert foretold.keys() <= profiler.ignored.keys(), "what had no effect was foretold, and no more"
        reported = option in profiler.ignored
        assert reported != (option in self.honours), f"{option}; ignored: {profiler.ignored}"
        assert all(profiler.ignored.values()), "every ignored option has a reason"
        if not reported:
            return
        await self._record(profiler, a_capture(tmp_path, step=3))
        assert option not in profiler.ignored, "`ignored` is of the latest capture"

    @_on_the_loop
    async def test_an_option_the_engine_does_not_know_is_an_error_or_reported(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        capture = msgspec.structs.replace(a_capture(tmp_path), extra={"no_such_option": 1})
        try:
            await profiler.start(capture)
            await profiler.stop()
            report = str(dict(profiler.ignored))
        except EngineError as error:
            report = str(error)
        assert "no_such_option" in report
        assert await profiler.stop() == []
        assert not await self.recording(profiler)

    @pytest.mark.parametrize("awaits", [0, 1, 2, 3, 5, 8])
    @_on_the_loop
    async def test_a_cancelled_start_leaves_nothing_running(
        self, make_profiler: MakeProfiler, tmp_path: Path, awaits: int
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        starting = asyncio.create_task(profiler.start(a_capture(tmp_path, step=1)))
        for _ in range(awaits):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():  # the start had ended before `cancel`
            starting.result()
            await profiler.stop()
        await self._assert_idle_and_usable(profiler, tmp_path)

    @_on_the_loop
    async def test_a_start_that_fails_halfway_leaves_nothing_running(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        self._needs("fail_halfway")
        profiler = make_profiler(tmp_path, 0)
        await self.fail_halfway(profiler)
        with pytest.raises(EngineError):
            await profiler.start(a_capture(tmp_path, step=1))
        await self.repair(profiler)
        await self._assert_idle_and_usable(profiler, tmp_path)

    @_on_the_loop
    async def test_a_start_that_hangs_ends_at_the_callers_deadline(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        self._needs("hang_on_start")
        profiler = make_profiler(tmp_path, 0)
        await self.hang_on_start(profiler)
        with pytest.raises(asyncio.TimeoutError):
            await self._quickly(asyncio.wait_for(profiler.start(a_capture(tmp_path, step=1)), 0.2))
        await self.repair(profiler)
        await self._assert_idle_and_usable(profiler, tmp_path)

    @_on_the_loop
    async def test_a_stop_that_hangs_ends_at_the_callers_deadline(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        self._needs("hang_on_stop")
        profiler = make_profiler(tmp_path, 0)
        await profiler.start(a_capture(tmp_path, step=1))
        await self.work(profiler, 2)
        await self.hang_on_stop(profiler)
        with pytest.raises(asyncio.TimeoutError):
            await self._quickly(asyncio.wait_for(profiler.stop(), 0.2))
        await self.repair(profiler)
        await self._assert_idle_and_usable(profiler, tmp_path)

    @_on_the_loop
    async def test_stop_after_the_engine_died_is_an_error_at_once(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        self._needs("die")
        profiler = make_profiler(tmp_path, 0)
        await profiler.start(a_capture(tmp_path))
        await self.work(profiler, 2)
        await self.die(profiler)
        with pytest.raises(EngineError):
            await self._quickly(profiler.stop())
        assert await profiler.stop() == [], "a dead engine's capture is over"

    @_on_the_loop
    async def test_start_on_a_dead_engine_is_an_error_at_once(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        self._needs("die")
        profiler = make_profiler(tmp_path, 0)
        await self.die(profiler)
        with pytest.raises(EngineError):
            await self._quickly(profiler.start(a_capture(tmp_path)))
        assert await profiler.stop() == []

    @_on_the_loop
    async def test_the_event_loop_keeps_beating_v10(
        self, make_profiler: MakeProfiler, tmp_path: Path
    ) -> None:
        profiler = make_profiler(tmp_path, 0)
        await asyncio.to_thread(profiler.check)
        heart = asyncio.create_task(longest_gap_s())
        await asyncio.sleep(0)
        await profiler.start(a_capture(tmp_path))
        await self.work(profiler, 2)
        await profiler.stop()
        heart.cancel()
        await asyncio.wait([heart])
        assert heart.result() < self.longest_block_s, "start or stop blocked the event loop"

    # Helpers of the tests.

    def _needs(self, method: str) -> None:
        if getattr(type(self), method) is getattr(EngineConformance, method):
            pytest.skip(f"this engine has no `{method}`: override it in the subclass of EngineConformance")

    async def _record(self, profiler: EngineProfiler, capture: EngineCapture) -> list[Artifact]:
        await profiler.start(capture)
        await self.work(profiler, 4)
        return await profiler.stop()

    async def _assert_idle_and_usable(self, profiler: EngineProfiler, tmp_path: Path) -> None:
        assert await profiler.stop() == [], "a start that did not succeed left a capture to stop"
        assert not await self.recording(profiler), "a worker of the engine is still recording"
        capture = a_capture(tmp_path, step=7, name="afterwards")
        artifacts = await self._record(profiler, capture)
        assert artifacts, "a later capture records nothing"
        for artifact in artifacts:
            assert_complete(artifact, capture)

    async def _quickly(self, call: Coroutine[None, None, T]) -> T:
        began = time.monotonic()
        try:
            return await call
        finally:
            took = time.monotonic() - began
            assert took < self.quick_s, f"took {took:.1f} s"


def a_capture(root: Path, *, step: int = 1, replica: int = 0, name: str = "capture") -> EngineCapture:
    """Return a capture with default options below `root`. Its folders do not exist yet."""
    layout = StepLayout(root / f"step_{step:06d}")
    return EngineCapture(
        step=step,
        run_id="a-run",
        out_dir=str(layout.engine_dir(replica)),
        step_dir=str(layout.root),
        name=f"{name}-step{step}",
        replica=replica,
        activities=("cpu",),
    )


def assert_complete(artifact: Artifact, capture: EngineCapture) -> None:
    """Assert that the artifact's file and sidecar are in the capture's folder and match the artifact."""
    root = Path(capture.step_dir)
    path = root / artifact.path
    assert not Path(artifact.path).is_absolute(), f"{artifact.path} is not relative to the step folder"
    assert path.resolve().is_relative_to(root.resolve())
    assert path.is_file(), f"{path} was announced and does not exist"
    assert artifact.size_bytes == path.stat().st_size > 0
    assert artifact.replica == capture.replica
    assert artifact.host
    assert artifact.kind
    assert artifact.tool
    sidecar = msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar)
    assert sidecar.artifact == artifact
    assert (sidecar.step, sidecar.run_id) == (capture.step, capture.run_id)


def files_below(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def contents(folder: str) -> dict[str, bytes]:
    """Return {relative path: bytes} of every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder)}


async def longest_gap_s() -> float:
    """Run until cancelled, and return the longest time that the event loop did not run this task."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - last)
