"""instrument(): code that one cannot edit, timed where it stands."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable, spans_alone
from stepscope import ProfileConfig, capture, instrument
from stepscope._recording.instrument import patch
from stepscope._recording.process import failures
from stepscope.errors import ConfigError
from stepscope.testing.recorded_run import finished_spans

MODULE = """
import functools

class Base:
    def inherited(self):
        return "inherited"

class Engine(Base):
    def generate(self, n):
        return n + 1

    async def agenerate(self, n):
        return n + 1

    @classmethod
    def create(cls):
        return cls.__name__

    @staticmethod
    def double(n):
        return 2 * n

    def broken(self):
        raise ValueError("theirs")

    class Nested:
        def method(self):
            return "nested"

def load(path):
    return path

built_in = len
partial = functools.partial(load, "x")
"""

Stages = Callable[[], list[tuple[str | None, str]]]


@pytest.fixture
def name(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Provide a module that can be imported and is not, under a name of the test's own."""
    module = "framework_" + request.node.name.partition("[")[0]
    with importable(tmp_path / "modules", **{module: MODULE}):
        yield module


@pytest.fixture
def framework(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path / "run")


@pytest.fixture
def stages(config: ProfileConfig) -> Stages:
    return lambda: [(span.role, span.stage) for span in finished_spans(config.save_path)]


def test_a_method_of_an_imported_module_is_timed_at_once(
    name: str, framework: Any, config: ProfileConfig, stages: Stages
) -> None:
    original = framework.Engine.generate
    handle = instrument(name, "Engine.generate", role="rollout", attrs=lambda self, n: {"n": n})
    assert handle.installed
    assert inspect.isfunction(framework.Engine.generate)
    assert inspect.signature(framework.Engine.generate) == inspect.signature(original)
    with capture(1, config=config):
        assert framework.Engine().generate(1) == 2
    assert stages() == [("rollout", "generate")]


def test_a_module_that_is_not_imported_is_timed_from_its_import_on(
    name: str, config: ProfileConfig, stages: Stages
) -> None:
    handle = instrument(name, "load", role="trainer", stage="load_weights")
    assert (handle.installed, name in sys.modules) == (False, False)
    framework: Any = importlib.import_module(name)
    assert handle.installed
    with capture(1, config=config):
        assert framework.load("x") == "x"
    assert stages() == [("trainer", "load_weights")]


@pytest.mark.parametrize("path", ["create", "double", "Nested.method", "inherited", "agenerate"])
def test_every_kind_of_method_stays_what_it_is_and_comes_back(name: str, framework: Any, path: str) -> None:
    before = dict(vars(framework.Engine))
    base = dict(vars(framework.Base))
    handle = instrument(name, f"Engine.{path}", role="rollout")
    if path in before:
        assert type(vars(framework.Engine)[path]) is type(before[path])
        assert vars(framework.Engine)[path] is not before[path]
    engine = framework.Engine()
    if path == "create":
        assert framework.Engine.create() == engine.create() == "Engine"
    elif path == "double":
        assert framework.Engine.double(2) == engine.double(2) == 4
    elif path == "Nested.method":
        assert engine.Nested().method() == "nested"
    elif path == "inherited":
        assert engine.inherited() == "inherited"
    else:
        assert inspect.iscoroutinefunction(engine.agenerate)
    assert dict(vars(framework.Base)) == base
    handle.remove()
    assert dict(vars(framework.Engine)) == before


def test_removing_puts_the_original_back_and_may_be_repeated(name: str, framework: Any) -> None:
    original = framework.load
    handle = instrument(name, "load", role="trainer")
    assert framework.load is not original
    handle.remove()
    handle.remove()
    assert framework.load is original
    assert not handle.installed
    assert instrument(name, "load", role="critic").installed


def test_removing_before_the_import_cancels_it(name: str) -> None:
    handle = instrument(name, "load", role="trainer")
    handle.remove()
    framework: Any = importlib.import_module(name)
    assert not hasattr(framework.load, "__stepscope__")


def test_what_others_patched_on_top_is_not_taken_away(
    name: str, framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    handle = instrument(name, "load", role="trainer")
    ours = framework.load
    framework.load = theirs = lambda path: ours(path)
    handle.remove()
    assert framework.load is theirs
    assert "replaced again since" in caplog.text


def test_the_same_call_again_is_the_same_handle(name: str, framework: Any) -> None:
    first = instrument(name, "load", role="trainer", attrs={"size": 7})
    once = framework.load
    assert instrument(name, "load", role="trainer", attrs={"size": 7}) is first
    assert framework.load is once


def test_a_function_is_not_timed_twice(name: str, framework: Any) -> None:
    instrument(name, "load", role="trainer")
    with pytest.raises(ConfigError, match=r"remove\(\) the first"):
        instrument(name, "load", role="critic")
    instrument(name, "Base.inherited", role="rollout", stage="decode")
    with pytest.raises(ConfigError, match=r"inherited.*rollout/decode"):
        instrument(name, "Engine.inherited", role="rollout")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Engine.genrate", r"Engine\.agenerate, Engine\.broken, .*did you mean 'Engine\.generate'\?"),
        ("Enigne.generate", r"Base, Engine, load.*"),
        ("lod", r"did you mean 'load'\?"),
        ("load.deeper", "nothing: the module has no function. Fix: correct the module"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(
    name: str, framework: Any, path: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        instrument(name, path, role="rollout")
    instrument(name, "load", role="trainer")


def test_a_function_of_the_script_itself_is_refused_with_where_it_could_stand() -> None:
    with pytest.raises(ConfigError, match="into a module"):
        instrument("__main__", "no_such_function_of_the_test_runner", role="rollout")


@pytest.mark.parametrize("path", ["built_in", "partial", "Engine"])
def test_what_is_no_python_function_is_refused(name: str, framework: Any, path: str) -> None:
    with pytest.raises(TypeError, match="times Python functions"):
        instrument(name, path, role="rollout")


def test_a_module_below_folders_without_an_init_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "package_of_folders" / "workers" / "fsdp"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "worker.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    absent = patch.absent_part
    assert absent("package_of_folders.workers.fsdp.worker") is None
    assert absent("package_of_folders.workers.fsdp.none") == "package_of_folders.workers.fsdp.none"
    assert absent("package_of_folders.workers.none.worker") == "package_of_folders.workers.none"
    assert not any(name.startswith("package_of_folders") for name in sys.modules)


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'no_such_package'"):
        instrument("no_such_package.engine", "LLM.generate", role="rollout")
    with pytest.raises(ConfigError, match="can be imported"):
        instrument("", "LLM.generate", role="rollout")


def test_wrong_arguments_are_refused_before_anything_is_patched(name: str, framework: Any) -> None:
    with pytest.raises(ConfigError, match="role"):
        instrument(name, "load", role="")
    assert not hasattr(framework.load, "__stepscope__")


@pytest.mark.usefixtures("in_production")
def test_a_wrong_name_does_not_break_the_import_it_waited_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = instrument(name, "Engine.genrate", role="rollout")
    framework: Any = importlib.import_module(name)
    assert framework.Engine().generate(1) == 2
    assert not handle.installed
    assert "mean 'Engine.generate'?" in caplog.text
    assert f"instrument({name!r}, 'Engine.genrate')" in failures._noted
    instrument(name, "Engine.generate", role="rollout")


def test_the_frameworks_own_errors_pass_through(
    name: str, framework: Any, config: ProfileConfig, stages: Stages
) -> None:
    instrument(name, "Engine.broken", role="rollout")
    with capture(1, config=config), pytest.raises(ValueError, match="theirs"):
        framework.Engine().broken()
    assert stages() == [("rollout", "broken")]
