"""Timelines that each node writes of its own traces: together they are the one timeline."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from packages.core.tests.test_merge_rows import step
from stepscope.files.layout import StepLayout
from stepscope.timeline import Selection, merge_step
from stepscope.timeline.execution.calls import WorkerDiedError, answer_to, call_of, result_of
from stepscope.timeline.execution.near import NearFiles
from stepscope.timeline.merge.per_node import NodeIndex, merge_per_node

_P = TypeVar("_P")
_T = TypeVar("_T")


class TwoNodes(NearFiles):
    """Two nodes over one folder. Calls and results pass as bytes, as they do to another machine."""

    def __init__(self, *dead: str) -> None:
        self.elsewhere: dict[Path, int] = {}
        self._dead = dead

    def submit_near(
        self,
        files: Sequence[Path],
        fn: Callable[[_P], _T],
        part: _P,
        then: Callable[[_T], _T] | None = None,
        away: Callable[[_P], _P] | None = None,
    ) -> Future[_T]:
        raise AssertionError("no node is asked for what this machine has")

    def node_with(self, files: Sequence[Path], host: str) -> str | None:
        return host if host in ("host-a", "host-b") else "host-a"

    def submit_at(self, node: str, fn: Callable[[_P], _T], part: _P) -> Future[_T]:
        future = Future[_T]()
        if node in self._dead:
            future.set_exception(WorkerDiedError(f"on the Ray node {node}: it died"))
        else:
            future.set_result(result_of(answer_to(call_of(fn, (part,))), fn))
        return future

    def kill(self) -> None: ...


def events_of(*files: Path) -> Counter[str]:
    """Return the events of several timelines, without names and without arrows between processes."""
    events: list[dict[str, Any]] = []
    for file in files:
        events += json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kept: Iterable[dict[str, Any]] = (
        event
        for event in events
        if event["ph"] != "M" and not (event["ph"] in "sf" and event["cat"] == "stepscope")
    )
    return Counter(json.dumps(event, sort_keys=True) for event in kept)


def test_the_timelines_of_two_nodes_are_together_that_of_the_step(tmp_path: Path) -> None:
    path = step(tmp_path)
    index = merge_per_node(path, TwoNodes(), jobs=1)
    whole = merge_step(path, to=tmp_path / "whole.json.gz")
    layout = StepLayout(path)
    assert msgspec.json.decode(layout.node_index.read_bytes(), type=NodeIndex) == index
    parts = {part.node: part for part in index.parts}
    assert {node: part.ranks for node, part in parts.items()} == {"host-a": (0, 1, 2), "host-b": (3,)}
    files = [Path(part.path) for part in index.parts]
    assert [part.size_bytes for part in index.parts] == [file.stat().st_size for file in files]
    assert events_of(*files) == events_of(tmp_path / "whole.json.gz")
    assert sum(part.events for part in index.parts) == whole.events
    assert (index.base_ns, index.window_ns) == (whole.base_ns, whole.window_ns)
    assert {(one.file, one.what) for one in index.problems} <= {
        (one.file, one.what) for one in whole.problems
    }


def test_a_selection_leaves_out_traces_before_they_are_read(tmp_path: Path) -> None:
    path, selection = step(tmp_path), Selection(ranks=(3,), to_ms=2.5)
    index = merge_per_node(path, TwoNodes(), selection=selection, jobs=1, to=tmp_path / "index.json")
    merge_step(path, selection=selection, to=tmp_path / "whole.json.gz")
    files = [Path(part.path) for part in index.parts]
    assert events_of(*files) == events_of(tmp_path / "whole.json.gz")
    assert [part.ranks for part in index.parts if part.ranks] == [(3,)]
    assert (tmp_path / "index.json").is_file()


def test_a_node_that_dies_costs_its_own_part(tmp_path: Path) -> None:
    index = merge_per_node(step(tmp_path), TwoNodes("host-b"), jobs=1)
    assert [part.node for part in index.parts] == ["host-a"]
    assert "node host-b" in [problem.file for problem in index.problems]
