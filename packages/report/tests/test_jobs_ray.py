"""Reports by the nodes of a real Ray cluster: the same numbers, and what an actor that dies costs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from packages.report.tests import golden
from packages.report.tests.test_merge_rows import step
from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope_report.cli.app import app
from stepscope_report.timeline import load_step, load_traces
from stepscope_report.timeline.processes import Lost, NodeLostError, results

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError  # isort: skip

from stepscope_report.cli.ray_nodes import RayNodes, connected  # isort: skip

pytestmark = pytest.mark.usefixtures("ray_cluster")


def die_once(flag: str) -> str:
    """Kill the process the first time."""
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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    with connected("auto", 2) as executor:
        executor.add_step(StepLayout(tmp_path))
        yield executor


@pytest.mark.parametrize("name", golden.steps())
def test_a_recorded_step_is_read_the_same_on_ray(name: str) -> None:
    path = golden.steps()[name].absolute()
    timeline = load_step(path)
    with connected("auto", 2) as nodes:
        nodes.add_step(StepLayout(path))
        assert not nodes.elsewhere
        alone, together = (
            msgspec.json.encode(load_traces(path, timeline, executor=executor, digests=False))
            for executor in (None, nodes)
        )
    assert together == alone


def test_a_call_whose_actor_dies_is_done_again_once(nodes: RayNodes, tmp_path: Path) -> None:
    assert list(results(nodes, die_once, [str(tmp_path / "died")], [[]])) == ["alive"]
    (lost,) = results(nodes, die, [""], [[]])
    assert isinstance(lost, Lost)
    assert "Ray node" in lost.why


def test_a_node_that_dies_before_it_has_answered_is_lost(nodes: RayNodes) -> None:
    node = nodes._nodes[0]
    node._listed = False
    assert isinstance(node._failure(ActorUnavailableError("no connection", b"1" * 16)), NodeLostError)
    assert isinstance(node._failure(ModuleNotFoundError("stepscope")), RecordError)


def test_an_error_of_a_call_is_raised_here(nodes: RayNodes) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        nodes.submit(fail, "").result()


def test_a_file_that_no_node_has_is_named(nodes: RayNodes, tmp_path: Path) -> None:
    with pytest.raises(NodeLostError, match="no Ray node"):
        nodes.submit_near([tmp_path / "gone"], fail, "").result()


def test_leaving_early_ends_the_calls(nodes: RayNodes) -> None:
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


@pytest.mark.parametrize("listed", [8, 9])
def test_a_file_that_became_shorter_is_not_left_in_part(nodes: RayNodes, tmp_path: Path, listed: int) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.write_bytes(b"8 bytes.")
    node = nodes._nodes[0]
    read = node.call
    node.call = lambda fn, path, *args: read(fn, there, *args)  # type: ignore[method-assign]  # another disk
    node.fetch(here, listed)
    assert here.exists() == (listed == 8)
    assert not list(tmp_path.glob(".*"))
