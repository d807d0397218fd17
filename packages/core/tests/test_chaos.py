"""Chaos, a few rounds of it: `dev.py chaos` plays as many as one likes, and kills drivers too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

CHAOS = Path(__file__).with_name("chaos") / "run.py"


@pytest.mark.parametrize("seed", [1004])
def test_whatever_happens_training_goes_on_and_the_manifest_is_true(seed: int) -> None:
    command = [sys.executable, str(CHAOS), "--rounds", "5", "--seed", str(seed), "--no-drivers"]
    played = subprocess.run(command, capture_output=True, text=True)
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"


def test_what_the_flight_recorder_writes_is_true_whatever_happens_meanwhile() -> None:
    command = [sys.executable, str(CHAOS), "--recorder", "--rounds", "4", "--seed", "4"]
    played = subprocess.run(command, capture_output=True, text=True)
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"
    assert all(name in played.stdout for name in ("kill", "full_disk", "clock_jump", "two_triggers"))
