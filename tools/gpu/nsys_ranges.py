"""The part `nsys`: two captured steps under Nsight Systems, if it is installed.

nsys starts this module as a program: `python -m tools.gpu.nsys_ranges FOLDER`.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from stepscope import ProfileConfig, capture, flush
from stepscope.backends.nsys import command
from tools.gpu.device import Device
from tools.gpu.results import Record
from tools.gpu.trace_files import artifacts
from tools.gpu.trainer import small

STEPS = (1, 3)


def run(record: Record, device: Device, folder: Path) -> None:
    nsys = shutil.which("nsys")
    if nsys is None:
        record.absent("nsys is not on PATH, so nothing ran under it")
        return
    if device.pretend:
        record.absent("nsys is on PATH, and without a GPU there is nothing for it to record")
        return
    words = command(profile(folder / "run"))[1:]
    program = [sys.executable, "-m", "tools.gpu.nsys_ranges", str(folder / "run")]
    subprocess.run([nsys, *words, *program], check=True)
    own = json.loads((folder / "run" / "own.json").read_text())
    for step in STEPS:
        files = artifacts(folder / "run" / f"step_{step:06d}", "nsys_report")
        record.equal(f"step {step}: reports", len(files), 1, source="the loop")
        for file in files.values():
            _read(record, nsys, file, folder / f"step_{step}.sqlite", step, own[str(step)])


def profile(folder: Path) -> ProfileConfig:
    return ProfileConfig.from_mapping(
        {"save_path": str(folder), "steps": list(STEPS), "tool": "nsys", "counters": "off"}
    )


def _read(record: Record, nsys: str, file: Path, export: Path, step: int, own_ms: float) -> None:
    """Compare the range of a stage in nsys' own export with the time by CUDA events around the stage."""
    convert = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={export}", str(file)]
    subprocess.run(convert, check=True)
    with closing(sqlite3.connect(export)) as tables:
        (kernels,) = tables.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        named = "LEFT JOIN StringIds ON StringIds.id = textId WHERE coalesce(text, value) = ?"
        ranges = tables.execute(
            f"SELECT end - start FROM NVTX_EVENTS {named}", ("actor.update_actor",)
        ).fetchall()
    record.check(f"step {step}: kernels", kernels, "some", source="nsys export", agrees=kernels > 0)
    record.equal(f"step {step}: ranges of update_actor", len(ranges), 1, source="nsys export")
    for (duration_ns,) in ranges:
        record.near(
            f"step {step}: update_actor",
            duration_ns / 1e6,
            own_ms,
            unit="ms",
            source="CUDA events",
            within=0.1,
            beyond=1.0,
        )


def program(folder: Path) -> None:
    """Train five steps, capture two of them, and write the times of all by CUDA events."""
    trainer, config = small(Device(pretend=False)), profile(folder)
    own: dict[int, float] = {}
    for step in range(5):
        with capture(step, config=config, role="actor", rank=0):
            trainer.step()
        own[step] = next(times.device_ms for times in trainer.own if times.stage == "update_actor")
    flush(60)
    (folder / "own.json").write_text(json.dumps(own))


if __name__ == "__main__":
    program(Path(sys.argv[1]))
