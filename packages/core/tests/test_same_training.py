"""A captured, a recorded and a plain run of one seeded training end alike, exceptions included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stepscope.files.layout import RunLayout
from tests.tree import ROOT

MAIN = Path(__file__).with_name("same_training.py")
WAYS = {
    "plain": {"STEPSCOPE_DISABLE": "1"},
    "off": {"STEPSCOPE_STEPS": "99"},
    "recorded": {"STEPSCOPE_STEPS": "99", "STEPSCOPE_RECORD": "spans"},
    "captured": {"STEPSCOPE_STEPS": "every:1"},
}


def ended(folder: Path, way: str) -> dict[str, Any]:
    """Run the training on two ranks. Return what each ends with."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    own = {
        "STEPSCOPE_SAVE_PATH": str(folder / "run"),
        "STEPSCOPE_RAISE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    subprocess.run(
        [*torchrun, str(MAIN), str(folder)],
        env={**os.environ, **own, **WAYS[way]},
        capture_output=True,
        timeout=200,
        check=True,
    )
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))}


def test_weights_rewards_and_timeouts_are_the_same_however_it_is_recorded(tmp_path: Path) -> None:
    ends = {way: ended(tmp_path / way, way) for way in WAYS}
    assert ends["plain"].keys() == {"rank0", "rank1"}
    assert len(ends["plain"]["rank0"]["reached"]) == 16
    assert ends["off"] == ends["recorded"] == ends["captured"] == ends["plain"]
    assert sorted(RunLayout(tmp_path / "captured" / "run").steps()) == [0, 1, 2, 3]
    assert sorted(RunLayout(tmp_path / "off" / "run").steps()) == []
