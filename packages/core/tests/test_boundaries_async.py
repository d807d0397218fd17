"""Steps of an async trainer that nobody edits: captures open and close without blocking its event loop."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.actors import end
from stepscope import ProfileConfig, configure
from stepscope._recording.capture import configure as run
from stepscope._recording.instrument import configured, step_boundaries
from stepscope._recording.process import failures
from stepscope.testing.recorded_run import finished_spans

ray = pytest.importorskip("ray")
pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("ray_cluster")

FRAMEWORK = """
import asyncio, functools, torch

class Worker:
    def update(self):
        return 1

class Trainer:
    def __init__(self, workers, begin):
        self.workers, self.begin = workers, getattr(self, begin)
        self.ticks, self.waited, self.global_step = 0, [], 0

    async def train(self, steps):
        ticking = asyncio.ensure_future(self.tick())
        for self.global_step in range(steps):
            await asyncio.sleep(0)
            before = self.ticks
            made = self.begin("a prompt")
            if asyncio.iscoroutine(made):
                assert await made == "a prompt"
            self.waited.append(self.ticks - before)
            await self.update()
        ticking.cancel()

    async def tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0)

    @torch.no_grad()
    async def decorated(self, prompt):
        return self._generate(prompt)

    def returned(self, prompt):
        return self.decorated(prompt)

    def plain(self, prompt):
        return self._generate(prompt)

    def _generate(self, prompt):
        return prompt

    async def update(self):
        await self.workers[0].update.remote()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "asyncframework.py").write_text(FRAMEWORK)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(run, "_configured", None)
    monkeypatch.setattr(step_boundaries, "_next", 0)
    yield importlib.import_module("asyncframework")
    step_boundaries.switch(step_boundaries._finish(None))
    configured.apply(ProfileConfig())
    sys.modules.pop("asyncframework", None)


@pytest.fixture
def worker(module: Any) -> Iterator[Any]:
    environment = {"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}}
    actor = ray.remote(num_cpus=0)(module.Worker).options(runtime_env=environment).remote()
    ray.get(actor.update.remote())
    yield actor
    end(actor)


def trained(module: Any, worker: Any, save_path: Path, begin: str) -> Any:
    entry = {"module": "asyncframework"}
    boundary = {"number": "self.global_step", "workers": {"actor": "self.workers"}}
    entries: list[dict[str, object]] = [
        {**entry, "name": f"Trainer.{begin}", "step": "begin", **boundary},
        {**entry, "name": "Trainer.train", "step": "end"},
        {**entry, "name": "Trainer._generate", "role": "rollout"},
        {**entry, "name": "Trainer.update", "role": "trainer"},
        {**entry, "name": "Worker.update", "role": "actor"},
    ]
    roles = {"*": {"profiler": "off"}}
    configure(ProfileConfig(save_path=save_path, steps=[1, 2], roles=roles, instrument=entries))
    trainer = module.Trainer([worker], begin)
    asyncio.run(trainer.train(4))
    return trainer


@pytest.mark.parametrize("begin", ["decorated", "returned"])
def test_a_step_that_begins_with_a_coroutine_is_captured_with_its_workers_while_the_loop_runs_on(
    module: Any, worker: Any, tmp_path: Path, begin: str
) -> None:
    trainer = trained(module, worker, tmp_path / "run", begin)
    for step in (1, 2):
        stages = sorted((span.role, span.stage) for span in finished_spans(tmp_path / "run", step))
        assert stages == [("actor", "update"), ("rollout", "_generate"), ("trainer", "update")]
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_000001", "step_000002"]
    # ticks of another task while the call opened a capture, or closed one too
    assert min(trainer.waited[1:]) > 2


def test_a_step_that_begins_with_a_plain_call_is_refused_at_the_first_one_with_the_fix(
    module: Any,
    worker: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    with caplog.at_level(logging.WARNING, "stepscope"):
        trained(module, worker, tmp_path / "run", "plain")
    assert not list((tmp_path / "run").glob("step_*"))
    assert "capturing a step" in str(failures.take())
    (message,) = [text for text in caplog.messages if "would block the running event loop" in text]
    assert "asyncframework:Trainer.plain" in message
    assert "Fix: " in message
    assert "async def" in message.partition("Fix: ")[2]
