"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from packages.report.tests.commands import Command

pytest.register_assert_rewrite("packages.core.tests.verl_cpu.steps")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Provide one Ray for the whole test run, since a start takes seconds. Kill the actors you make."""
    ray = pytest.importorskip("ray")
    # Below /tmp and short: the paths of Ray's sockets may not exceed 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    started = [
        server.process
        for servers in ray._private.worker._global_node.all_processes.values()
        for server in servers
    ]
    ray.shutdown()
    for process in started:
        process.wait(30)  # killed: one that is not waited for is a ResourceWarning
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def remote(ray_cluster: None) -> Iterator[Callable[..., Any]]:
    """Return `remote(cls, *arguments, **options)`, which starts a Ray actor that ends with the test."""
    import ray

    started: list[Any] = []

    def start(cls: Any, *arguments: Any, **options: Any) -> Any:
        actor = cls if hasattr(cls, "remote") else ray.remote(cls)
        if hasattr(actor, "options"):  # or else the options of the actor are chosen already
            actor = actor.options(**{"num_cpus": 0, **options})
        started.append(actor.remote(*arguments))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trouble of stepscope's own logged and noted, as in a run. Under pytest it is raised."""
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")


@pytest.fixture(scope="module", autouse=True)
def no_actor_is_left() -> Iterator[None]:
    """End the actors that a test file started: a capture names those of its job that it was not given."""
    yield
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    core, deadline = ray._private.worker.global_worker.core_worker, time.monotonic() + 30
    while (actors := living_actors()) and time.monotonic() < deadline:
        for actor in actors:
            core.kill_actor(ray.ActorID.from_hex(actor), True)
        time.sleep(0.05)
    assert not actors


def living_actors() -> dict[str, str]:
    """Return {id: class} of the Ray actors that have not ended."""
    from ray._private.state import state

    table = state.actor_table(None, None, None)
    return {actor: about["ActorClassName"] for actor, about in table.items() if about["State"] != "DEAD"}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return `command(*words, code=0)`, which runs `stepscope` and returns what it printed."""
    from packages.report.tests.commands import Command

    return Command(capsys)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """End the work after captures, done or not, together with the test."""
    yield
    from stepscope._recording.session import pipeline

    pipeline.end("the test ended", 30, patient=False)


@pytest.fixture
def leftovers_are_collected() -> Iterator[None]:
    """Collect what a test left while its warnings are expected, since a later test would be told of them."""
    yield
    gc.collect()


@pytest.fixture
def one_recorder() -> Iterator[None]:
    """End the flight recorder of the test, its requests and its measured loops."""
    from stepscope._recording.capture import on_demand
    from stepscope._recording.recorder import standing, steps

    yield
    on_demand.end("the test ended")
    on_demand._forget()
    standing.stop()
    steps._loops.clear()
