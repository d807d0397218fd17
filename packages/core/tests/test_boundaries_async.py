"""Steps of an async trainer that nobody edits: captures open and close without blocking its event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable, spans_alone
from stepscope import configure
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
def module(tmp_path: Path) -> Iterator[Any]:
    with importable(tmp_path / "modules", asyncframework=FRAMEWORK) as imported:
        yield imported()


@pytest.fixture
def worker(module: Any, remote: Callable[..., Any]) -> Any:
    environment = {"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}}
    actor = remote(module.Worker, runtime_env=environment)
    ray.get(actor.update.remote())
    return actor


def trained(module: Any, worker: Any, save_path: Path, begin: str) -> Any:
    boundary = {"number": "self.global_step", "workers": {"actor": "self.workers"}}
    entries: list[dict[str, object]] = [
        {"name": f"Trainer.{begin}", "step": "begin", **boundary},
        {"name": "Trainer.train", "step": "end"},
        {"name": "Trainer._generate", "role": "rollout"},
        {"name": "Trainer.update", "role": "trainer"},
        {"name": "Worker.update", "role": "actor"},
    ]
    listed = [{"module": "asyncframework", **entry} for entry in entries]
    configure(spans_alone(save_path, steps=[1, 2], instrument=listed))
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


@pytest.mark.usefixtures("in_production")
def test_a_step_that_begins_with_a_plain_call_is_refused_at_the_first_one_with_the_fix(
    module: Any, worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stepscope"):
        trained(module, worker, tmp_path / "run", "plain")
    assert not list((tmp_path / "run").glob("step_*"))
    assert "capturing a step" in str(failures._noted)
    (message,) = [text for text in caplog.messages if "would block the running event loop" in text]
    assert "asyncframework:Trainer.plain" in message
    assert "async def" in message.partition("Fix: ")[2]
