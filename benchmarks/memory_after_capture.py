"""Memory that a process keeps after a capture of 400k events is written, compared with its peak.

Both are resident memory over the value before the recording: the peak, and the memory after the trace is
written and dropped. By torch alone, this is `export_chrome_trace`, `del` and a garbage collection.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import arguments, header, interleaved, table, verdict
from export_stall import Training, describe

from stepscope._recording.process.exports import Exporter
from stepscope.backends.torch import window
from stepscope.backends.torch.backend import TorchBackend
from stepscope.config import ProfileConfig
from stepscope.testing.backend_conformance import a_window

EVENTS = 400_000
TORCH, OURS = "torch", "stepscope"


def resident_mb(field: str = "VmRSS") -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def grown(work: Callable[[], None]) -> tuple[float, float]:
    """Return (peak, value afterwards) of the resident MB over the value before `work`."""
    window.give_memory_back()  # free memory that the other side has left
    before = resident_mb()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    work()
    return resident_mb("VmHWM") - before, resident_mb() - before


class Bench:
    def __init__(self, folder: Path, events: int) -> None:
        self.folder = folder
        self.events = events
        self.training = Training()
        self.backend = TorchBackend(ProfileConfig())
        self.backend.prepare()
        self.exporter = Exporter()
        self.grew: dict[str, list[tuple[float, float]]] = {TORCH: [], OURS: []}

    def measured(self, name: str, work: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            self.grew[name].append(grown(work))
            return self.grew[name][-1][1]

        return run

    def torch(self) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.training.record(self.events)
        profile.export_chrome_trace(str(self.folder / "torch.json"))
        del profile
        gc.collect()

    def stepscope(self) -> None:
        self.backend.start(a_window())
        self.training.record(self.events)
        [pending] = self.backend.stop()
        target = self.folder / "stepscope.json"
        self.exporter.submit(
            pending, target=target, describe=describe, on_done=lambda _: None, deferred=False
        )
        del pending
        self.exporter.drain(600)


def main() -> None:
    quick = arguments(__doc__).quick
    header("memory after a capture", "stepscope", "torch")
    folder = Path(tempfile.mkdtemp())
    try:
        bench = Bench(folder, EVENTS // 10 if quick else EVENTS)
        sides = {TORCH: bench.measured(TORCH, bench.torch), OURS: bench.measured(OURS, bench.stepscope)}
        interleaved(sides, 2 if quick else 5)
    finally:
        shutil.rmtree(folder)
    rows = []
    for name, grew in bench.grew.items():
        peak = statistics.median(growth[0] for growth in grew[1:])
        kept = statistics.median(growth[1] for growth in grew[1:])
        rows.append([name, f"{peak:.0f}", f"{kept:.1f}", f"{kept / peak:.1%}"])
    table(["MB over before", "peak", "kept", "of the peak"], rows)
    shares = [kept / peak * 100 for peak, kept in bench.grew[OURS][1:]]
    verdict("stepscope keeps, of the peak", statistics.median(shares), 2, " %")


if __name__ == "__main__":
    main()
