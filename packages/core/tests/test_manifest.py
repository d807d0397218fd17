"""States of the manifest: typed when they are written, mapped when an earlier version wrote them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope import ProfileConfig, capture
from stepscope.errors import MissingArtifactsError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import fold, read_parts
from stepscope.files.manifest.records import AWAITED, Expectation, Manifest, Pending, ProcessPart, awaited
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.storage.reading import decode
from stepscope.recording.output.manifest_part import ManifestPart
from stepscope.report.tables.health import cut_processes
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope.timeline import load_step


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
    assert (item.state, item.pending, item.reason) == ("partial", None, "the disk is full")


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
    assert manifest.problems() == [f"{gone.key}: torch trace: missing: the process is gone: {AWAITED[waits]}"]


def test_what_a_process_of_another_host_owes_is_pending(tmp_path: Path) -> None:
    step = StepLayout(tmp_path)
    put(step, a_part(expected=(awaited("spans", "spans", "closing"),)))
    manifest = fold(read_parts(step)[0])
    assert (manifest.state, manifest.problems()) == ("pending", [])
    assert manifest.awaited() == [
        "actor_rank0_elsewhere_pid7: spans: pending: nothing says that its process closed the capture"
    ]


def test_a_part_of_a_later_format_is_named_and_not_guessed_at(tmp_path: Path) -> None:
    step = StepLayout(tmp_path)
    path = put(step, a_part(format=3))
    parts, unreadable = read_parts(step)
    assert not parts
    assert "a later version of stepscope" in unreadable[path]


def format_1(expected: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    part = msgspec.to_builtins(a_part())
    del part["ended_by"]
    return {**part, "format": 1, "expected": expected, **fields}


OLD = [
    ({"name": "spans", "state": "ok"}, ("spans", "ok", None)),
    (
        {"name": "spans", "state": "missing", "reason": "the process has not closed its capture"},
        ("spans", "pending", "closing"),
    ),
    (
        {"name": "torch trace of update", "state": "missing", "reason": "not exported yet"},
        ("trace", "pending", "exporting"),
    ),
    ({"name": "torch trace", "state": "skipped", "reason": "rank 1 of 2"}, ("trace", "skipped", None)),
    (
        {"name": "finish command", "state": "missing", "reason": "it has not run yet"},
        ("after", "pending", "running"),
    ),
    (
        {
            "name": "files of actor[0]",
            "state": "missing",
            "reason": "on its own host, which shares no folder with this one; not fetched yet",
        },
        ("fetch", "pending", "fetching"),
    ),
    (
        {"name": "replica 1", "state": "failed", "reason": "timeout: stop; its files may still come"},
        ("engine", "failed", "late"),
    ),
    (
        {"name": "replica 1", "state": "failed", "reason": "it has not run yet"},
        ("engine", "failed", None),
    ),
    (
        {"name": "torch trace", "state": "partial", "reason": "not exported yet"},
        ("trace", "partial", None),
    ),
    ({"name": "actor rank 7", "state": "skipped", "reason": "no such rank"}, ("selection", "skipped", None)),
]


@pytest.mark.parametrize(("old", "new"), OLD)
def test_an_expectation_of_format_1_is_typed_when_it_is_read(
    tmp_path: Path, old: dict[str, Any], new: tuple[object, ...]
) -> None:
    step = StepLayout(tmp_path)
    put(step, a_part()).write_bytes(msgspec.json.encode(format_1([old])))
    ((item,),) = (part.expected for part in read_parts(step)[0])
    assert (item.kind, item.state, item.pending) == new
    assert item.reason == old.get("reason")


@pytest.mark.parametrize(
    ("error", "ended_by"),
    [
        ("the process was terminated (SIGTERM)", "signal"),
        ("the process exited", "exit"),
        ("ValueError: no", "exception"),
        (None, None),
    ],
)
def test_the_end_of_a_part_of_format_1_is_typed_when_it_is_read(
    tmp_path: Path, error: str | None, ended_by: str | None
) -> None:
    step = StepLayout(tmp_path)
    put(step, a_part()).write_bytes(msgspec.json.encode(format_1([], error=error)))
    (part,) = read_parts(step)[0]
    assert (part.ended_by, part.error) == (ended_by, error)


@pytest.mark.parametrize(
    "junk", [{"format": 1}, {"format": 1, "expected": [7]}, {"format": 1, "expected": 0}]
)
def test_what_only_says_that_it_is_format_1_is_no_part(tmp_path: Path, junk: dict[str, Any]) -> None:
    step = StepLayout(tmp_path)
    path = put(step, a_part())
    path.write_bytes(msgspec.json.encode(junk))
    assert list(read_parts(step)[1]) == [path]


def test_a_user_error_in_the_words_of_an_exit_cuts_nothing(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[1])
    cap = capture(1, config=config).open()
    cap.close(error="the process exited")
    assert cap.result.path is not None
    assert not cut_processes(load_step(cap.result.path))


def test_an_expectation_says_of_what_kind_it_is() -> None:
    with pytest.raises(TypeError, match="kind"):
        Expectation(name="torch trace", state="ok")  # type: ignore[call-arg]  # on purpose
