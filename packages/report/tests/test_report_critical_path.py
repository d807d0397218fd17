"""The critical path in a report: its table, its marks, and its track in a merged timeline."""

from __future__ import annotations

import gzip
import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from stepscope.testing.steps import StepFolder
from stepscope_report import CriticalPath, StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.terminal.text import render
from stepscope_report.timeline import load_step, merge_step

MS = 1_000_000


def recorded(save_path: Path) -> Path:
    """A step of 3 s: a rollout whose last trajectory called a slow tool, and a weight sync that aborts."""
    folder = StepFolder(save_path)
    trainer, actor = folder.process("trainer", owner=True), folder.process("actor", 0)
    rollout = trainer.span("rollout", 0, 900 * MS, role="agent_loop")
    for name, took in (("t1", 300), ("t2", 890)):
        own = {"trajectory": name, "turn": 0}
        turn = trainer.span("turn", 1 * MS, took * MS, parent=rollout, role="agent_loop", **own)  # type: ignore[arg-type]
        trainer.span("generate", 1 * MS, 90 * MS, parent=turn, role="rollout", **own)  # type: ignore[arg-type]
        trainer.span("queue", 90 * MS, 100 * MS, parent=turn, role="env", **own)  # type: ignore[arg-type]
        trainer.span("search", 100 * MS, took * MS, parent=turn, role="env", **own)  # type: ignore[arg-type]
    sync = trainer.span("sync_weights", 900 * MS, 2950 * MS)
    actor.span("abort_requests", 910 * MS, 2910 * MS, link=trainer.link(sync))
    actor.span("send_weights", 2910 * MS, 2940 * MS, link=trainer.link(sync))
    for process in (trainer, actor):
        process.close(3000 * MS)
    return folder.write()


def path_of(tmp_path: Path) -> tuple[StepReport, CriticalPath]:
    report = step_report(load_step(recorded(tmp_path)))
    return report, report.critical_path


def test_a_weight_sync_has_the_time_of_the_calls_below_it_and_their_shares(tmp_path: Path) -> None:
    _, path = path_of(tmp_path)
    (sync,) = (row for row in path.stages if row.stage == "sync_weights")
    assert (sync.wall_ns, sync.inside_ns, sync.saves_ns) == (20 * MS, 2050 * MS, 2050 * MS)
    assert [(part.stage, part.wall_ns) for part in sync.parts] == [
        ("abort_requests", 2000 * MS),
        ("send_weights", 30 * MS),
    ]


def test_advice_on_a_weight_sync_counts_the_calls_below_it_and_begins_with_the_longest(
    tmp_path: Path,
) -> None:
    """No stage that moves weights runs while requests are aborted, so that leaves alone say 50 ms."""
    report, path = path_of(tmp_path)
    assert path.weights is not None
    assert (path.weights.wall_ns, path.weights.saves_ns) == (2050 * MS, 2050 * MS)
    (advice,) = (item for item in report.advice if item.rule == "weight-sync")
    assert advice.saves_ns == 2050 * MS
    assert "abort_requests 2.00 s" in advice.because[1]
    assert "abort_requests" in advice.do


def test_a_slow_tool_has_its_trajectory_and_what_the_next_one_lets_it_save(tmp_path: Path) -> None:
    _, path = path_of(tmp_path)
    (tool,) = (row for row in path.stages if row.stage == "search")
    assert (tool.wall_ns, tool.trajectory, tool.turn) == (790 * MS, "t2", 0)
    assert tool.saves_ns == 790 * MS  # the search of the other trajectory takes no time either
    (queue,) = (row for row in path.stages if row.stage == "queue")
    assert (queue.kind, queue.wall_ns, queue.process) == ("wait", 10 * MS, "trainer")


def test_terminal_page_and_json_show_it(tmp_path: Path) -> None:
    timeline = load_step(recorded(tmp_path))
    report = step_report(timeline)
    text = StringIO()
    Console(file=text, width=150).print(render(report))
    assert "Critical path" in text.getvalue()
    assert "env queue (waiting)" in text.getvalue()
    page = render_step(timeline, report)
    assert '<section id="critical-path">' in page
    assert page.count("critical path: ") >= 4  # the marks above the processes
    assert page.index('data-t="critical path: ') < page.index('data-t="trainer: ')


def test_a_merged_timeline_has_a_track_of_it(tmp_path: Path) -> None:
    step = recorded(tmp_path)
    merge_step(step)
    events = json.loads(gzip.decompress((step / "timeline.json.gz").read_bytes()))["traceEvents"]
    drawn = [event for event in events if event.get("cat") == "critical path"]
    names = [event["name"].partition(" ")[2] for event in drawn]
    assert names == ["rollout", "generate", "queue", "search", "rollout", "sync_weights", "abort_requests",
                     "send_weights", "sync_weights"]  # fmt: skip
    assert len({(event["pid"], event["tid"]) for event in drawn}) == 1
    assert sum(event["dur"] for event in drawn) == 2_950_000
    assert next(event["args"]["kind"] for event in drawn if event["name"] == "env queue") == "wait"
