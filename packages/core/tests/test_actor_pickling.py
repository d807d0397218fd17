"""Actor classes as Ray pickles them: a timed method refers to what cannot be pickled, and still travels."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import pytest

from packages.core.tests.released_frameworks import LOST, NEWEST, VERSIONS, facts_at, preset_at
from stepscope import ProfileConfig, instrument
from stepscope._recording.instrument import configured, patch
from stepscope._recording.spans import layers
from stepscope._recording.spans.wrapping import is_replacement
from stepscope.config import InstrumentConfig
from tools.framework_facts import FunctionFacts

ray = pytest.importorskip("ray")

MODULE = """
import functools, threading
import ray
from stepscope import profile_step

LOCK = threading.Lock()

def traced(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        with LOCK:
            return fn(*args, **kwargs)
    return call

class Decorated:
    @profile_step(role="actor", attrs=lambda self, n: {"locked": LOCK.locked()})
    def update(self, n):
        with LOCK:
            return n + 1

    @profile_step(role="rollout")
    async def generate(self, n):
        with LOCK:
            return n + 1

    @profile_step(role="rollout")
    def stream(self, n):
        with LOCK:
            yield n + 1

    @profile_step(role="rollout")
    async def astream(self, n):
        with LOCK:
            yield n + 1

    @profile_step(role="actor")
    @ray.method(num_returns=2)
    def above_ray_method(self, n):
        with LOCK:
            return n + 1, n

    @ray.method(num_returns=2)
    @profile_step(role="actor")
    def below_ray_method(self, n):
        with LOCK:
            return n + 1, n

    @traced
    @profile_step(role="actor")
    def below_another(self, n):
        return n + 1

    @profile_step(role="actor")
    @traced
    def above_another(self, n):
        return n + 1

class Plain:
    def update(self, n, kind="actor"):
        with LOCK:
            return n + 1

    async def generate(self, n, kind="actor"):
        with LOCK:
            return n + 1

    def stream(self, n):
        with LOCK:
            yield n + 1

class Derived(Plain):
    pass
"""


def pickled(cls: type) -> bytes:
    """Return the class as `ray.remote(cls).remote()` exports it. Raises TypeError as that does."""
    from ray import actor as actors
    from ray.util.tracing import tracing_helper

    private: tuple[Any, Any] = (actors, tracing_helper)
    actor = private[0]._modify_class(cls)
    private[1]._inject_tracing_into_class(actor)
    data: bytes = ray.cloudpickle.dumps(actor)
    return data


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = "actors_" + request.node.name.partition("[")[0]
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    for handle in list(patch._instruments.values()):
        handle.remove()
    configured.apply(ProfileConfig())
    del sys.modules[name]


def called(data: bytes, folder: Path, *methods: str) -> str:
    """Return the results of the class' methods in a process that only has its module."""
    code = (
        "import asyncio, inspect, sys, ray.cloudpickle\n"
        "actor = ray.cloudpickle.loads(sys.stdin.buffer.read())()\n"
        "for name in sys.argv[1:]:\n"
        "    result = getattr(actor, name)(1)\n"
        "    print(asyncio.run(result) if inspect.iscoroutine(result) else result)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *methods], input=data, capture_output=True, cwd=folder, check=True
    )
    return done.stdout.decode().replace("\n", " ").strip()


def test_a_decorated_class_travels_with_the_globals_of_its_module_behind(module: Any, tmp_path: Path) -> None:
    data = pickled(module.Decorated)
    assert called(data, tmp_path, "update", "generate", "below_another", "above_another") == "2 2 2 2"


def test_an_instrumented_class_is_the_bare_one_where_nothing_is_instrumented(
    module: Any, tmp_path: Path
) -> None:
    for name in ("update", "generate", "stream"):
        instrument(module.__name__, f"Plain.{name}", role="actor")
    assert called(pickled(module.Plain), tmp_path, "update", "generate") == "2 2"


def test_one_whose_calls_are_told_apart_and_begin_steps_travels_too(module: Any, tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [
        {"module": module.__name__, "name": f"Plain.{name}", **rest}
        for name in ("update", "generate")
        for rest in (
            {"role": "ref", "where": {"kind": "ref"}},
            {"role": "actor", "values": {"n": "n"}, "policy_version": "n"},
            {"kind": "trajectory", "id": "kind"},
            {"kind": "turn"},
            {"kind": "consume", "id": "result"},
            {"step": "around"},
        )
    ]
    configured.apply(ProfileConfig(instrument=entries))
    assert called(pickled(module.Plain), tmp_path, "update", "generate") == "2 2"


def test_a_method_that_is_timed_in_a_class_and_in_its_base_travels(module: Any, tmp_path: Path) -> None:
    instrument(module.__name__, "Derived.update", role="actor")
    instrument(module.__name__, "Plain.update", role="ref")
    assert called(pickled(module.Derived), tmp_path, "update") == "2"


# The classes of the presets. Their packages need engines and GPUs to be imported, so each is built from the
# facts about it: its functions below decorators of the same kinds, the classes that Ray sends below it, and a
# lock to which all functions refer.

HEADER = """
from __future__ import annotations
import functools, inspect, sys, threading
import ray
LOCK = threading.Lock()

def same(fn):
    return fn

def plain(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs)
    return inner

def asynchronous(fn):
    @functools.wraps(fn)
    async def inner(*args, **kwargs):
        return await fn(*args, **kwargs)
    return inner

def both(fn):
    return asynchronous(fn) if inspect.iscoroutinefunction(fn) else plain(fn)

def looks_at_caller(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        called = fn(*args, **kwargs)
        return called if sys._getframe(1) else None
    return inner

"""
DECORATORS = {"plain": "plain", "async": "asynchronous", "both": "both", "same": "same"}


def built(cls: str, functions: dict[str, FunctionFacts]) -> str:
    """Return the source of a module with these functions, methods of `cls` or none, and its actor classes."""
    own = {name: facts for name, facts in functions.items() if not (cls and facts.defined_in)}
    inherited = {name: facts for name, facts in functions.items() if name not in own}
    if not cls:
        return HEADER + "".join(_function(name, facts) for name, facts in functions.items())
    sent = {at.split(":")[1]: how for facts in functions.values() for at, how in facts.actors.items()}
    text = HEADER + f"class Above:\n    pass\n{_methods(inherited)}\n"
    text += "@ray.remote\n" if sent.get(cls) == "decorator" else ""
    text += f"class {cls}(Above):\n    pass\n{_methods(own)}\n"
    for name, how in sent.items():
        below = "" if name == cls else f"class {name}({cls}):\n    pass\n"
        text += ("@ray.remote\n" if how == "decorator" and below else "") + below
        text += f"Sent{name} = ray.remote(num_cpus=0)({name})\n" if how == "module" else ""
    return text


def _methods(functions: dict[str, FunctionFacts]) -> str:
    return textwrap.indent("".join(_function(name, facts) for name, facts in functions.items()), "    ")


def _function(name: str, facts: FunctionFacts) -> str:
    shapes = [
        "looks_at_caller" if decorator.looks_at_caller else DECORATORS[decorator.shape]
        for decorator in facts.decorators
    ]
    lines = [f"@{each}\n" for each in filter(None, [facts.static, *shapes])]
    kind = "async def" if facts.is_async else "def"
    body = "LOCK; yield" if facts.is_generator else "LOCK"
    return f"{''.join(lines)}{kind} {name}({', '.join(facts.arguments)}): {body}\n"


@pytest.fixture
def built_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Built]]:
    """Build the classes of a preset at a version, each in a module of its own, and instrument them."""
    made: list[str] = []

    def build(preset: str, version: str) -> Built:
        monkeypatch.syspath_prepend(tmp_path)
        facts = facts_at(preset, version)
        places = {target: (target.split(":")[0], *owner_of(target)) for target in facts}
        names: dict[tuple[str, str], str] = {}
        for module, cls, _ in places.values():
            name = names.setdefault((module, cls), f"built_{preset.replace('-', '_')}_{len(names)}")
            own = {method: facts[t] for t, (m, c, method) in places.items() if (m, c) == (module, cls)}
            (tmp_path / f"{name}.py").write_text(built(cls, own))
            made.append(name)
        modules = {place: importlib.import_module(name) for place, name in names.items()}
        bare = {place: _size(modules[place], place[1]) for place in modules}
        entries = [
            msgspec.structs.replace(entry, **_moved(entry, names))
            for entry in preset_at(preset, version).entries
        ]
        return Built(facts, modules, bare, entries)

    yield build
    configured.apply(ProfileConfig())
    for name in made:
        sys.modules.pop(name, None)


class Built(NamedTuple):
    facts: dict[str, FunctionFacts]
    modules: dict[tuple[str, str], ModuleType]
    """(module, class) -> the module with it."""
    bare: dict[tuple[str, str], int | None]
    """Size of each class as Ray pickles it, uninstrumented."""
    entries: list[InstrumentConfig]


def owner_of(target: str) -> tuple[str, str]:
    """Return the class, if any, and the name of a function."""
    cls, _, name = target.split(":")[1].rpartition(".")
    return cls, name


def _moved(entry: InstrumentConfig, names: Mapping[tuple[str, str], str]) -> dict[str, str]:
    return {"module": names[str(entry.module), owner_of(f":{entry.name}")[0]]}


def _size(module: ModuleType, cls: str) -> int | None:
    """Return the length of the pickle of a class that Ray has not copied yet."""
    found = getattr(module, cls, None) if cls else None
    return len(pickled(found)) if isinstance(found, type) else None


@pytest.mark.parametrize(("preset", "version"), VERSIONS)
def test_the_functions_of_a_preset_are_reached_where_ray_sends_them(
    preset: str, version: str, built_preset: Callable[..., Built], caplog: pytest.LogCaptureFixture
) -> None:
    made = built_preset(preset, version)
    lost = [path for name, path in LOST if name == preset and version == NEWEST]
    fitting = [entry for entry in made.entries if not set(lost) & set(entry.where)]
    configured.apply(ProfileConfig(instrument=fitting))
    assert [handle.target for handle in configured._applied.values() if not handle.installed] == []
    assert len(configured._applied) == len({(entry.module, entry.name) for entry in fitting})
    for target, facts in made.facts.items():
        cls, method = owner_of(target)
        module = made.modules[target.split(":")[0], cls]
        if (module.__name__, f"{cls}.{method}".strip(".")) not in {(e.module, e.name) for e in fitting}:
            continue
        for actor, how in facts.actors.items():
            name = actor.split(":")[1]
            sent = getattr(module, f"Sent{name}" if how == "module" else name)
            sent = ray.remote(sent) if how == "call" else sent
            reached = getattr(sent.__ray_metadata__.modified_class, method)
            assert any(is_replacement(function) for function in layers.path_of(reached)), (
                f"{target} in {name}"
            )
    for (module_name, cls), size in made.bare.items():
        # By reference: nothing of a method is in the pickle, with stepscope or without.
        assert _size(made.modules[module_name, cls], cls) == size, f"{module_name}:{cls}"


def test_a_function_that_ray_sends_without_it_is_found(built_preset: Callable[..., Built]) -> None:
    made = built_preset("nemo-rl", NEWEST)
    place = ("nemo_rl.models.policy.workers.dtensor_policy_worker_v2", "DTensorPolicyWorkerV2Impl")
    sent = made.modules[place].DTensorPolicyWorkerV2.__ray_metadata__.modified_class
    assert not any(is_replacement(function) for function in layers.path_of(sent.train))
    configured.apply(ProfileConfig(instrument=made.entries))
    assert any(is_replacement(function) for function in layers.path_of(sent.train))
