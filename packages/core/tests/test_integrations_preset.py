"""The integration that a preset names: it is imported with its framework, and a failure harms nobody."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from stepscope._recording.instrument import configured
from stepscope.config.presets import Preset, read_preset
from stepscope.integrations import verl


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configured, "_integrations", set())
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def preset(folder: Path, name: str, integration: str) -> Preset:
    """Write a framework and its integration, and return a preset of both."""
    (folder / f"{name}_framework.py").write_text("PLACES = []\n")
    (folder / f"{name}_integration.py").write_text(integration)
    return Preset(
        name=name,
        distribution=f"{name}-framework",
        tested="1",
        entries=(),
        integration=f"{name}_integration",
        covers={},
    )


def test_an_integration_is_imported_with_its_framework_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import toy_framework\ntoy_framework.PLACES.append('ours')\n"
    configured.integrate([preset(tmp_path, "toy", text)])
    assert "toy_integration" not in sys.modules
    framework = importlib.import_module("toy_framework")
    assert framework.PLACES == ["ours"]
    configured.integrate([preset(tmp_path, "toy", text)])
    assert framework.PLACES == ["ours"]


def test_an_integration_that_fails_is_logged_and_the_framework_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")  # as for users
    monkeypatch.syspath_prepend(str(tmp_path))
    configured.integrate([preset(tmp_path, "broken", "1 / 0\n")])
    assert importlib.import_module("broken_framework").PLACES == []
    assert "broken_integration" in caplog.text


def test_a_release_of_verl_without_a_place_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")  # as for users
    verl._extend(ModuleType("verl.utils.tracking"))
    assert "verl.utils.tracking" in caplog.text


def test_without_verl_its_integration_is_imported_alone() -> None:
    name = read_preset("verl").integration
    assert name is not None
    importlib.import_module(name)
    assert "verl" not in sys.modules
