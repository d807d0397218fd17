"""States of the manifest: typed when they are written, mapped when an earlier version wrote them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope.errors import MissingArtifactsError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import AWAITED, Manifest, Pending, ProcessPart, awaited
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.storage import decode, files_below, size_below
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.sections.health import cut_processes
from stepscope_report.timeline import load_step


class Unlucky(FakeEngineProfiler):
    """Fails to start, in the words given."""

    def __init__(self, words: str) -> None:
        super().__init__(FakeEngine())
        self._words = words

    def check(self) -> None:
        raise RuntimeError(self._words)


@pytest.mark.parametrize("words", AWAITED.values())
def test_an_engine_that_failed_is_missing_whatever_its_words(tmp_path: Path, words: str) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"ranks": "all"}})
    with capture(1, config=config, engines=[Unlucky(words)]) as cap:
        pass
    assert any(words in line for line in cap.result.problems())
    with pytest.raises(MissingArtifactsError, match=words):
        cap.result.raise_for_missing()


TWO_STEPS = """
import sys, torch
from stepscope import ProfileConfig, capture
config = ProfileConfig(
    save_path=sys.argv[1], steps=[0, 1], torch={"activities": ["cpu"]}, export={"when": sys.argv[2]}
)
for step in range(3):
    with capture(step, config=config):
        torch.ones(8) + 1
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("when", ["background", "deferred"])
def test_the_manifest_of_a_process_that_has_ended_awaits_nothing(tmp_path: Path, when: str) -> None:
    subprocess.run([sys.executable, "-c", TWO_STEPS, str(tmp_path), when], check=True, timeout=120)
    for layout in RunLayout(tmp_path).steps().values():
        manifest = decode(layout.manifest.read_bytes(), Manifest)
        (part,) = manifest.processes
        assert (manifest.state, manifest.awaited()) == ("ok", [])
        assert part == read_parts(layout)[0][0]


def artifact() -> Artifact:
    return Artifact(
        path="traces/a.json", kind="torch_trace", tool="torch", role="actor", host="h", size_bytes=1
    )


def a_part(**fields: Any) -> ProcessPart:
    process = ProcessInfo(role="actor", rank=0, world_size=1, host="elsewhere", pid=7)
    made = ProcessPart(
        run_id="run1",
        step=2,
        process=process,
        owner=True,
        opened=ClockAnchor(wall_ns=0, mono_ns=0),
        recorded=True,
        why="roles.* selects all ranks",
    )
    return msgspec.structs.replace(made, **fields)


def part_in(folder: Path) -> ManifestPart:
    return ManifestPart(folder / "part.json", a_part())


@pytest.mark.parametrize("file_first", [True, False])
def test_a_file_and_a_failure_are_partial_whichever_came_first(tmp_path: Path, file_first: bool) -> None:
    part = part_in(tmp_path)
    for _ in range(2):
        part.export_begins("torch trace", None, {})
    outcomes = [(artifact(), None), (None, "the disk is full")]
    for made, error in outcomes if file_first else reversed(outcomes):
        part.export_ends("torch trace", made, error, 0)
    (item,) = part.record.expected
    assert (item.state, item.pending) == ("partial", None)


def test_a_failure_says_that_another_file_is_still_on_its_way(tmp_path: Path) -> None:
    part = part_in(tmp_path)
    part.export_begins("torch trace", None, {})
    part.fail("torch trace", "the second window did not start", kind="trace")
    (item,) = part.record.expected
    assert (item.state, item.pending) == ("failed", "exporting")


# Parts on disk.


def put(step: StepLayout, part: ProcessPart) -> Path:
    path = step.part_of(part.process, part.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(part))
    return path


@pytest.fixture
def gone() -> ProcessInfo:
    """Return a process of this host that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return ProcessInfo(role="actor", rank=0, world_size=1, host=socket.gethostname(), pid=process.pid)


@pytest.mark.parametrize("waits", ["closing", "exporting", "running"])
def test_what_a_process_that_is_gone_still_owed_is_missing(
    tmp_path: Path, gone: ProcessInfo, waits: Pending
) -> None:
    step = StepLayout(tmp_path)
    put(step, a_part(process=gone, expected=(awaited("torch trace", "trace", waits),)))
    manifest = fold(read_parts(step)[0])
    assert manifest.state == "missing"
    (problem,) = manifest.problems()
    assert problem.startswith(f"{gone.key}: torch trace: missing: ")
    assert problem.endswith(AWAITED[waits])


def test_what_a_process_of_another_host_owes_is_pending(tmp_path: Path) -> None:
    step = StepLayout(tmp_path)
    put(step, a_part(expected=(awaited("spans", "spans", "closing"),)))
    manifest = fold(read_parts(step)[0])
    assert (manifest.state, manifest.problems()) == ("pending", [])
    (owed,) = manifest.awaited()
    assert "pid7: spans: pending: " in owed


@pytest.mark.parametrize("number", [1, 3])
def test_a_part_of_another_format_is_named_and_not_guessed_at(tmp_path: Path, number: int) -> None:
    step = StepLayout(tmp_path)
    path = put(step, a_part(format=number))
    parts, unreadable = read_parts(step)
    assert not parts
    assert "another version" in unreadable[path]


def test_a_user_error_in_the_words_of_an_exit_cuts_nothing(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[1])
    cap = capture(1, config=config).open()
    cap.close(error="the process exited")
    assert cap.result.path is not None
    assert not cut_processes(load_step(cap.result.path))


def test_a_folder_that_goes_while_files_are_listed_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12")
    listed = files_below(tmp_path)
    first = next(listed)
    shutil.rmtree(tmp_path / "b")
    assert [first, *listed] == [tmp_path / "a" / "file", tmp_path / "c" / "file"]
    assert size_below(tmp_path) == 4
