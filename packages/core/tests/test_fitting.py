"""Presets of a framework whose newer version has dropped arguments: the calls are recorded all the same."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope import ProfileConfig, capture, configure
from stepscope._recording.capture import configure as run
from stepscope._recording.instrument import configured, patch, step_boundaries
from stepscope._recording.instrument.calls import LAYERS, Timing
from stepscope._recording.instrument.configured import _timing
from stepscope._recording.instrument.fitting import fitted
from stepscope._recording.instrument.step_boundaries import Boundary
from stepscope.config import InstrumentConfig
from stepscope.config.presets import preset_names, read_preset
from stepscope.testing.recorded_run import finished_spans

NEWEST = """
class SkyRLGymGenerator:
    weight_version = 3

    async def agent_loop(self, prompt, trajectory):
        return prompt
"""
"""SkyRL's generator without `trajectory_id` and `training_phase`."""


def without_arguments(self: object) -> None:
    """Stand for a method that has lost every argument."""


def entries(preset: str) -> list[InstrumentConfig]:
    return list(read_preset(preset, lambda _: None).entries)


@pytest.mark.parametrize("preset", preset_names())
def test_every_entry_of_every_preset_outlives_its_arguments(preset: str) -> None:
    """Only what an entry cannot do without ends it: the id of what is consumed, and the engine."""
    by_target: dict[str, list[InstrumentConfig]] = {}
    for entry in entries(preset):
        by_target.setdefault(f"{entry.module}:{entry.name}", []).append(entry)
    for target, group in by_target.items():
        timings = [_timing(entry) for entry in group if entry.step is None]
        step = next((entry for entry in group if entry.step is not None), None)
        boundary = None if step is None else Boundary(step, counts=True)
        left = fitted(without_arguments, timings, boundary, target)  # type: ignore[arg-type]  # a function
        for layer in LAYERS:
            needs = [timing for timing in timings if timing.kind in layer and _lives(timing)]
            assert bool(needs) <= any(timing.kind in layer for timing in left.timings), target
        assert (left.boundary is None) == (boundary is None), target


def _lives(timing: Timing) -> bool:
    needed = [*timing.id, timing.engine] if timing.kind in ("consume", "engine") else []
    return all(path is None or path.startswith(("self.", "result")) for path in needed)


@pytest.fixture
def newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide a SkyRL of tomorrow, with the shipped preset in effect."""
    package = tmp_path / "modules" / "skyrl" / "train" / "generators"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "skyrl_gym_generator.py").write_text(NEWEST)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    monkeypatch.setattr(run, "_configured", None)
    monkeypatch.setattr(patch, "missed", {})
    roles = {"*": {"profiler": "off"}}
    configure(ProfileConfig(save_path=tmp_path / "run", steps=[1], roles=roles, instrument=["skyrl"]))
    yield importlib.import_module("skyrl.train.generators.skyrl_gym_generator")
    step_boundaries.switch(step_boundaries._finish(None))
    configured.apply(ProfileConfig())
    for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl"]:
        del sys.modules[name]


def test_a_trajectory_without_its_label_is_a_trajectory(
    newest: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = newest.SkyRLGymGenerator()
    with capture(1):
        assert asyncio.run(generator.agent_loop("1+1=", object())) == "1+1="
    (span,) = finished_spans(tmp_path / "run", 1)
    assert (span.role, span.stage) == ("agent_loop", "trajectory")
    lost = {name.partition(" of ")[0] for name in patch.missed if "agent_loop" in name}
    assert lost == {"'training_phase'", "'trajectory_id.instance_id'", "'trajectory_id.repetition_id'"}
    logged = [record.getMessage() for record in caplog.get_records("setup")]
    (message,) = [text for text in logged if "'training_phase' of" in text]
    assert ": self, prompt, trajectory" in message
