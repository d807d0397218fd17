"""Captures on demand over Ray where hosts share no folder: what is asked at the owner's reaches all of them,
and what they recorded comes home.

`/proc/self/cwd/run` is a folder of its own in each process that has a working directory of its own, so these
hosts are processes. `tests/two_hosts.py` has two hosts.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from packages.core.tests.actors import end
from packages.core.tests.runs import manifest_of, outcomes
from stepscope import ProfileConfig, capture, profile_step, request_capture
from stepscope._recording.capture import on_demand
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.fanout import fetch
from stepscope._recording.process import exports
from stepscope._recording.recorder import steps
from stepscope._recording.session import budget, pipeline, programs
from stepscope._recording.session.session import Session
from stepscope.engines.actor_call import LEFT_BEHIND
from stepscope.engines.ray import RayRollout
from stepscope.errors import EngineError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.requests import read_listening
from stepscope.files.storage import Arrival
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope.testing.steps import StepFolder
from stepscope_report.cli.app import run

ray = pytest.importorskip("ray")


class Host:
    """A worker, or an engine's server, with a disk and a name of its own."""

    def __init__(self, folder: str, name: str) -> None:
        os.makedirs(folder)
        os.chdir(folder)
        socket.gethostname = lambda: name

    @profile_step(role="actor")
    def update(self) -> int:
        return os.getpid()

    def load_torch(self) -> None:
        import torch  # noqa: F401  # what it does is what `tool: torch` records

    def keeps(self) -> int:
        return len(fetch._sessions)

    def lose(self, name: str) -> None:
        """Somebody removes the folders of that name."""
        for folder in list(Path().rglob(name)):
            shutil.rmtree(folder)

    def stand_in_the_way(self, name: str) -> None:
        """Somebody puts a file where the folders of that name are."""
        os.environ["STEPSCOPE_RAISE"] = "0"  # as where no test runs
        for folder in list(Path().rglob(name)):
            folder.rename(folder.with_name(f"{name}-moved"))  # at once: the worker may write there meanwhile
            folder.touch()

    def files(self) -> list[str]:
        return sorted(str(path) for path in Path().rglob("*") if path.is_file())


class AsyncHost(Host):
    @profile_step(role="rollout")
    async def generate(self) -> int:
        return os.getpid()


def fake_engine(engine: object = None, replica: int | None = None) -> FakeEngineProfiler:
    return FakeEngineProfiler(FakeEngine(workers=1), replica)


def start(folder: Path, name: str, kind: type[Host] = Host) -> Any:
    host = ray.remote(num_cpus=0)(kind).remote(str(folder / name), name)
    ray.get(host.update.remote())
    return host


@pytest.fixture(scope="module")
def hosts(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    made = {
        name: start(folder, name, kind)
        for name, kind in (("host-b", Host), ("host-c", Host), ("host-d", AsyncHost))
    }
    ray.get(made["host-c"].load_torch.remote())
    yield made
    for actor in made.values():
        ray.kill(actor)


@pytest.fixture
def mortal(remote: Callable[..., Any], tmp_path: Path) -> Any:
    host = remote(Host, str(tmp_path / "host-m"), "host-m")
    ray.get(host.update.remote())
    return host


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Provide the run's folder: another one in each process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_demand, "_listener", None)
    before = threading.enumerate()
    yield f"/proc/self/cwd/{tmp_path.name}"
    drain()  # what is written later would be so in the next folder
    if on_demand._listener is not None:
        on_demand._listener.close()
    for thread in threading.enumerate():
        if thread.name == "stepscope-requests" and thread not in before:
            thread.join(10)


@pytest.fixture
def config(here: str) -> ProfileConfig:
    """Return a configuration that captures nothing unless asked."""
    return ProfileConfig(
        save_path=here,
        control={"poll_seconds": 3600},
        torch={"activities": ["cpu"]},
        budget={"fanout_seconds": 120},
    )


def trained(config: ProfileConfig, hosts: dict[str, Any], steps: range, engines: object = None) -> Manifest:
    """Return the manifest of the step that was captured, with all files written."""
    manifests = []
    for step in steps:
        workers = {"actor": [hosts["host-b"], hosts["host-c"]]}
        with capture(step, workers=workers, engines=engines, config=config) as cap:
            ray.get([hosts[name].update.remote() for name in ("host-b", "host-c")])
        if cap.result.captured:
            manifests.append(cap.result.wait(120))
    (manifest,) = manifests
    assert manifest is not None
    return manifest


def alone(config: ProfileConfig, host: Any, step: int = 0) -> CaptureResult:
    """Return a capture in which one host takes part, closed."""
    with capture(step, workers={"actor": [host]}, config=config.replace(steps=[step])) as cap:
        ray.get(host.update.remote())
    return cap.result


def listening() -> on_demand.Listener:
    assert on_demand._listener is not None
    return on_demand._listener


def drain() -> None:
    """Finish the work after a capture, and the work at the end of the process."""
    steps.flush()
    assert exports.exporter().drain(120) == []
    assert pipeline._commands.drain(120) == []


def files_of(result: CaptureResult) -> CapturedFiles:
    assert result._files is not None
    return result._files


def problems(result: CaptureResult) -> list[str]:
    """Return all of them, once everything that can be here is."""
    manifest = result.wait(120)
    assert manifest is not None
    return manifest.problems()


def part_of(manifest: Manifest, host: str) -> ProcessPart:
    return next(part for part in manifest.processes if part.process.host == host)


def test_a_request_at_the_owners_reaches_hosts_that_do_not_see_it_and_their_files_come_home(
    here: str, config: ProfileConfig, hosts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_capture(roles="actor", ranks=[1], save_path=here, next_run=True)
    manifest = trained(config, hosts, range(2))
    assert not manifest.problems()
    step = RunLayout(here).step(0)
    assert [part.process.host for part in manifest.processes if not part.owner] == ["host-b", "host-c"]
    assert not part_of(manifest, "host-b").recorded
    assert part_of(manifest, "host-c").recorded
    spans = "".join(path.read_text() for path in step.spans.glob("actor_*"))
    assert spans.count('"stage":"update"') == 2
    (trace,) = step.traces.rglob("*.json.gz")
    assert "host-c" in trace.name
    assert not any("control" in path for path in ray.get(hosts["host-b"].files.remote()))
    listening()._write()
    (answer,) = read_listening(RunLayout(here))
    assert answer.answers[request].steps == [0]
    assert list(answer.answers[request].others.values()) == ["began", "began"]
    assert run(["trigger", "list", here]) == 0
    assert "actor[1] Actor(Host" in capsys.readouterr().out
    assert run(["report", here, "--no-html"]) == 0
    assert "update" in capsys.readouterr().out


def test_an_engine_takes_part_in_a_capture_that_was_asked_for_with_its_roles_and_ranks(
    here: str, config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(pipeline, "artifact_hooks", [lambda path, sidecar: seen.append(path.name)])
    request = request_capture(roles="rollout", ranks="all", save_path=here, next_run=True)
    engines = [RayRollout(hosts["host-d"], fake_engine), fake_engine()]
    manifest = trained(config, hosts, range(2), engines)
    pipeline._hooks.drain(30)
    assert not manifest.problems()
    owner = next(part for part in manifest.processes if part.owner)
    replicas = {item.name: item for item in owner.expected if item.name.startswith("replica")}
    assert {name: item.state for name, item in replicas.items()} == {"replica 0": "ok", "replica 1": "ok"}
    (file,) = (artifact.path for artifact in replicas["replica 0"].artifacts)
    assert (RunLayout(here).step(0).root / file).exists()
    assert Path(file).name in seen
    assert not part_of(manifest, "host-b").recorded  # the request names the rollout alone
    others = listening()._answers[request].others
    assert [others["replica 0"], others["replica 1"]] == ["began", "began"]


def test_a_request_for_one_replica_leaves_the_other_alone_and_says_so(
    here: str, config: ProfileConfig, hosts: dict[str, Any]
) -> None:
    request = request_capture(roles="rollout", ranks="first", save_path=here, next_run=True)
    engines = [fake_engine(), RayRollout(hosts["host-d"], fake_engine)]
    manifest = trained(config, hosts, range(1), engines)
    owner = next(part for part in manifest.processes if part.owner)
    states = {item.name: item.state for item in owner.expected if item.name.startswith("replica")}
    assert states == {"replica 0": "ok", "replica 1": "skipped"}
    others = listening()._answers[request].others
    assert others["replica 0"] == "began"
    assert "first rank" in others["replica 1"]


def test_a_tool_that_is_asked_for_holds_in_actors_that_do_not_see_the_request(
    here: str, config: ProfileConfig, hosts: dict[str, Any]
) -> None:
    request_capture(roles="actor", ranks=[1], tool="cuda_memory", save_path=here, next_run=True)
    part = part_of(trained(config, hosts, range(1)), "host-c")
    assert [item.name for item in part.expected if "trace" in item.name] == ["cuda_memory trace"]


def test_without_a_wait_they_come_home_beside_the_training(
    here: str, config: ProfileConfig, hosts: dict[str, Any]
) -> None:
    result = alone(config, hosts["host-b"])
    assert not result.problems()  # what is on its way is no problem yet
    assert "1 on other hosts" in result.summary()
    drain()
    manifest = msgspec.json.decode(RunLayout(here).step(0).manifest.read_bytes(), type=Manifest)
    assert [part.process.host for part in manifest.processes if not part.owner] == ["host-b"]


def test_a_worker_that_dies_before_its_files_are_fetched_is_named_with_its_host(
    config: ProfileConfig, mortal: Any
) -> None:
    result = alone(config.replace(export={"when": "deferred"}), mortal)
    end(mortal)
    (line,) = [line for line in problems(result) if "files of actor[0]" in line]
    assert "failed: actor died" in line
    assert "are on host-m" in line


def test_with_gather_off_they_stay_where_they_are_and_are_missing(
    config: ProfileConfig, hosts: dict[str, Any]
) -> None:
    result = alone(config.replace(finish={"gather": False}), hosts["host-b"])
    (line,) = problems(result)
    assert "does not share" in line


def test_traces_that_do_not_fit_stay_there_and_the_spans_come(
    config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "over_budget", lambda _: "budget.free_mb: 0 MB are free")
    result = alone(config.replace(roles={"actor": {"ranks": "all"}}), hosts["host-c"])
    assert any("host-c: " in line and "free_mb" in line for line in problems(result))
    manifest = manifest_of(result)
    assert part_of(manifest, "host-c").recorded


def test_what_is_not_here_when_time_is_up_is_said_to_lie_there(
    config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        programs.Chores, "_wait_for_files", lambda _: None
    )  # nobody fetches beside the training
    result = alone(config, hosts["host-b"])
    files_of(result).gather(lambda: 0.0)
    assert any("not fetched" in line and "on host-b" in line for line in result.problems())


def test_a_worker_whose_part_was_removed_writes_it_again(
    config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.Chores, "_wait_for_files", lambda _: None)
    result = alone(config, hosts["host-b"])
    ray.get(hosts["host-b"].lose.remote("processes"))
    assert problems(result) == []


def test_a_worker_that_cannot_write_its_part_is_failed_and_the_rest_of_its_files_come_home(
    here: str, config: ProfileConfig, mortal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.Chores, "_wait_for_files", lambda _: None)
    result = alone(config, mortal)
    ray.get(mortal.stand_in_the_way.remote("processes"))
    (line,) = problems(result)
    assert "files of actor[0]" in line
    assert "not on host-m's" in line
    assert list(RunLayout(here).step(0).spans.glob("actor_*"))


def test_files_of_captures_that_wait_in_line_are_all_fetched_in_the_end_and_kept_no_longer(
    config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ninth capture once took the first one's place."""
    monkeypatch.setattr(programs.Chores, "_wait_for_files", lambda _: None)  # as if slow work stood in line
    before = ray.get(hosts["host-b"].keeps.remote())
    results = [alone(config, hosts["host-b"], step) for step in range(10)]
    assert ray.get(hosts["host-b"].keeps.remote()) == before + 10
    assert [problems(result) for result in results] == [[]] * 10
    assert ray.get(hosts["host-b"].keeps.remote()) == before


def test_what_nobody_fetches_is_not_kept_for_it(config: ProfileConfig, hosts: dict[str, Any]) -> None:
    before = ray.get(hosts["host-b"].keeps.remote())
    alone(config.replace(finish={"gather": False}), hosts["host-b"])
    assert ray.get(hosts["host-b"].keeps.remote()) == before


def test_an_engines_files_that_its_worker_fetches_make_its_replica_whole(
    config: ProfileConfig, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_time(line: object, step_dir: str, artifacts: object) -> dict[str, str]:
        return {f"{LEFT_BEHIND}host-d": "the call was given up"}

    monkeypatch.setattr("stepscope.engines.ray.bring_home", no_time)
    monkeypatch.setattr(programs.Chores, "_wait_for_files", lambda _: None)
    chosen = config.replace(steps=[0], roles={"rollout": {"ranks": "all"}})
    with capture(0, engines=[RayRollout(hosts["host-d"], fake_engine)], config=chosen) as cap:
        pass
    replica = outcomes(cap.result)["replica 0"]
    assert (replica.state, list(replica.ignored)) == ("partial", ["artifacts on host-d"])
    assert not problems(cap.result)
    replica = outcomes(cap.result)["replica 0"]
    assert (replica.state, replica.reason, replica.ignored) == ("ok", None, {})


def test_what_is_here_stays_so_when_it_is_asked_for_again(
    config: ProfileConfig, hosts: dict[str, Any]
) -> None:
    result = alone(config, hosts["host-b"])
    drain()
    files_of(result).gather(lambda: 0.0)
    assert not result.problems()


# Piece by piece.


@pytest.fixture
def step(tmp_path: Path) -> StepLayout:
    return RunLayout(tmp_path / "home").step(3)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", ".", "a/../../x"])
def test_a_path_from_a_worker_that_leads_out_of_the_step_is_refused(step: StepLayout, path: str) -> None:
    home = fetch.Home(step, ProfileConfig())
    with pytest.raises(EngineError, match="no path in"):
        home.begin(fetch.Remote(path=path, size_bytes=1))


def test_a_link_at_home_leads_no_file_out_of_it(step: StepLayout, tmp_path: Path) -> None:
    step.root.mkdir(parents=True)
    (step.root / "spans").symlink_to(tmp_path)
    home = fetch.Home(step, ProfileConfig())
    with pytest.raises(EngineError, match="no path in"):
        home.begin(fetch.Remote(path="spans/x.jsonl", size_bytes=1))


def test_a_file_that_is_given_up_leaves_nothing(step: StepLayout) -> None:
    arrival = fetch.Home(step, ProfileConfig()).begin(fetch.Remote(path="spans/x.jsonl", size_bytes=9))
    assert isinstance(arrival, Arrival)
    arrival.add(b"half")
    arrival.give_up()
    assert list(step.spans.iterdir()) == []


def test_a_capture_that_this_process_never_saw_is_an_error() -> None:
    with pytest.raises(EngineError, match="did it restart"):
        fetch.files_of("nobody", [])


def test_a_capture_that_was_one_too_many_is_said_to_be(
    step: StepLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_KEPT", 1)
    for name in ("first", "second"):
        fetch.keep(cast(Session, SimpleNamespace(capture_id=name)))
    with pytest.raises(EngineError, match="1 later captures"):
        fetch.files_of("first", [])
    fetch.release("second")


def test_the_owners_part_alone_is_looked_at(step: StepLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 512 ranks once read the parts of all."""
    owner = StepFolder(step.root.parent).process("trainer", 0).info
    name = step.part_of(owner, "run1").name
    assert not step.has_part(name)
    step.processes.mkdir(parents=True)
    (step.processes / name).touch()
    monkeypatch.setattr(Path, "iterdir", None)
    monkeypatch.setattr(Path, "glob", None)
    assert step.has_part(name)
    assert step.has_part(None)
