"""Cost of sampling counters at 10 Hz, in percent of one core.

The sampling thread measures its own CPU time while a capture is open, in a process that computes and opens
spans on an event loop. The table has a row for each source. No peer samples the same values. psutil, if it is
installed, is shown with CPU, memory and open files. The sources do not include NVML, which needs a GPU.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from _measure import arguments, header, table, verdict

from stepscope import ProfileConfig, capture, span
from stepscope._recording.counters.load import HostClaim, garbage, host_load, process_load
from stepscope.backends.counters import CounterSource
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import read_parts

HZ = 10
GOAL_PERCENT = 0.5


async def turns(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        async with span("turn"):
            await asyncio.sleep(0.01)
            sum(range(10_000))


def thread_percent(seconds: float) -> float:
    """Return the CPU time of the sampler's thread, in percent of the captured time."""
    with tempfile.TemporaryDirectory() as folder:
        config = ProfileConfig(
            save_path=folder, steps=[1], roles={"*": {"profiler": "off"}}, counters={"hz": HZ}
        )
        began = time.monotonic_ns()
        with capture(1, config=config):
            asyncio.run(turns(seconds))
        passed_ns = time.monotonic_ns() - began
        (part,) = read_parts(RunLayout(Path(folder)).step(1))[0]
    return 100 * part.cost.counters_ns / passed_ns


def sample_us(sample: Callable[[], Mapping[str, float]], count: int) -> float:
    sample()
    began = time.thread_time_ns()
    for _ in range(count):
        sample()
    return (time.thread_time_ns() - began) / count / 1000


def sources() -> dict[str, CounterSource]:
    own = [*process_load(), *garbage(), *host_load(HostClaim("/benchmark"))]
    return {source.name: source for source in own}


def psutil_us(count: int) -> float | None:
    try:
        process = import_module("psutil").Process()
    except ImportError:
        return None

    def sample() -> Mapping[str, float]:
        return {"cpu": process.cpu_percent(), "rss": process.memory_info().rss, "files": process.num_fds()}

    return sample_us(sample, count)


def main() -> None:
    quick = arguments(__doc__).quick
    header("counters at 10 Hz", "stepscope")
    count, seconds = (100, 3.0) if quick else (1000, 20.0)
    rows = []
    for name, source in sources().items():
        us = sample_us(source.sample, count)
        hz = min(HZ, 1 / source.interval_s) if source.interval_s else HZ
        rows.append([name, f"{us:.1f}", f"{hz:.0f}", f"{us * hz / 1e4:.4f}"])
        source.close()
    peer = psutil_us(count)
    if peer is not None:
        rows.append(["psutil: CPU, memory, open files", f"{peer:.1f}", f"{HZ}", f"{peer * HZ / 1e4:.4f}"])
    table(["one sample", "CPU us", "Hz", "% of a core"], rows)
    percent = thread_percent(seconds)
    print(f"  the thread, in a capture of {seconds:.0f} s: {percent:.3f} % of a core\n")
    verdict("the sampler's thread, of a core", percent, GOAL_PERCENT, " %")


if __name__ == "__main__":
    main()
