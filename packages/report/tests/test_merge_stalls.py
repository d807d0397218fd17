"""Stalls of engines in a merged timeline: spans in the engine's row."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from packages.report.tests.steps import MS, close
from packages.report.tests.test_report_breakdown import driver_of
from packages.report.tests.test_report_stalls import expect, recorded
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.timeline import Selection, merge_step
from stepscope_report.timeline.merge.step_events import STALL


def step(tmp_path: Path) -> Path:
    """A driver, and two replicas, the first of which has two processes and stalls twice."""
    folder = StepFolder(tmp_path)
    driver = driver_of(folder)
    driver.span("turn", 0, 100 * MS, role="agent_loop")
    for rank, replica in enumerate((0, 0, 1)):
        folder.process("rollout", rank, replica=replica).span("decode", 0, 100 * MS)
    expect(driver, 0, recorded(driver, 0, (10, 20), (60, 90)))
    expect(driver, 1, recorded(driver, 1))
    close(folder, 100 * MS)
    return folder.write()


def stalls_in(path: Path, base_ns: int) -> list[tuple[int, int, int]]:
    """Return (pid, first ms, last ms) of each drawn stall."""
    content = gzip.decompress((path / "timeline.json.gz").read_bytes())
    events: list[dict[str, Any]] = json.loads(content, parse_float=Decimal)["traceEvents"]
    begin_us = (OPENED_NS - base_ns) // 1000
    return [
        (e["pid"], int(e["ts"] - begin_us) // 1000, int(e["ts"] + e["dur"] - begin_us) // 1000)
        for e in events
        if e["name"] == STALL
    ]


def test_stalls_are_spans_of_the_replicas_first_row(tmp_path: Path) -> None:
    path = step(tmp_path)
    merged = merge_step(path)
    (first, *_) = [row.pid for row in merged.rows if row.replica == 0]
    assert stalls_in(path, merged.base_ns) == [(first, 10, 20), (first, 60, 90)]
    assert merged.spans == 4 + 2


def test_a_selection_of_time_leaves_stalls_out(tmp_path: Path) -> None:
    path = step(tmp_path)
    merged = merge_step(path, selection=Selection(to_ms=50))
    assert [stall[1:] for stall in stalls_in(path, merged.base_ns)] == [(10, 20)]
    assert [what.split()[:2] for what in merged.left_out] == [["1", "spans"]]


def test_a_selection_of_other_roles_leaves_stalls_out(tmp_path: Path) -> None:
    path = step(tmp_path)
    merged = merge_step(path, selection=Selection(roles=("agent_loop",)))
    assert stalls_in(path, merged.base_ns) == []
