"""Advice from traces alone on kernels, copies and streams of devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stepscope_report.advice import Advice
from stepscope_report.advice.trace_evidence import (
    SMALL_US,
    TraceEvidence,
    is_little,
    longest_process,
    say_us,
    share,
)
from stepscope_report.formatting import count, duration
from stepscope_report.table import grouped
from stepscope_report.timeline.activity.content import Kernel

_MANY = 200
"""Number of kernels that a process must have for advice on small kernels."""


def small_kernels(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if nine of ten kernels take under 10 us on average, and a tenth of the time passes between
    kernels.
    """
    worst: tuple[int, str, int, int] | None = None
    for name, own in grouped(evidence.activities, lambda activity: activity.name).items():
        kernels = [kernel for one in own for kernel in one.content.kernels if kernel.work == "compute"]
        total = sum(kernel.count for kernel in kernels)
        small = sum(kernel.count for kernel in kernels if kernel.total_us < SMALL_US * kernel.count)
        between_ns = sum(
            row.total_ns
            for row in evidence.gaps
            if row.process == name and row.kind in ("queued", "slow launches")
        )
        if (
            name in evidence.untrusted
            or total < _MANY
            or small * 10 < total * 9
            or between_ns * 10 < evidence.recorded_ns(name)
        ):
            continue
        if worst is None or between_ns > worst[0]:
            worst = between_ns, name, small, total
    if worst is not None:
        between_ns, name, small, total = worst
        yield Advice(
            rule="small-kernels",
            what="nearly all kernels are small, so that the time between them counts",
            because=(f"{small:,} of {total:,} kernels take under 10 us", share(name, between_ns, evidence)),
            do="torch.compile or fused kernels, CUDA graphs (mode='reduce-overhead'), larger batches",
            saves_ns=between_ns,
        )


_PAGEABLE = re.compile(".*Pageable")


def unpinned_copies(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if copies between a device and memory that is not pinned took 1 % of a process' time."""
    copies = [copy for copy in _copies(evidence) if _PAGEABLE.match(copy[1].name)]
    process, ns = longest_process((name, kernel.total_us) for name, kernel in copies)
    if ns and ns * 100 >= evidence.recorded_ns(process):
        yield Advice(
            rule="unpinned-copies",
            what="memory that is not pinned is copied",
            because=(share(process, ns, evidence), _most_copied(process, copies)),
            do="pin_memory=True in the DataLoader, tensor.pin_memory(), and non_blocking=True",
            saves_ns=ns,
        )


def exposed_copies(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a device only copied, and mostly pinned memory, for a tenth of its time."""
    alone = {row: row.busy_ns - row.compute_ns - row.exposed_ns for row in evidence.traces.devices}
    row = max(alone, key=lambda row: alone[row], default=None)
    if row is None or alone[row] * 10 < row.recorded_ns:
        return
    most = _most_copied(row.process, _copies(evidence))
    if not _PAGEABLE.match(most):
        yield Advice(
            rule="exposed-copies",
            what="copies are not hidden behind computation",
            because=(share(row.process, alone[row], evidence), most),
            do="pinned memory, non_blocking=True and a stream of its own, a layer ahead; less offloading",
            saves_ns=alone[row],
        )


def _copies(evidence: TraceEvidence) -> list[tuple[str, Kernel]]:
    """Return (name of the process, copy) for each kind of copy."""
    of_all = ((one.name, kernel) for one in evidence.activities for kernel in one.content.kernels)
    return [(name, kernel) for name, kernel in of_all if kernel.work == "memory"]


def _most_copied(process: str, copies: Iterable[tuple[str, Kernel]]) -> str:
    most = max((kernel for name, kernel in copies if name == process), key=lambda kernel: kernel.total_us)
    return f"{most.name}: {count(most.count, 'copy')}, {say_us(most.total_us)}"


_OPTIMIZER = "Optimizer.step#"
_FEW_KERNELS = 20


def unfused_optimizer(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if steps of the optimizer launch many kernels, no optimizer is fused, and the steps take 3 % of
    the recorded time.
    """
    fused = any(row.name.startswith("aten::_fused_") for row in evidence.traces.operators)
    steps = (
        (max(label.cpu_us, label.busy_us or 0.0), activity.name, label)
        for activity in evidence.activities
        for label in activity.content.labels
        if label.path[-1].startswith(_OPTIMIZER) and label.count
    )
    us, process, label = max(steps, key=lambda step: step[0], default=(0.0, "", None))
    if fused or label is None:
        return
    each, ns = label.kernels // label.count, round(us * 1000)
    if each >= _FEW_KERNELS and ns * 100 >= 3 * evidence.recorded_ns(process):
        yield Advice(
            rule="unfused-optimizer",
            what="the optimizer launches many kernels, none of them fused",
            because=(
                f"{label.path[-1]}: {each:,} kernels a step",
                f"{process}: {say_us(label.cpu_us)} on the CPU, {say_us(label.busy_us or 0.0)} on the device",
            ),
            do="fused=True in torch's Adam, AdamW and SGD, else foreach=True",
            saves_ns=ns,
        )


_FP32 = re.compile(r".*(?<![a-z])sgemm|.*f32f32_f32f32|.*tf32|Cijk_\w+_SB_|.*s1688gemm", re.IGNORECASE)
_HALF = re.compile(r".*(b|_|p)f16|.*half|.*fp16", re.IGNORECASE)
"""Names of matrix products in half precision, as cuBLAS, cutlass and Tensile name them."""
_TF32 = re.compile(r".*tf32|.*s1688gemm", re.IGNORECASE)


def is_single(kernel: str) -> bool:
    """Return True if a kernel is a matrix product in single precision."""
    return _FP32.match(kernel) is not None and _HALF.match(kernel) is None


def single_precision(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if matrix products in single precision took a fifth of a process' computation and 2 % of its
    time.
    """
    single = [
        (activity.name, kernel)
        for activity in evidence.activities
        for kernel in activity.content.kernels
        if kernel.work == "compute" and is_single(kernel.name)
    ]
    process, ns = longest_process((name, kernel.total_us) for name, kernel in single)
    compute_ns = sum(row.compute_ns for row in evidence.traces.devices if row.process == process)
    if ns == 0 or ns * 5 < compute_ns or is_little(ns // 2, process, evidence):
        return
    worst = max((kernel for name, kernel in single if name == process), key=lambda kernel: kernel.total_us)
    yield Advice(
        rule="single-precision",
        what="matrix products run in single precision",
        because=(f"{process}: {duration(ns)} of {duration(compute_ns)} computation", f"{worst.name[:60]}"),
        do="torch.autocast(dtype=torch.bfloat16), or BF16 weights"
        + ("" if _TF32.match(worst.name) else "; at least torch.set_float32_matmul_precision('high')"),
        saves_ns=ns // 2,
    )


def serial_streams(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a device has several streams of computation that hardly ever run at once. The streams beside
    the busiest stream must take 1 % of the recorded time.
    """
    for activity in evidence.activities:
        for device, streams in grouped(activity.content.streams, lambda stream: stream.device).items():
            usage = next((one for one in activity.content.devices if one.name == device), None)
            ordered = sorted((stream.compute_us for stream in streams), reverse=True)
            if usage is None or len(ordered) < 2 or ordered[1] * 5 < ordered[0]:
                continue
            at_once_us = sum(ordered) - usage.compute_us
            others_us = sum(ordered[1:])
            if at_once_us * 10 > others_us or is_little(round(others_us * 1000), activity.name, evidence):
                continue
            yield Advice(
                rule="uneven-streams",
                what="streams that could compute at once run one after the other",
                because=(
                    f"{activity.name}: {len(ordered)} streams",
                    f"the busiest {say_us(ordered[0])}, the others {say_us(others_us)}",
                    f"at once {say_us(max(0.0, at_once_us))}",
                ),
                do="look for events and synchronisations between them; else one stream does as well",
                saves_ns=round(others_us * 1000),
            )
            return
