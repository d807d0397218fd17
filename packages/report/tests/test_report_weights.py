"""Weight synchronisation of steps made by hand: phases, bytes per bucket and rank, and who waited."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from packages.report.tests.steps import MS, Row, a_step, close, printed, reported
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.sections.weight_sync import WeightSync
from stepscope_report.timeline import load_step

GB = 1_000_000_000


def report(tmp_path: Path, *, sized: bool = True) -> StepReport:
    """Return the report of a step of 1 s: two ranks send two buckets each, a replica loads them, one idles.

    Rank 0 sends a bucket of 1 GB in 100 ms, rank 1 in 200 ms.
    """
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    actors = [folder.process("actor", rank) for rank in range(2)]
    replica = folder.process("rollout", replica=0)
    critic = folder.process("critic", 0)
    whole: dict[str, AttrValue] = {"bytes": 4 * GB} if sized else {}
    sync = driver.span("sync_weights", 500 * MS, 1000 * MS, attrs=whole)
    for rank, actor in enumerate(actors):
        for bucket in range(2):
            length_ns = (rank + 1) * 100 * MS
            start_ns = 500 * MS + bucket * length_ns
            attrs: dict[str, AttrValue] = {"bucket": bucket, "bytes": GB} if sized else {}
            actor.span("send_weights", start_ns, start_ns + length_ns, link=driver.link(sync), attrs=attrs)
    replica.span("load_weights", 900 * MS, 1000 * MS, link=driver.link(sync))
    critic.span("update_critic", 0, 500 * MS)
    driver.span("update_actor", 0, 500 * MS)
    close(folder, 1000 * MS)
    return step_report(load_step(folder.write()))


def sync_of(result: StepReport) -> WeightSync:
    assert result.weight_sync is not None
    return result.weight_sync


def test_phases_stand_by_their_starts_with_the_bytes_of_all_ranks(tmp_path: Path) -> None:
    phases = sync_of(report(tmp_path)).phases
    assert [(phase.role, phase.stage, phase.since_ns, phase.active_ns, phase.bytes) for phase in phases] == [
        ("actor", "send_weights", 500 * MS, 400 * MS, 4 * GB),
        ("trainer", "sync_weights", 500 * MS, 500 * MS, 4 * GB),
        ("rollout", "load_weights", 900 * MS, 100 * MS, None),
    ]


def test_each_bucket_of_each_rank_has_its_rate(tmp_path: Path) -> None:
    transfers = sync_of(report(tmp_path)).transfers
    rates = {(row.rank, row.bucket): row.gb_per_s for row in transfers if row.stage == "send_weights"}
    assert rates == {(0, "0"): 10, (0, "1"): 10, (1, "0"): 5, (1, "1"): 5}


def test_who_did_nothing_meanwhile_waited(tmp_path: Path) -> None:
    waits = {wait.process: wait.waited_ns for wait in sync_of(report(tmp_path)).waits}
    assert waits["critic 0"] == 500 * MS
    assert waits["actor 0"] == 300 * MS


def test_of_nested_calls_of_a_stage_the_outermost_has_the_bytes(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("trainer sync_weights", 0, 100, {"attrs": {"bytes": GB}}),
        ("trainer sync_weights", 0, 50, "sync_weights", {"attrs": {"bytes": GB // 2}}),
    ]
    sync = sync_of(reported(a_step(tmp_path, 100, rows)))
    assert [phase.bytes for phase in sync.phases] == [GB]
    assert [(row.bytes, row.gb_per_s) for row in sync.transfers] == [(GB, 10)]


def test_the_tables_are_printed_drawn_and_in_json(tmp_path: Path) -> None:
    result = report(tmp_path)
    text = printed(result, 150)
    for title in ("Weight synchronisation", "Weights moved, by process and bucket", "Waited for weights"):
        assert title in text
    assert 'id="weight-sync"' in render_step(load_step(tmp_path / "step_000002"), result)
    assert json.loads(msgspec.json.encode(result))["weight_sync"]["active_ns"] == 500 * MS


def test_without_bytes_the_report_says_how_to_state_them(tmp_path: Path) -> None:
    result = report(tmp_path, sized=False)
    assert sync_of(result).transfers == ()
    assert 'attrs={"bytes": ...}' in printed(result, 150)


def test_a_step_that_moves_no_weights_has_no_such_section(tmp_path: Path) -> None:
    result = reported(a_step(tmp_path, 10, [("trainer update_actor", 0, 9)]))
    assert result.weight_sync is None
    assert "Weight" not in printed(result, 150)
