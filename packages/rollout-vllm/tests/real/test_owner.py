"""Tests that a process with an AsyncLLM survives if other code starts or stops the AsyncLLM's profiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm

assert vllm
BOTH = ["vllm_frontend_trace", "vllm_trace"]


@pytest.fixture(scope="module")
def outcomes(
    model: str, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return {case: outcome} from the output of `owner_main.py`, which must exit with 0."""
    main = Path(__file__).with_name("owner_main.py")
    folder = tmp_path_factory.mktemp("owner")
    words = [sys.executable, str(main), model, str(folder / "run"), json.dumps(sizes)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=1000)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert done.returncode == 0, f"{done.returncode}: {lines}\n{done.stderr[-3000:]}"
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", ["a capture", "a capture after all that"])
def test_the_process_and_its_workers_leave_a_trace_each(
    outcomes: dict[str, dict[str, Any]], case: str
) -> None:
    assert (outcomes[case]["state"], outcomes[case]["kinds"]) == ("ok", BOTH)


def test_a_stop_that_somebody_else_sent_first_is_not_sent_again(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["somebody stops it first"]["state"] == "ok"


def test_a_profiler_that_somebody_else_started_is_left_alone(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["somebody started it before"]
    assert outcome["state"] == "failed"
    assert "omebody else started" in outcome["reason"]


def test_an_engine_that_is_shut_down_with_a_capture_open_lets_its_process_end(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    assert outcomes["shut down with a capture open"]["state"] in ("failed", "ok")
