"""Cost of reading torch traces for a report: `read_trace` compared with HolisticTraceAnalysis (HTA).

Idle, compute and other device time of each rank must be the same in both, and so must the kernels of each
rank. `read_trace` also returns operators with self time, memory and iterations. CPU time is that of this
process and its children for the same files, in rotating order. Peak memory is measured in separate processes.
The traces look like a GPU's and come from a seeded generator, or from a folder of `.json.gz` (an argument),
for example `tests/data` in a clone of HolisticTraceAnalysis.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from _measure import header, interleaved, table, verdict
from merge import peak_kb

from stepscope_report.timeline.activity.content_reader import read_trace

RANKS = 4
ROUNDS = 5
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, "
    "float const*, float const*, float const*, float*, float*, float*)"
)
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAUNCH = {"cbid": 211, "shared memory": 0}
SHAPE = {
    "queued": 0, "context": 1, "registers per thread": 128, "blocks per SM": 1.2, "warps per SM": 9.6,
    "grid": [128, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 25,
}  # fmt: skip


class Numbers(NamedTuple):
    """Device times of one rank, in us."""

    idle: int
    compute: int
    other: int
    whole: int
    kernels: dict[str, int]
    """{name: summed duration} of kernels that compute or communicate."""


def make_trace(rank: int, layers: int) -> bytes:
    """Return a rank's trace with so many layers of operators, launches, flows and kernels, in whole us."""
    rng = random.Random(rank)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}}
    ]
    host, device, correlation = 1_000_000, 1_000_400, 100_000  # HTA fails below 2^15
    for _ in range(layers):
        events.append(_op("autograd::engine::evaluate_function: AddmmBackward0", host, 900))
        for step, (name, kernel) in enumerate((("aten::mm", GEMM), ("aten::native_layer_norm", NORM))):
            correlation += 1
            at, dur = host + 20 + 400 * step, rng.randint(80, 300)
            events += [_op(name, at, 300), _op("aten::empty", at + 5, 20)]
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242}
            about = {**LAUNCH, "correlation": correlation, "External id": correlation}
            events.append({**launch, "ts": at + 60, "dur": 9, "args": about})
            flow = {"id": correlation, "pid": 4242, "tid": 4242, "ts": at + 60, "cat": "ac2g", "name": "ac2g"}
            events.append({"ph": "s", **flow})
            device = max(device, at + 90)
            events.append(_kernel(kernel, device, dur, 7, correlation))
            events.append({"ph": "f", **flow, "pid": rank, "tid": 7, "ts": device, "bp": "e"})
            device += dur
        if rng.random() < 0.1:
            correlation += 1
            events.append(_kernel(REDUCE, device - 100, rng.randint(200, 500), 20, correlation))
        host += 1000
    whole = {
        "schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
        "deviceProperties": [{"id": rank, "name": "NVIDIA A100", "totalGlobalMem": 42505273344}],
        "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events,
    }  # fmt: skip
    return json.dumps(whole).encode()


def _op(name: str, start: int, dur: int) -> dict[str, Any]:
    args = {"External id": start, "Sequence number": 7, "Fwd thread id": 0, "Ev Idx": start}
    place = {"pid": 4242, "tid": 4242, "ts": start, "dur": dur}
    return {"ph": "X", "cat": "cpu_op", "name": name, **place, "args": args}


def _kernel(name: str, start: int, dur: int, stream: int, correlation: int) -> dict[str, Any]:
    args = {**SHAPE, "device": 0, "stream": stream, "correlation": correlation, "External id": correlation}
    place = {"pid": 0, "tid": stream, "ts": start, "dur": dur}
    return {"ph": "X", "cat": "kernel", "name": name, **place, "args": args}


def ours(path: Path) -> Numbers:
    content = read_trace(path)
    (device,) = content.devices
    whole = round(device.last_us - device.first_us)
    busy, compute = round(device.busy_us), round(device.compute_us)
    kernels = {kernel.name: round(kernel.total_us) for kernel in content.kernels}
    return Numbers(whole - busy, compute, busy - compute, whole, kernels)


def holistic(path: Path) -> Numbers:
    return _numbers(_opened(path))


def holistic_as_a_report(path: Path) -> Numbers:
    """Have HTA also compute the other results that a report has: idle time by cause, hidden communication,
    times of launches and lengths of queues.
    """
    analysis = _opened(path)
    analysis.get_idle_time_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_cuda_kernel_launch_stats(visualize=False)
    analysis.get_queue_length_summary()
    return _numbers(analysis)


def _opened(path: Path) -> Any:
    return importlib.import_module("hta.trace_analysis").TraceAnalysis(
        trace_files={0: str(path)}, trace_dir="", include_last_profiler_step=True
    )


def _numbers(analysis: Any) -> Numbers:
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10**9)
    idle, compute, other, whole = (
        round(times[f"{name}_time(us)"]) for name in ("idle", "compute", "non_compute", "kernel")
    )
    sums = {str(name): round(us) for name, us in zip(kernels["name"], kernels["sum (us)"], strict=True)}
    return Numbers(idle, compute, other, whole, sums)


READERS: dict[str, Callable[[Path], Numbers]] = {"stepscope": ours, "HolisticTraceAnalysis": holistic}


def cpu_seconds() -> float:
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + done.ru_utime + done.ru_stime


def timed(reader: Callable[[Path], Numbers], paths: list[Path]) -> float:
    began = cpu_seconds()
    for path in paths:
        reader(path)
    return cpu_seconds() - began


class Compared(NamedTuple):
    different: list[str]
    """Numbers that differ by more than `rounding` allows."""
    times: int
    """Number of compared times: idle, compute and other of each rank."""
    kernels: int
    equal: int
    """Number of times and kernels that are equal to the us."""


def compared(paths: list[Path]) -> Compared:
    # HTA would leave out kernels that were launched outside of a ProfilerStep.
    trace = importlib.import_module("hta.common.trace").Trace
    trace._filter_irrelevant_gpu_kernels = lambda self, include_last_profiler_step=False: None
    differences, pairs, kernels = [], list[tuple[int | None, int | None]](), 0
    for path in paths:
        one, other, allowed = ours(path), holistic(path), rounding(path)
        for name, a, b in zip(one._fields[:-1], one[:-1], other[:-1], strict=True):
            pairs.append((a, b))
            if abs(a - b) > sum(allowed.values()):
                differences.append(f"{path.name}: {name}: {a} and {b} us")
        for kernel in {*one.kernels, *other.kernels}:
            us = one.kernels.get(kernel), other.kernels.get(kernel)
            pairs.append(us)
            kernels += 1
            if us[0] is None or us[1] is None or abs(us[0] - us[1]) > allowed.get(kernel, 0):
                differences.append(f"{path.name}: {kernel[:60]}: {us[0]} and {us[1]} us")
    return Compared(differences, len(pairs) - kernels, kernels, sum(a == b for a, b in pairs))


def rounding(path: Path) -> dict[str, int]:
    """Return {kernel: us by which HTA's rounding may change its time}: 0 if the trace has whole us.

    HTA rounds starts up and ends down, so that a kernel of 1 us may take -2 us.
    """
    kernels = read_trace(path).kernels
    whole = all(kernel.total_us.is_integer() for kernel in kernels)
    return {kernel.name: 0 if whole else 3 * kernel.count for kernel in kernels}


def peak_mb(name: str, path: Path) -> float:
    """Return the peak memory of a reader in a separate process, without the memory of its imports."""
    command = [sys.executable, __file__, "--once", name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def once(name: str, path: Path) -> None:
    quiet()
    if name != "stepscope":
        importlib.import_module("hta.trace_analysis")
    before = peak_kb()
    READERS[name](path)
    print((peak_kb() - before) / 1000)


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)


def megabytes(path: Path) -> float:
    with gzip.open(path) as file:
        return sum(map(len, iter(lambda: file.read(1 << 20), b""))) / 1e6


def inputs(folder: Path, real: Path | None, quick: bool) -> list[Path]:
    if real is not None:
        traces = sorted(path for path in real.rglob("*.json.gz") if path.stat().st_size > 200_000)
        return [path for path in traces if len(read_trace(path).devices) == 1]
    paths = [folder / f"rank{rank}.json.gz" for rank in range(1 if quick else RANKS)]
    for rank, path in enumerate(paths):
        path.write_bytes(gzip.compress(make_trace(rank, 1000 if quick else 10_000), 1))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: rough numbers")
    parser.add_argument("traces", nargs="?", type=Path, help="a folder of .json.gz traces of GPUs")
    options = parser.parse_args()
    quiet()
    header("reading torch traces for a report", "stepscope", "HolisticTraceAnalysis", "msgspec", "isal")
    readers = dict(READERS)
    try:
        importlib.import_module("hta.trace_analysis")
    except ImportError as error:
        print(f"not installed: HolisticTraceAnalysis ({error})\n")
        del readers["HolisticTraceAnalysis"]
    with tempfile.TemporaryDirectory() as folder:
        paths = inputs(Path(folder), options.traces, options.quick)
        size = sum(map(megabytes, paths))
        runs = {name: (lambda reader=reader: timed(reader, paths)) for name, reader in readers.items()}
        results = interleaved(runs, 2 if options.quick or options.traces else ROUNDS)
        medians = {name: sorted(times)[len(times) // 2] for name, times in results.items()}
        largest = max(paths, key=megabytes)
        peaks = {name: peak_mb(name, largest) for name in medians}
        rows = [
            [name, f"{size / seconds:.0f}", f"{seconds / medians['stepscope']:.1f}x", f"{peaks[name]:.0f}"]
            for name, seconds in medians.items()
        ]
        kind = "made" if options.traces is None else "real"
        table(
            [f"{size:.0f} MB of JSON in {len(paths)} {kind} traces", "MB/s of CPU", "CPU/ours", "peak MB"],
            rows,
        )
        if len(medians) > 1:
            found_both = compared(paths)
            print(*(f"DIFFERENT  {line}" for line in found_both.different), sep="\n", end="")
            print("\n" * bool(found_both.different), end="")
            times, kernels, equal = found_both[1:]
            rounded = times + kernels - equal - len(found_both.different)
            print(f"compared: {times} times of {len(paths)} ranks (idle, compute, other, all),")
            print(f"{kernels} of kernels;", end=" ")
            print(f"{equal} are the same to the us, {rounded} within what HTA rounds\n")
            verdict("numbers that differ", len(found_both.different), 0, "")
            peer = "HolisticTraceAnalysis"
            verdict("less CPU than " + peer, medians[peer] / medians["stepscope"], 15, "x", at_least=True)
            verdict("of its memory", peaks["stepscope"] / peaks[peer], 0.1, "x")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
