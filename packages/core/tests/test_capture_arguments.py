"""Arguments of `capture`: what is wrong raises at the run's first call, selected or not, and never later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope import ProfileConfig, capture, prepare
from stepscope.errors import CaptureError, ConfigError, EngineError
from stepscope.files.layout import RunLayout
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    """Return a configuration that captures steps 2 and 3 and profiles no role."""
    return ProfileConfig(
        save_path=str(tmp_path / "run"), steps=[2, 3], roles={"rollout": {"ranks": "all", "profiler": "off"}}
    )


def two_of_one_number() -> list[FakeEngineProfiler]:
    return [FakeEngineProfiler(FakeEngine(workers=1), replica=0) for _ in range(2)]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one number twice": ({"engines": two_of_one_number()}, "capture(engines=)"),
    "no adapter": ({"engines": "nope"}, "capture(engines=)"),
    "no worker": ({"workers": {"actor": ["x"]}}, "capture(workers=)['actor']"),
    "a number": ({"workers": 3}, "capture(workers=)"),
    "a worker's role": ({"workers": {"my role!": [object()]}}, "capture(workers)"),
    "a role": ({"role": "my role!"}, "capture(role)"),
    "no role": ({"role": None}, "capture(role)"),
    "a negative rank": ({"rank": -1}, "capture(rank)"),
    "a rank as text": ({"rank": "0"}, "capture(rank)"),
    "a rank as bool": ({"rank": True}, "capture(rank)"),
    "a mapping": ({"config": {"steps": [3]}}, "capture(config)"),
}


@pytest.mark.parametrize(("arguments", "field"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_at_the_first_step_though_it_is_not_captured(
    config: ProfileConfig, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        capture(0, **{"config": config, **arguments})
    assert raised.value.field == field


def test_an_engine_that_no_adapter_knows_raises_at_the_first_step(config: ProfileConfig) -> None:
    with pytest.raises(EngineError):
        capture(0, config=config, engines=[object()])


def test_a_folder_that_cannot_be_written_raises_at_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = ProfileConfig(save_path=str(tmp_path / "file"), steps=[2])
    with pytest.raises(ConfigError, match="save_path"):
        capture(0, config=config)


async def test_a_capture_that_would_block_the_loop_raises_at_the_first_step(config: ProfileConfig) -> None:
    with pytest.raises(CaptureError, match="block"):
        capture(0, config=config, engines=[FakeEngineProfiler(FakeEngine(workers=1))]).open()


async def test_async_with_opens_the_first_step_in_a_running_loop(config: ProfileConfig) -> None:
    engines = [FakeEngineProfiler(FakeEngine(workers=1))]
    captured = []
    for step in range(3):
        async with capture(step, config=config, engines=engines) as cap:
            captured.append(cap.selected)
    assert captured == [False, False, True]


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2), torch.tensor([2])])
def test_an_integer_of_a_checkpoint_is_a_step_and_a_rank(config: ProfileConfig, step: Any) -> None:
    with capture(step, config=config, rank=step) as captured:
        pass
    assert (captured.step, type(captured.step)) == (2, int)
    assert len(list(RunLayout(config.save_path).step(2).root.glob("processes/trainer_rank2*"))) == 1


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, 2**62 + 1, None, torch.tensor([1, 2])])
def test_what_is_no_integer_is_no_step(config: ProfileConfig, step: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        capture(step, config=config)
    assert raised.value.field == "capture(step)"


class Engines(list[object]):
    """Engines of which one is wrong once the run's first capture has checked them."""

    def __iter__(self) -> Iterator[object]:
        checked, self[:] = list(super().__iter__()), ["vlm"]
        return iter(checked)


def test_what_is_wrong_later_is_entered_and_the_run_goes_on(
    config: ProfileConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines([FakeEngineProfiler(FakeEngine(workers=1))])
    for step in range(4):
        with capture(step, config=config, engines=engines) as captured:
            pass
        if step in (2, 3):
            manifest = captured.result.wait(30)
            assert manifest is not None
            assert len([line for line in manifest.problems() if "engines: failed" in line]) == 1
    logged = [record.getMessage() for record in caplog.records if "engines: failed" in record.getMessage()]
    assert len(logged) == 2  # a line for each captured step


@pytest.mark.parametrize("wrong", [{"config": {"steps": [1]}}, {"role": "my role!"}])
def test_prepare_takes_what_capture_takes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(**wrong)
    assert raised.value.field == f"prepare({next(iter(wrong))})"
