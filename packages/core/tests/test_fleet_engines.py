"""Ray actors that hold an engine, in a capture; and what `prepare` does on all kinds of workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.actors import end
from packages.core.tests.runs import manifest_of, outcomes, until
from stepscope import ProfileConfig, capture, prepare, profile_step
from stepscope._recording.capture import readiness
from stepscope._recording.capture.prepare import before_first_step
from stepscope.engines.ray import RayRollout
from stepscope.errors import CaptureError
from stepscope.files.layout import RunLayout

pytest.importorskip("torch")
ray = pytest.importorskip("ray")


class Replica:
    """An engine in an actor: an iteration is one product."""

    def __init__(self) -> None:
        import torch

        self.model = torch.nn.Linear(8, 8)

    @profile_step(role="rollout")
    def generate(self) -> None:
        import torch

        self.model(torch.ones(1, 8))


def test_an_engines_actor_records_spans_and_leaves_the_profiler_to_the_engine(
    remote: Callable[..., Any], tmp_path: Path
) -> None:
    handles = [remote(Replica) for _ in range(2)]
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"*": {"ranks": "all"}})
    ray.get([handle.__ray_ready__.remote() for handle in handles])  # longer than 30 s on a busy machine
    # One of the two is also given as a worker; both are recorded once, and in the same way.
    workers, engines = {"policy": handles[0]}, [RayRollout(handle) for handle in handles]
    with capture(1, workers=workers, engines=engines, config=config) as cap:
        ray.get([handle.generate.remote() for handle in handles])
    cap.result.raise_for_missing()
    manifest = manifest_of(cap.result)
    parts = {part.process.role: part for part in manifest.processes if not part.owner}
    assert {role: part.process.replica for role, part in parts.items()} == {"policy": 0, "rollout": 1}
    for part in parts.values():
        assert part.spans >= 1
        states = {item.name: item for item in part.expected}
        assert states["torch trace"].state == "skipped"
        assert "the engine in" in str(states["torch trace"].reason)
    replicas = {name: item.state for name, item in outcomes(manifest).items() if name.startswith("replica")}
    assert replicas == {"replica 0": "ok", "replica 1": "ok"}


def test_prepare_pays_the_first_start_on_every_worker(
    remote: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [remote(Replica) for _ in range(2)]
    roles = {"actr": {"ranks": "all"}, "actor": {"ranks": "all"}, "*": {"ranks": "first"}}
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles=roles)
    prepare(workers={"actor": handles}, config=config)
    assert "roles.actr matched" in caplog.text
    assert "roles.actor matched" not in caplog.text
    assert not RunLayout(tmp_path).steps()
    end(handles[1])
    with pytest.raises(CaptureError, match=r"actor\[1\] .*died"):
        prepare(workers={"actor": handles}, config=config)


def test_prepare_reaches_every_worker_of_a_run_that_is_only_triggered(
    remote: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [remote(Replica) for _ in range(2)]
    config = ProfileConfig(save_path=tmp_path, roles={"atcor": {"ranks": "all"}, "*": {"ranks": "first"}})
    prepare(workers={"actor": handles}, config=config)
    assert "roles.atcor matched" in caplog.text
    assert not RunLayout(tmp_path).steps()
    end(handles[1])
    prepare(workers={"actor": handles}, config=config)
    assert "capture on request" in caplog.text
    assert "actor[1] Actor(Replica" in caplog.text


class Starting:
    """An async actor whose constructor takes its time, as that of an agent loop does."""

    def __init__(self, until: Path) -> None:
        import torch  # noqa: F401  # without it, there is nothing to prepare

        while not until.exists():
            time.sleep(0.02)

    async def has_started_kineto(self) -> bool:
        from stepscope.backends.torch import window

        return window.kineto_has_started


def test_an_unedited_program_is_not_held_for_a_worker_that_starts(
    remote: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "PATIENCE_S", 1.0)
    monkeypatch.setattr("stepscope._recording.process.identity._prepared_in", 0)
    config = ProfileConfig(save_path=tmp_path / "run", steps=[1], roles={"*": {"ranks": "all"}})
    ready = tmp_path / "ready"
    handle = remote(Starting, ready)
    began = time.monotonic()
    before_first_step(config, {"agent_loop": [handle]}, None, "trainer")
    assert time.monotonic() - began < config.budget.fanout_seconds / 2
    assert "cannot work" not in caplog.text
    ready.touch()
    ray.get(handle.__ray_ready__.remote())
    until(lambda: ray.get(handle.has_started_kineto.remote()), 60)
