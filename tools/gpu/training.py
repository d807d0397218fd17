"""The part `training`: the demo's trainer and in-process rollout in two processes, and the run's report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope_report.timeline import Span, Timeline, load_step
from tools.gpu.device import Device
from tools.gpu.rank import RANKS, Own
from tools.gpu.results import Record
from tools.gpu.trace_files import work_in

KEPT = "kept"
"""Folder in the part's folder, whose files are copied to the output."""


def run(record: Record, device: Device, folder: Path) -> None:
    steps, group = device.size(6, 3), device.size(8, 2)
    root = folder / "run"
    owns = _train(root, steps, group, device)
    record.figure("steps", steps)
    record.figure("mean reward by step", ", ".join(f"{own.reward:.3f}" for own in owns[0]))
    lacking = [problem for own in (*owns[0], *owns[1]) for problem in own.problems]
    record.check(
        "files that the manifests lack", lacking or "none", "none", source="manifest", agrees=not lacking
    )
    last = root / f"step_{steps - 1:06d}"
    timeline = load_step(last)
    for rank in range(RANKS):
        _compare(record, device, timeline, rank, owns[rank][-1])
    _traces(record, device, last)
    _pages(record, root, last, folder / KEPT)


def _train(root: Path, steps: int, group: int, device: Device) -> list[list[Own]]:
    """Run both ranks, and return the times and counts that each rank took without stepscope."""
    root.mkdir(parents=True)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tools.gpu.rank", str(root), str(rank), str(steps), str(group)),
                device.name.partition(":")[0],
            ],
            env={**os.environ, "STEPSCOPE_RUN_ID": "60a0b0c0", "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        )
        for rank in range(RANKS)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    files = [root.parent / f"own_{rank}.json" for rank in range(RANKS)]
    return [[Own(**own) for own in json.loads(file.read_text())] for file in files]


def _compare(record: Record, device: Device, timeline: Timeline, rank: int, own: Own) -> None:
    """Compare the spans of one rank with the times and counts that it took without stepscope."""
    spans = [span for span in timeline.spans if timeline.processes[span.process].info.rank == rank]
    (update,) = (span for span in spans if span.stage == "update_actor")
    record.near(
        f"rank {rank}: update_actor",
        (update.dur_ns or 0) / 1e6,
        own.update_wall_ms,
        unit="ms",
        source="time.perf_counter",
        within=0.05,
        beyond=2.0,
    )
    record.near(
        f"rank {rank}: update_actor on the device",
        (update.dur_ns or 0) / 1e6,
        own.update_device_ms,
        unit="ms",
        source=device.clock,
        within=0.1,
        beyond=5.0,
    )
    record.equal(f"rank {rank}: tokens of all turns", _tokens(spans), own.tokens, source="the loop's tensors")
    names = {span.trajectory for span in spans if span.trajectory}
    record.equal(f"rank {rank}: trajectories", len(names), own.trajectories, source="the loop")
    if rank == 0:
        record.near(
            "wall time of the step",
            timeline.window.wall_ns / 1e6,
            own.wall_ms,
            unit="ms",
            source="time.perf_counter",
            within=0.05,
            beyond=20.0,
        )


def _tokens(spans: Sequence[Span]) -> int:
    turns = [span for span in spans if (span.role, span.stage) == ("rollout", "generate")]
    return sum(int((span.attrs or {})["tokens"] or 0) for span in turns)


def _traces(record: Record, device: Device, step: Path) -> None:
    """Check that the traces of rank 0's trainer and of rank 1's replica have work of the device."""
    files = sorted(file for file in step.rglob("*.json.gz") if "traces" in file.parts)
    works = {str(file.relative_to(step / "traces")): len(work_in(file, device.work)) for file in files}
    record.equal("traces of the last step", len(works), RANKS, source="the configuration")
    for name, events in works.items():
        what = f"{sorted(device.work)[0]} events in {name.partition('/')[0]}"
        record.check(what, events, "some", source="the JSON", agrees=events > 0)


def _pages(record: Record, root: Path, last: Path, kept: Path) -> None:
    """Run `stepscope report` and `stepscope merge`, and copy their files to `kept`."""
    kept.mkdir()
    command = [sys.executable, "-m", "stepscope"]
    text = subprocess.run([*command, "report", "--full", str(root)], stdout=subprocess.PIPE, text=True)
    (kept / "report.txt").write_text(text.stdout)
    record.equal("stepscope report: exit code", text.returncode, 0, source="the command line")
    merged = subprocess.run([*command, "merge", str(last)]).returncode
    record.equal("stepscope merge: exit code", merged, 0, source="the command line")
    pages = {"report.html": last / "report.html", "report_run.html": root / "report.html"}
    for name, file in {**pages, "timeline.json.gz": last / "timeline.json.gz"}.items():
        if file.exists():
            shutil.copyfile(file, kept / name)
            record.figure(f"{name} in kB", file.stat().st_size / 1e3)
    record.check(
        "the report page",
        f"{sum((kept / name).exists() for name in pages)} pages",
        f"{len(pages)} pages",
        source="the folder",
        agrees=all((kept / name).exists() for name in pages),
    )
