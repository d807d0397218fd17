"""Engines that unedited programs build: armed by their adapter at the call that builds them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope import ProfileConfig
from stepscope._recording.instrument import configured
from stepscope.engines import EngineFactory, EngineProfiler, protocol

LIBRARY = """
class Settings:
    profiler = None
    def create(self, doubled=1):
        return [self.profiler] * doubled
"""


class Adapter(EngineFactory):
    """The adapter of a library that must be told of its profiler when an engine is built."""

    builder = "enginelib.settings:Settings.create"

    def arm(self, config: ProfileConfig, settings: object) -> None:
        if getattr(settings, "broken", False):
            raise ValueError("nothing to arm")
        settings.profiler = config.save_path  # type: ignore[attr-defined]  # of the library

    def recognises(self, engine: object) -> bool:
        return False

    def owned(self) -> Sequence[object]:
        return ()

    def __call__(self, engine: object, replica: int) -> EngineProfiler:
        raise NotImplementedError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Import the library and return its class, which was not imported before."""
    (tmp_path / "enginelib").mkdir()
    (tmp_path / "enginelib" / "__init__.py").write_text("")
    (tmp_path / "enginelib" / "settings.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(configured, "_watched", set())
    monkeypatch.setattr(configured, "_config", None)
    points = {"enginelib": SimpleNamespace(load=Adapter)}
    monkeypatch.setattr(protocol, "installed", lambda: points)
    yield lambda: importlib.import_module("enginelib.settings").Settings
    for name in ("enginelib.settings", "enginelib"):
        sys.modules.pop(name, None)


def a_config(tmp_path: Path, **engine: object) -> ProfileConfig:
    return ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"engine": engine}})


def test_an_engine_of_a_named_adapter_is_armed(library: Callable[[], Any], tmp_path: Path) -> None:
    configured.watch(a_config(tmp_path), {"enginelib"})
    assert library()().create(doubled=2) == [str(tmp_path)] * 2


def test_an_engine_whose_adapter_no_entry_names_is_left_alone(
    library: Callable[[], Any], tmp_path: Path
) -> None:
    configured.watch(a_config(tmp_path), set())
    assert library()().create() == [None]


def test_a_library_that_is_imported_already_is_armed(library: Callable[[], Any], tmp_path: Path) -> None:
    settings = library()
    configured.watch(a_config(tmp_path), {"enginelib"})
    assert settings().create() == [str(tmp_path)]


def test_no_engine_is_armed_where_none_is_recorded(library: Callable[[], Any], tmp_path: Path) -> None:
    configured.watch(a_config(tmp_path, profiler="off"), {"enginelib"})
    assert library()().create() == [None]


def test_a_later_configuration_disarms(library: Callable[[], Any], tmp_path: Path) -> None:
    configured.watch(a_config(tmp_path), {"enginelib"})
    settings = library()
    configured.watch(a_config(tmp_path), set())
    assert settings().create() == [None]


def test_an_engine_that_cannot_be_armed_is_built_all_the_same(
    library: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    configured.watch(a_config(tmp_path), {"enginelib"})
    broken = library()()
    broken.broken = True
    assert broken.create() == [None]
    assert "settings:Settings.create" in caplog.text
