"""Fixtures for tests of code that stepscope instruments: `stepscope_run` and `stepscope_clock`.

Load them with `pytest_plugins = ["stepscope.testing.plugin"]`, in the root conftest.py or a test module. A
`pytest11` entry point would load them into every pytest run wherever stepscope is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope._recording.capture import configure
from stepscope._recording.process import shutdown
from stepscope._recording.spans import slot
from stepscope.files.manifest.records import Ending
from stepscope.testing.recorded_run import FakeClock, RecordedRun


@pytest.fixture
def stepscope_run(tmp_path: Path) -> Iterator[RecordedRun]:
    """Configure a run in `tmp_path` in which each `capture` records spans; restore the old one afterwards."""
    before = configure._configured
    try:
        yield RecordedRun(tmp_path / "stepscope")
    finally:
        shutdown.close_everything(Ending("exit", "the test is over"), deadline_s=30)
        configure._configured = before
        assert slot.active is None


@pytest.fixture
def stepscope_clock() -> Iterator[FakeClock]:
    """Stop the clock of spans until the test calls `stepscope_clock.advance(seconds)`."""
    with FakeClock() as clock:
        yield clock
