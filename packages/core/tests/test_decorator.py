"""profile_step: what is recorded of sync, async, generator and async-generator functions, and when.

One file above 400 lines: each kind of function answers the same questions, side by side.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from packages.core.tests.runs import spans_alone
from stepscope import ProfileConfig, capture, profile_step, span
from stepscope._recording.process import failures as guard
from stepscope._recording.session.profiler_windows import Windows
from stepscope._recording.spans import maker as recorder
from stepscope._recording.spans import scopes, slot
from stepscope.errors import ConfigError
from stepscope.files.spans import Span
from stepscope.testing.recorded_run import finished_spans

Spans = Callable[[], list[Span]]


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return spans_alone(tmp_path)


@pytest.fixture
def spans(config: ProfileConfig) -> Spans:
    """Return the closed spans of all captured steps, in order of their start."""
    return lambda: finished_spans(config.save_path)


class Worker:
    @profile_step(role="actor")
    def update(self, batch: int) -> int:
        return batch + 1

    @profile_step(role="ref", stage="log_prob")
    async def compute(self, batch: int) -> int:
        with span("inside"):
            await asyncio.sleep(0)
        return batch + 1

    @profile_step(role="rollout")
    def stream(self, n: int) -> Generator[int, str, str]:
        received = []
        for i in range(n):
            received.append((yield i))  # noqa: PERF401 # a comprehension cannot yield
        return f"done {received}"

    @profile_step(role="rollout")
    async def astream(self, n: int) -> AsyncGenerator[int, str]:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    @classmethod
    @profile_step(role="actor")
    def below_classmethod(cls) -> str:
        return cls.__name__

    @profile_step(role="actor")
    @classmethod
    def above_classmethod(cls) -> str:
        return cls.__name__

    @staticmethod
    @profile_step(role="actor")
    def below_staticmethod(batch: int) -> int:
        return batch

    @profile_step(role="actor")
    @staticmethod
    def above_staticmethod(batch: int) -> int:
        return batch


async def collected(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


def exhausted(generator: Generator[int, str, str]) -> tuple[list[int], str]:
    items = []
    try:
        while True:
            items.append(next(generator))
    except StopIteration as stop:
        return items, stop.value


# Without a capture.


def test_without_a_capture_every_kind_does_what_it_did(spans: Spans) -> None:
    worker = Worker()
    assert worker.update(1) == 2
    assert asyncio.run(worker.compute(1)) == 2
    assert exhausted(worker.stream(2)) == ([0, 1], "done [None, None]")
    assert asyncio.run(collected(worker.astream(2))) == [0, 1]
    assert spans() == []


# With one.


def test_a_call_is_a_span_of_the_declared_role_and_stage(config: ProfileConfig, spans: Spans) -> None:
    with capture(1, config=config):
        assert Worker().update(1) == 2
    (recorded,) = spans()
    assert (recorded.role, recorded.stage, recorded.error) == ("actor", "update", None)
    assert recorded.dur_ns > 0


def test_a_coroutine_is_timed_to_its_end_and_not_to_its_creation(config: ProfileConfig, spans: Spans) -> None:
    async def main() -> None:
        async with capture(1, config=config):
            assert await Worker().compute(1) == 2

    asyncio.run(main())
    outer, inside = spans()
    assert (outer.stage, inside.parent) == ("log_prob", outer.span)
    assert inside.start_ns + inside.dur_ns <= outer.start_ns + outer.dur_ns


def test_a_coroutine_that_is_never_awaited_is_no_span(config: ProfileConfig, spans: Spans) -> None:
    with capture(1, config=config):
        Worker().compute(1).close()
    assert spans() == []


@pytest.mark.parametrize("place", ["below", "above"])
@pytest.mark.parametrize(
    ("kind", "arguments", "result"), [(classmethod, (), "Child"), (staticmethod, (7,), 7)]
)
def test_class_and_static_methods_are_timed_with_the_decorator_on_either_side(
    config: ProfileConfig, spans: Spans, place: str, kind: type, arguments: tuple[int, ...], result: object
) -> None:
    class Child(Worker):
        pass

    name = f"{place}_{kind.__name__}"
    with capture(1, config=config):
        assert getattr(Child, name)(*arguments) == getattr(Child(), name)(*arguments) == result
    assert [recorded.stage for recorded in spans()] == [name, name]
    assert isinstance(vars(Worker)[name], kind)


def test_nested_calls_and_stacked_decorators_are_nested_spans(config: ProfileConfig, spans: Spans) -> None:
    @profile_step(role="trainer", stage="outer")
    @profile_step(role="actor", stage="middle")
    def update() -> int:
        return Worker().update(1)

    with capture(1, config=config):
        assert update() == 2
    outer, middle, inner = spans()
    assert (outer.stage, middle.stage, inner.stage) == ("outer", "middle", "update")
    assert (middle.parent, inner.parent) == (outer.span, middle.span)


def test_concurrent_coroutines_are_siblings(config: ProfileConfig, spans: Spans) -> None:
    arrived = 0
    both = asyncio.Event()

    @profile_step(role="agent_loop")
    async def meet() -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 2:
            both.set()
        await both.wait()

    async def main() -> None:
        async with capture(1, config=config):
            with span("gather"):
                await asyncio.gather(meet(), meet())

    asyncio.run(main())
    gather, first, second = spans()
    assert first.parent == second.parent == gather.span
    assert second.start_ns < first.start_ns + first.dur_ns


def test_a_recursion_without_an_end_is_the_users_own_error(
    config: ProfileConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")

    @profile_step(role="env")
    def down() -> None:
        down()

    with capture(1, workers={}, config=config):
        before = scopes.current.get()
        with pytest.raises(RecursionError):
            down()
        assert scopes.current.get() is before
        assert (guard._noted, caplog.text) == (set(), "")
        assert Worker().update(1) == 2
    assert spans()[-1].parent is None
    assert {str(recorded.error).partition(":")[0] for recorded in spans()[:-1]} == {"RecursionError"}


def test_a_capture_takes_nothing_from_the_depth_that_recursion_has(config: ProfileConfig) -> None:
    @profile_step(role="env")
    def leaf() -> None: ...

    def down(n: int) -> None:
        leaf() if n == 0 else down(n - 1)

    def deepest() -> int:
        for n in range(sys.getrecursionlimit(), 0, -1):
            try:
                down(n)
            except RecursionError:
                continue
            return n
        raise AssertionError("no depth at all")

    off = deepest()
    with capture(1, config=config):
        assert deepest() == off


# Generators.


def test_the_consumer_is_not_attributed_to_the_generator(config: ProfileConfig, spans: Spans) -> None:
    with capture(1, config=config):
        for _ in Worker().stream(2):
            with span("consume"):
                pass
    in_order = spans()
    assert [recorded.stage for recorded in in_order] == ["stream", "consume", "stream", "consume", "stream"]
    assert {recorded.parent for recorded in in_order} == {None}
    for earlier, later in pairwise(in_order):
        assert earlier.start_ns + earlier.dur_ns <= later.start_ns


async def test_the_consumer_is_not_attributed_to_the_async_generator(
    config: ProfileConfig, spans: Spans
) -> None:
    async with capture(1, config=config):
        async for _ in Worker().astream(2):
            with span("consume"):
                await asyncio.sleep(0)
    in_order = spans()
    assert [recorded.stage for recorded in in_order] == [
        "astream",
        "consume",
        "astream",
        "consume",
        "astream",
    ]
    assert {recorded.parent for recorded in in_order} == {None}


def test_a_generator_that_is_older_than_the_capture_is_recorded_from_there_on(
    config: ProfileConfig, spans: Spans
) -> None:
    generator = Worker().stream(4)
    next(generator)
    with capture(1, config=config):
        next(generator)
    next(generator)
    with capture(2, config=config):
        next(generator)
    assert [recorded.attrs for recorded in spans()] == [{"resumption": 1}, {"resumption": 3}]


def test_send_reaches_the_generator_and_its_return_value_the_caller(config: ProfileConfig) -> None:
    generator = Worker().stream(2)
    with capture(1, config=config):
        next(generator)
        assert generator.send("a") == 1
        with pytest.raises(StopIteration) as stop:
            generator.send("b")
    assert stop.value.value == "done ['a', 'b']"


@profile_step(role="rollout")
def catching(log: list[str]) -> Generator[int, int, str]:
    try:
        while True:
            try:
                yield 1
            except ValueError as error:
                log.append(f"caught {error}")
                yield 2
    except KeyError:
        return "left"
    finally:
        log.append("finally")


@profile_step(role="rollout")
async def acatching(log: list[str]) -> AsyncGenerator[int, int]:
    try:
        while True:
            try:
                yield 1
            except ValueError as error:
                log.append(f"caught {error}")
                yield 2
    except KeyError:
        return
    finally:
        await asyncio.sleep(0)
        log.append("finally")


@pytest.mark.parametrize("captured", [False, True])
def test_throw_close_and_abandonment_do_what_they_did(config: ProfileConfig, captured: bool) -> None:
    def begun() -> Generator[int, int, str]:
        log.clear()
        generator = catching(log)
        next(generator)
        return generator

    log: list[str] = []
    with capture(1, config=config if captured else ProfileConfig(steps=[99])):
        generator = begun()
        assert generator.throw(ValueError("x")) == 2
        assert next(generator) == 1
        with pytest.raises(StopIteration, match="left"):
            generator.throw(KeyError())
        assert log == ["caught x", "finally"]

        for error in (TypeError("mine"), GeneratorExit()):
            generator = begun()
            with pytest.raises(type(error)) as raised:
                generator.throw(error)
            assert raised.value is error
            with pytest.raises(StopIteration):
                next(generator)
            assert log == ["finally"]

        generator = begun()
        generator.close()
        generator.close()
        assert log == ["finally"]

        generator = begun()
        del generator
        assert log == ["finally"]

        catching(log).close()  # never started
        assert log == ["finally"]


@pytest.mark.parametrize("captured", [False, True])
async def test_athrow_aclose_and_asend_do_what_they_did(config: ProfileConfig, captured: bool) -> None:
    log: list[str] = []
    async with capture(1 if captured else 0, config=config if captured else ProfileConfig(steps=[99])):
        generator = acatching(log)
        assert await generator.asend(None) == 1  # type: ignore[arg-type] # the first value sent must be None
        assert await generator.athrow(ValueError("x")) == 2
        assert await anext(generator) == 1
        with pytest.raises(StopAsyncIteration):
            await generator.athrow(KeyError())
        assert log == ["caught x", "finally"]

        log.clear()
        generator = acatching(log)
        await anext(generator)
        await generator.aclose()
        await generator.aclose()
        assert log == ["finally"]

        log.clear()
        generator = acatching(log)
        await anext(generator)
        with pytest.raises(TypeError, match="mine"):
            await generator.athrow(TypeError("mine"))
        assert log == ["finally"]


def test_a_generator_that_yields_while_being_closed_is_the_users_own_error() -> None:
    @profile_step(role="rollout")
    def stubborn() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    generator = stubborn()
    next(generator)
    with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
        generator.close()  # type: ignore[attr-defined] # an Iterator to the type checker


def test_closing_early_is_not_an_error_of_the_span(config: ProfileConfig, spans: Spans) -> None:
    with capture(1, config=config):
        generator = catching([])
        next(generator)
        generator.close()
    assert [recorded.error for recorded in spans()] == [None, None]


async def test_a_generator_may_be_closed_by_another_task(config: ProfileConfig, spans: Spans) -> None:
    log: list[str] = []

    async def close(generator: AsyncGenerator[int, int]) -> None:
        with span("closing task"):
            await generator.aclose()

    async with capture(1, config=config):
        with span("starting task"):
            generator = acatching(log)
            await anext(generator)
            here = scopes.current.get()
            await asyncio.create_task(close(generator))
            assert scopes.current.get() is here
    first, last = (recorded for recorded in spans() if recorded.stage == "acatching")
    parents = {recorded.span: recorded.stage for recorded in spans()}
    assert (parents[first.parent or 0], parents[last.parent or 0]) == ("starting task", "closing task")
    assert log == ["finally"]


def test_a_generator_may_be_closed_by_another_thread(config: ProfileConfig, spans: Spans) -> None:
    log: list[str] = []
    with capture(1, config=config):
        generator = catching(log)
        next(generator)
        closer = threading.Thread(target=generator.close)
        closer.start()
        closer.join()
    assert log == ["finally"]
    assert len({recorded.thread for recorded in spans()}) == 2


def test_an_abandoned_async_generator_is_finalised_by_its_loop(config: ProfileConfig, spans: Spans) -> None:
    log: list[str] = []

    async def main() -> None:
        async with capture(1, config=config):
            generator = acatching(log)
            await anext(generator)
            del generator
            while not log:  # noqa: ASYNC110 # nothing else tells that the loop has finalised it
                await asyncio.sleep(0)

    asyncio.run(main())
    assert log == ["finally"]
    assert len(spans()) == 2


def test_the_end_of_the_loop_closes_an_async_generator_once(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    kept = []

    async def main() -> None:
        kept.append(acatching(log))
        await anext(kept[0])

    asyncio.run(main())  # its shutdown closes every generator it knows of, concurrently
    assert log == ["finally"]
    assert caplog.text == ""


# Errors of the user.


@profile_step(role="actor", stage="fails")
def fails() -> None:
    raise ValueError("mine")


@profile_step(role="actor", stage="fails")
async def afails() -> None:
    await asyncio.sleep(0)
    raise ValueError("mine")


@profile_step(role="actor", stage="fails")
def generator_fails() -> Iterator[int]:
    yield 0
    raise ValueError("mine")


@profile_step(role="actor", stage="fails")
async def agenerator_fails() -> AsyncIterator[int]:
    yield 0
    raise ValueError("mine")


RAISING: dict[str, Callable[[], object]] = {
    "sync": fails,
    "async": lambda: asyncio.run(afails()),
    "generator": lambda: list(generator_fails()),
    "async generator": lambda: asyncio.run(collected(agenerator_fails())),
}


@pytest.mark.parametrize("kind", RAISING)
def test_v4_an_exception_closes_the_span_and_is_named_in_it(
    config: ProfileConfig, spans: Spans, kind: str
) -> None:
    with capture(1, config=config), pytest.raises(ValueError, match="mine"):
        RAISING[kind]()
    assert spans()[-1].error == "ValueError: mine"
    with capture(2, config=config):
        assert Worker().update(1) == 2
    assert spans()[-1].parent is None  # nothing leaked into what came after


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", RAISING)
def test_a_traceback_has_one_frame_of_ours(config: ProfileConfig, kind: str, captured: bool) -> None:
    with capture(1, config=config if captured else ProfileConfig(steps=[99])):
        with pytest.raises(ValueError, match="mine") as caught:
            RAISING[kind]()
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum(file.startswith("<profile_step ") for file in frames) == 1
    assert not [name for name in frames if "stepscope/_recording" in name]
    assert caught.value.__context__ is None


def test_a_cancelled_coroutine_says_so_in_its_span(config: ProfileConfig, spans: Spans) -> None:
    @profile_step(role="agent_loop")
    async def waits() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with capture(1, config=config):
            task = asyncio.create_task(waits())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    (recorded,) = spans()
    assert (recorded.error, recorded.cancelled) == (None, True)


# Failures of ours.


class Broken:
    """A profiler's windows that fail in one place."""

    discrete = True
    begin = Windows.begin

    def __init__(self, place: str) -> None:
        self.place = place

    def open(self, stage: str, role: str) -> bool:
        return self._fail("open")

    def mark(self, span: Span, is_async: bool) -> None:
        return None

    def close(self) -> None:
        self._fail("close")

    def _fail(self, place: str) -> bool:
        if place == self.place:
            raise OSError("ours")
        return True


@pytest.mark.parametrize("place", ["open", "close"])
@pytest.mark.parametrize("kind", ["sync", "async", "generator", "async generator"])
def test_when_we_fail_the_function_runs_once_and_its_result_and_error_stand(
    config: ProfileConfig,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    place: str,
) -> None:
    calls = []

    def body() -> int:
        calls.append(kind)
        return 7

    @profile_step(role="actor")
    def plain() -> int:
        return body()

    @profile_step(role="actor")
    async def coroutine() -> int:
        return body()

    @profile_step(role="actor")
    def generator() -> Iterator[int]:
        yield body()

    @profile_step(role="actor")
    async def agenerator() -> AsyncIterator[int]:
        yield body()

    run: dict[str, Callable[[], object]] = {
        "sync": plain,
        "async": lambda: asyncio.run(coroutine()),
        "generator": lambda: next(iter(generator())),
        "async generator": lambda: asyncio.run(collected(agenerator()))[0],
    }
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    with capture(1, config=config):
        assert slot.active is not None
        monkeypatch.setattr(slot.active.log, "observer", Broken(place))
        before = scopes.current.get()
        assert run[kind]() == 7
        assert calls == [kind]
        with pytest.raises(ValueError, match="mine"):
            RAISING[kind]()
        assert scopes.current.get() is before
    assert "OSError: ours" in caplog.text
    if place == "close":
        assert spans()[-1].error == "ValueError: mine"


def test_a_span_that_could_not_be_opened_leaves_a_gap(
    config: ProfileConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    failures = [OSError("ours")]

    def fails_once() -> scopes.Scope | None:
        if failures:
            raise failures.pop()
        return scopes.current.get()

    @profile_step(role="trainer")
    def untimed() -> int:
        return Worker().update(1)

    # Without counters, whose sampler opens a few spans in another way.
    with capture(1, config=config.replace(counters="off")), span("outer"):
        monkeypatch.setattr(recorder, "_current", fails_once)
        assert untimed() == 2
    outer, update = spans()
    assert (outer.stage, update.stage, update.parent) == ("outer", "update", outer.span)
    assert "opening the span untimed" in guard._noted


# Attributes.


def test_attributes_may_be_a_mapping(config: ProfileConfig, spans: Spans) -> None:
    told = {"size": 7}

    @profile_step(role="actor", attrs=told)
    def update() -> None: ...

    told["size"] = 8
    with capture(1, config=config):
        update()
    assert spans()[0].attrs == {"size": 7}


def test_attributes_may_be_a_function_of_the_arguments(config: ProfileConfig, spans: Spans) -> None:
    @profile_step(role="actor", attrs=lambda a, /, b, *c, d, **e: {"all": f"{a}{b}{c}{d}{e}"})
    def update(a: int, /, b: int = 2, *c: int, d: int = 4, **e: int) -> None: ...

    with capture(1, config=config):
        update(1)
        update(1, 2, 3, d=5, z=6)
    assert [recorded.attrs for recorded in spans()] == [{"all": "12()4{}"}, {"all": "12(3,)5{'z': 6}"}]


@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda extra: {}, lambda: 7])
def test_attributes_that_fail_do_not_reach_the_caller(
    config: ProfileConfig,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[..., dict[str, int]],
) -> None:
    @profile_step(role="actor", attrs=wrong)
    def update() -> int:
        return 7

    with capture(1, config=config):
        assert update() + update() == 14
    assert spans()[0].attrs is None
    assert caplog.text.count("actor/update") == 1
    assert "internal error" not in caplog.text


# How it is written.


class Bare:
    @profile_step
    def update(self, batch: int) -> int:
        return batch + 1

    @profile_step()
    async def generate(self, batch: int) -> int:
        return batch + 1

    @profile_step("critic")
    def value(self, batch: int) -> int:
        return self.update(batch)

    @profile_step
    @classmethod
    def above_classmethod(cls) -> str:
        return cls.__name__

    @staticmethod
    @profile_step
    def below_staticmethod(batch: int) -> int:
        return batch

    @profile_step(stage="scored")
    def score(self, batch: int) -> int:
        return batch


def test_a_function_without_a_role_has_that_of_the_span_around_it_else_of_the_process(
    config: ProfileConfig, spans: Spans
) -> None:
    with capture(1, config=config, role="agent_loop"):
        assert (Bare().update(1), asyncio.run(Bare().generate(1)), Bare().value(1)) == (2, 2, 2)
        assert (Bare.above_classmethod(), Bare.below_staticmethod(1), Bare().score(1)) == ("Bare", 1, 1)
        with span("rewards", role="reward"):
            Bare().score(1)
    assert [(line.role, line.stage) for line in spans()] == [
        ("agent_loop", "update"),
        ("agent_loop", "generate"),
        ("critic", "value"),
        ("critic", "update"),
        ("agent_loop", "above_classmethod"),
        ("agent_loop", "below_staticmethod"),
        ("agent_loop", "scored"),
        ("reward", "rewards"),
        ("reward", "scored"),
    ]


# What is refused.


@pytest.mark.parametrize("role", ["", "  ", 7])
def test_a_role_is_text(role: str) -> None:
    with pytest.raises(ConfigError, match=r'text.*role="actor"'):
        profile_step(role=role)
    with pytest.raises(ConfigError, match=r'text.*role="actor"'):
        profile_step(role)


def test_a_stage_is_text_and_attrs_are_a_mapping_or_a_function() -> None:
    with pytest.raises(ConfigError, match=r"stage.*leave"):
        profile_step(role="actor", stage="")
    with pytest.raises(ConfigError, match=r"attrs.*mapping"):
        profile_step(role="actor", attrs=[("size", 7)])  # type: ignore[call-overload] # that is the point


# Memory.


class Batch:
    pass


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async", "generator", "thrown into", "async generator", "raising"])
def test_arguments_and_results_are_freed_with_the_call(
    config: ProfileConfig, kind: str, captured: bool
) -> None:
    @profile_step(role="actor")
    def plain(batch: Batch) -> Batch:
        return Batch()

    @profile_step(role="actor")
    def raising(batch: Batch) -> None:
        raise ValueError("mine")

    @profile_step(role="actor")
    async def coroutine(batch: Batch) -> Batch:
        return Batch()

    @profile_step(role="actor")
    def generator(batch: Batch) -> Iterator[Batch]:
        try:
            yield Batch()
        except ValueError:
            yield Batch()

    @profile_step(role="actor")
    async def agenerator(batch: Batch) -> AsyncIterator[Batch]:
        yield Batch()

    def call(batch: Batch) -> None:
        if kind == "sync":
            plain(batch)
        elif kind == "async":
            drive(coroutine(batch))
        elif kind == "generator":
            next(generator(batch))
        elif kind == "thrown into":
            running = generator(batch)
            next(running)
            running.throw(ValueError())  # type: ignore[attr-defined] # an Iterator to the type checker
        elif kind == "async generator":
            drive(anext(agenerator(batch)))
        else:
            try:
                raising(batch)
            except ValueError:
                pass

    batch = Batch()
    freed = weakref.ref(batch)
    gc.disable()
    try:
        with capture(1, config=config if captured else ProfileConfig(steps=[99])):
            call(batch)
            del batch
            assert freed() is None
    finally:
        gc.enable()


def drive(awaitable: object) -> None:
    """Run what never suspends, without an event loop and its references."""
    iterator = awaitable.__await__()  # type: ignore[attr-defined] # of any awaitable
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_suspended_generator_does_not_keep_what_it_yielded() -> None:
    @profile_step(role="rollout")
    def stream() -> Iterator[Batch]:
        yield Batch()
        yield Batch()

    generator = stream()
    item = next(generator)
    freed = weakref.ref(item)
    del item
    assert freed() is None


def test_the_context_variables_of_the_user_pass_through() -> None:
    seen = contextvars.ContextVar("seen", default=0)

    @profile_step(role="actor")
    def update() -> None:
        seen.set(7)

    update()
    assert seen.get() == 7


def test_switching_the_decorators_off_returns_the_function_itself() -> None:
    code = """
import sys
from stepscope import instrument, profile_step
def update(): ...
class Worker: ...
assert profile_step(role="actor")(update) is update
assert profile_step(role="actor")(Worker) is Worker
assert profile_step(update) is update
assert profile_step()(update) is profile_step("actor")(update) is update
import json
before = json.dumps
instrument("json", "dumps", role="env").remove()
assert json.dumps is before and "wrapt" not in sys.modules
"""
    for value, code_ in (("1", 0), ("0", 1), ("", 1)):
        env = {"STEPSCOPE_DISABLE": value, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
        assert done.returncode == code_, done.stderr
