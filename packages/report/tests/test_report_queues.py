"""Queues of replicas in the table of engines: two of four requests wait, and the table says so or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.test_report_engines import MS, Rollout, report_of
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder


def slots(folder: StepFolder, *, named: tuple[str, ...], replicas: int = 2, calling: bool = False) -> None:
    """On each replica four requests at 0, of 10 + 40 ms, in two slots. So two of them wait for 50 ms."""
    for number in range(replicas):
        process = folder.process("agent_loop" if calling else "rollout", number)
        process.span("load_weights", 0, 5 * MS, role="rollout")
        for request in range(4):
            edges = (0, 50 * (request // 2), 50 * (request // 2) + 10, 50 * (request // 2) + 50)
            for stage, begin, end in zip(("queue", "prefill", "decode"), edges, edges[1:], strict=False):
                attrs: dict[str, AttrValue] = {"replica": number} if stage in named else {}
                process.span(stage, begin * MS, end * MS, role="rollout", attrs=attrs)


@pytest.mark.parametrize("named", [(), ("prefill", "decode"), ("queue", "prefill", "decode")])
def test_a_process_that_names_its_phases_is_one_row_with_its_queue(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    """Two of four requests wait for half of the time, whether or not their spans name the replica too."""
    rollout = Rollout(tmp_path)
    slots(rollout.folder, named=named)
    rows = rollout.rows()
    assert [row.processes for row in rows.values()] == [("rollout 0",), ("rollout 1",)]
    assert [(row.waiting_mean, row.waiting_most) for row in rows.values()] == [(1.0, 2)] * 2
    assert report_of(rollout.folder.layout.root).phaseless == ()


def test_queues_of_an_unknown_replica_are_not_called_empty(tmp_path: Path) -> None:
    """A caller of two replicas: its queues, which name none, stand in no row."""
    rollout = Rollout(tmp_path)
    slots(rollout.folder, named=("prefill", "decode"), calling=True)
    rows = rollout.rows()
    assert list(rows) == ["replica 0", "replica 1"]
    assert [(row.waiting_mean, row.waiting_most) for row in rows.values()] == [(None, None)] * 2
