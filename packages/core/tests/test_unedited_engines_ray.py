"""Engines in Ray actors of a loop that nobody edits, numbered as the framework numbers them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable, outcomes, spans_alone
from stepscope import configure
from stepscope._recording.capture import configure as run
from stepscope._recording.fanout import unedited_engines
from stepscope.engines import local_engines
from stepscope.engines import ray as engines_of_actors
from stepscope.engines.local_engines import register, register_none
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Expectation

ray = pytest.importorskip("ray")
pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("ray_cluster")

FRAMEWORK = """
import ray, torch

class Server:
    def __init__(self, rank):
        self.rank = rank
        self.build()

    def build(self):
        self.engine, self.draft = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    async def generate(self):
        return float(self.engine(torch.ones(1, 4)).detach().sum())

class Trainer:
    def __init__(self, handles):
        self.handles = handles

    def step(self):
        return ray.get([handle.generate.remote() for handle in self.handles])
"""


STEP: dict[str, object] = {"module": "server_loop", "name": "Trainer.step", "step": "around"}


def engines(*adapters: str) -> dict[str, object]:
    return {"engines": dict.fromkeys(adapters, "self.handles")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("framework")


@pytest.fixture(scope="module")
def servers(folder: Path, ray_cluster: None) -> list[Any]:
    """Start two servers for all tests, because each of them imports torch."""
    environment = {"env_vars": {"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)])}}
    with importable(folder, server_loop=FRAMEWORK) as imported:
        server: Any = imported().Server
        return [ray.remote(server).options(runtime_env=environment).remote(rank) for rank in (5, 4)]


def build_anew(server: Any) -> None:
    """Give a server engines that nothing knows."""
    local_engines._entries.clear()
    local_engines._empty.clear()
    engines_of_actors._seats.clear()
    server.build()


@pytest.fixture
def trainer(
    servers: list[Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Provide a trainer with two servers; its boundary leads to them under two adapters."""
    ray.get([server.__ray_call__.remote(build_anew) for server in servers])
    monkeypatch.setattr(unedited_engines, "_answers", {})
    monkeypatch.setattr("stepscope._recording.process.identity._prepared_in", 0)
    roles = {"rollout": {"profiler": "off", "ranks": "all"}, "*": {"profiler": "off"}}
    with importable(folder, server_loop=FRAMEWORK) as imported:
        configure(spans_alone(tmp_path / "run", roles=roles, instrument=[{**STEP, **engines("torch")}]))
        yield imported().Trainer(list(servers))


def rows(tmp_path: Path, step: int) -> dict[str, Expectation]:
    left = outcomes(RunLayout(tmp_path / "run").step(step))
    return {name: item for name, item in left.items() if item.kind == "engine"}


def register_by_rank(server: Any) -> None:
    register("torch", server.engine, server.rank)


def register_no_engine(server: Any) -> None:
    register_none("torch")


def register_as_anothers(server: Any) -> None:
    register("another", server.engine, server.rank)


def test_engines_that_nothing_registered_are_found_in_the_actors_and_numbered_by_order(
    trainer: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        trainer.step()
    for step in (0, 1):
        assert {name: row.state for name, row in rows(tmp_path, step).items()} == {
            "replica 0": "ok",
            "replica 1": "ok",
        }


def test_registered_engines_have_the_numbers_of_the_framework(trainer: Any, tmp_path: Path) -> None:
    ray.get([handle.__ray_call__.remote(register_by_rank) for handle in trainer.handles])
    trainer.step()
    outcomes = rows(tmp_path, 0)
    assert sorted(outcomes) == ["replica 4", "replica 5"]
    for name, row in outcomes.items():
        (artifact,) = row.artifacts
        assert artifact.path.startswith(f"traces/rollout/replica{name[-1]}/")


@pytest.mark.parametrize("registering", [register_as_anothers, register_no_engine])
def test_actors_without_an_engine_of_this_adapter_are_left_out(
    trainer: Any, tmp_path: Path, registering: Callable[[Any], None]
) -> None:
    ray.get(trainer.handles[0].__ray_call__.remote(registering))
    trainer.step()
    assert list(rows(tmp_path, 0)) == ["replica 0"]


@pytest.mark.parametrize("held", ["torch", "another"])
def test_an_actor_under_two_adapters_needs_that_of_the_engine_that_it_holds(
    trainer: Any, tmp_path: Path, held: str, caplog: pytest.LogCaptureFixture
) -> None:
    configure(run.current().replace(instrument=[{**STEP, **engines("another", "torch")}]))
    registering = register_by_rank if held == "torch" else register_as_anothers
    ray.get([handle.__ray_call__.remote(registering) for handle in trainer.handles])
    trainer.step()
    assert sorted(rows(tmp_path, 0)) == (["replica 4", "replica 5"] if held == "torch" else [])
    assert ("'another' are not" in caplog.text) == (held == "another")


def name_others(manager: Any, handles: list[Any]) -> None:
    manager.named = handles  # weakly registered
    for number, handle in enumerate(handles):
        register("torch", handle, 7 + number)


def name_a_server(manager: Any) -> None:
    register("torch", "http://localhost:1", 3)


def test_an_actor_may_name_the_actors_that_hold_the_engines(trainer: Any, tmp_path: Path) -> None:
    manager, *handles = trainer.handles[0], trainer.handles[1]
    ray.get(manager.__ray_call__.remote(name_others, handles))
    trainer.handles = [manager]
    trainer.step()
    assert {name: row.state for name, row in rows(tmp_path, 0).items()} == {"replica 7": "ok"}


def test_an_actor_may_name_the_server_that_it_launched(trainer: Any, tmp_path: Path) -> None:
    ray.get(trainer.handles[0].__ray_call__.remote(name_a_server))
    trainer.handles = trainer.handles[:1]
    trainer.step()
    (row,) = rows(tmp_path, 0).values()
    assert (row.name, row.state) == ("replica 3", "failed")
    assert "drives no servers" in str(row.reason)


def test_a_dead_actor_costs_its_own_row(trainer: Any, tmp_path: Path) -> None:
    """The last test: it kills a server."""
    trainer.step()
    ray.kill(trainer.handles[0])
    with pytest.raises(ray.exceptions.RayActorError):
        trainer.step()
    outcomes = rows(tmp_path, 1)
    assert [outcomes[name].state for name in ("replica 0", "replica 1")] == ["failed", "ok"]
