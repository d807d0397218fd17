"""Fixtures of the tests in this folder. `test_wheels.py` runs them in a separate process for each wheel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages.npu.tests.on_a_wheel.unpacked import Compiled, install
from stepscope.backends.process_lock import PROCESS_LOCK

WHEEL = Path(os.environ["TORCH_NPU_WHEEL"])
_COMPILED = install(WHEEL)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """Yield a reset stand-in, and check that the working directory stays empty."""
    here = tmp_path_factory.mktemp("working_directory")
    monkeypatch.chdir(here)
    monkeypatch.setattr(_COMPILED, "fails", {})
    monkeypatch.setattr(_COMPILED, "no_prof", False)
    _COMPILED.calls.clear()
    yield _COMPILED
    assert PROCESS_LOCK.holder is None
    assert list(here.iterdir()) == []  # torch_npu wrote into the working directory
