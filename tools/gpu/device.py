"""The GPU of the run. With `--pretend`, the CPU and stand-ins take its place."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STANDIN_SMI = Path(__file__).with_name("standin_smi.py")
SMI_PLACES = ("/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi", "/opt/bin/nvidia-smi")


class Stopwatch:
    """The time of some work on the device, measured without stepscope."""

    ms: float = 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


class Device:
    """The first visible GPU, or the CPU."""

    def __init__(self, *, pretend: bool) -> None:
        self.pretend = pretend
        self.name = "cpu" if pretend else "cuda:0"
        self.torch = torch.device(self.name)
        if pretend:
            torch.set_num_threads(1)
        self.clock = "time.perf_counter" if pretend else "CUDA events"
        self.work = frozenset({"cpu_op"} if pretend else {"kernel", "gpu_memcpy", "gpu_memset"})
        """Categories of a torch trace that are work of this device."""

    def size(self, gpu: int, cpu: int) -> int:
        """Return `gpu`, or `cpu` with `--pretend`."""
        return cpu if self.pretend else gpu

    def synchronize(self) -> None:
        if not self.pretend:
            torch.cuda.synchronize()

    @contextmanager
    def timed(self) -> Iterator[Stopwatch]:
        """Measure the work that the block starts on the device, and wait for its end."""
        watch = Stopwatch()
        if self.pretend:
            began = time.perf_counter()
            yield watch
            watch.ms = (time.perf_counter() - began) * 1000
            return
        start, end = _event(), _event()
        start.record()
        yield watch
        end.record()
        end.synchronize()
        watch.ms = start.elapsed_time(end)

    def smi(self) -> list[str] | None:
        """Return the command that starts nvidia-smi, or None if it is not installed."""
        if self.pretend:
            return [sys.executable, str(STANDIN_SMI)]
        path = shutil.which("nvidia-smi") or next((p for p in SMI_PLACES if Path(p).exists()), None)
        return None if path is None else [path]
