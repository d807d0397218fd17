"""profile_step and torch.compile: a capture neither breaks compiled code nor is lost on what surrounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope import ProfileConfig, capture, profile_step, span
from stepscope._recording.instrument.call_arguments import Condition
from stepscope._recording.instrument.calls import Timing
from stepscope._recording.instrument.patch import Instrument
from stepscope.files.spans import Span
from stepscope.testing.recorded_run import finished_spans

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")

Spans = Callable[[], list[str]]


def _scale(x: Any, *, by: float = 2.0) -> Any:
    return x * by


def _break(x: Any) -> Any:
    torch._dynamo.graph_break()
    return x * 2


sample = ModuleType("sample")
sample.__dict__.update(double=_scale, broken=_break)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(tmp_path), steps="every:1", roles={"*": {"profiler": "off"}})


@pytest.fixture
def stages(config: ProfileConfig) -> Spans:
    return lambda: [line.stage for line in recorded(config)]


def recorded(config: ProfileConfig) -> list[Span]:
    return finished_spans(config.save_path)


@profile_step(role="actor")
def double(x: Any, *, by: float = 2.0) -> Any:
    return x * by


@profile_step(role="actor", attrs=lambda x: {"size": x.numel()})
def layer(x: Any) -> Any:
    return double(x) + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_capture_does_not_break_a_compiled_function_that_is_decorated(
    config: ProfileConfig, fullgraph: bool
) -> None:
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="eager")
    for step in range(3):
        assert compiled(torch.ones(2)).tolist() == [3, 3]
        with capture(step, config=config):
            assert compiled(torch.ones(2)).tolist() == [3, 3]


def test_nor_does_it_recompile_one_that_calls_a_decorated_function(config: ProfileConfig) -> None:
    counter = testing.CompileCounter()
    compiled = torch.compile(lambda x: layer(x) - 1, fullgraph=True, backend=counter)
    for step in range(3):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        with capture(step, config=config):
            assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert counter.frame_count == 1


def test_a_compiled_function_is_timed_with_the_decorator_above(config: ProfileConfig, stages: Spans) -> None:
    compiled = torch.compile(double, fullgraph=True, backend="eager")
    forward = profile_step(role="actor", stage="forward")(compiled)
    with capture(1, config=config):
        assert forward(torch.ones(2)).tolist() == [2, 2]
    assert stages() == ["forward"]


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
def test_a_coroutine_below_a_decorator_of_torch_is_timed_to_its_end(
    config: ProfileConfig, stages: Spans, hide: str
) -> None:
    timed = profile_step(role="actor", stage="outer")(HIDING[hide](doubled))

    async def main() -> None:
        async with capture(1, config=config):
            assert (await timed(torch.ones(2))).tolist() == [2, 2]
            with span("after"):
                pass

    asyncio.run(main())
    assert stages() == ["outer", "inside", "after"]
    outer, inside, after = recorded(config)
    assert (inside.parent, after.parent) == (outer.span, None)
    assert inside.start_ns + inside.dur_ns <= outer.start_ns + outer.dur_ns


without_gradients = torch.no_grad()(double)


def test_a_decorator_above_stays_in_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: without_gradients(x) + x.detach(), fullgraph=True, backend="eager")
    assert not compiled(x).requires_grad


def test_nor_does_it_recompile_one_that_calls_an_instrumented_function(config: ProfileConfig) -> None:
    condition = Condition({"by": 2.0}, {})
    timings = [Timing("actor", None, None, condition), Timing("ref", None, None, Condition({}, {}))]
    handle = Instrument(sample.__name__, "double", timings)
    handle.install(sample)
    counter = testing.CompileCounter()
    compiled = torch.compile(lambda x: sample.double(x) - 1, fullgraph=True, backend=counter)
    try:
        for step in range(3):
            assert compiled(torch.ones(2)).tolist() == [1, 1]
            with capture(step, config=config):
                assert compiled(torch.ones(2)).tolist() == [1, 1]
    finally:
        handle.remove()
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
@pytest.mark.parametrize("kind", ["span", "turn", "trajectory"])
def test_an_instrumented_function_that_breaks_the_graph_runs(config: ProfileConfig, kind: str) -> None:
    values = {"gradient": "x.requires_grad"} if kind == "span" else {}
    timing = Timing("actor", None, None, Condition({}, {}), kind=kind, values=values, id=("x",))
    handle = Instrument(sample.__name__, "broken", [timing])
    handle.install(sample)
    compiled = torch.compile(lambda x: sample.broken(x + 1) - 1, backend="eager")
    try:
        for step in range(3):
            assert compiled(torch.ones(2)).tolist() == [3, 3]
            with capture(step, config=config):
                assert compiled(torch.ones(2)).tolist() == [3, 3]
    finally:
        handle.remove()
