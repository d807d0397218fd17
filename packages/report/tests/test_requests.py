"""Arrows from who made a request to who served it, by the name that both give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packages.report.tests.steps import MS, timeline_of
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report.timeline import load_step, merge_step
from stepscope_report.timeline.tree import requests


def step(tmp_path: Path) -> tuple[StepFolder, FakeProcess, FakeProcess]:
    """Return an agent loop and an engine on one host."""
    folder = StepFolder(tmp_path)
    return folder, folder.process("agent_loop", owner=True), folder.process("rollout", 0)


def named(folder: StepFolder) -> list[tuple[str, str]]:
    timeline = load_step(folder.write())
    spans = timeline.spans
    return [(spans[cause].stage, spans[effect].stage) for cause, effect in requests(timeline)]


def turn(loop: FakeProcess, name: str, at: int = 0, stage: str = "turn", **more: Any) -> int:
    return loop.span(
        stage, at, at + 9 * MS, trajectory=f"t{name}", turn=0, attrs={"request_id": name}, **more
    )


def test_a_turn_leads_to_the_spans_that_served_its_request(tmp_path: Path) -> None:
    folder, loop, engine = step(tmp_path)
    turn(loop, "r1")
    turn(loop, "r2", stage="other turn")
    serve = engine.span("serve", MS, 8 * MS, attrs={"request_id": "r1"})
    engine.span("prefill", 2 * MS, 3 * MS, parent=serve, attrs={"request_id": "r1"})
    engine.span("decode", 3 * MS, 4 * MS, attrs={"request_id": "r2"})
    engine.span("unnamed", 3 * MS, 4 * MS)
    assert sorted(named(folder)) == [("other turn", "decode"), ("turn", "serve")]
    merge_step(folder.layout.root)
    events = timeline_of(folder.layout.root)["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ends = {e["id"]: slices[e["pid"], e["tid"], e["ts"]] for e in events if e["ph"] == "f"}
    starts = {e["id"]: slices[e["pid"], e["tid"], e["ts"]] for e in events if e["ph"] == "s"}
    assert sorted((starts[number], ends[number]) for number in ends) == [
        ("other turn", "decode"),
        ("turn", "serve"),
    ]
    assert {e["name"] for e in events if e["ph"] == "s"} == {"request"}


def test_the_innermost_span_that_names_the_request_made_it(tmp_path: Path) -> None:
    folder, loop, engine = step(tmp_path)
    outer = turn(loop, "r1")
    turn(loop, "r1", MS, "model call", parent=outer)
    engine.span("serve", MS, 8 * MS, attrs={"request_id": "r1"})
    assert named(folder) == [("model call", "serve")]


def test_what_a_carrier_says_is_not_said_twice(tmp_path: Path) -> None:
    folder, loop, engine = step(tmp_path)
    made = turn(loop, "r1")
    engine.span("serve", MS, 8 * MS, link=loop.link(made), attrs={"request_id": "r1"})
    assert named(folder) == []


def test_two_processes_that_could_have_made_it_make_no_arrow(tmp_path: Path) -> None:
    folder, loop, engine = step(tmp_path)
    turn(loop, "r1")
    turn(folder.process("agent_loop", pid=77), "r1")
    engine.span("serve", MS, 8 * MS, attrs={"request_id": "r1"})
    assert named(folder) == []


def test_spans_that_only_overlap_make_no_arrow(tmp_path: Path) -> None:
    folder, loop, engine = step(tmp_path)
    loop.span("turn", 0, 9 * MS, trajectory="t1", turn=0)
    engine.span("iteration", MS, 2 * MS)
    assert named(folder) == []
