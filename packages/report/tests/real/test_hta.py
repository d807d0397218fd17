"""HolisticTraceAnalysis loads the traces that stepscope writes for each rank, as they lie on disk."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hta.trace_analysis import TraceAnalysis

from stepscope.files.layout import RunLayout, StepLayout
from stepscope_report.timeline.activity.content_reader import read_trace
from stepscope_report.timeline.activity.device_idle import ON_HOST

pytestmark = pytest.mark.filterwarnings("ignore")  # it calls what pandas deprecates

RANK = """
import sys, torch
from stepscope import ProfileConfig, capture, flush, profile_step

every_rank = {"*": {"ranks": "all"}}
config = ProfileConfig.from_mapping({"save_path": sys.argv[1], "steps": [2], "roles": every_rank})
model = torch.nn.Linear(8, 8)

@profile_step(role="actor")
def update() -> None:
    model(torch.ones(4, 8)).sum().backward()

with capture(2, config=config):
    for _ in range(20):
        update()
flush()
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> StepLayout:
    """Two ranks, recorded one after the other into one folder."""
    folder = tmp_path_factory.mktemp("run")
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, "-c", RANK, str(folder)], check=True, env=environment, timeout=300)
    return RunLayout(folder).step(2)


def traces(step: StepLayout) -> dict[int, str]:
    return {
        rank: str(path) for rank in range(2) for path in step.traces.rglob(f"*_rank{rank}-of-2_*.json.gz")
    }


def test_it_loads_the_trace_of_every_rank_with_all_operators(step: StepLayout) -> None:
    files = traces(step)
    assert sorted(files) == [0, 1]
    analysis = TraceAnalysis(trace_files=dict(files))
    for rank, path in files.items():
        written = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        operators = [event for event in written if event["ph"] == "X" and event["cat"] == "cpu_op"]
        trace = analysis.t.get_trace(rank)
        names = analysis.t.symbol_table.get_sym_table()
        seen = [names[at] for at in trace["name"]]
        assert seen.count("aten::linear") == sum(event["name"] == "aten::linear" for event in operators) >= 20
        assert sum(names[at] == "cpu_op" for at in trace["cat"]) == len(operators)


def test_its_analyses_that_need_no_device_run(step: StepLayout) -> None:
    analysis = TraceAnalysis(trace_files=traces(step))
    kernels, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    assert kernels.empty  # nothing ran on a device here


def test_gaps_caused_by_the_program_are_its_host_waits(tmp_path: Path) -> None:
    chance, at, events = random.Random(5), 100, list[dict[str, object]]()
    for number in range(1, 400):
        start = at + chance.choice((0, 2, 40))
        call, dur = start - chance.randrange(3, 60), chance.randrange(5, 80)
        called, on_stream = {"correlation": number}, {"correlation": number, "stream": 7, "device": 0}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": call, "dur": 2}
        ran = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start, "dur": dur}
        events += [{"ph": "X", "args": called, **launch}, {"ph": "X", "args": on_stream, **ran}]
        at = start + dur
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    times, _ = TraceAnalysis(trace_files={0: str(path)}).get_idle_time_breakdown(
        ranks=[0], streams=[7], visualize=False
    )
    waits = {row.idle_category: row.idle_time for row in times.itertuples()}
    gaps = read_trace(path).gaps
    assert sum(gap.total_us for gap in gaps if gap.kind in ON_HOST) == waits.pop("host_wait") > 0
    assert sum(gap.total_us for gap in gaps if gap.kind == "queued") == sum(waits.values()) > 0
