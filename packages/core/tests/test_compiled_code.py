"""Recorded functions in code that torch.compile compiles: they return what they return unrecorded.

Where the user's function is part of a graph, nothing records it. Where it breaks the graph, torch calls what
stands in its place, and a capture has its span.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from stepscope import capture, consume, profile_step, span, step_tokens
from stepscope._recording.instrument.call_arguments import Condition
from stepscope._recording.instrument.calls import Timing
from stepscope._recording.instrument.patch import Instrument
from stepscope.testing.recorded_run import RecordedRun

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Dynamo does not know how to trace", "ignore:The .grad attribute"
)

ANY_CALL = Condition({}, {})


class Pair(NamedTuple):
    first: Any
    second: Any


def sample(is_broken: bool) -> ModuleType:
    """Return a module with functions in all places. All break the graph, or none does."""

    def result(x: Any, factor: float) -> Any:
        y = x * factor
        return y + y.sum().item() if is_broken else y + 1

    def plain(x: Any, factor: float = 2.0) -> Any:
        return result(x, factor)

    def assigned(model: Any, x: Any) -> Any:
        return result(x, model.factor)

    class Model:
        factor = 2.0

        def method(self, x: Any, *, by: float = 1.0) -> Any:
            return result(x, self.factor * by)

        @staticmethod
        def static(x: Any) -> Any:
            return result(x, 3.0)

        @classmethod
        def of_class(cls, x: Any) -> Any:
            return result(x, cls.factor)

        def inherited(self, x: Any) -> Any:
            return result(x, self.factor)

        def generator(self, x: Any) -> Iterator[Any]:
            yield result(x, self.factor)
            yield x

    Model.assigned = assigned  # type: ignore[attr-defined] # as people replace methods of frameworks

    class Smaller(Model):
        def inherited(self, x: Any) -> Any:
            return super().inherited(x) * 2

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined] # torch is imported where there is one
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> Any:
            return result(x * self.weight, 2.0)

    module = ModuleType("sample")
    module.__dict__.update(plain=plain, Model=Model, Smaller=Smaller, Net=Net)
    module.__dict__.update(model=Model(), smaller=Smaller(), net=Net())
    return module


CALLS: dict[str, Callable[[ModuleType, Any], Any]] = {
    "plain": lambda module, x: module.plain(x),
    "Model.method": lambda module, x: module.model.method(x, by=2.0),
    "Model.static": lambda module, x: module.model.static(x),
    "Model.of_class": lambda module, x: module.model.of_class(x) + module.Model.of_class(x),
    "Model.assigned": lambda module, x: module.model.assigned(x),
    "Smaller.inherited": lambda module, x: module.smaller.inherited(x),
    "Net.forward": lambda module, x: module.net(x),
}


def decorate(attrs: Any, module: ModuleType, name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    parent: Any = getattr(module, owner) if owner else module
    setattr(parent, attribute, profile_step(role="actor", stage="s", attrs=attrs)(vars(parent)[attribute]))


def instrument(timings: list[Timing], module: ModuleType, name: str) -> None:
    Instrument("sample", name, timings).install(module)


def timing(kind: str, **fields: Any) -> Timing:
    return Timing("actor", None, None, fields.pop("condition", ANY_CALL), kind=kind, **fields)


ELSEWHERE = Condition({"x.dtype": "no such type"}, {})
WAYS: dict[str, Callable[[ModuleType, str], None]] = {
    "decorated": partial(decorate, None),
    "with attrs": partial(decorate, {"size": 7}),
    "with computed attrs": partial(decorate, lambda *args, **_: {"sizes": sum(map(torch.is_tensor, args))}),
    "span": partial(instrument, [timing("span")]),
    "values": partial(instrument, [timing("span", values={"size": "result.ndim", "x": "x.ndim"})]),
    "tool": partial(instrument, [timing("tool")]),
    "turn": partial(instrument, [timing("turn")]),
    "trajectory": partial(instrument, [timing("trajectory")]),
    "turn and span": partial(instrument, [timing("turn"), timing("span")]),
    "consume": partial(instrument, [timing("consume", id=("x.dtype",))]),
    "chosen": partial(instrument, [timing("span", condition=ELSEWHERE), timing("span")]),
}
SPANS = {"consume": 0, "turn and span": 2}
"""Numbers of spans of a call, where it is not 1."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(recorded: RecordedRun, way: str, is_broken: bool) -> None:
    """Call a function in each place from compiled code, in captures and between them."""
    x, calls, spans = torch.ones(2), [], 0
    for place, call in CALLS.items():
        module = sample(is_broken)
        wanted = call(module, x + 1).tolist()
        WAYS[way](module, place)
        called = partial(called_in, module, call)
        compiled = torch.compile(called, backend="eager", fullgraph=not is_broken)
        calls.append((place, called, compiled, wanted))
        spans += SPANS.get(way, 1) * (2 if place == "Model.of_class" else 1)
    for step in range(2):
        with capture(step):
            for place, _, compiled, wanted in calls:
                assert compiled(x).tolist() == wanted, place
        for place, _, compiled, wanted in calls:
            assert compiled(x).tolist() == wanted, place
        assert len(recorded.spans(step)) == (spans if is_broken else 0)
    with capture(3):
        for place, called, _, wanted in calls:
            assert called(x).tolist() == wanted, place
    assert len(recorded.spans(3)) == spans


def called_in(module: ModuleType, call: Callable[[ModuleType, Any], Any], x: Any) -> Any:
    return call(module, x + 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_function_is_part_of_a_whole_graph(recorded: RecordedRun, way: str) -> None:
    check(recorded, way, is_broken=False)


@pytest.mark.parametrize("way", WAYS)
def test_and_is_recorded_where_it_breaks_the_graph(recorded: RecordedRun, way: str) -> None:
    check(recorded, way, is_broken=True)


@pytest.mark.parametrize("way", ["decorated", "values"])
def test_and_that_in_discrete_mode_too(recorded: RecordedRun, way: str) -> None:
    recorded.configure(mode="discrete")
    check(recorded, way, is_broken=True)


def test_nothing_of_ours_is_compiled(recorded: RecordedRun) -> None:
    check(recorded, "values", is_broken=True)
    compiled = torch._dynamo.convert_frame.output_codes.seen
    files = {code().co_filename for code in compiled if code() is not None}
    assert files
    assert not [file for file in files if "/stepscope/" in file]


RESULTS: dict[str, Callable[[Any], Any]] = {
    "a named tuple": lambda x: Pair(x, x + 1),
    "a dict": lambda x: {"x": x},
    "a module": lambda x: torch.nn.Flatten(0),
    "none": lambda x: None,
    "a number": lambda x: 7,
    "an object": lambda x: torch.Size([2]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_each_type_of_result_is_returned(recorded: RecordedRun, kind: str) -> None:
    class Model:
        @profile_step(role="actor")
        def step(self, x: Any) -> Any:
            x.sum().item()
            return RESULTS[kind](x)

    model = Model()
    compiled = torch.compile(lambda x: model.step(x + 1), backend="eager")
    for step in range(2):
        with capture(step):
            assert repr(compiled(torch.ones(2))) == repr(RESULTS[kind](torch.ones(2) + 1))
        assert recorded.stages(step) == ["actor/step"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_generator_yields_what_it_yields_unrecorded(recorded: RecordedRun, is_broken: bool) -> None:
    module, x = sample(is_broken), torch.ones(2)
    wanted = [y.tolist() for y in module.model.generator(x)]
    decorate(None, module, "Model.generator")
    compiled = torch.compile(
        lambda x: list(module.model.generator(x)), backend="eager", fullgraph=not is_broken
    )
    for step in range(2):
        with capture(step):
            assert [y.tolist() for y in compiled(x)] == wanted
        assert [y.tolist() for y in compiled(x)] == wanted
        assert len(recorded.spans(step)) == (3 if is_broken else 0)


def test_a_method_that_is_compiled_may_be_called_from_compiled_code(recorded: RecordedRun) -> None:
    class Model:
        def step(self, x: Any) -> Any:
            return x + x.sum().item()

    Model.step = profile_step(role="actor")(torch.compile(Model.step, backend="eager"))  # type: ignore[method-assign]
    model = Model()
    compiled = torch.compile(lambda x: model.step(x + 1), backend="eager")
    for step in range(2):
        with capture(step):
            assert compiled(torch.ones(2)).tolist() == [6, 6]
        assert compiled(torch.ones(2)).tolist() == [6, 6]
    with capture(3):
        assert model.step(torch.ones(2)).tolist() == [3, 3]
    assert recorded.stages(3) == ["actor/step"]


def test_tokens_and_trajectories_are_not_counted_in_a_graph(recorded: RecordedRun) -> None:
    def step(x: Any) -> Any:
        step_tokens(train=5)
        consume("a")
        return x * 2

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for number in range(2):
        with capture(number):
            assert compiled(torch.ones(2)).tolist() == [2, 2]
        assert compiled(torch.ones(2)).tolist() == [2, 2]


# torch copies the iterator of the spans' numbers, which Python 3.12 and 3.13 tell to whoever wants warnings.
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
def test_they_are_counted_below_a_graph(recorded: RecordedRun) -> None:
    def count(x: Any) -> None:
        with span("counting"):
            step_tokens(train=x.numel())

    def step(x: Any) -> Any:
        count(x)
        return x * 2

    compiled = torch.compile(step, backend="eager")
    with capture(0):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert recorded.stages(0) == ["trainer/counting", "trainer/step_tokens"]


# Decorators of torch, and code that is compiled once.


def double(x: Any, *, by: float = 2.0) -> Any:
    return x * by


@profile_step(role="actor", attrs=lambda x: {"size": x.numel()})
def layer(x: Any) -> Any:
    return profiled(x)


profiled = profile_step(role="actor")(double)


@pytest.mark.parametrize("way", ["decorated", "instrumented"])
def test_a_capture_recompiles_nothing(recorded: RecordedRun, way: str) -> None:
    module = ModuleType("sample")
    module.__dict__.update(double=layer if way == "decorated" else double)
    if way == "instrumented":
        timings = [timing("span", condition=Condition({"by": 2.0}, {})), timing("span")]
        Instrument("sample", "double", timings).install(module)
    counter = testing.CompileCounter()
    compiled = torch.compile(lambda x: module.double(x) - 1, fullgraph=True, backend=counter)
    for step in range(3):
        assert compiled(torch.ones(2)).tolist() == [1, 1]
        with capture(step):
            assert compiled(torch.ones(2)).tolist() == [1, 1]
    assert counter.frame_count == 1


def test_a_compiled_function_is_timed_with_the_decorator_above(recorded: RecordedRun) -> None:
    compiled = torch.compile(profiled, fullgraph=True, backend="eager")
    forward = profile_step(role="actor", stage="forward")(compiled)
    with capture(1):
        assert forward(torch.ones(2)).tolist() == [2, 2]
    assert recorded.stages(1) == ["actor/forward"]


async def doubled(x: Any) -> Any:
    with span("inside"):
        await asyncio.sleep(0)
    return torch.as_tensor(x * 2)


HIDING = {  # torch itself compiles no function that awaits
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "disable": torch.compiler.disable,
}


@pytest.mark.parametrize("hide", HIDING)
def test_a_coroutine_below_a_decorator_of_torch_is_timed_to_its_end(recorded: RecordedRun, hide: str) -> None:
    timed = profile_step(role="actor", stage="outer")(HIDING[hide](doubled))

    async def main() -> None:
        async with capture(1):
            assert (await timed(torch.ones(2))).tolist() == [2, 2]
            with span("after"):
                pass

    asyncio.run(main())
    outer, inside, after = recorded.spans(1)
    assert (outer.stage, inside.parent, after.parent) == ("outer", outer.span, None)
    assert inside.start_ns + inside.dur_ns <= outer.start_ns + outer.dur_ns


without_gradients = torch.no_grad()(profiled)


def test_a_decorator_above_stays_in_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: without_gradients(x) + x.detach(), fullgraph=True, backend="eager")
    assert not compiled(x).requires_grad
