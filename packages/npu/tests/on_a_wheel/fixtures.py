"""Tests in this folder run in a process of their own, on one wheel: `test_wheels.py` starts them."""

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
    """Provide the stand-in, as new. The working directory is one that must stay empty."""
    here = tmp_path_factory.mktemp("working_directory")
    monkeypatch.chdir(here)
    monkeypatch.setattr(_COMPILED, "fails", {})
    monkeypatch.setattr(_COMPILED, "no_prof", False)
    _COMPILED.calls.clear()
    yield _COMPILED
    assert PROCESS_LOCK.holder is None
    assert list(here.iterdir()) == []  # torch_npu wrote into the working directory
