"""The mirror of a run: after each capture, beside the training, and before an old step goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from packages.core.tests.mirrored import HOST, a_config, a_step, contents, drain
from stepscope import ProfileConfig, capture, span
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import fold, read_parts
from stepscope.files.manifest.records import Expectation
from stepscope.files.mirror import uncopied
from stepscope.mirror import program
from stepscope.recording.fanout import worker_side
from stepscope.recording.fanout.messages import StartRequest, StopRequest
from stepscope.testing.steps import StepFolder

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def outcomes(step: StepLayout) -> dict[str, Expectation]:
    return {item.name: item for part in fold(read_parts(step)[0]).processes for item in part.expected}


def test_after_a_capture_its_folder_is_copied_with_the_manifest_that_says_so(
    tmp_path: Path, url: str
) -> None:
    config = a_config(tmp_path, url)
    with capture(1, config=config) as block, span("update"):
        pass
    assert block.result.problems() == []  # under way is no problem
    drain()
    step = RunLayout(config.save_path).step(1)
    assert outcomes(step)["mirror"].state == "ok"
    store = tmp_path / "store" / "step_000001"
    assert contents(store) == contents(step.root)
    assert outcomes(StepLayout(store))["mirror"].state == "ok"
    assert uncopied(step, HOST, url) == []


def test_a_mirror_that_cannot_be_reached_is_recorded_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("in the way")
    config = a_config(tmp_path, f"file://{tmp_path}/store/x")
    with capture(1, config=config):
        pass
    drain()
    item = outcomes(RunLayout(config.save_path).step(1))["mirror"]
    assert item.state == "failed"
    assert re.search(r"file\(s\) are not there, \S+: (NotADirectory|FileExists)Error", str(item.reason))
    assert "step 1: mirror: failed" in caplog.text


def test_a_restarted_run_sends_what_the_killed_one_did_not(tmp_path: Path, url: str) -> None:
    killed = a_step(tmp_path / "run", step=1)
    config = a_config(tmp_path, url)
    with capture(2, config=config):
        pass
    drain()
    assert contents(tmp_path / "store" / "step_000001") == contents(killed.root)


def test_a_step_that_another_process_records_now_is_left_alone(tmp_path: Path, url: str) -> None:
    folder = StepFolder(tmp_path / "run", step=1)
    folder.process("trainer", 0, host=HOST, pid=os.getpid(), owner=True)  # never closed, and alive
    folder.write()
    a_step(tmp_path / "run", step=2)
    assert program.main(str(tmp_path / "run"), "2", url, "yes") == 0
    assert [path.name for path in (tmp_path / "store").glob("step*")] == ["step_000002"]


def test_an_old_step_is_removed_once_its_copy_is_whole_and_not_before(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    store.write_text("in the way")
    config = a_config(tmp_path, url, budget={"keep_steps": 1})
    layout = RunLayout(config.save_path)
    for step in (1, 2):
        with capture(step, config=config):
            pass
        drain()
    assert list(layout.steps()) == [1, 2]
    assert "budget.keep_steps leaves step 1" in caplog.text
    store.unlink()  # the store is back
    for step in (3, 4):
        with capture(step, config=config):
            pass
        drain()
    assert list(layout.steps()) == [4]
    assert sorted(path.name for path in store.glob("step*")) == [f"step_00000{step}" for step in (1, 2, 3, 4)]


def test_a_rank_that_does_not_mirror_leaves_old_steps_to_the_one_that_does(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot know that a copy is under way in another process: it said that there was none."""
    config = a_config(tmp_path, url, budget={"keep_steps": 1})
    for step in (1, 2):
        with capture(step, config=config, rank=1):
            pass
        drain()
    assert list(RunLayout(config.save_path).steps()) == [1, 2]
    assert "no whole copy" not in caplog.text
    for step in (3, 4):
        with capture(step, config=config, rank=0):
            pass
        drain()
    assert 3 not in RunLayout(config.save_path).steps()


def start(config: ProfileConfig, owner_part: str = "owner.json") -> None:
    request = StartRequest(
        capture_id="c1",
        run_id="run1",
        step=1,
        config=config,
        role="actor",
        position=0,
        owner_part=owner_part,
    )
    assert worker_side.start_worker(request).refused is None


def test_a_worker_that_shares_no_folder_with_the_owner_sends_its_own_files(tmp_path: Path, url: str) -> None:
    config = a_config(tmp_path, url)
    start(config)
    worker_side.stop_worker(StopRequest(capture_id="c1"))
    drain()
    step = RunLayout(config.save_path).step(1)
    assert outcomes(step)["mirror"].state == "ok"
    assert contents(tmp_path / "store" / "step_000001") == contents(step.root)


def test_a_worker_that_shares_the_folder_leaves_it_to_the_owner(tmp_path: Path, url: str) -> None:
    config = a_config(tmp_path, url)
    folder = StepFolder(config.save_path, step=1)
    owner = folder.process("trainer", 0, owner=True)
    folder.write()
    start(config, RunLayout(config.save_path).step(1).part_of(owner.info, "run1").name)
    worker_side.stop_worker(StopRequest(capture_id="c1"))
    drain()
    assert "mirror" not in outcomes(RunLayout(config.save_path).step(1))
    assert not (tmp_path / "store").exists()


def test_what_a_worker_recorded_for_nothing_is_not_sent(tmp_path: Path, url: str) -> None:
    config = a_config(tmp_path, url)
    start(config)
    worker_side.stop_worker(StopRequest(capture_id="c1", discard="started too late"))
    drain()
    assert outcomes(RunLayout(config.save_path).step(1))["mirror"].state == "skipped"
    assert not (tmp_path / "store").exists()
