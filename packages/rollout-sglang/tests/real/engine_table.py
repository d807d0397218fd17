"""Tests of all pairs of options, by the eight rows of an orthogonal array.

The options are set by a configuration, and `capture()` records. Run by `test_engines.py`.
"""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_sglang import generate, on_its_loop

from stepscope import ProfileConfig, aprepare, capture
from stepscope.errors import ConfigError
from stepscope.files.manifest import Expectation
from stepscope.files.sidecar import Artifact
from stepscope_report.timeline import load_step
from stepscope_sglang._versions import PLUGINS_SINCE, installed, older

MERGES = not older(installed(), "0.5.4")


class Row(NamedTuple):
    by_stage: bool
    merge: bool
    bounded: bool
    with_stack: bool
    record_shapes: bool
    cuda: bool
    start: bool
    """True if the configuration states `start: 0`; False if it relies on the default."""


ROWS = [Row(a, b, a ^ b, c, a ^ c, b ^ c, a ^ b ^ c) for a, b, c in product((False, True), repeat=3)]
"""Rows of Taguchi's orthogonal array L8."""


def config_of(row: Row, save_path: Path, iterations: dict[str, int] | None = None) -> ProfileConfig:
    if iterations is None:
        iterations = {**({"start": 0} if row.start else {}), **({"count": 1} if row.bounded else {})}
    engine = {
        "by_stage": row.by_stage,
        "merge": row.merge,
        **({"iterations": iterations} if iterations else {}),
    }
    return ProfileConfig(
        save_path=str(save_path),
        steps="7",
        roles={"rollout": {"ranks": "all", "engine": engine}, "*": {"ranks": "first"}},
        torch={
            "activities": ["cpu", "cuda"] if row.cuda else ["cpu"],
            "with_stack": row.with_stack,
            "record_shapes": row.record_shapes,
        },
    )


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(n for n, on in row._asdict().items() if on) or "plain"
)
def test_a_row_of_the_table(engine: Any, tmp_path: Path, row: Row) -> None:
    replica = capture_of(engine, config_of(row, tmp_path))
    assert replica.state == "ok", replica.reason
    merged = [artifact for artifact in replica.artifacts if artifact.kind == "merged_trace"]
    traces = [artifact for artifact in replica.artifacts if artifact.kind == "torch_trace"]
    assert sorted(artifact.stage or "" for artifact in traces) == (
        ["decode", "prefill"] if row.by_stage else [""]
    )
    assert bool(merged) == (row.merge and not row.by_stage and MERGES)
    ignored = {"activities": row.cuda, "merge": row.merge and not merged}
    assert set(replica.ignored) == {option for option, asked in ignored.items() if asked}
    for trace in traces:
        assert_content(trace, tmp_path / "step_000007", row)


def capture_of(engine: Any, config: ProfileConfig) -> Expectation:
    async def scenario() -> Expectation:
        async with capture(7, engines=engine, config=config) as cap:
            await generate(engine, 1, 4)
        manifest = cap.result.manifest()
        assert manifest is not None
        (part,) = manifest.processes
        (replica,) = [item for item in part.expected if item.name == "replica 0"]
        return replica

    return on_its_loop(engine, scenario())


def test_the_step_keeps_the_settings_of_the_engine(engine: Any, tmp_path: Path) -> None:
    capture_of(engine, config_of(ROWS[0], tmp_path))
    manifest = load_step(tmp_path / "step_000007").manifest
    assert manifest is not None
    (settings,) = (engine for part in manifest.processes for engine in part.settings)
    assert (settings.framework, settings.version, settings.engine) == ("sglang", installed(), True)
    values = {setting.name: setting.value for setting in settings.settings}
    memory = values.pop("mem_fraction_static")
    assert memory is None or (isinstance(memory, float) and 0 < memory < 1)
    assert values == {
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "dp_size": 1,
        "enable_mixed_chunk": False,
        "max_running_requests": 8,
        "tp_size": 1,
    }


def assert_content(trace: Artifact, step: Path, row: Row) -> None:
    with gzip.open(step / trace.path) as file:
        events = json.load(file)["traceEvents"]
    kinds = {event.get("cat") for event in events}
    shapes = any("Input Dims" in event.get("args", {}) for event in events)
    assert "cpu_op" in kinds
    assert ("python_function" in kinds) == row.with_stack
    assert shapes == row.record_shapes
    passes = embeddings(events)
    if row.bounded:
        assert passes == 1
    elif not row.by_stage:
        assert passes == 4


PAIRS = list(product((None, 0, 1), (None, 1), (False, True)))
"""(start, count, by stage): all pairs of `start` and `count`, with None for the default. A count of 0 is
refused, as another test shows."""


@pytest.mark.parametrize(("start", "count", "by_stage"), PAIRS, ids=str)
def test_a_window_of_the_table(
    engine: Any, tmp_path: Path, start: int | None, count: int | None, by_stage: bool
) -> None:
    window = {name: value for name, value in (("start", start), ("count", count)) if value is not None}
    config = config_of(Row(by_stage, *[False] * 6), tmp_path, iterations=window)
    replica = capture_of(engine, config)
    if start == 1 and not by_stage and older(installed(), PLUGINS_SINCE):
        assert replica.state == "failed"
        assert "to nobody" in (replica.reason or "")
        return
    assert replica.state == "ok", replica.reason
    assert ("iterations.start" in replica.ignored) == (start == 1 and by_stage)
    recorded = {
        artifact.stage: passes_of(artifact, tmp_path / "step_000007")
        for artifact in replica.artifacts
        if artifact.kind == "torch_trace"
    }
    left = 4 - (start or 0)
    assert recorded == ({"prefill": 1, "decode": count or 3} if by_stage else {None: count or left})


def test_verls_keys_of_a_window_by_stage_record_both_stages(engine: Any, tmp_path: Path) -> None:
    contents = ["cpu", "profile_by_stage", "merge_profiles"]
    tool = {"torch": {"discrete": True, "contents": contents, "step_start": 1, "step_end": 4}}
    rollout = {"profiler": {"enable": True, "all_ranks": True, "tool_config": tool}}
    config = ProfileConfig.from_verl(
        {
            "global_profiler": {"tool": "torch", "steps": [7], "save_path": str(tmp_path)},
            "actor_rollout_ref": {"rollout": rollout},
        }
    )
    on_its_loop(engine, aprepare(engines=engine, config=config))
    replica = capture_of(engine, config)
    stages = {artifact.stage for artifact in replica.artifacts if artifact.kind == "torch_trace"}
    assert stages == {"prefill", "decode"}
    assert set(replica.ignored) == {"iterations.start", "merge"}


def passes_of(trace: Artifact, step: Path) -> int:
    with gzip.open(step / trace.path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return embeddings(events)


def embeddings(events: list[dict[str, Any]]) -> int:
    """Return the number of forward passes, each of which has two embeddings."""
    return [event.get("name") for event in events].count("aten::embedding") // 2


def test_no_activities_are_refused_by_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="records nothing"):
        ProfileConfig(save_path=str(tmp_path), steps="7", torch={"activities": []})


def test_an_empty_window_is_refused_by_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="count"):
        ProfileConfig(
            save_path=str(tmp_path),
            steps="7",
            roles={"*": {"ranks": "all", "engine": {"iterations": {"start": 0, "count": 0}}}},
        )
