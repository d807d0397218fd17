"""Captures that reach Ray actors of every kind, and what becomes of those that are dead, busy or not named.

One file above 400 lines, because all cases share the actors and the readers of what they leave.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import pickle
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from packages.core.tests.actors import end
from packages.core.tests.runs import manifest_of, spans_alone, step_of, until
from packages.core.tests.suspensions import CancelledAt
from stepscope import ProfileConfig, capture, prepare, profile_step
from stepscope._recording.capture import omissions
from stepscope._recording.capture.capture import Capture
from stepscope._recording.fanout import ray_fleet
from stepscope._recording.fanout.in_actor import Sent
from stepscope._recording.fanout.messages import StartRequest, StopRequest, WorkerOutcome
from stepscope._recording.fanout.ray_fleet import RayFleet, Worker, fleet_of, load_fleet
from stepscope._recording.process import failures
from stepscope._recording.spans import slot
from stepscope.backends.torch import backend as torch_backend
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import ProcessPart
from stepscope.files.spans import Line, Open

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")


class Trainer:
    """A sync actor; with max_concurrency a threaded one."""

    @profile_step(role="actor")
    def update(self) -> int:
        return os.getpid()

    @profile_step(role="actor")
    def update_until(self, path: str) -> None:
        self.busy_until(path)

    def busy_until(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)  # the only way to wait in a sync actor for something from outside

    def captured(self) -> bool:
        return slot.session() is not None

    def fleet_of_itself(self, handle: Any) -> str:
        try:
            fleet_of([handle])
        except ConfigError as error:
            return str(error)
        return ""


class AsyncTrainer:
    @profile_step(role="actor")
    async def update(self) -> int:
        return os.getpid()

    async def captured(self) -> bool:
        return slot.session() is not None


def make(kind: type = Trainer, **options: Any) -> Any:
    return ray.remote(kind).options(**options).remote()


@pytest.fixture(scope="module")
def crew(ray_cluster: None) -> Iterator[dict[str, list[Any]]]:
    """Two actors of each kind, which no test may hurt."""
    made = {
        "sync": [make(), make()],
        "threaded": [make(max_concurrency=4), make(max_concurrency=4)],
        "async": [make(AsyncTrainer), make(AsyncTrainer)],
    }
    ray.get([actor.update.remote() for actors in made.values() for actor in actors])
    yield made
    for actors in made.values():
        for actor in actors:
            ray.kill(actor)


@pytest.fixture
def victim(remote: Callable[..., Any]) -> Any:
    """Provide an actor that may be killed, and comes back once."""
    return remote(Trainer, max_restarts=1)


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path / "run", budget={"fanout_seconds": 20})


@pytest.fixture
def request_1(config: ProfileConfig) -> StartRequest:
    return StartRequest(capture_id=secrets.token_hex(8), run_id="run", step=1, config=config)


def stop_of(request: StartRequest) -> StopRequest:
    return StopRequest(capture_id=request.capture_id)


def own(cap: Capture) -> ProcessPart:
    return next(part for part in manifest_of(cap.result).processes if part.owner)


def workers_of(config: ProfileConfig, step: int) -> list[ProcessPart]:
    return [part for part in manifest_of(step_of(config, step)).processes if not part.owner]


def spans_below(config: ProfileConfig, step: int) -> list[str]:
    """Return the stages of all spans in the workers' files, open ones included."""
    read = msgspec.json.Decoder(Line).decode_lines
    files = step_of(config, step).spans.glob("actor_*.jsonl")
    return [line.stage for file in files for line in read(file.read_bytes()) if isinstance(line, Open)]


# All is well.


def test_a_worker_reads_the_configuration_of_all_requests_once(request_1: StartRequest) -> None:
    again = msgspec.structs.replace(request_1, step=2)
    first, second = (pickle.loads(pickle.dumps(Sent(request))) for request in (request_1, again))
    assert (first, second) == (request_1, again)
    assert second.config is first.config


@pytest.mark.parametrize("kind", ["sync", "threaded", "async"])
def test_actors_of_every_kind_record_without_a_change_to_their_class(
    crew: dict[str, list[Any]], config: ProfileConfig, kind: str
) -> None:
    with capture(1, workers=crew[kind], config=config) as cap:
        ray.get([actor.update.remote() for actor in crew[kind]])
    ray.get([actor.update.remote() for actor in crew[kind]])
    assert cap.result.problems() == []
    assert spans_below(config, 1) == ["update", "update"]
    parts = workers_of(config, 1)
    assert {(part.process.role, part.process.rank, part.process.rank_source) for part in parts} == {
        ("actor", 0, "position"),
        ("actor", 1, "position"),
    }
    assert {part.process.actor_id for part in parts} == {actor._actor_id.hex() for actor in crew[kind]}


def test_a_mapping_names_the_roles(crew: dict[str, list[Any]], config: ProfileConfig) -> None:
    with capture(1, workers={"critic": crew["sync"], "reward": crew["async"][0]}, config=config):
        pass
    assert sorted((part.process.role, part.process.rank) for part in workers_of(config, 1)) == [
        ("critic", 0),
        ("critic", 1),
        ("reward", 0),
    ]


class Unnamed:
    @profile_step
    def update(self) -> int:
        return 1


def test_a_method_without_a_role_has_the_one_that_the_capture_gives_its_actor(
    config: ProfileConfig, remote: Callable[..., Any]
) -> None:
    named, nameless = remote(Unnamed), remote(Unnamed)
    for step, workers, role in ((1, {"critic": named}, "critic"), (2, [nameless], "worker")):
        with capture(step, workers=workers, config=config):
            ray.get([actor.update.remote() for actor in (named, nameless)])
        (file,) = step_of(config, step).spans.glob(f"{role}_*.jsonl")
        lines = msgspec.json.Decoder(Line).decode_lines(file.read_bytes())
        assert [(line.role, line.stage) for line in lines if isinstance(line, Open)] == [(role, "update")]


def test_an_actor_with_several_handles_takes_part_once(ray_cluster: None, config: ProfileConfig) -> None:
    actor = make(name="shared")
    group = SimpleNamespace(workers=[actor, ray.get_actor("shared")])
    fleet = load_fleet({"actor": group, "ref": [actor]})
    assert isinstance(fleet, RayFleet)
    assert [worker.name for worker in fleet.workers] == [
        f"actor[0] Actor(Trainer, {actor._actor_id.hex()[:8]})"
    ]
    ray.kill(actor)


@pytest.mark.parametrize("workers", [[], "actor", 3, [object()], {"actor": []}, SimpleNamespace(workers=[1])])
def test_what_is_not_rays_is_left_to_other_fleets(ray_cluster: None, workers: object) -> None:
    assert fleet_of(workers) is None
    with pytest.raises(ConfigError, match="Ray actor handle"):
        load_fleet(workers)


def test_a_stranger_among_the_handles_is_an_error(crew: dict[str, list[Any]]) -> None:
    with pytest.raises(ConfigError, match=r"capture\(workers=\)\[1\].*handle"):
        fleet_of([crew["sync"][0], None])


@pytest.mark.parametrize("shape", ["class", "list", "beside a handle"])
def test_a_class_in_place_of_its_handles_is_named_with_its_role(
    crew: dict[str, list[Any]], config: ProfileConfig, shape: str
) -> None:
    cls = ray.remote(Trainer)
    workers = {"class": {"actor": cls}, "list": {"actor": [cls]}}.get(
        shape, {"critic": crew["sync"], "actor": cls}
    )
    with pytest.raises(ConfigError, match=r"\['actor'\] .* Trainer\.remote\("):
        capture(1, workers=workers, config=config).open()


def test_a_role_without_workers_is_named(crew: dict[str, list[Any]], config: ProfileConfig) -> None:
    with pytest.raises(ConfigError, match=r"\(workers=\)\['critic'\] is \[\]"):
        capture(1, workers={"actor": crew["sync"], "critic": []}, config=config).open()


def test_handles_may_be_kept_by_number(crew: dict[str, list[Any]], config: ProfileConfig) -> None:
    """As RLlib's actor manager keeps its env runners."""
    numbered = dict(enumerate(crew["sync"], start=1))
    shapes = [numbered, {"env": numbered}, {"env": SimpleNamespace(_actors=numbered)}]
    for step, workers in enumerate(shapes, start=1):
        fleet = fleet_of(workers)
        assert fleet is not None, step
        assert [worker.actor_id for worker in fleet.workers] == [
            handle._actor_id.hex() for handle in crew["sync"]
        ]


def test_a_driver_that_names_no_workers_hears_of_it_once_and_each_report_lists_it(
    config: ProfileConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(omissions, "_prepared", False)
    monkeypatch.setattr(failures, "_warned", set())
    for _ in range(2):
        with capture(1, config=config) as cap:
            pass
        assert any(item.name == "workers" and item.state == "skipped" for item in own(cap).expected)
    assert caplog.text.count("given no workers") == 1


@pytest.mark.parametrize("none", [{}, []])
def test_no_workers_may_be_meant(
    none: list[Any], config: ProfileConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_warned", set())
    with capture(1, config=config, workers=none) as cap:
        pass
    assert "given no workers" not in caplog.text
    assert all(item.name != "workers" for item in own(cap).expected)


def test_workers_that_were_prepared_and_not_captured_are_named(
    crew: dict[str, list[Any]],
    config: ProfileConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(omissions, "_prepared", False)
    monkeypatch.setattr(failures, "_warned", set())
    prepare(workers=crew["sync"], config=config)
    with capture(1, config=config):
        pass
    assert "capture() none" in caplog.text


def test_an_actor_given_as_an_engine_is_told_where_it_belongs(
    crew: dict[str, list[Any]], config: ProfileConfig
) -> None:
    with pytest.raises(ConfigError, match=r"\{'rollout': \[actor\]\}.*RayRollout"):
        capture(1, config=config, engines=[crew["sync"][0]]).open()


def test_an_actor_cannot_be_a_worker_of_its_own_capture(crew: dict[str, list[Any]]) -> None:
    actor = crew["sync"][0]
    assert "wait for itself" in ray.get(actor.fleet_of_itself.remote(actor))


# Trouble.


def outcome_of(outcomes: list[WorkerOutcome], actor: Any) -> WorkerOutcome:
    (outcome,) = [outcome for outcome in outcomes if actor._actor_id.hex()[:8] in outcome.name]
    return outcome


def fleet(*actors: Any) -> RayFleet:
    workers = fleet_of(list(actors))
    assert workers is not None
    return workers


async def test_a_dead_actor_is_missing_and_the_others_are_recorded(
    crew: dict[str, list[Any]], config: ProfileConfig
) -> None:
    dead, alive = make(), crew["sync"][0]
    await asyncio.to_thread(end, dead)
    async with capture(1, workers=[dead, alive], config=config) as cap:
        await alive.update.remote()
    (problem,) = await asyncio.to_thread(cap.result.problems)
    assert "worker[0] Actor(Trainer" in problem
    assert "missing: actor died: " in problem
    assert spans_below(config, 1) == ["update"]


async def test_a_worker_killed_during_a_capture_is_missing_and_its_spans_are_readable(
    crew: dict[str, list[Any]], config: ProfileConfig, tmp_path: Path
) -> None:
    dead, alive = make(), crew["sync"][0]
    pid = await dead.update.remote()
    async with capture(1, workers=[dead, alive], config=config) as cap:
        hanging = dead.update_until.remote(str(tmp_path / "never"))
        await asyncio.to_thread(_await_span, config, "update_until")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            await hanging
    problems = await asyncio.to_thread(cap.result.problems)
    assert any("worker[0]" in problem and "missing: actor died" in problem for problem in problems)
    assert "update_until" in spans_below(config, 1)
    async with capture(2, workers=[alive], config=config) as cap:
        await alive.update.remote()
    assert await asyncio.to_thread(cap.result.problems) == []


def _await_span(config: ProfileConfig, stage: str) -> None:
    until(lambda: stage in spans_below(config, 1))  # another process writes the file


async def test_an_actor_that_restarted_is_missing_and_takes_part_again(
    victim: Any, config: ProfileConfig
) -> None:
    async with capture(1, workers=[victim], config=config) as cap:
        os.kill(await victim.update.remote(), signal.SIGKILL)
        while not await _answers(victim):  # noqa: ASYNC110  (Ray has no event for a restart)
            await asyncio.sleep(0.05)
    problems = await asyncio.to_thread(cap.result.problems)
    assert any("missing: the actor" in problem for problem in problems)
    async with capture(2, workers=[victim], config=config):
        await victim.update.remote()
    assert spans_below(config, 2) == ["update"]


async def _answers(actor: Any) -> bool:
    try:
        await actor.captured.remote()
    except ray.exceptions.RayActorError:
        return False
    return True


@pytest.mark.parametrize("known", [True, False])
async def test_a_busy_actor_costs_its_own_deadline_and_begins_nothing_later(
    crew: dict[str, list[Any]],
    request_1: StartRequest,
    config: ProfileConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    busy, idle = crew["sync"]
    # The start goes to one known to be on this machine at once, and to others after a question.
    monkeypatch.setattr(ray_fleet, "_here", {actor._actor_id.hex() for actor in crew["sync"] if known})
    free = tmp_path / "free"
    held = busy.busy_until.remote(str(free))
    both = fleet(busy, idle)
    done: list[str] = []

    async def noted(worker: Worker) -> WorkerOutcome:
        outcome = await worker.start(request_1, 0.5)
        done.append(outcome.state)
        return outcome

    outcomes = await asyncio.gather(*map(noted, both.workers))
    assert done == ["ok", "failed"]  # the idle one was through before the busy one's deadline
    assert re.search(r"^timeout: start .* 0\.5 s", str(outcome_of(outcomes, busy).reason))
    assert ray_fleet._here == {idle._actor_id.hex()}  # who gave no answer is asked next time
    free.touch()
    await held
    assert not await busy.captured.remote()
    stopped = await both.stop(stop_of(request_1), 20)
    assert [outcome.state for outcome in stopped] == ["ok"]
    assert len(list(step_of(config, 1).processes.glob("*.json"))) == 1


async def test_an_actor_that_is_busy_at_the_stop_closes_when_it_gets_to_it(
    crew: dict[str, list[Any]], request_1: StartRequest, config: ProfileConfig, tmp_path: Path
) -> None:
    busy, free = crew["sync"][0], tmp_path / "free"
    alone = fleet(busy)
    await alone.start(request_1, 20)
    held = busy.update_until.remote(str(free))
    (outcome,) = await alone.stop(stop_of(request_1), 0.3)
    assert outcome.state == "failed"
    assert re.search(r"^timeout: stop .* 0\.3 s", str(outcome.reason))
    free.touch()
    await held
    assert not await busy.captured.remote()
    assert "update_until" in spans_below(config, 1)


def test_cancelled_at_any_await_a_capture_leaves_no_worker_recording(
    crew: dict[str, list[Any]], config: ProfileConfig
) -> None:
    workers = {kind: actors[:1] for kind, actors in crew.items()}

    async def recorded(step: int) -> Capture:
        async with capture(step, config=config, workers=workers) as cap:
            await asyncio.gather(*(actor.update.remote() for (actor,) in workers.values()))
            whole.append(step)
        return cap

    whole: list[int] = []
    for suspension in itertools.count(1):
        step = 2 * suspension
        cancelled = CancelledAt(suspension, again=bool(suspension % 2))
        cancelled.run(recorded(step))
        assert not any(ray.get([actor.captured.remote() for (actor,) in workers.values()])), suspension
        if step in RunLayout(config.save_path).steps():
            parts = manifest_of(step_of(config, step)).processes
            assert all(part.closed is not None for part in parts), suspension
            assert "closing" not in {item.pending for part in parts for item in part.expected}, suspension
            (owner,) = (part for part in parts if part.owner)
            assert ("CancelledError" in str(owner.error)) == (step not in whole), suspension
        cap = asyncio.run(recorded(step + 1))
        assert own(cap).absent == ()
        assert len(workers_of(config, step + 1)) == 3
        if not cancelled.came:
            break


async def test_two_captures_at_once_in_one_worker_are_refused(
    crew: dict[str, list[Any]], request_1: StartRequest
) -> None:
    first, second = fleet(crew["async"][0]), fleet(crew["async"][0])
    await first.start(request_1, 20)
    (outcome,) = await second.start(msgspec.structs.replace(request_1, capture_id="capture-2", step=2), 20)
    assert outcome.state == "failed"
    assert "step 1 is open" in str(outcome.reason)
    assert await second.stop(StopRequest(capture_id="capture-2"), 20) == []
    assert await crew["async"][0].captured.remote()
    await first.stop(stop_of(request_1), 20)
    assert not await crew["async"][0].captured.remote()


# Clocks.


async def test_processes_of_one_machine_share_its_clock(
    crew: dict[str, list[Any]], request_1: StartRequest
) -> None:
    crewed = fleet(*crew["sync"])
    for outcomes in (
        await crewed.start(request_1, 20),
        await crewed.stop(stop_of(request_1), 20),
    ):
        clocks = [outcome.clock for outcome in outcomes]
        assert [(clock.offset_ns, clock.uncertainty_ns) for clock in clocks if clock] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("kind", ["sync", "threaded", "async"])
async def test_between_machines_the_true_offset_lies_within_the_stated_uncertainty(
    crew: dict[str, list[Any]], request_1: StartRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(ray_fleet, "boot_id", lambda: "another machine")
    crewed = fleet(*crew[kind])
    started = await crewed.start(request_1, 20)
    stopped = await crewed.stop(stop_of(request_1), 20)
    for clock in [outcome.clock for outcome in [*started, *stopped]]:
        assert clock is not None
        assert clock.process.startswith("actor_rank")
        assert abs(clock.offset_ns) <= clock.uncertainty_ns  # both sides read one clock: the true offset is 0
        assert clock.uncertainty_ns < 100_000_000
        assert clock.at_mono_ns <= time.monotonic_ns()


def hold_exports(instance: object, seconds: int) -> None:
    """Have each export hold the GIL, as that of a large trace does."""
    import_module("torch")
    real = torch_backend._write

    def write(*args: Any) -> None:
        ctypes.PyDLL(None).sleep(seconds)
        real(*args)

    setattr(torch_backend, "_write", write)  # noqa: B010  # mypy knows it as a function of other arguments


def test_the_answer_of_a_worker_does_not_wait_for_its_export(tmp_path: Path) -> None:
    config = ProfileConfig(
        save_path=str(tmp_path / "run"),
        steps=["every:1"],
        roles={"actor": {"ranks": "all"}},
        torch={"activities": ["cpu"]},
        budget={"fanout_seconds": 60},
    )
    actor = make(Trainer)
    ray.get(actor.__ray_call__.remote(hold_exports, 4))
    with capture(1, workers=[actor], config=config) as step:
        ray.get(actor.update.remote())
    closed = time.monotonic()
    assert step.result.wait(60)
    assert time.monotonic() - closed > 2
    (worker,) = workers_of(config, 1)
    assert [item.state for item in worker.expected if item.kind == "trace"] == ["ok"]
    ray.kill(actor)
