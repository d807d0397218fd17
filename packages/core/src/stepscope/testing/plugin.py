"""Fixtures for tests of code that stepscope instruments: `stepscope_run` and `stepscope_clock`.

Asked for by `pytest_plugins = ["stepscope.testing.plugin"]`, in the root conftest.py or a test module. It is
no `pytest11` entry point: that would load it into every pytest run of everyone who has stepscope installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.files.manifest.records import Ending
from stepscope.recording.capture import configure
from stepscope.recording.process import shutdown
from stepscope.recording.spans import slot
from stepscope.testing.fake_clock import FakeClock
from stepscope.testing.recorded_run import RecordedRun


@pytest.fixture
def stepscope_run(tmp_path: Path) -> Iterator[RecordedRun]:
    """A configured run in `tmp_path`, in which each `capture` records spans. Taken back after the test."""
    before = configure._configured
    try:
        yield RecordedRun(tmp_path / "stepscope")
    finally:
        shutdown.close_everything(Ending("exit", "the test is over"), deadline_s=30)
        configure._configured = before
        assert slot.active is None


@pytest.fixture
def stepscope_clock() -> Iterator[FakeClock]:
    """Span times stand still until the test says `stepscope_clock.advance(seconds)`."""
    with FakeClock() as clock:
        yield clock
