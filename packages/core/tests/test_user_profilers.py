"""A torch.profiler of the user's own inside a capture: what it costs is in the manifest."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from packages.core.tests.runs import manifest_of
from stepscope import ProfileConfig, capture, profile_step
from stepscope.files.manifest import Manifest
from stepscope_report.cli import run


@profile_step(role="trainer")
def update() -> None:
    torch.ones(50) @ torch.ones(50)


def of_their_own() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def captured(folder: Path, mode: str) -> Manifest:
    config = ProfileConfig(save_path=folder, steps=[1], mode=mode, roles={"*": {"ranks": "all"}})  # type: ignore[arg-type]  # forms
    with capture(1, config=config, workers={}) as cap:
        update()
        with of_their_own():
            update()
        update()
    cap.result.wait(60)
    return manifest_of(cap.result)


def test_a_trace_that_the_users_profiler_cut_is_partial(tmp_path: Path) -> None:
    manifest = captured(tmp_path, "continuous")
    (line,) = manifest.problems()
    assert "torch trace: partial: " in line
    assert run(["ls", str(tmp_path)]) == 3


def test_stages_before_and_behind_the_users_profiler_are_recorded_in_discrete_mode(tmp_path: Path) -> None:
    manifest = captured(tmp_path, "discrete")
    (item,) = [item for part in manifest.processes for item in part.expected if item.kind == "trace"]
    assert (item.state, len(item.artifacts)) == ("partial", 2)
    assert "not stepscope's" in str(item.reason)
