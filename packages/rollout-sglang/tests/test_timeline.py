"""Test of a step with SGLang, from its capture to the merged timeline."""

from __future__ import annotations

from pathlib import Path

from fake_sglang import FakeManager

from stepscope import ProfileConfig, capture, trajectory, turn
from stepscope_report.timeline.load import load_step
from stepscope_report.timeline.merge.merge import merge_step
from stepscope_sglang import SglangProfiler, request_facts

META = {
    "prompt_tokens": 8,
    "completion_tokens": 4,
    "cached_tokens": 3,
    "queue_time": 0.125,
    "e2e_latency": 1.5,
}


async def captured(root: Path, **engine: object) -> Path:
    """Return the folder of a step with a replica of two ranks, and a turn that sent a request to it."""
    manager = FakeManager(tp=2)
    config = ProfileConfig(
        save_path=str(root),
        steps="3",
        roles={"rollout": {"ranks": "all", "engine": engine}, "*": {"ranks": "first"}},
        torch={"activities": ["cpu"]},
        tool="torch",
    )
    async with capture(3, engines=[SglangProfiler(manager)], config=config, role="agent_loop"):
        with trajectory("t-1"), turn(0) as this:
            await manager.generate(4)
            this.set(**request_facts(META))
    return root / "step_000003"


async def test_the_traces_of_both_ranks_are_in_the_timeline_and_the_merged_one_is_not(tmp_path: Path) -> None:
    step = await captured(tmp_path, merge=True)
    merged = merge_step(step)
    replica = [file for file in merged.files if "/replica0/" in file.file]
    rows = {row.pid: row for row in merged.rows}
    assert sorted((rows[file.row].role, rows[file.row].rank) for file in replica) == [
        ("rollout", 0),
        ("rollout", 1),
    ]
    assert any("merged-" in text and "the traces beside" in text for text in merged.left_out)


async def test_the_turn_says_where_the_requests_time_went(tmp_path: Path) -> None:
    timeline = load_step(await captured(tmp_path))
    (this,) = [span for span in timeline.spans if span.stage == "turn"]
    assert this.trajectory == "t-1"
    attrs = this.attrs or {}
    assert (attrs["queued_s"], attrs["latency_s"], attrs["cached_tokens"]) == (0.125, 1.5, 3)
