"""Ray actors whose classes nobody edits: instrumented by the capture they take part in."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import spans_alone
from packages.core.tests.stale_trl import write_stale_trl
from stepscope import ProfileConfig, capture, instrument
from stepscope._recording.instrument import configured
from stepscope._recording.spans import layers, wrapping
from stepscope.testing.recorded_run import finished_spans
from stepscope_report import step_report
from stepscope_report.timeline.load import load_step

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")

FRAMEWORK = """
import ray

class Base:
    def update(self):
        return self.forward("actor") + 1

    def forward(self, kind):
        return 1

    @classmethod
    def kind(cls):
        return "plain"

class AsyncWorker:
    async def generate(self):
        return 2

class AgentLoop:
    async def run(self, turns, **kwargs):
        for _ in range(turns):
            await self.generate()
        return [0] * turns

    async def generate(self):
        pass

@ray.remote
class Decorated(Base):
    def update(self):
        return 3

    @staticmethod
    def score():
        return 4
"""


SHAPES = """
import ray

class Base:
    def f(self):
        return self.g()

    def g(self):
        return 1

class AsyncBase:
    async def f(self):
        return 1

class Grouped:
    @ray.method(concurrency_group="io")
    def f(self):
        return 1

@ray.remote(num_cpus=0)
class Own:
    def f(self):
        return 1

class Below(Base):
    pass

@ray.remote(num_cpus=0)
class Inherits(Below):
    pass

class OwnName:
    def f(self):
        return 1

@ray.remote(num_cpus=0)
class InheritsByName(OwnName):
    pass

class Same:
    def f(self):
        return 1

SameModule = ray.remote(num_cpus=0)(Same)

class Both:
    def f(self):
        return 1

class Hidden(Both):
    pass

Both = ray.remote(num_cpus=0)(Both)
BelowHidden = ray.remote(num_cpus=0)(Hidden)

@ray.remote(num_cpus=0)
class InheritsAsync(AsyncBase):
    pass

@ray.remote(num_cpus=0, concurrency_groups={"io": 2})
class InheritsGrouped(Grouped):
    pass
"""
NAMED = {
    "Own": "Own.f",
    "Inherits": "Base.f",
    "InheritsByName": "InheritsByName.f",
    "SameModule": "Same.f",
    "BelowHidden": "Both.f",
    "InheritsAsync": "AsyncBase.f",
    "InheritsGrouped": "Grouped.f",
}
"""Actor class -> the function that an entry names."""


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Provide the actor classes, in no process instrumented, and what finds their module in actors."""
    (tmp_path / "rayshapes.py").write_text(SHAPES)
    (tmp_path / "rayshapes_base.py").write_text("class Base:\n    def f(self):\n        return 1\n")
    (tmp_path / "rayshapes_later.py").write_text(
        "import ray, rayshapes_base\nLater = ray.remote(num_cpus=0)(rayshapes_base.Base)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}}
    module: Any = importlib.import_module("rayshapes")
    importlib.import_module("rayshapes_base")
    yield {name: getattr(module, name).options(runtime_env=environment) for name in NAMED} | {
        "Later": lambda: importlib.import_module("rayshapes_later").Later.options(runtime_env=environment)
    }
    configured.apply(ProfileConfig())
    for name in ("rayshapes", "rayshapes_base", "rayshapes_later"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Provide the module, and how actors find it too."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "rayframework.py").write_text(FRAMEWORK)
    sys.path.insert(0, str(folder))
    paths = ":".join([str(folder), *filter(None, sys.path)])
    yield importlib.import_module("rayframework"), {"env_vars": {"PYTHONPATH": paths}}
    sys.path.remove(str(folder))
    del sys.modules["rayframework"]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ProfileConfig]:
    roles = {
        "Base.update": "actor",
        "Base.kind": "actor",
        "AsyncWorker.generate": "rollout",
        "Decorated.update": "critic",
        "Decorated.score": "reward",
        "Base.forward": "actor",
    }
    entries: list[dict[str, object]] = [{"name": name, "role": role} for name, role in roles.items()]
    entries.insert(0, {"name": "Base.forward", "role": "ref", "where": {"kind": "ref"}})
    listed = [{"module": "rayframework", **entry} for entry in entries]
    yield spans_alone(tmp_path / "run", instrument=listed)
    configured.apply(ProfileConfig())


def spans(config: ProfileConfig, step: int) -> list[tuple[str | None, str]]:
    return sorted((span.role, span.stage) for span in finished_spans(config.save_path, step))


def test_actors_that_live_already_are_instrumented_by_the_first_capture(
    framework: tuple[Any, dict[str, Any]], config: ProfileConfig, remote: Callable[..., Any]
) -> None:
    module, environment = framework
    kinds = (module.Base, module.AsyncWorker, module.Decorated)
    plain, coroutine, decorated = (remote(kind, runtime_env=environment) for kind in kinds)
    calls = [plain.update, plain.kind, coroutine.generate, decorated.update, decorated.score]
    before = ray.get([call.remote() for call in calls])
    for step in (1, 2):
        with capture(step, config=config, workers=[plain, coroutine, decorated]):
            assert ray.get([call.remote() for call in calls]) == before == [2, "plain", 2, 3, 4]
        assert spans(config, step) == [
            ("actor", "forward"),
            ("actor", "kind"),
            ("actor", "update"),
            ("critic", "update"),
            ("reward", "score"),
            ("rollout", "generate"),
        ]


def test_trajectories_of_an_unedited_async_actor_make_the_long_tail(
    framework: tuple[Any, dict[str, Any]], config: ProfileConfig, remote: Callable[..., Any]
) -> None:
    module, environment = framework
    run = {"name": "AgentLoop.run", "kind": "trajectory", "id": "uid", "values": {"turns": "len(result)"}}
    turn = {"name": "AgentLoop.generate", "kind": "turn"}
    listed: list[dict[str, object]] = [{"module": "rayframework", **entry} for entry in (run, turn)]
    config = config.replace(instrument=listed)
    actor = remote(module.AgentLoop, runtime_env=environment)
    for step in (6, 7):  # the first capture meets an actor that nothing has instrumented
        with capture(step, config=config, workers={"agent_loop": actor}):
            assert ray.get([actor.run.remote(turns, uid=f"q{turns}") for turns in (1, 2, 3)])
        tail = step_report(load_step(Path(config.save_path) / f"step_{step:06d}")).long_tail
        assert tail is not None
        assert tail.trajectories == 3
        assert {row.trajectory for row in tail.worst} == {"q1", "q2", "q3"}
        calls = [(spread.stage, spread.calls) for spread in tail.spreads]
        assert calls == [("trajectory", 3), ("turn", 6)]


@pytest.mark.parametrize("live", [False, True])
def test_each_shape_of_actor_class_has_each_call_recorded(
    shapes: dict[str, Any], tmp_path: Path, live: bool, remote: Callable[..., Any]
) -> None:
    """Ray copied all of them but one before their functions were replaced, and sends these copies."""
    listed = [
        {"module": _module(shape), "name": name, "role": shape.lower(), "stage": "f"}
        for shape, name in {**NAMED, "Later": "Base.f"}.items()
    ]
    inherited = {"module": "rayshapes", "name": "Base.g", "role": "inherits", "stage": "g"}
    config = spans_alone(tmp_path / "run", instrument=[*listed, inherited])
    if not live:
        configured.apply(config)
    classes = {**shapes, "Later": shapes["Later"]()}
    actors = {shape.lower(): remote(cls) for shape, cls in classes.items()}
    ray.get([actor.__ray_ready__.remote() for actor in actors.values()])  # ten of them start slowly
    if live:
        assert ray.get([actor.f.remote() for actor in actors.values()]) == [1] * len(actors)
    for step in (1, 2):
        with capture(step, config=config, workers=actors):
            assert ray.get([actor.f.remote() for actor in actors.values()]) == [1] * len(actors)
        assert spans(config, step) == sorted([*((role, "f") for role in actors), ("inherits", "g")])


def _module(shape: str) -> str:
    return "rayshapes_base" if shape == "Later" else "rayshapes"


def test_the_copies_of_ray_come_back_too(shapes: dict[str, Any]) -> None:
    module = sys.modules["rayshapes"]
    copies = [getattr(module, name).__ray_metadata__.modified_class for name in NAMED]
    before = [list(layers.path_of(copy.f)) for copy in copies]
    handles = [instrument("rayshapes", name, role="actor") for name in NAMED.values()]
    assert all(wrapping.is_replacement(copy.f) for copy in copies)
    assert all(
        inspect.iscoroutinefunction(copy.f) == (name == "InheritsAsync")
        for name, copy in zip(NAMED, copies, strict=True)
    )
    for handle in handles:
        handle.remove()
    assert [list(layers.path_of(copy.f)) for copy in copies] == before


def test_a_class_that_another_actor_holds_travels_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's actors hold the class of their worker, with Ray's table of its methods."""
    (tmp_path / "rayheld.py").write_text(
        "import threading\nLOCK = threading.Lock()\n"  # which no pickle takes
        "class Base:\n    def f(self):\n        with LOCK:\n            return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    held = ray.remote(importlib.import_module("rayheld").Base)
    handle = instrument("rayheld", "Base.f", role="actor")
    try:
        assert ray.cloudpickle.loads(ray.cloudpickle.dumps(held.__ray_metadata__))
    finally:
        handle.remove()


class Importer:
    """An actor that imports the framework. Its driver never does."""

    def train(self) -> str:
        trainer: Any = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
        return str(trainer()._calculate_rewards())


@pytest.mark.usefixtures("in_production")
def test_a_name_that_only_workers_miss_is_logged_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    remote: Callable[..., Any],
) -> None:
    folder = write_stale_trl(tmp_path / "modules")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("RANK", raising=False)
    paths = ":".join([str(folder), str(Path(__file__).parents[3]), *filter(None, sys.path)])
    environment = {"env_vars": {"PYTHONPATH": paths, "STEPSCOPE_RAISE": "0"}}
    actors = [remote(Importer, runtime_env=environment) for _ in range(2)]
    config = spans_alone(tmp_path / "run", instrument=["trl"])
    for step in (1, 2):
        with capture(step, config=config, workers={"actor": actors}):
            assert ray.get([actor.train.remote() for actor in actors]) == ["_calculate_rewards"] * 2
    configured.apply(ProfileConfig())
    assert "trl.trainer.grpo_trainer" not in sys.modules
    (line,) = (line for line in caplog.messages if "'GRPOTrainer._generate'" in line)
    assert "0.29.0 to 1.16.0 (9.9 is" in line
    assert "'GRPOTrainer._generate_all'?" in line
    assert sum("'rloo_trainer' in trl.trainer" in line for line in caplog.messages) == 1
