"""The examples run as they are, capture what they say, and are as short as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from stepscope.files.layout import RunLayout, StepLayout
from stepscope_report import StepReport, step_report
from stepscope_report.diff import diff
from stepscope_report.timeline import load_step
from tests.tree import files

EXAMPLES = Path(__file__).parents[1] / "examples"
TO_COPY = [path for path in files(".py", ".sh") if path.parent == EXAMPLES and path.name != "ascend_check.py"]
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def run(name: str, folder: Path, *options: str, front: Sequence[str] = ()) -> list[float]:
    """Run an example, which writes below `folder`. Return the mean rewards that it prints, by step.

    Args:
        front: A module and its options, which run the example: `-m torch.distributed.run`.
    """
    command = [sys.executable, *front, str(EXAMPLES / name), *options]
    own_cluster = {**os.environ, "RAY_ADDRESS": "local"}  # not that of a test that runs beside this one
    done = subprocess.run(command, cwd=folder, env=own_cluster, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return [float(line.rpartition(" ")[2]) for line in lines]


def captured(run: Path) -> dict[int, StepLayout]:
    """Return the captured steps. On a busy machine, the flight recorder writes slow ones beside them."""
    steps = RunLayout(run).steps().items()
    return {number: step for number, step in steps if step.traces.is_dir()}


def stages(layout: StepLayout) -> set[tuple[str, str]]:
    return {(span.role, span.stage) for span in load_step(layout.root).spans}


@needs_torch
def test_the_plain_loop_learns_and_two_of_its_steps_are_captured(tmp_path: Path) -> None:
    rewards = run("existing_loop.py", tmp_path)
    assert rewards[-1] > 3 * rewards[0]
    steps = captured(tmp_path / "outputs/existing_loop")
    assert list(steps) == [10, 20]
    for layout in steps.values():
        assert stages(layout) == {
            ("rollout", "generate"),
            ("reward", "compute_reward"),
            ("actor", "update_actor"),
        }
        manifest = load_step(layout.root).manifest
        assert manifest is not None
        assert manifest.problems() == []


@needs_torch
def test_both_ranks_of_the_torchrun_loop_are_captured_and_profiled(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    rewards = run("torchrun_loop.py", tmp_path, front=torchrun)
    assert rewards[-1] > 3 * rewards[0]
    steps = captured(tmp_path / "outputs/torchrun_loop")
    assert list(steps) == [10, 20]
    for layout in steps.values():
        timeline = load_step(layout.root)
        assert timeline.manifest is not None
        assert timeline.manifest.problems() == []
        assert {process.info.rank for process in timeline.processes} == {0, 1}
        assert len(list(layout.traces.rglob("*.json.gz"))) == 2
        report = step_report(timeline)
        calls = {(stage.role, stage.stage): stage.calls for stage in report.stages}
        calls.pop(("actor", "all_reduce"), None)  # of DDP, if a rank waited there
        assert calls == {
            ("rollout", "generate"): 2,
            ("reward", "compute_reward"): 2,
            ("actor", "update_actor"): 2,
        }


def test_the_page_on_torchrun_shows_lines_of_the_example() -> None:
    source = iter((EXAMPLES / "torchrun_loop.py").read_text().splitlines())
    page = (EXAMPLES.parent / "docs/first-capture.md").read_text()
    (excerpt,) = [
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_process" in text
    ]
    lines = [line.removesuffix(" ...") for line in excerpt.splitlines() if line.strip() not in ("", "...")]
    assert [line for line in lines if line not in source] == []  # a search goes on behind the line before


@needs_torch
@needs_ray
def test_grpo_on_ray_is_captured_from_the_loop_to_the_forward_passes(tmp_path: Path) -> None:
    assert len(run("grpo_ray.py", tmp_path)) == 4
    steps = captured(tmp_path / "outputs/grpo_ray")
    assert list(steps) == [1, 3]
    expected = {
        ("actor", "update_actor"),
        ("agent_loop", "trajectory"),
        ("env", "tool"),
        ("ref", "compute_ref_log_prob"),
        ("rollout", "decode"),
    }
    for layout in steps.values():
        assert expected <= stages(layout)
        assert len(list(layout.traces.glob("rollout/replica*/*.json.gz"))) == 4  # a trace and passes each


@pytest.mark.slow
def test_the_report_of_the_slow_step_names_its_tools_and_the_fix_is_proved(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        slow, fixed = (pool.submit(run, "slow_step.py", tmp_path, *words) for words in ((), ("--fixed",)))
    assert len(slow.result()) == len(fixed.result()) == 10
    before, after = (reports(tmp_path / "outputs/slow_step" / side) for side in ("before", "after"))
    assert "slow-tools" in {advice.rule for advice in before[0].advice}
    changes = {change.stage: change for change in diff(before, after).changes}
    assert changes["tool"].delta_ns < -50_000_000
    queue = changes["queue"]
    assert (queue.a.mean_ns or 0) > 10 * (queue.b.mean_ns or 0)


def reports(run_folder: Path) -> list[StepReport]:
    return [step_report(load_step(layout.root)) for layout in RunLayout(run_folder).steps().values()]


def test_the_tutorial_shows_the_slow_step_as_it_is() -> None:
    source = (EXAMPLES / "slow_step.py").read_text()
    page = (EXAMPLES.parent / "docs/tutorial.md").read_text()
    excerpts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(excerpts) == 3
    assert [excerpt for excerpt in excerpts if excerpt not in source] == []


@pytest.mark.parametrize("path", TO_COPY, ids=lambda path: path.name)
def test_an_example_to_copy_has_less_than_120_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("path", TO_COPY, ids=lambda path: path.name)
def test_an_example_is_in_the_table_and_names_its_command(path: Path) -> None:
    assert f"\n| [{path.name}]({path.name}) | " in (EXAMPLES / "README.md").read_text()
    assert f"examples/{path.name}" in path.read_text()
