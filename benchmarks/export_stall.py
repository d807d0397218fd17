"""Delay of a training loop while a trace of 200k events is written.

The stall is the time by which a fixed training loop ends later because of the trace. torch's own
`export_chrome_trace("x.json.gz")` writes the trace before the loop, stepscope's exporter writes it during the
loop, or, with `export.when: deferred`, after the loop. The stop of torch's profiler is not counted.

The table also shows CPU times that explain the stall: how long the GIL was held to write and to free the
trace, and the export's CPU time within the step (the hand-over, and other threads during the loop). These CPU
times are valid on a busy machine, too. The stall is wall-clock time and needs two idle cores, one of them for
the compressor.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from _measure import Measured, arguments, header, interleaved, median_over, table, verdict

from stepscope._recording.process.exports import Exporter, ExportResult
from stepscope.backends.torch.backend import TorchBackend
from stepscope.config import ProfileConfig
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.backend_conformance import a_window

EVENTS = 200_000
ROUNDS = 5
NOTHING, TORCH = "no export", "torch .json.gz"
BACKGROUND, DEFERRED = "stepscope, background", "stepscope, deferred"


class Training:
    """A model so small that the overhead of operators takes most of the time."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        for _ in range(2):  # the first steps set up autograd and momenta
            self.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.step()
        self.events = len(profile.events())
        """Number of profiler events of one step."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(torch.randn(8, 16)), torch.randint(4, (8,)))
        torch.autograd.backward(loss)
        self.optimizer.step()

    def record(self, events: int) -> None:
        for _ in range(events // self.events):
            self.step()


def training_loop(iterations: int) -> None:
    """Run steps of a model so small that Python takes most of the time."""
    weight = torch.ones(8, 8)
    for step in range(iterations):
        weight = torch.tanh(weight @ weight)
        sum(step % k for k in range(1, 20))


class Bench:
    def __init__(self, folder: Path, events: int, iterations: int) -> None:
        self.folder = folder
        self.events = events
        self.iterations = iterations
        self.training = Training()
        self.backend = TorchBackend(ProfileConfig())
        self.backend.prepare()
        self.exporter = Exporter()
        self.sizes: dict[str, int] = {}
        self.held: dict[str, list[float]] = {TORCH: [], BACKGROUND: [], DEFERRED: []}
        """CPU ms with the GIL held, by round."""
        self.inside: dict[str, list[float]] = {NOTHING: [], TORCH: [], BACKGROUND: [], DEFERRED: []}
        """CPU ms of the export within the step, on all threads, by round."""

    def nothing(self) -> float:
        """Return the ms of the loop without an export."""
        return self.loop(NOTHING, 0.0)

    def torch(self) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.training.record(self.events)
        path = self.folder / "torch.json.gz"
        began, cpu = time.perf_counter(), time.thread_time()
        profile.export_chrome_trace(str(path))
        held = (time.thread_time() - cpu) * 1e3
        self.held[TORCH].append(held)
        exported = (time.perf_counter() - began) * 1e3
        self.sizes[TORCH] = path.stat().st_size
        return exported + self.loop(TORCH, held)

    def background(self) -> float:
        return self.stepscope(deferred=False)

    def deferred(self) -> float:
        return self.stepscope(deferred=True)

    def stepscope(self, *, deferred: bool) -> float:
        self.backend.start(a_window())
        self.training.record(self.events)
        [pending] = self.backend.stop()
        results: list[ExportResult] = []
        name = DEFERRED if deferred else BACKGROUND

        def write(path: Path) -> None:
            cpu = time.thread_time()
            pending.write(path)
            self.held[name].append((time.thread_time() - cpu) * 1e3)

        began, cpu = time.perf_counter(), time.thread_time()
        self.exporter.submit(
            msgspec.structs.replace(pending, write=write),
            target=self.folder / "stepscope.json",
            describe=describe,
            on_done=results.append,
            deferred=deferred,
        )
        submitted = (time.perf_counter() - began) * 1e3
        took = submitted + self.loop(name, (time.thread_time() - cpu) * 1e3)
        if deferred is bool(results):
            raise SystemExit(
                "the loop has to outlast the export, and a deferred export the loop: more iterations"
            )
        self.exporter.drain(600)
        assert results[0].artifact is not None, results[0].error
        self.sizes[name] = results[0].artifact.size_bytes
        return took

    def loop(self, name: str, before: float) -> float:
        """Run the loop and return its ms. `before` is CPU ms that the export has taken of this thread."""
        began, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        training_loop(self.iterations)
        took = (time.perf_counter() - began) * 1e3
        others = (time.process_time() - process) - (time.thread_time() - thread)
        self.inside[name].append(before + others * 1e3)
        return took


def describe(size_bytes: int, path: Path) -> Sidecar:
    artifact = Artifact(
        path=path.name, kind="torch_trace", tool="torch", role="actor", host="h", size_bytes=size_bytes
    )
    return Sidecar(step=2, run_id="bench", artifact=artifact, process=None, opened=None, closed=None)


def report(results: Measured, bench: Bench) -> None:
    stalls = {name: median_over(results, name, NOTHING) for name in (TORCH, BACKGROUND, DEFERRED)}
    held = {name: statistics.median(stalls_ms[1:]) for name, stalls_ms in bench.held.items()}
    inside = {name: statistics.median(stalls_ms[1:]) for name, stalls_ms in bench.inside.items()}
    rows = [
        [
            name,
            f"{stall:.0f}",
            f"{stalls[TORCH] / stall:.1f}x" if stall > 1 else "-",
            f"{held[name]:.0f}",
            f"{held[TORCH] / held[name]:.1f}x",
            f"{inside[name]:.1f}",
            f"{bench.sizes[name] / 1e6:.1f}",
        ]
        for name, stall in stalls.items()
    ]
    table(["", "stall ms", "less by", "GIL held, CPU ms", "less by", "inside the step, CPU ms", "MB"], rows)
    less = stalls[TORCH] / max(stalls[BACKGROUND], 1)
    verdict("background: stalls less than torch's own", less, 10, "x", at_least=True)
    extra = inside[DEFERRED] - inside[NOTHING]
    verdict("deferred: CPU of any thread that the export takes inside the step", extra, 1, " ms")


def main() -> None:
    quick = arguments(__doc__).quick
    header("the stall that export adds", "stepscope", "torch", "isal")
    events, iterations = (20_000, 30_000) if quick else (EVENTS, 200_000)
    folder = Path(tempfile.mkdtemp())
    try:
        bench = Bench(folder, events, iterations)
        contenders = {
            NOTHING: bench.nothing,
            TORCH: bench.torch,
            BACKGROUND: bench.background,
            DEFERRED: bench.deferred,
        }
        report(interleaved(contenders, 2 if quick else ROUNDS), bench)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
