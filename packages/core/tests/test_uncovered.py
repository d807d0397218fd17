"""Trainers that a preset does not cover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepscope._recording.instrument import frameworks
from stepscope.config.presets import preset_names, read_preset

TRAIN = "transformers.trainer:Trainer.train"


@pytest.fixture(autouse=True)
def trl() -> Iterator[None]:
    frameworks.expect([read_preset("trl")])
    yield
    frameworks.expect([])


def trainer(name: str, module: str, *bases: type) -> type:
    return type(name, bases, {"__module__": module})


BASE = trainer("Trainer", "transformers.trainer")
SFT = trainer("SFTTrainer", "trl.trainer.sft_trainer", BASE)


@pytest.mark.parametrize(
    "cls",
    [SFT, trainer("MyTrainer", "__main__", SFT)],
)
def test_a_trainer_of_the_preset_and_a_class_derived_from_it_are_covered(
    cls: type, caplog: pytest.LogCaptureFixture
) -> None:
    frameworks.check_covered(TRAIN, (cls(),))
    assert (frameworks.uncovered(), caplog.messages) == ({}, [])


@pytest.mark.parametrize(
    "cls",
    [
        trainer("OwnTrainer", "__main__", BASE),
        trainer("GOLDTrainer", "trl.experimental.gold.gold_trainer", SFT),
        trainer("ForeignTrainer", "elsewhere"),
    ],
)
def test_any_other_trainer_is_named_once(cls: type, caplog: pytest.LogCaptureFixture) -> None:
    frameworks.check_covered(TRAIN, (cls(),))
    frameworks.check_covered(TRAIN, (cls(),))
    (line,) = caplog.messages
    assert f"{cls.__name__}: the preset 'trl'" in line
    assert list(frameworks.uncovered()) == [cls.__name__]


def test_a_function_that_gets_no_trainer_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    frameworks.check_covered("transformers.trainer_callback:CallbackHandler.on_step_end", (object(),))
    assert caplog.messages == []


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_looks_for_trainers_in_calls_that_bound_its_steps(name: str) -> None:
    preset = read_preset(name)
    bounds = {f"{entry.module}:{entry.name}" for entry in preset.entries if entry.step is not None}
    assert set(preset.covers) <= bounds
