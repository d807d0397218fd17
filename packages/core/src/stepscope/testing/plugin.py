"""Pytest fixtures for tests of instrumented code: `stepscope_run` and `stepscope_clock`.

Load the fixtures with `pytest_plugins = ["stepscope.testing.plugin"]` in the root conftest.py or a test
module. They are not a `pytest11` entry point, because then every pytest run would import stepscope.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope._recording.capture import configure
from stepscope._recording.process import shutdown
from stepscope._recording.spans import slot
from stepscope.files.manifest import Ending
from stepscope.testing.recorded_run import FakeClock, RecordedRun


@pytest.fixture
def stepscope_run(tmp_path: Path) -> Iterator[RecordedRun]:
    """Configure a run in `tmp_path` whose captures record spans. The old configuration is restored
    afterwards.
    """
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
