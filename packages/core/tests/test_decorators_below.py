"""Functions below decorators of others: timed to their end, and none of the decorators notices.

One file above 400 lines: the same decorators hide each kind of function, decorated and instrumented.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import inspect
import sys
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import spans_alone
from stepscope import ProfileConfig, capture, configure, instrument, profile_step, span
from stepscope._recording.instrument import patch
from stepscope._recording.spans import scopes
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.spans import Span
from stepscope.testing.recorded_run import finished_spans

Any_ = Callable[..., Any]
Spans = Callable[[], list[Span]]


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path)


@pytest.fixture
def spans(config: ProfileConfig) -> Spans:
    """Return the closed spans of all captured steps, in order of their start."""
    return lambda: finished_spans(config.save_path)


# Decorators that hide what they decorate, as those of frameworks do.


def wrapped(fn: Any_) -> Any_:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return inner


def bare(fn: Any_) -> Any_:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return inner


def through_a_partial(fn: Any_) -> Any_:
    held = functools.partial(fn)

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    return inner


class Caller:
    def __init__(self, fn: Any_) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def through_an_object(fn: Any_) -> Any_:
    held = Caller(fn)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    return inner


def delegated(fn: Any_) -> Any_:
    """Stand for `def generate(self, n): return self._generate(n)`."""

    def inner(n: int) -> Any:
        return fn(n)

    return inner


def twice(fn: Any_) -> Any_:
    return bare(wrapped(fn))


HIDING = [wrapped, bare, twice, through_a_partial, through_an_object, delegated]
hiding = pytest.mark.parametrize("hide", HIDING, ids=lambda hide: hide.__name__)


async def work(n: int) -> int:
    with span("inside"):
        await asyncio.sleep(0)
    if n < 0:
        raise ValueError("mine")
    return n + 1


def contains(outer: Span, inner: Span) -> bool:
    return (
        inner.parent == outer.span
        and outer.start_ns <= inner.start_ns
        and inner.start_ns + inner.dur_ns <= outer.start_ns + outer.dur_ns
    )


# Coroutines.


@hiding
async def test_a_hidden_coroutine_is_timed_to_its_end(
    config: ProfileConfig, spans: Spans, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout", stage="generate")(hide(work))
    async with capture(1, config=config):
        before = scopes.current.get()
        assert await timed(1) == 2
        assert scopes.current.get() is before
    outer, inside = spans()
    assert outer.stage == "generate"
    assert contains(outer, inside)


@hiding
async def test_so_is_one_in_a_task_of_its_own(
    config: ProfileConfig, spans: Spans, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout", stage="generate")(hide(work))
    async with capture(1, config=config):
        with span("gather"):
            assert await asyncio.gather(*(asyncio.create_task(timed(n)) for n in range(3))) == [1, 2, 3]
    (gather,) = (line for line in spans() if line.stage == "gather")
    calls = [line for line in spans() if line.stage == "generate"]
    inside = [line for line in spans() if line.stage == "inside"]
    assert {call.parent for call in calls} == {gather.span}
    assert [sum(contains(call, line) for line in inside) for call in calls] == [1, 1, 1]


@hiding
async def test_its_error_is_that_of_the_span_and_of_the_caller(
    config: ProfileConfig, spans: Spans, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout", stage="generate")(hide(work))
    async with capture(1, config=config):
        with pytest.raises(ValueError, match="mine") as caught:
            await timed(-1)
        assert scopes.current.get() is None
    assert spans()[0].error == "ValueError: mine"
    assert caught.value.__context__ is None


@hiding
async def test_what_is_returned_is_a_coroutine_of_its_name_as_ever(
    config: ProfileConfig, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout")(hide(work))
    assert not inspect.iscoroutinefunction(timed)
    async with capture(1, config=config):
        coroutine = timed(1)
        assert inspect.iscoroutine(coroutine)
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
        assert (coroutine.__name__, coroutine.__qualname__) == ("work", "work")
        assert await coroutine == 2


@hiding
def test_one_that_nobody_awaits_is_warned_of_once(
    config: ProfileConfig, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout")(hide(work))
    with capture(1, config=config), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timed(1)
        gc.collect()
        timed(1).close()
        gc.collect()
    assert ["'work'" in str(warning.message) for warning in caught] == [True]


async def test_a_coroutine_that_somebody_else_keeps_is_returned_itself(
    config: ProfileConfig, spans: Spans
) -> None:
    kept = []

    @profile_step(role="rollout")
    def submit(n: int) -> Awaitable[int]:
        kept.append(work(n))
        return kept[0]

    async with capture(1, config=config):
        submit(1)  # dropped, and it is not closed
        assert await kept[0] == 2
    assert spans()[0].stage == "submit"


async def test_a_closed_coroutine_closes_the_hidden_one(config: ProfileConfig, spans: Spans) -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    timed = profile_step(role="rollout", stage="waits")(through_a_partial(waits))
    async with capture(1, config=config):
        task = asyncio.create_task(timed())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == [True]
    assert spans()[0].cancelled


# Futures.


async def test_a_task_that_is_returned_is_timed_to_its_end_and_stays_that_task(
    config: ProfileConfig, spans: Spans
) -> None:
    made = []

    @profile_step(role="rollout")
    def submit(n: int) -> asyncio.Task[int]:
        made.append(asyncio.create_task(work(n)))
        return made[-1]

    async with capture(1, config=config):
        task = submit(1)
        assert task is made[0]
        assert scopes.current.get() is None
        assert await task == 2
        failing = submit(-1)
        with pytest.raises(ValueError, match="mine"):
            await failing
    first, inside, second, _ = spans()
    assert contains(first, inside)
    assert (first.stage, first.error, second.error) == ("submit", None, "ValueError: mine")


async def test_the_error_of_a_future_that_nobody_reads_is_still_logged_by_asyncio(
    config: ProfileConfig,
) -> None:
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    @profile_step(role="rollout")
    def submit() -> asyncio.Future[int]:
        future: asyncio.Future[int] = loop.create_future()
        loop.call_soon(future.set_exception, ValueError("mine"))
        return future

    async with capture(1, config=config):
        submit()
        while not told:  # nothing else tells that it was collected
            gc.collect()
            await asyncio.sleep(0)
    assert ["never retrieved" in context["message"] for context in told] == [True]


# Generators.


async def items(n: int) -> AsyncIterator[int]:
    for i in range(n):
        with span("inside"):
            await asyncio.sleep(0)
        yield i


def plain_items(n: int) -> Iterator[int]:
    for i in range(n):
        with span("inside"):
            pass
        yield i


@hiding
async def test_a_hidden_async_generator_is_timed_per_resumption(
    config: ProfileConfig, spans: Spans, hide: Callable[[Any_], Any_]
) -> None:
    timed = profile_step(role="rollout", stage="stream")(hide(items))
    async with capture(1, config=config):
        generator = timed(2)
        assert inspect.isasyncgen(generator)
        async for _ in generator:
            with span("consumer"):
                await asyncio.sleep(0)
    resumptions = [line for line in spans() if "resumption" in (line.attrs or {})]
    inside = [line for line in spans() if line.stage == "inside"]
    assert [line.attrs for line in resumptions] == [{"resumption": i} for i in range(3)]
    assert all(map(contains, resumptions, inside))
    assert {line.parent for line in spans() if line.stage == "consumer"} == {None}


@hiding
def test_so_is_a_hidden_generator(config: ProfileConfig, spans: Spans, hide: Callable[[Any_], Any_]) -> None:
    timed = profile_step(role="rollout", stage="stream")(hide(plain_items))
    with capture(1, config=config):
        generator = timed(2)
        assert inspect.isgenerator(generator)
        assert generator.__name__ == "plain_items"
        for _ in generator:
            with span("consumer"):
                pass
    assert {line.parent for line in spans() if line.stage == "consumer"} == {None}
    resumptions = [line for line in spans() if "resumption" in (line.attrs or {})]
    inside = [line for line in spans() if line.stage == "inside"]
    assert len(resumptions) == 3
    assert all(map(contains, resumptions, inside))


def test_a_generator_that_somebody_else_keeps_is_returned_itself(config: ProfileConfig) -> None:
    kept = plain_items(3)

    @profile_step(role="rollout")
    def loader() -> Iterator[int]:
        return kept

    with capture(1, config=config):
        assert loader() is kept
        assert next(loader()) == 0  # a replacement would close it here
        assert list(loader()) == [1, 2]


def test_a_decorated_list_of_a_generator_is_one_call(config: ProfileConfig, spans: Spans) -> None:
    def listed(fn: Any_) -> Any_:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> list[Any]:
            return list(fn(*args, **kwargs))

        return inner

    timed = profile_step(role="rollout", stage="rows")(listed(plain_items))
    with capture(1, config=config):
        assert timed(2) == [0, 1]
    assert [line.stage for line in spans()] == ["rows", "inside", "inside"]


# Staticmethods, caches, and what is no function.


async def test_a_staticmethod_of_a_hidden_coroutine_is_timed_to_its_end(
    config: ProfileConfig, spans: Spans
) -> None:
    class Worker:
        above = profile_step(role="rollout")(staticmethod(wrapped(work)))
        below = staticmethod(profile_step(role="rollout")(bare(work)))

    async with capture(1, config=config):
        assert await Worker.above(1) == await Worker().below(1) == 2
    outer, inside, other, its = spans()
    assert contains(outer, inside)
    assert contains(other, its)


async def test_a_cached_task_is_timed_to_its_end_at_each_call(config: ProfileConfig, spans: Spans) -> None:
    @profile_step(role="env")
    @wrapped
    @functools.cache
    def fetch(n: int) -> asyncio.Task[int]:
        return asyncio.create_task(work(n))

    async with capture(1, config=config):
        assert [await task for task in (fetch(1), fetch(1))] == [2, 2]
        assert await fetch(1) == 2
    calls = [line for line in spans() if line.stage == "fetch"]
    (inside,) = (line for line in spans() if line.stage == "inside")
    over = [call.start_ns + call.dur_ns > inside.start_ns + inside.dur_ns for call in calls[:2]]
    assert (len(calls), over) == (3, [True, True])


# Decorators that look at their caller.


def returned_to_coroutines(fn: Any_) -> Any_:
    """Return a coroutine to a coroutine, and what it results in to other callers."""

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        coroutine = fn(*args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        if frame.f_back.f_code.co_flags & inspect.CO_COROUTINE:
            return coroutine
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(asyncio.run, coroutine).result()

    return inner


def caller_of_two_levels() -> str:
    return sys._getframe(2).f_code.co_name


def named_by_its_caller(fn: Any_) -> Any_:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(caller_of_two_levels(), *args, **kwargs)

    return inner


async def awaiting(fn: Any_) -> object:
    return await fn(1)


async def calling(fn: Any_) -> object:
    return (lambda: fn(1))()


@pytest.mark.parametrize("captured", [False, True])
def test_a_decorator_that_looks_at_its_caller_finds_the_one_it_had(
    config: ProfileConfig, spans: Spans, captured: bool
) -> None:
    timed = profile_step(role="trainer", stage="update")(returned_to_coroutines(work))
    with capture(1, config=config if captured else ProfileConfig(steps=[99])):
        assert timed(1) == asyncio.run(awaiting(timed)) == asyncio.run(calling(timed)) == 2
    assert [line.stage for line in spans()] == ["update", "inside"] * (3 if captured else 0)


def test_so_does_one_whose_helper_looks(config: ProfileConfig, spans: Spans) -> None:
    @profile_step(role="trainer", stage="told")
    @named_by_its_caller
    def told(name: str, n: int) -> tuple[str, int]:
        return name, n

    def here() -> object:
        return told(1)

    with capture(1, config=config):
        assert here() == ("here", 1)
    assert [line.stage for line in spans()] == ["told"]


def test_a_function_that_looks_at_its_caller_is_refused_with_the_reason() -> None:
    def by_back() -> object:
        return sys._getframe().f_back

    def by_number() -> object:
        return sys._getframe(1)

    def by_stack() -> object:
        return inspect.stack()[1]

    def own_frame(stack: Any_) -> object:
        return sys._getframe().f_code, stack()

    for looking in (by_back, by_number, by_stack):
        with pytest.raises(TypeError, match=r"by_\w+ .*caller.*Fix: "):
            profile_step(role="env")(looking)
    profile_step(role="env")(own_frame)


def test_the_way_around_a_decorator_leads_around_it() -> None:
    decorated = wrapped(plain_items)
    assert vars(profile_step(role="env")(decorated))["__wrapped__"] is plain_items


# Instrumented.


class Shop:
    """Methods of an unedited program. Each test gets a class of its own."""

    @wrapped
    async def run(self, uid: str) -> dict[str, int]:
        return {"tokens": sum([await self.ask(uid, turn) for turn in (0, 1)])}

    @through_a_partial
    async def ask(self, uid: str, turn: int) -> int:
        return int(await self.call("add", turn))

    @bare
    async def call(self, tool: str, n: int, *, by: int = 1) -> int:
        return await work(n)

    @returned_to_coroutines
    async def sync(self, version: int) -> int:
        return await work(version)

    @through_a_partial
    async def step(self, number: int) -> int:
        return int(await self.sync(number))

    @through_an_object
    def fields(self, name: str, *, size: int = 1) -> tuple[str, int]:
        return name, size

    async def train(self) -> list[int]:
        return [await self.step(number) for number in (1, 2)]


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Shop]]:
    module = types.ModuleType("shop_of_this_test")
    made = type("Shop", (), {k: v for k, v in vars(Shop).items() if k not in ("__dict__", "__weakref__")})
    made.__module__, module.Shop = module.__name__, made  # type: ignore[attr-defined] # of a module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield made
    configure(steps=[])
    for handle in list(patch._instruments.values()):
        handle.remove()


def entries(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"module": "shop_of_this_test", **entry} for entry in given]


async def test_hidden_calls_of_every_kind_end_with_their_coroutine(
    config: ProfileConfig, spans: Spans, shop: type[Shop]
) -> None:
    listed = entries(
        {"name": "Shop.run", "kind": "trajectory", "id": "uid", "values": {"tokens": "result.tokens"}},
        {"name": "Shop.ask", "kind": "turn", "index": "turn", "values": {"tokens": "result"}},
        {"name": "Shop.call", "kind": "tool", "tool": "tool", "values": {"sum": "result"}},
        {"name": "Shop.sync", "kind": "weight_sync", "policy_version": "version"},
    )
    configure(config.replace(instrument=listed))
    async with capture(1):
        assert await asyncio.create_task(shop().run("a")) == {"tokens": 3}
        assert await shop().sync(7) == 8
    by_stage = {stage: [line for line in spans() if line.stage == stage] for stage in
                ("trajectory", "turn", "add", "sync_weights", "inside")}  # fmt: skip
    (run,) = by_stage["trajectory"]
    assert (run.trajectory, run.attrs, run.error) == ("a", {"tokens": 3}, None)
    assert [line.turn for line in by_stage["turn"]] == [0, 1]
    assert [line.attrs for line in by_stage["turn"]] == [{"tokens": 1}, {"tokens": 2}]
    assert [line.attrs for line in by_stage["add"]] == [{"sum": 1}, {"sum": 2}]
    assert by_stage["sync_weights"][0].policy_version == 7
    assert all(contains(run, turn) for turn in by_stage["turn"])
    assert all(map(contains, by_stage["turn"], by_stage["add"]))
    assert all(map(contains, [*by_stage["add"], *by_stage["sync_weights"]], by_stage["inside"]))


async def test_a_step_around_a_hidden_coroutine_ends_with_it(
    config: ProfileConfig, spans: Spans, shop: type[Shop]
) -> None:
    listed = entries({"name": "Shop.step", "step": "around", "number": "number"})
    configure(config.replace(instrument=listed))
    assert await shop().train() == [2, 3]
    assert sorted(RunLayout(Path(config.save_path)).steps()) == [1, 2]
    assert [line.stage for line in spans()] == ["inside", "inside"]


@pytest.mark.parametrize("kind", ["span", "values", "condition", "step"])
def test_an_instrumented_function_has_the_code_that_others_inspect(shop: type[Shop], kind: str) -> None:
    def add(self: object, one: int, other: int = 2, *, by: int = 3) -> int:
        return one + other + by

    shop.add = add  # type: ignore[attr-defined] # a method that this test has added
    keys: dict[str, dict[str, Any]] = {
        "span": {"role": "env"},
        "values": {"role": "env", "values": {"sum": "result"}},
        "condition": {"role": "env", "where": {"one": 1}},
        "step": {"step": "around"},
    }
    configure(steps=[99], instrument=entries({"name": "Shop.add", **keys[kind]}))
    timed = shop.add  # type: ignore[attr-defined] # as above
    assert timed is not add
    assert inspect.getfullargspec(timed) == inspect.getfullargspec(add)
    assert inspect.signature(timed, follow_wrapped=False) == inspect.signature(add)
    assert timed(shop(), 1, by=4) == 7
    with pytest.raises(TypeError, match=r"add\(\) .* argument 'size'"):
        timed(shop(), 1, size=4)


def test_an_entry_whose_function_looks_at_its_caller_is_refused(shop: type[Shop]) -> None:
    def looks(self: object) -> object:
        return inspect.stack()[1]

    shop.looks = looks  # type: ignore[attr-defined] # a method that this test has added
    with pytest.raises((ConfigError, TypeError), match="of its caller"):
        instrument("shop_of_this_test", "Shop.looks", role="env")
    assert shop.looks is looks  # type: ignore[attr-defined] # as above
