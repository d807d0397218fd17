"""A replica inside a Ray actor: the contract on every kind of actor, and what only actors can do wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope.engines.protocol import EngineCapture, EngineProfiler, Iterations, patience_s, waited_s
from stepscope.engines.ray import RayRollout, ignored_of
from stepscope.errors import EngineError
from stepscope.files.manifest import LATE
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import (
    EngineConformance,
    MakeProfiler,
    a_capture,
    assert_complete,
    files_below,
)
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.sections.health import step_health
from stepscope_report.timeline import load_step

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")


class Rollout:
    """A sync actor; with max_concurrency a threaded one. The engine is an attribute, as in a user's class."""

    def __init__(self) -> None:
        self.engine = FakeEngine()

    def renew(self) -> None:
        self.engine = FakeEngine()

    def generate(self, iterations: int) -> None:
        asyncio.run(self.engine.generate(iterations))

    def spoil(self, fault: str, value: object) -> None:
        setattr(self.engine, fault, value)

    def recording(self) -> int:
        return len(self.engine.recordings)

    def pid(self) -> int:
        return os.getpid()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def busy_until(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)  # the only way to wait in a sync actor for something from outside


class AsyncRollout:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.loops: set[int] = set()

    async def renew(self) -> None:
        self.engine = FakeEngine()

    async def generate(self, iterations: int) -> None:
        await self.engine.generate(iterations)

    async def spoil(self, fault: str, value: object) -> None:
        setattr(self.engine, fault, value)

    async def recording(self) -> int:
        return len(self.engine.recordings)

    async def loop(self) -> int:
        return id(asyncio.get_running_loop())


class TorchReplica:
    """An async actor that decodes with a module of its own; nothing in it knows of us."""

    def __init__(self) -> None:
        import torch

        self.model = torch.nn.Linear(4, 4)

    async def generate(self, iterations: int) -> None:
        import torch

        for _ in range(iterations):
            self.model(torch.ones(1, 4))
            await asyncio.sleep(0)


def fake(engine: object, replica: int) -> EngineProfiler:
    return FakeEngineProfiler(cast(FakeEngine, engine), replica)


def rollout(actor: Any, replica: int | None = None) -> RayRollout:
    return RayRollout(actor, fake, attribute="engine", replica=replica)


@pytest.fixture(scope="module", params=["sync", "threaded", "async"])
def pair(request: pytest.FixtureRequest, ray_cluster: None) -> list[Any]:
    """Two actors of one kind."""
    kind = AsyncRollout if request.param == "async" else Rollout
    options = {"max_concurrency": 4} if request.param == "threaded" else {}
    return [make(kind, **options) for _ in range(2)]


class TestRayRollout(EngineConformance):
    honours = frozenset({"iterations"})

    @pytest.fixture
    def make_profiler(self, pair: list[Any]) -> MakeProfiler:
        ray.get([actor.renew.remote() for actor in pair])
        return lambda tmp_path, replica: rollout(pair[replica % 2], replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await _actor(profiler).generate.remote(iterations)

    async def die(self, profiler: EngineProfiler) -> None:
        await _actor(profiler).spoil.remote("dead", True)

    async def fail_halfway(self, profiler: EngineProfiler) -> None:
        await _actor(profiler).spoil.remote("fails_to_start", 1)

    async def hang_on_start(self, profiler: EngineProfiler) -> None:
        await _actor(profiler).spoil.remote("hangs_on_start", 1)

    async def hang_on_stop(self, profiler: EngineProfiler) -> None:
        await _actor(profiler).spoil.remote("hangs_on_stop", 1)

    async def repair(self, profiler: EngineProfiler) -> None:
        for fault in ("fails_to_start", "hangs_on_start", "hangs_on_stop"):
            await _actor(profiler).spoil.remote(fault, None)


def _actor(profiler: EngineProfiler) -> Any:
    return cast(RayRollout, profiler)._line.actor


class LoopNoting(FakeEngineProfiler):
    async def start(self, capture: EngineCapture) -> None:
        await super().start(capture)
        self._ignored = {"loop": str(id(asyncio.get_running_loop()))}


class StubbornError(Exception):
    """As the exceptions of some engine libraries: pickled without an error, not to be unpickled."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


class Raising(FakeEngineProfiler):
    async def start(self, capture: EngineCapture) -> None:
        raise StubbornError(7, detail="out of buffers")


class StopFails(FakeEngineProfiler):
    """Says how long it is waited for, and that files may still come."""

    async def stop(self) -> list[Artifact]:
        capture = self._capture
        await super().stop()
        assert capture is not None
        self._ignored = {LATE: f"waited for {patience_s(capture):g} s"}
        raise EngineError("the scheduler did not answer")


def noting(engine: object, replica: int) -> EngineProfiler:
    return LoopNoting(cast(FakeEngine, engine), replica)


def raising(engine: object, replica: int) -> EngineProfiler:
    return Raising(cast(FakeEngine, engine), replica)


def stop_fails(engine: object, replica: int) -> EngineProfiler:
    return StopFails(cast(FakeEngine, engine), replica)


def make(kind: type, **options: Any) -> Any:
    return ray.remote(kind).options(**options).remote()


@pytest.fixture
def actor(remote: Callable[..., Any]) -> Any:
    return remote(Rollout, max_restarts=1)


async def test_an_async_actors_engine_is_driven_on_the_actors_own_loop(tmp_path: Path) -> None:
    actor = make(AsyncRollout)
    replica = RayRollout(actor, noting, attribute="engine")
    await replica.start(a_capture(tmp_path))
    assert replica.ignored == {"loop": str(await actor.loop.remote())}
    await replica.stop()
    ray.kill(actor)


async def test_an_actor_that_died_before_the_capture_is_an_error(actor: Any, tmp_path: Path) -> None:
    ray.kill(actor)
    with pytest.raises(EngineError, match="actor died: "):
        await rollout(actor).start(a_capture(tmp_path))


async def test_an_actor_that_dies_during_the_capture_is_an_error_at_once(tmp_path: Path) -> None:
    actor = make(Rollout)
    replica = rollout(actor)
    await replica.start(a_capture(tmp_path))
    os.kill(await actor.pid.remote(), signal.SIGKILL)
    with pytest.raises(EngineError, match="actor died"):
        await asyncio.wait_for(replica.stop(), 20)
    assert await replica.stop() == []


def test_an_engine_whose_actor_died_in_the_step_is_named_first(tmp_path: Path) -> None:
    actors = [make(Rollout) for _ in range(2)]
    engines = [rollout(actor, number) for number, actor in enumerate(actors)]
    roles = {"rollout": {"ranks": "all"}, "*": {"profiler": "off"}}
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), "steps": [1], "roles": roles})
    with capture(1, workers={}, engines=engines, config=config) as cap:
        os.kill(ray.get(actors[1].pid.remote()), signal.SIGKILL)
    assert cap.result.path is not None
    health = step_health(load_step(cap.result.path))
    assert (health.lost, [row.died for row in health.processes if row.owner]) == (("replica 1",), [False])


async def test_an_actor_that_restarts_during_the_capture_is_an_error(actor: Any, tmp_path: Path) -> None:
    replica = rollout(actor)
    await replica.start(a_capture(tmp_path))
    await kill_and_await_restart(actor)
    with pytest.raises(EngineError, match="the actor restarted"):
        await replica.stop()
    await replica.start(a_capture(tmp_path, step=2))
    assert await replica.stop()


async def test_why_a_stop_failed_is_said_also_where_the_actor_is_gone_by_then(
    actor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = rollout(actor)
    await replica.start(a_capture(tmp_path))
    await kill_and_await_restart(actor)

    ask: Any = replica._line.ask

    async def gone(question: object, *arguments: object) -> object:
        if question is ignored_of:
            raise EngineError("actor died")
        return await ask(question, *arguments)

    monkeypatch.setattr(replica._line, "ask", gone)
    with pytest.raises(EngineError, match="the actor restarted"):
        await replica.stop()


async def test_a_start_that_was_given_up_on_a_busy_actor_is_taken_back(actor: Any, tmp_path: Path) -> None:
    replica, free = rollout(actor), tmp_path / "free"
    busy = actor.busy_until.remote(str(free))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(replica.start(a_capture(tmp_path, step=1)), 0.2)
    free.touch()
    await busy
    assert await actor.recording.remote() == 0
    later = a_capture(tmp_path, step=2)
    await replica.start(later)
    await actor.generate.remote(2)
    for artifact in await replica.stop():
        assert_complete(artifact, later)
    assert not (tmp_path / "step_000001").exists()


async def test_a_stop_that_was_given_up_on_a_busy_actor_still_happens(actor: Any, tmp_path: Path) -> None:
    replica, free = rollout(actor), tmp_path / "free"
    capture = a_capture(tmp_path)
    await replica.start(capture)
    busy = actor.busy_until.remote(str(free))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(replica.stop(), 0.2)
    free.touch()
    await busy
    assert await actor.recording.remote() == 0
    assert files_below(capture.out_dir)


async def test_an_engine_that_hangs_on_start_leaves_its_actor_to_its_work(actor: Any, tmp_path: Path) -> None:
    await actor.spoil.remote("hangs_on_start", 0)
    starting = asyncio.create_task(rollout(actor).start(a_capture(tmp_path)))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(actor.pid.remote(), 5) > 0
    assert not starting.done()
    starting.cancel()
    await asyncio.wait([starting])


async def test_an_exception_that_does_not_unpickle_arrives_as_text(actor: Any, tmp_path: Path) -> None:
    replica = RayRollout(actor, raising, attribute="engine")
    with pytest.raises(EngineError, match="StubbornError: 7: "):
        await replica.start(a_capture(tmp_path))


async def test_a_stop_that_fails_in_the_actor_says_what_may_still_come(actor: Any, tmp_path: Path) -> None:
    replica = RayRollout(actor, stop_fails, attribute="engine")
    await replica.start(a_capture(tmp_path))
    waited_s.set(7.0)
    with pytest.raises(EngineError, match="did not answer"):
        await replica.stop()
    assert replica.ignored == {LATE: "waited for 7 s"}


async def test_a_wrong_attribute_is_an_error_that_lists_those_there_are(actor: Any, tmp_path: Path) -> None:
    replica = RayRollout(actor, fake, attribute="llm.engine")
    with pytest.raises(EngineError, match=r"'llm\.engine'.*: engine"):
        await asyncio.to_thread(replica.check)
    with pytest.raises(EngineError, match="its attributes: engine"):
        await replica.start(a_capture(tmp_path))


async def test_an_adapter_that_is_not_installed_is_an_error_with_the_fix(actor: Any) -> None:
    replica = RayRollout(actor, "no-such-engine")
    with pytest.raises(EngineError, match="pip install"):
        await asyncio.to_thread(replica.check)


async def test_the_actors_environment_is_left_alone_v12(actor: Any, tmp_path: Path) -> None:
    replica = rollout(actor)
    before = await actor.environment.remote()
    await replica.start(a_capture(tmp_path))
    during = await actor.environment.remote()
    await replica.stop()
    assert before == during == await actor.environment.remote()


def test_importing_it_loads_no_ray() -> None:
    code = "import sys, stepscope.engines.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_torch_replica_in_an_async_actor_is_recorded_by_default(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    actor = make(TorchReplica)
    replica = RayRollout(actor)
    await asyncio.to_thread(replica.check)
    capture = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(start=1, count=3))
    await replica.start(capture)
    await actor.generate.remote(6)
    (artifact,) = await replica.stop()
    ray.kill(actor)
    assert_complete(artifact, capture)
    assert replica.ignored == {}
    with gzip.open(Path(capture.step_dir) / artifact.path) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    assert names.count("aten::linear") == 3


async def kill_and_await_restart(actor: Any) -> None:
    os.kill(await actor.pid.remote(), signal.SIGKILL)
    while not await _answers(actor):  # noqa: ASYNC110  (Ray has no event for a restart)
        await asyncio.sleep(0.05)


async def _answers(actor: Any) -> bool:
    try:
        await actor.pid.remote()
    except ray.exceptions.RayActorError:
        return False
    return True
