"""Actor classes as Ray pickles them: a timed method refers to what cannot be pickled, and still travels."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.core.tests.framework_names import DATA, definition, released
from stepscope import ProfileConfig, instrument
from stepscope._recording.instrument import configured, patch
from stepscope._recording.spans.wrapping import declared, is_replacement
from stepscope.config import InstrumentConfig
from stepscope.config.presets import preset_names, read_preset

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


def test_nothing_of_ours_is_copied_onto_a_decorator_above(module: Any) -> None:
    above, wrapper = module.Decorated.below_another, module.Decorated.below_another.__wrapped__
    assert set(vars(above)) == {"__wrapped__"}
    assert declared(above) is declared(wrapper) is vars(wrapper)["__stepscope__"]


def test_what_ray_made_of_an_instrumented_method_is_known_as_its_replacement(module: Any) -> None:
    instrument(module.__name__, "Plain.update", role="actor")
    assert is_replacement(ray.cloudpickle.loads(pickled(module.Plain)).update)
    assert not is_replacement(ray.cloudpickle.loads(pickled(module.Plain)).generate)


# The classes of the presets. Their packages need engines and GPUs to be imported, so each class is built from
# the released source of its functions, beside a lock that all of them refer to. Bases, and decorators other
# than classmethod and staticmethod, are left out.

WHEELS = [
    ("trl", "1.16.0"),
    ("verl", "0.9.1"),
    ("openrlhf", "0.11.2"),
    ("areal", "1.0.4"),
    ("skyrl", "0.4.0"),
    ("rllib", "2.60.0"),
]
RECORDED = ["nemo-rl", "slime"]
"""On no index with their code: built from the recorded arguments."""
HEADER = "from __future__ import annotations\nimport threading\nLOCK = threading.Lock()\n"


def built_classes(preset: str, entries: Sequence[InstrumentConfig]) -> Iterator[tuple[str, str, str]]:
    """(module, class, source) of the classes that `entries` names."""
    names = dict.fromkeys((str(entry.module), str(entry.name)) for entry in entries)
    for module, cls in dict.fromkeys((module, name.split(".")[0]) for module, name in names if "." in name):
        methods = [name for where, name in names if where == module and name.startswith(f"{cls}.")]
        bodies = [ast.unparse(_function(preset, module, name)) for name in methods]
        yield module, cls, HEADER + f"class {cls}:\n" + textwrap.indent("\n\n".join(bodies), "    ")


def _function(preset: str, module: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    if preset in RECORDED:
        recorded = json.loads((DATA / f"{preset}.json").read_text())["arguments"][f"{module}:{name}"]
        signature = ", ".join(["self", *(name for name in recorded if name != "self")])
        (function,) = ast.parse(f"def {name.split('.')[-1]}({signature}): pass").body
        assert isinstance(function, ast.FunctionDef)
    else:
        original = definition(released(preset, dict(WHEELS)[preset]), module, name)
        assert original is not None
        function = copy.deepcopy(original)
    kinds = ("classmethod", "staticmethod")
    function.decorator_list = [
        decorator
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in kinds
    ]
    none = ast.Constant(None)
    function.args.defaults = [none for _ in function.args.defaults]
    function.args.kw_defaults = [default and none for default in function.args.kw_defaults]
    function.body.insert(0, ast.Expr(ast.Name("LOCK", ast.Load())))
    return function


def test_every_preset_is_pickled() -> None:
    assert {preset for preset, _ in WHEELS} | set(RECORDED) == set(preset_names())


@pytest.mark.parametrize("preset", [*dict(WHEELS), *RECORDED])
def test_the_classes_of_a_preset_are_pickled_as_ray_does_it(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    # What TRL calls of other packages is in no wheel of its own.
    entries = [
        entry
        for entry in read_preset(preset, lambda _: dict(WHEELS).get(preset)).entries
        if str(entry.module).split(".")[0] not in ("transformers", "accelerate")
    ]
    names: dict[tuple[str, str], str] = {}
    for number, (module, cls, source) in enumerate(built_classes(preset, entries)):
        name = names[module, cls] = f"built_{preset.replace('-', '_')}_{number}"
        (tmp_path / f"{name}.py").write_text(source)
    try:
        classes = [getattr(importlib.import_module(name), cls) for (_, cls), name in names.items()]
        bare = [len(pickled(cls)) for cls in classes]
        moved = [
            msgspec.structs.replace(entry, module=names[str(entry.module), str(entry.name).split(".")[0]])
            for entry in entries
            if "." in str(entry.name)
        ]
        configured.apply(ProfileConfig(instrument=moved))
        assert len(configured._applied) == len({(entry.module, entry.name) for entry in moved})
        assert all(handle.installed for handle in configured._applied.values())
        # By reference: nothing of a method is in the pickle, with stepscope or without.
        assert [len(pickled(cls)) for cls in classes] == bare
    finally:
        configured.apply(ProfileConfig())
        for name in names.values():
            sys.modules.pop(name, None)
