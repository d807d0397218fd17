"""Merges and reports by the nodes of a real Ray cluster: the same bytes, and what a task that dies costs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from packages.core.tests import golden
from packages.core.tests.test_jobs import merged
from packages.core.tests.test_merge_per_node import events_of
from packages.core.tests.test_merge_rows import step
from stepscope.cli.app import app
from stepscope.files.layout import StepLayout
from stepscope.timeline import Selection, load_step, load_traces, merge_step
from stepscope.timeline.execution.calls import WorkerDiedError, WorkerFailedError
from stepscope.timeline.execution.parts import Lost, results
from stepscope.timeline.merge import row_parts
from stepscope.timeline.merge.row_parts import RowPart, WrittenRow, write_part
from stepscope.timeline.merge.write import Sink

pytest.importorskip("ray")

from stepscope.cli.reading.ray_nodes import RayNodes, connected  # isort: skip

pytestmark = pytest.mark.usefixtures("ray_cluster")


def die_once(flag: str) -> str:
    """A task that kills its process the first time."""
    if not os.path.exists(flag):
        Path(flag).touch()
        os._exit(9)
    return "alive"


def die(_: str) -> str:
    os._exit(9)


def fail(_: str) -> str:
    raise ValueError("on purpose")


def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def beside(part: RowPart, name: str) -> Path:
    assert part.to is not None
    return part.to.parent / name


def write_half_once(part: RowPart) -> WrittenRow:
    """A task whose process is killed the first time, with a piece on the disk that is not whole."""
    if (flag := beside(part, "died")).exists():
        return write_part(part)
    flag.touch()
    return write_half(part)


def write_half(part: RowPart) -> WrittenRow:
    real = Sink.write

    def write(self: Sink, data: bytes) -> None:
        real(self, data[: len(data) // 2 + 1])
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    Sink.write = write  # type: ignore[method-assign] # the process ends
    return write_part(part)


def write_on_a_full_disk(part: RowPart) -> WrittenRow:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        return write_part(part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def write_for_long(part: RowPart) -> WrittenRow:
    open(beside(part, "pipe"), "w").close()
    time.sleep(600)
    return write_part(part)


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with connected("auto", 2) as executor:
        yield executor


@pytest.mark.parametrize("name", golden.steps())
def test_a_recorded_step_gives_the_same_bytes_on_ray(name: str, nodes: RayNodes, tmp_path: Path) -> None:
    path = golden.steps()[name].absolute()
    nodes.add_step(StepLayout(path))
    assert not nodes.elsewhere
    assert merged(path, tmp_path / "2.json.gz", nodes) == merged(path, tmp_path / "1.json.gz")
    timeline = load_step(path)
    alone, together = (
        msgspec.json.encode(load_traces(path, timeline, executor=executor)) for executor in (None, nodes)
    )
    assert together == alone


def test_a_task_that_dies_is_done_again_once(nodes: RayNodes, tmp_path: Path) -> None:
    flag = str(tmp_path / "died")
    assert list(results(nodes, die_once, [flag], [[]])) == ["alive"]
    (lost,) = results(nodes, die, [""], [[]])
    assert isinstance(lost, Lost)
    assert "on the Ray node" in lost.why


def test_an_error_of_a_call_is_raised_here(nodes: RayNodes) -> None:
    with pytest.raises(WorkerFailedError, match="ValueError: on purpose"):
        nodes.submit(fail, "").result()


def test_a_file_that_no_node_has_is_named(nodes: RayNodes, tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="no Ray node has it"):
        nodes.submit_near([tmp_path / "gone"], fail, "").result()


@pytest.mark.parametrize("where", ["here", "another node", "another disk"])
def test_only_a_node_that_is_here_and_sees_this_disk_writes_its_piece_itself(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = step(tmp_path)
    alone = merged(path, tmp_path / "1.json.gz")
    nodes.add_step(StepLayout(path))
    created = list[bytes]()
    real = row_parts._create

    def create(piece: Path, content: bytes) -> None:
        created.append(content)
        real(piece, content[::-1] if where == "another disk" and len(content) == 16 else content)

    monkeypatch.setattr(row_parts, "_create", create)
    for node in nodes._nodes:
        assert node.here
        node.here = where != "another node"
    assert merged(path, tmp_path / "2.json.gz", nodes) == alone
    tokens = [content for content in created if content == created[0]]
    returned = [content for content in created if content != created[0]]
    assert len(returned) == (0 if where == "here" else len(tokens))
    assert not list(tmp_path.glob(".*"))


def test_a_task_that_is_killed_while_it_writes_costs_nothing_if_the_second_lives(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    nodes.add_step(StepLayout(path))
    alone, text = merged(path, tmp_path / "1.json.gz")
    monkeypatch.setattr(row_parts, "write_part", write_half_once)
    assert merged(path, tmp_path / "2.json.gz", nodes) == (alone, text)
    assert (tmp_path / "died").exists()
    monkeypatch.setattr(row_parts, "write_part", write_half)
    outcome, _ = merged(path, tmp_path / "3.json.gz", nodes)
    assert not outcome.files
    assert {file.file for file in alone.files} <= {
        problem.file for problem in outcome.problems if "left out: twice, on the Ray node" in problem.what
    }
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_an_error_that_names_the_piece(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    nodes.add_step(StepLayout(path))
    monkeypatch.setattr(row_parts, "write_part", write_on_a_full_disk)
    with pytest.raises(OSError, match=re.escape(f"{tmp_path}/.row.")):
        merged(path, tmp_path / "timeline.json.gz", nodes)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "timeline.json.gz").exists()


def test_ctrl_c_while_tasks_write_leaves_no_file(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step(tmp_path)
    nodes.add_step(StepLayout(path))
    pipe, seen = tmp_path / "pipe", list[Path]()
    os.mkfifo(pipe)
    monkeypatch.setattr(row_parts, "write_part", write_for_long)

    def interrupt() -> None:
        pipe.read_bytes()  # until a task writes
        seen.extend(tmp_path.glob(".row*"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        merged(path, tmp_path / "timeline.json.gz", nodes)
    thread.join()
    assert seen
    assert not list(tmp_path.glob(".*"))


def test_leaving_early_ends_the_tasks(nodes: RayNodes) -> None:
    began = time.monotonic()
    waiting = results(nodes, wait, [0.01, 60.0], [[], []])
    assert next(waiting) == 0.01
    with pytest.raises(KeyboardInterrupt):
        waiting.throw(KeyboardInterrupt)
    assert time.monotonic() - began < 30


def test_the_command_line_says_the_same_with_ray(tmp_path: Path) -> None:
    path = step(tmp_path)
    alone = CliRunner().invoke(app, ["report", str(path), "--json"])
    on_ray = CliRunner().invoke(app, ["report", str(path), "--json", "--ray", "auto"])
    assert (on_ray.stdout, on_ray.exit_code) == (alone.stdout, alone.exit_code)
    written = CliRunner().invoke(
        app, ["merge", str(path), "--ray", "auto", "-o", str(tmp_path / "r.json.gz")]
    )
    assert (tmp_path / "r.json.gz").is_file(), written.output


def test_a_node_writes_the_timeline_of_its_traces_into_the_steps_folder(tmp_path: Path) -> None:
    path = step(tmp_path)
    command = ["merge", str(path), "--ray", "auto", "--per-node", "--ranks", "0,3", "--json"]
    made = CliRunner().invoke(app, command)
    (part,) = json.loads(made.stdout)["parts"]
    assert (part["node"], part["ranks"]) == (socket.gethostname(), [0, 3])
    merge_step(path, selection=Selection(ranks=(0, 3)), to=tmp_path / "whole.json.gz")
    assert Path(part["path"]).parent == path
    assert events_of(Path(part["path"])) == events_of(tmp_path / "whole.json.gz")
