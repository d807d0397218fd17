"""Test that `stepscope why` names a stopped engine, and not the calls that wait for the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm

from stepscope.files.layout import RunLayout
from stepscope_report.cli.why import ask
from stepscope_report.waiting import say_call
from stepscope_report.why import why

assert vllm


@pytest.fixture
def stopped(model: str, sizes: dict[str, Any], tmp_path: Path) -> Iterator[RunLayout]:
    """Provide the folder of a run whose engine is stopped while it has five requests."""
    main = Path(__file__).with_name("why_main.py")
    words = [sys.executable, str(main), model, str(tmp_path / "run"), json.dumps(sizes)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line == "stopped\n"), None)
        assert line is not None, (tmp_path / "log").read_text()[-3000:]
        yield RunLayout(tmp_path / "run")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_engine_that_stopped_is_named_in_two_seconds(stopped: RunLayout) -> None:
    until = time.monotonic() + 30
    while not any(engine.requests == 5 for state in ask(stopped, 10) for engine in state.engines):
        assert time.monotonic() < until
    began = time.monotonic()
    answer = why(ask(stopped, 10))
    took = time.monotonic() - began
    first = answer.calls[answer.culprits[0]]
    assert took < 2
    assert (first.kind, first.stage) == ("engine", "replica 0")
    assert "engine replica 0, 5 requests (" in say_call(first)
    assert ", no token for " in say_call(first)
    assert len(answer.engines) == 1
    generating = [call for call in answer.calls if call.stage == "generate"]
    assert len(generating) == 5
    assert all(answer.calls[index].kind == "engine" for call in generating for index in call.waits_for)
    assert all(call.waits_for for call in generating)
