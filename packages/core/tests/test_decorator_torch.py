"""profile_step and torch.compile: a capture neither breaks compiled code nor is lost on what surrounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from stepscope import ProfileConfig, capture, profile_step
from stepscope.files.spans import Line, Span
from stepscope.recording.instrument.call_arguments import Condition
from stepscope.recording.instrument.kinds import Timing
from stepscope.recording.instrument.patch import Instrument

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")

Spans = Callable[[], list[str]]


def _scale(x: Any, *, by: float = 2.0) -> Any:
    return x * by


sample = ModuleType("sample")
sample.__dict__["double"] = _scale


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
    def read() -> list[str]:
        files = Path(config.save_path).glob("step_*/spans/*.jsonl")
        lines = [
            line for file in files for line in msgspec.json.Decoder(Line).decode_lines(file.read_bytes())
        ]
        return [line.stage for line in lines if isinstance(line, Span)]

    return read


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
