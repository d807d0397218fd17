"""profile_step: to inspect, copy, pickle, cloudpickle and other processes the wrapper is the function."""

from __future__ import annotations

import abc
import copy
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
import traceback
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped] # it has none
import pytest

from stepscope import profile_step
from stepscope._recording.fanout import worker_side

HERE = Path(__file__).parent


@pytest.fixture
def sample_tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("sample_tasks")


class Signatures:
    def none(self) -> None: ...
    def plain(self, a: int, b: Decimal = Decimal(1)) -> int: ...  # type: ignore[empty-body]
    def positional_only(self, a: int, /, b: int, c: int = 3) -> None: ...
    def positional_with_default(self, a: int = 1, /) -> None: ...
    def keyword_only(self, *, a: int, b: int = 2) -> None: ...
    def var_positional(self, *args: int, a: int = 1) -> None: ...
    def var_keyword(self, **kwargs: int) -> None: ...
    def everything(self, a: int, /, b: int = 2, *args: int, c: int, d: int = 4, **kwargs: int) -> None: ...
    def our_own_names(self, runtime: int, fn: int, declared: int, wrapper: int, span: int) -> None: ...
    async def coroutine(self, a: int, *, b: int = 2) -> None: ...
    def generator(self, a: int = 1) -> Iterator[int]:
        yield a

    async def async_generator(self, a: int = 1) -> AsyncIterator[int]:
        yield a


ORIGINALS: list[Any] = [value for value in vars(Signatures).values() if inspect.isfunction(value)]


def dunder_names(a: int, __fn: int, *__args: int, __runtime: int = 3) -> tuple[object, ...]:
    return a, __fn, __args, __runtime


ORIGINALS.append(dunder_names)
of_each_kind = pytest.mark.parametrize("fn", ORIGINALS, ids=lambda fn: fn.__name__)


@of_each_kind
def test_the_signature_is_exact(fn: types.FunctionType) -> None:
    wrapper = profile_step(role="actor")(fn)
    assert inspect.signature(wrapper) == inspect.signature(fn)
    assert typing.get_type_hints(wrapper) == typing.get_type_hints(fn)
    assert inspect.getsource(wrapper) == inspect.getsource(fn)
    if fn is not dunder_names:
        assert inspect.signature(wrapper, follow_wrapped=False) == inspect.signature(fn)
        assert inspect.getfullargspec(wrapper) == inspect.getfullargspec(fn)


@of_each_kind
def test_the_kind_is_the_same(fn: types.FunctionType) -> None:
    wrapper = profile_step(role="actor")(fn)
    assert type(wrapper) is types.FunctionType
    for ask in (
        inspect.isfunction,
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    ):
        assert ask(wrapper) == ask(fn)


@of_each_kind
def test_the_metadata_is_the_functions(fn: types.FunctionType) -> None:
    vars(fn)["of_the_user"] = ["kept"]
    wrapper = profile_step(role="actor")(fn)
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__doc__",
        "__globals__",
        "__defaults__",
    ):
        assert getattr(wrapper, name) is getattr(fn, name)
    assert (
        wrapper.__annotations__ == fn.__annotations__
    )  # Python 3.14 makes those of each when they are asked
    assert wrapper.__kwdefaults__ == fn.__kwdefaults__
    assert wrapper.__wrapped__ is fn  # type: ignore[attr-defined] # set by functools
    assert wrapper.of_the_user is fn.of_the_user  # type: ignore[attr-defined]
    assert wrapper.__code__.co_name == fn.__name__


def test_a_worker_knows_the_roles_of_its_class(sample_tasks: ModuleType) -> None:
    assert worker_side.decorated_roles(sample_tasks.Actor) == ("actor", "rollout")
    shipped = cloudpickle.loads(by_value(sample_tasks, sample_tasks.Actor))
    assert worker_side.decorated_roles(shipped) == ("actor", "rollout")


def test_arguments_arrive_as_they_were_given() -> None:
    @profile_step(role="actor")
    def everything(
        a: int, /, b: int = 2, *args: int, c: int, d: int = 4, **kwargs: int
    ) -> tuple[object, ...]:
        return a, b, args, c, d, kwargs

    assert everything(1, c=3) == (1, 2, (), 3, 4, {})
    assert everything(1, 5, 6, 7, c=3, d=8, a=9) == (1, 5, (6, 7), 3, 8, {"a": 9})
    assert everything(1, b=5, c=3) == (1, 5, (), 3, 4, {})
    assert profile_step(role="actor")(dunder_names)(1, 2, 3) == (1, 2, (3,), 3)


def test_a_mutable_default_is_one_object() -> None:
    def append(item: int, to: list[int] = [], *, also: list[int] = []) -> tuple[list[int], list[int]]:  # noqa: B006
        to.append(item)
        also.append(item)
        return to, also

    wrapper = profile_step(role="actor")(append)
    wrapper(1)
    assert append(2) == wrapper(3) == ([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("kind", ["sync", "async", "generator", "async generator"])
def test_a_wrong_call_is_refused_at_the_call_in_the_functions_name(kind: str) -> None:
    functions: dict[str, Callable[..., object]] = {
        "sync": Signatures.plain,
        "async": Signatures.coroutine,
        "generator": Signatures.generator,
        "async generator": Signatures.async_generator,
    }
    fn = functions[kind]
    with pytest.raises(TypeError) as theirs:
        fn(1, 2, 3, 4)
    with pytest.raises(TypeError) as ours:
        profile_step(role="actor")(fn)(1, 2, 3, 4)
    assert str(ours.value) == str(theirs.value)


def divide(a: int, *, by: int) -> float:
    return a / by


def test_a_traceback_shows_the_line_of_the_wrapper() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        profile_step("actor")(divide)(1, by=0)
    (frame,) = [
        frame
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if "<profile_step" in frame.filename
    ]
    assert (frame.name, frame.line) == ("divide", "return __fn(a, by=by, )")
    assert frame.filename == f"<profile_step {__name__}.divide>"


def test_wrappers_of_one_name_keep_their_own_lines() -> None:
    def first(a: int) -> None: ...
    def second(b: int) -> None: ...

    second.__qualname__ = first.__qualname__
    sources = [inspect.getsource(profile_step("actor")(fn).__code__) for fn in (first, second, first)]
    assert ["(a)" in source for source in sources] == [True, False, True]


def test_abstract_methods_stay_abstract() -> None:
    class Base(abc.ABC):
        @profile_step(role="actor")
        @abc.abstractmethod
        def below(self) -> None: ...

        @abc.abstractmethod
        @profile_step(role="actor")
        def above(self) -> None: ...

    assert Base.__abstractmethods__ == {"below", "above"}


def test_lambdas_and_properties_work() -> None:
    class Worker:
        @property
        @profile_step(role="actor")
        def size(self) -> int:
            return 7

    assert Worker().size == 7
    assert profile_step(role="actor", stage="double")(lambda n: 2 * n)(3) == 6


def test_a_decorated_decorator_is_called_by_its_own_signature() -> None:
    def tripled(fn: Callable[[int], int]) -> Callable[[int], int]:
        @functools.wraps(fn)
        def inner(*args: int, **kwargs: int) -> int:
            return 3 * fn(*args, **kwargs)

        return inner

    @profile_step(role="actor")
    @tripled
    def update(n: int) -> int:
        return n

    by_name: Any = update
    assert by_name(n=2) == 6
    assert list(inspect.signature(update).parameters) == ["n"]


@types.coroutine
def old_coroutine() -> Iterator[None]:
    yield


class Thing:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        (Thing, "decorate the methods of Thing"),
        (functools.partial(dunder_names, 1), "decorate the function inside"),
        (property(lambda self: 7), "put @property above"),
        (Signatures().plain, "decorate the function in the class: Signatures.plain"),
        (old_coroutine, "write the coroutine as `async def`"),
        (Thing(), "put @profile_step below what made it"),
        (len, "on a `def` that calls it"),
        (7, "profile_step times Python functions, not 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_python_function_is_refused_with_what_to_do(target: Callable[[], None], fix: str) -> None:
    with pytest.raises(TypeError, match=fix):
        profile_step(role="actor")(target)


# Copies and pickles.


def by_value(module: ModuleType, obj: object) -> bytes:
    cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(obj)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return data


def test_copies_of_a_function_are_the_function() -> None:
    wrapper = profile_step(role="actor")(dunder_names)
    assert copy.copy(wrapper) is wrapper
    assert copy.deepcopy({"fn": wrapper})["fn"] is wrapper


def test_importable_functions_and_methods_are_pickled_by_reference(sample_tasks: ModuleType) -> None:
    for obj in (
        sample_tasks.task,
        sample_tasks.Actor,
        sample_tasks.Actor.update,
        sample_tasks.Actor().update,
    ):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            assert len(dumps(obj)) < 200
    assert pickle.loads(pickle.dumps(sample_tasks.task)) is sample_tasks.task


def test_what_is_pickled_by_value_carries_little(sample_tasks: ModuleType) -> None:
    assert len(by_value(sample_tasks, sample_tasks.task)) < 2500
    ours = [cell.cell_contents for cell in sample_tasks.task.__closure__]
    assert sorted(type(value).__name__ for value in ours) == ["Declared", "function", "function"]


def test_functions_of_main_run_in_a_spawned_process_and_in_another_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import multiprocessing, subprocess, sys
import cloudpickle
sys.path.insert(0, {str(HERE)!r})
from sample_tasks import task
from stepscope import profile_step

@profile_step(role="env")
def local(n: int) -> int:
    return n + 1

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(local, [1, 2]) == [2, 3]
        assert pool.map(task, [1])[0][:2] == (2, False)
    code = "import sys, pickle; fn = pickle.load(sys.stdin.buffer); print(fn(1), fn.__stepscope__.role)"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, input=cloudpickle.dumps(local), capture_output=True, check=True)
    assert out.stdout == b"2 env\\n", out
"""
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
