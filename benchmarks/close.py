"""Time of `close()` in a step folder that already holds the parts of many other processes.

python benchmarks/close.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from stepscope import ProfileConfig, capture
from stepscope._recording.process import exports
from stepscope._recording.process.identity import run_id
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Expectation, ProcessPart
from stepscope.files.sidecar import ProcessInfo

OTHERS = (0, 64, 512)
ROUNDS = 7


def close_ms(config: ProfileConfig, step: int, others: int) -> tuple[float, float]:
    """Return the ms of a close: (on the clock, CPU of the process)."""
    cap = capture(step, config=config).open()
    layout = RunLayout(config.save_path).step(step)
    (own,) = layout.processes.glob("[!.]*.json")
    part = msgspec.json.decode(own.read_bytes(), type=ProcessPart)
    items = (
        Expectation(name="spans", kind="spans", state="ok"),
        Expectation(name="torch trace", kind="trace", state="ok"),
    )
    for rank in range(others):
        process = ProcessInfo(role="actor", rank=rank, world_size=others, host="elsewhere", pid=1000 + rank)
        other = msgspec.structs.replace(
            part, process=process, owner=False, expected=items, closed=part.opened
        )
        layout.part_of(process, run_id()).write_bytes(msgspec.json.encode(other))
    exports.exporter().drain(60)
    began, cpu_began = time.perf_counter(), time.process_time()
    cap.close()
    return (time.perf_counter() - began) * 1e3, (time.process_time() - cpu_began) * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # background work may still write
        config = ProfileConfig(save_path=str(Path(folder, "run")), steps="every:1", roles={"none": {}})
        steps = iter(range(10_000))
        close_ms(config, next(steps), 0)
        measured: dict[int, list[tuple[float, float]]] = {others: [] for others in OTHERS}
        for _ in range(ROUNDS):
            for others in OTHERS:
                measured[others].append(close_ms(config, next(steps), others))
        for others, times in measured.items():
            clock_ms, cpu_ms = (statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"{others:4d} other parts: close() {clock_ms:7.1f} ms, {cpu_ms:.1f} ms of CPU (of {ROUNDS})"
            )


if __name__ == "__main__":
    main()
