"""The public names, pinned, and what a type checker makes of them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import assert_type

import stepscope
from stepscope import (
    Capture,
    CaptureResult,
    ProfileConfig,
    Span,
    capture,
    configure,
    consume,
    on_artifact,
    on_report,
    profile_step,
    request_capture,
    span,
    step_tokens,
    trajectory,
    turn,
)
from stepscope.errors import ConfigError
from stepscope.files.scalars import StepScalars
from stepscope.files.sidecar import Sidecar
from stepscope.integrations import add_arguments, config_from_args

PUBLIC = {
    "Capture",
    "CaptureResult",
    "ProfileConfig",
    "Span",
    "advance",
    "aprepare",
    "attach",
    "capture",
    "carrier",
    "configure",
    "consume",
    "flush",
    "instrument",
    "on_artifact",
    "on_capture",
    "on_report",
    "prepare",
    "profile_step",
    "redact",
    "request_capture",
    "span",
    "step_tokens",
    "trajectory",
    "turn",
}
"""A name that is added here also needs a line in the pages and one in the changelog."""

INTEGRATIONS = {
    "hydra",
    "lightning",
    "transformers",
    "verl",
    "verl_tool",
}
"""Modules of `stepscope.integrations`, which the pages name."""


@profile_step(role="actor")
def plain(batch: list[int], scale: float = 1.0) -> float:
    return sum(batch) * scale


@profile_step(role="actor", stage="tell", attrs={"size": 1})
async def tell(text: str) -> bytes:
    return text.encode()


@profile_step(role="rollout")
def tokens(count: int) -> Iterator[int]:
    yield from range(count)


@profile_step(role="rollout")
async def stream(count: int) -> AsyncIterator[int]:
    for token in range(count):
        yield token


class Worker:
    @profile_step(role="actor")
    def update(self, batch: list[int]) -> int:
        return len(batch)

    @profile_step
    def forward(self, batch: list[int]) -> float:
        return float(len(batch))

    @profile_step()
    async def generate(self, prompt: str) -> bytes:
        return prompt.encode()

    @profile_step("actor", stage="scored")
    def score(self, text: str) -> int:
        return len(text)

    @classmethod
    @profile_step(role="actor")
    def build(cls, name: str) -> Worker:
        return cls()


def test_the_public_names_are_these() -> None:
    assert set(stepscope.__all__) == PUBLIC
    assert sorted(stepscope.__all__) == list(stepscope.__all__)
    assert all(hasattr(stepscope, name) for name in PUBLIC)


def test_the_places_in_frameworks_are_these() -> None:
    folder = Path(stepscope.__file__).parent / "integrations"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == INTEGRATIONS


def test_the_version_is_that_of_the_distribution() -> None:
    assert_type(stepscope.__version__, str)
    assert stepscope.__version__ == version("stepscope")
    assert "__version__" in dir(stepscope)


def test_a_decorated_function_keeps_its_type() -> None:
    assert_type(plain([1, 2], scale=2.0), float)
    assert_type(tokens(1), Iterator[int])
    assert_type(stream(1), AsyncIterator[int])
    assert_type(Worker.build("w").update([1]), int)
    assert_type(Worker().forward([1]), float)
    assert_type(Worker().score("a"), int)
    generating: Callable[[str], Coroutine[Any, Any, bytes]] = Worker().generate
    assert generating.__name__ == "generate"
    telling: Callable[[str], Coroutine[Any, Any, bytes]] = tell
    assert telling is tell
    assert (plain([1, 2], scale=2.0), list(tokens(2)), Worker.build("w").update([1])) == (6.0, [0, 1], 1)


def test_settings_are_typed_one_by_one(tmp_path: Path) -> None:
    assert configure(save_path=tmp_path, steps=[2, "10:50"], torch={"with_stack": True}).selects(2)
    with pytest.raises(ConfigError, match=r"save_paht.*'save_path'"):
        configure(save_paht=tmp_path)  # type: ignore[call-arg]  # the fact of this test
    with pytest.raises(ConfigError, match="mode is 'twice'"):
        configure(mode="twice")  # type: ignore[arg-type]  # likewise


def test_options_are_typed() -> None:
    parser = assert_type(add_arguments(ArgumentParser()), ArgumentParser)
    assert_type(config_from_args(parser.parse_args([])), ProfileConfig)


def test_workers_and_ranks_are_typed(tmp_path: Path) -> None:
    class Handle:
        _actor_id = "a1"

    handle = Handle()
    config = ProfileConfig()  # it selects no step
    capture(1, workers=handle, config=config).open()
    capture(1, workers=[handle], config=config).open()
    capture(1, workers={0: handle}, config=config).open()
    capture(1, workers={"actor": [handle], "ref": handle}, config=config).open()
    capture(1, workers={}, config=config).open()
    capture(1, workers=5, config=config).open()  # type: ignore[arg-type]  # the fact of this test
    with pytest.raises(ConfigError, match="ranks"):
        request_capture(ranks=0.5, save_path=tmp_path)  # type: ignore[arg-type]  # likewise


def test_what_hooks_and_blocks_are_given_has_public_names() -> None:
    def size(path: Path, sidecar: Sidecar) -> int | None:
        return sidecar.artifact.size_bytes

    def values(scalars: StepScalars) -> dict[str, float]:
        return scalars.values

    registering: tuple[Callable[[Any], object], ...] = (
        partial(on_artifact, size),
        partial(on_report, values),
    )
    assert all(map(callable, registering))
    block: Span = span("reward")
    with capture(1, config=ProfileConfig()) as opened:
        assert_type(opened.result, CaptureResult)
    assert isinstance(block, Span)


def test_blocks_are_context_managers_of_both_kinds() -> None:
    config = ProfileConfig()  # it selects no step
    with capture(1, config=config) as block, span("reward", role="reward"), trajectory("t1"), turn(0):
        assert_type(consume("t0", begun=0, policy_version=3), None)
        assert_type(step_tokens(rollout=10, train=7), None)
        assert_type(block, Capture)

    async def loop() -> None:
        async with capture(1, config=config) as block, span("reward"), trajectory("t1"), turn(0):
            assert_type(block, Capture)

    coroutine = loop()
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a capture of a step that is not selected waits for nothing")
