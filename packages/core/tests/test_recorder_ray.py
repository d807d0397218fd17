"""Flight recorders of Ray actors: told once, and written by an order that is a file."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import standing_recorder
from stepscope import ProfileConfig, attach, capture, carrier, profile_step, span
from stepscope._recording.fanout.ray_fleet import Worker
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.engine_queues import engine_states
from stepscope.backends.counters import CounterSource
from stepscope.engines.metrics import RUNNING, EngineMetrics
from stepscope.engines.ray import RayRollout
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.states import EngineState
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report import step_report
from stepscope_report.cli.why import ask
from stepscope_report.timeline import load_step
from stepscope_report.why import why

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster", "one_recorder")

POLL_S = 0.1


def set_clock(seconds: float) -> None:
    real = getattr(time, "_real_time_ns", time.time_ns)
    time._real_time_ns = real  # type: ignore[attr-defined]  # where a second call finds it
    time.time_ns = (lambda: real() + int(seconds * 1e9)) if seconds else real


class Trainer:
    def set_clock(self, seconds: float) -> None:
        set_clock(seconds)

    def pid(self) -> int:
        return os.getpid()

    @profile_step(role="actor")
    def update(self, seconds: float, carried: Any) -> float:
        with attach(carried):
            time.sleep(seconds)
        return seconds

    @profile_step(role="actor")
    def hang(self, carried: Any) -> None:
        with attach(carried):
            self.wait_for_the_lock()

    def wait_for_the_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=60)

    def train_in_an_open_step(self, folder: str, seconds: float) -> None:
        """Begin a step of its own that no call ends, as a loop does whose steps end where the next begins."""
        self.step = capture(1, config=config_in(Path(folder), recorder={"triggers": ["signal"]}))
        self.step.__enter__()
        with span("train", role="trainer"):
            time.sleep(seconds)

    def recorded(self) -> int:
        recorder = standing.standing()
        return -1 if recorder is None else len(recorder.log)


@pytest.fixture
def actors(remote: Callable[..., Any]) -> list[Any]:
    made = [remote(Trainer) for _ in range(2)]
    ray.get([actor.recorded.remote() for actor in made])
    return made


def config_in(folder: Path, recorder: Mapping[str, object] = {}, **settings: object) -> ProfileConfig:
    recorder = recorder or {"then_capture": 0, "slow_factor": 8, "last": 1}
    return ProfileConfig.from_mapping(
        {
            "save_path": str(folder),
            "record": "spans",
            "recorder": recorder,
            "control": {"poll_seconds": POLL_S},
            **settings,
        }
    )


def step_of(config: ProfileConfig, number: int, actors: list[Any], seconds: tuple[float, ...]) -> None:
    with capture(number, config=config, workers={"actor": actors}), span("train", role="trainer"):
        calls = [actor.update.remote(took, carrier()) for actor, took in zip(actors, seconds, strict=True)]
        ray.get(calls)


def await_recorders(actors: list[Any]) -> None:
    """Wait until each actor has a recorder: they are told in the background."""
    while min(ray.get([actor.recorded.remote() for actor in actors])) < 0:
        time.sleep(0.02)


def drained() -> None:
    assert standing_recorder()._work.drain(60) == []


def test_a_slow_step_holds_what_its_actors_did(
    tmp_path: Path, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    prepare = Worker.prepare

    async def counted(self: Worker, *args: Any) -> Any:
        calls.append(self.name)
        return await prepare(self, *args)

    monkeypatch.setattr(Worker, "prepare", counted)
    config = config_in(tmp_path)
    step_of(config, 0, actors, (0.01, 0.01))
    await_recorders(actors)
    took_s = [0.2]
    for number in range(1, 14):
        began_s = time.perf_counter()
        # Longer than any step that a busy machine made slow.
        step_of(config, number, actors, (0.02, 5 * max(took_s) if number == 12 else 0.02))
        took_s.append(time.perf_counter() - began_s)
    assert len(calls) == 2  # each actor is told once, and not once a step
    drained()
    layout = RunLayout(tmp_path)
    assert 12 in layout.steps()  # and others that a busy machine made slow
    parts, _ = read_parts(layout.step(12))
    manifest = fold(parts)
    assert manifest.problems() == []
    assert manifest.state == "ok"
    assert [part.process.role for part in manifest.processes] == ["trainer", "actor", "actor"]
    timeline = load_step(layout.step(12).root)
    updates = [span for span in timeline.spans if span.stage == "update"]
    short_ns, long_ns = sorted(span.dur_ns or 0 for span in updates)
    assert 20e6 <= short_ns < 500e6 < 1e9 <= long_ns  # a sleep lasts longer on a busy machine
    (train,) = [at for at, span in enumerate(timeline.spans) if span.stage == "train"]
    assert [span.parent for span in updates] == [train, train], "by the carriers"
    report = step_report(timeline)
    assert report.health.complete
    assert report.breakdown.lines[0].stage == "update"


def test_clocks_of_other_hosts_are_measured_at_first_and_with_the_step(
    tmp_path: Path, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actors run on this host, whose clock they share: what is measured must allow an offset of 0."""
    for module in ("fanout.ray_fleet", "capture.kept_steps"):
        monkeypatch.setattr(f"stepscope._recording.{module}.gethostname", lambda: "elsewhere")
    config = config_in(tmp_path, recorder={"triggers": []})
    step_of(config, 0, actors, (0.01, 0.01))
    recorder = standing_recorder()
    while recorder.measure is None:
        time.sleep(0.02)
    step_of(config, 1, actors, (0.05, 0.05))
    recorder.write_last(1)
    drained()
    parts, _ = read_parts(RunLayout(tmp_path).step(1))
    (owner,) = [part for part in parts if part.owner]
    assert len(owner.clocks) == 4
    assert {clock.process for clock in owner.clocks} == set(recorder.workers)
    assert all(abs(clock.offset_ns) <= clock.uncertainty_ns for clock in owner.clocks)
    updates = [span for span in load_step(RunLayout(tmp_path).step(1).root).spans if span.stage == "update"]
    assert len(updates) == 2


@pytest.mark.parametrize("seconds", [3600.0, -86_400.0])
def test_a_jump_of_the_wall_clock_moves_no_span(tmp_path: Path, actors: list[Any], seconds: float) -> None:
    config = config_in(tmp_path, recorder={"triggers": []})
    step_of(config, 0, actors, (0.01, 0.01))
    await_recorders(actors)
    recorder = standing_recorder()
    try:
        with capture(1, config=config), span("train", role="trainer"):
            ray.get([actor.update.remote(0.1, carrier()) for actor in actors])
            set_clock(seconds)
            ray.get([actor.set_clock.remote(seconds) for actor in actors])
            ray.get([actor.update.remote(0.2, carrier()) for actor in actors])
        recorder.write_last(1)
        drained()
        states = ask(RunLayout(tmp_path), 10)
    finally:
        set_clock(0)
    timeline = load_step(RunLayout(tmp_path).step(1).root)
    (train,) = [span for span in timeline.spans if span.stage == "train"]
    updates = [span for span in timeline.spans if span.stage == "update"]
    took_s = sorted((span.dur_ns or 0) / 1e9 for span in updates)
    assert len(took_s) == 4
    assert 0.1 <= took_s[0] < took_s[2]
    assert 0.2 <= took_s[2] <= took_s[3] < 60  # busy machines wake sleepers late, and not by hours
    ends = [(span.start_ns, span.start_ns + (span.dur_ns or 0)) for span in updates]
    assert all(train.start_ns - 10**6 <= start for start, _ in ends)
    assert all(end <= train.start_ns + (train.dur_ns or 0) + 10**6 for _, end in ends)
    assert len(states) == 3  # an order is obeyed, however early the clock says that it was made


def test_an_actor_that_is_terminated_writes_its_spans(tmp_path: Path, actors: list[Any]) -> None:
    config = config_in(tmp_path, recorder={"triggers": ["signal"], "last": 1})
    step_of(config, 0, actors, (0.01, 0.01))
    await_recorders(actors)
    pid = ray.get(actors[1].pid.remote())
    with capture(1, config=config), span("train", role="trainer"):
        call = actors[1].update.remote(60, carrier())
        time.sleep(0.5)  # until the call is under way
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(ray.exceptions.RayError):
            ray.get(call)
    drained()
    parts, _ = read_parts(RunLayout(tmp_path).step(1))
    (own,) = [part for part in parts if part.owner]
    assert own.recorder is not None
    assert own.recorder.trigger == "signal"
    assert "(SIGTERM)" in own.recorder.reason
    assert [part.process.pid for part in parts if part.process.pid == pid] == [pid]
    stages = {span.stage: span.dur_ns for span in load_step(RunLayout(tmp_path).step(1).root).spans}
    assert stages["update"] is None  # it had not ended


def test_an_idle_actor_that_is_ended_in_its_last_step_was_not_killed(
    tmp_path: Path, actors: list[Any]
) -> None:
    """Ray ends actors so when their program is over: with SIGTERM, whether or not a step is open."""
    pids = ray.get([actor.pid.remote() for actor in actors])
    folders = [str(tmp_path / name) for name in ("idle", "busy")]
    ray.get(actors[0].train_in_an_open_step.remote(folders[0], 0.0))
    call = actors[1].train_in_an_open_step.remote(folders[1], 60.0)
    while not RunLayout(folders[1]).root.exists():
        time.sleep(0.02)
    time.sleep(0.5)  # until the call is under way
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(call)
    with pytest.raises(ray.exceptions.RayError):
        while True:
            ray.get(actors[0].pid.remote())
    assert [list(RunLayout(folder).steps()) for folder in folders] == [[], [1]]


def test_an_actor_that_is_gone_is_named(tmp_path: Path, actors: list[Any]) -> None:
    config = config_in(tmp_path, control={"poll_seconds": POLL_S}, recorder={"triggers": ["exception"]})
    step_of(config, 0, actors, (0.01, 0.01))
    await_recorders(actors)
    recorder = standing_recorder()
    while len(recorder.workers) < 2:
        time.sleep(0.02)
    with pytest.raises(RuntimeError, match="out of data"), capture(1, config=config):
        ray.kill(actors[1])
        time.sleep(0.5)  # until its process is gone: nothing answers then
        raise RuntimeError("out of data")
    drained()
    parts, _ = read_parts(RunLayout(tmp_path).step(1))
    (problem,) = fold(parts).problems()
    assert "actor[1]" in problem
    assert "missing: it began" in problem


def test_the_actor_that_hangs_is_named(tmp_path: Path, remote: Callable[..., Any]) -> None:
    workers = [remote(Trainer) for _ in range(4)]
    config = config_in(tmp_path)
    step_of(config, 0, workers, (0.01,) * 4)
    await_recorders(workers)
    with capture(1, config=config), span("train", role="trainer"):
        for actor in workers[:2] + workers[3:]:
            actor.update.remote(30, carrier())
        workers[2].hang.remote(carrier())
        time.sleep(0.5)  # until the calls are under way
        began = time.monotonic()
        answer = why(ask(RunLayout(tmp_path), 10))
        took = time.monotonic() - began
    assert took < 2
    assert answer.silent == ()
    first = [answer.calls[index] for index in answer.culprits]
    assert {call.stage for call in first} == {"update", "hang"}
    (hung,) = [call for call in first if call.stage == "hang"]
    assert Trainer.wait_for_the_lock.__name__ in hung.where
    train = next(call for call in answer.calls if call.stage == "train")
    assert len(train.waits_for) == 4


def test_an_actor_that_is_captured_keeps_its_recorder(tmp_path: Path, actors: list[Any]) -> None:
    config = config_in(tmp_path, steps=[1], roles={"*": {"profiler": "off"}})
    for number in range(3):
        step_of(config, number, actors, (0.01, 0.01))
    assert min(ray.get([actor.recorded.remote() for actor in actors])) > 0


def test_an_engine_that_cannot_be_taken_keeps_the_recorder_from_no_actor(
    tmp_path: Path, actors: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    config, until = config_in(tmp_path), time.monotonic() + 60
    with capture(0, config=config, workers={"actor": actors}, engines=[FakeEngine(workers=1), "vlm"]):
        pass
    while min(ray.get([actor.recorded.remote() for actor in actors])) < 0:
        assert time.monotonic() < until, caplog.text
        time.sleep(POLL_S)  # they are told in the background
    assert "no engines: ConfigError: " in caplog.text


class SampledProfiler(FakeEngineProfiler):
    """One request runs."""

    def counters(self) -> list[CounterSource]:
        return list(EngineMetrics(lambda: {RUNNING: 1.0}, f"replica {self.replica}", blocks=False).sources())


class Replica:
    """An actor with an engine, whose class knows nothing of stepscope."""

    def __init__(self) -> None:
        self.engine = FakeEngine(workers=1)

    def states(self) -> list[EngineState]:
        recorder = standing.standing()
        return [] if recorder is None else list(engine_states(recorder.sampler, time.monotonic_ns()))


def sampled_profiler(engine: object, replica: int) -> SampledProfiler:
    assert isinstance(engine, FakeEngine)
    return SampledProfiler(engine, replica)


@pytest.fixture
def replicas(remote: Callable[..., Any]) -> list[Any]:
    return [remote(Replica) for _ in range(2)]


def test_the_recorder_of_a_replicas_actor_samples_its_engine(tmp_path: Path, replicas: list[Any]) -> None:
    engines = [RayRollout(replica, sampled_profiler, attribute="engine") for replica in replicas]
    states: list[list[EngineState]] = [[]]
    config, until = config_in(tmp_path), time.monotonic() + 60
    step = 0
    while not all(states) and time.monotonic() < until:
        with capture(step, config=config, engines=engines):
            time.sleep(0.2)
        step += 1
        states = ray.get([replica.states.remote() for replica in replicas])
    assert [[(state.name, state.running) for state in of_replica] for of_replica in states] == [
        [("replica 0", 1.0)], [("replica 1", 1.0)],
    ]  # fmt: skip
