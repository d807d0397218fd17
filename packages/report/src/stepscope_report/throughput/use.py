"""MFU of stages: FLOPs of the model per second, of the devices' peak.

MFU = FLOPs / (seconds of the stage * devices * peak FLOP/s). FLOPs are tokens * `flops_per_token`, of which
forward alone is a third (PaLM, appendix B), or those of the operators in traces with shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from stepscope_report.accounting import Label, Pair, clipped, joined, union_ns
from stepscope_report.spans import ROLLOUT, above, is_of, label_of, placed, trains
from stepscope_report.table import grouped
from stepscope_report.throughput.devices import Devices, Hardware, together
from stepscope_report.throughput.tokens import Count, stage_tokens
from stepscope_report.timeline import Span, Timeline, TraceActivity

_OTHER_MODELS = ROLLOUT | {"critic"}
"""Roles that `flops_per_token` says nothing of, or whose tokens are not all that they compute."""
_TFLOPS = {
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
    # nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    # resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet: 1,979, 1,513 and 1,671
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    # resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    # nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703: 4,500
    "NVIDIA B200": 2250.0,
    # resources.nvidia.com/en-us-l40s/l40s-datasheet-28413: 362.05, and 733 with sparsity
    "NVIDIA L40S": 362.05,
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "AMD Instinct MI300X": 1307.4,
}
"""Peak TFLOP/s by the names that torch gives devices: dense, in BF16 or FP16, from data sheets. Where these
print the figure with sparsity, which is twice the dense one, it is halved. A slice of a device (MIG) has
another name, and no peak. None of Huawei's was found for Ascend 910B; others name 256 to 376.
"""


class StageUse(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of a stage, and what they are of the devices' peak."""

    role: str
    stage: str
    flops: float
    source: str
    """The source of the FLOPs, as text: `flops_per_token`, or `operators` of traces."""
    device_ns: int
    """The stage's time times its devices."""
    devices: int
    unit: str
    """`GPU`, `NPU`; `rank` or `process` where no device is known."""
    device: str | None
    """Name of the devices, or None if they are unknown or of several kinds."""
    tflops_each: float
    """TFLOP/s of one device, while the stage ran."""
    peak_tflops: float | None
    """The peak of one device; None if it is neither known nor configured."""
    mfu: float | None
    """A part of 1, or None if no peak is known."""


def stage_uses(
    timeline: Timeline,
    activities: Sequence[TraceActivity],
    hardware: Hardware,
    trained: Count | None,
) -> tuple[StageUse, ...]:
    """Return the stages whose FLOPs are known.

    Args:
        trained: Tokens that `step_tokens` counted. They belong to the outermost stage that trains.
    """
    uses = [*_given(timeline, hardware, trained), *_traced(timeline, activities, hardware)]
    return tuple(sorted(uses, key=lambda use: (-use.flops, use.role, use.stage, use.source)))


def rollout_use(tokens: int, active_ns: int | None, devices: Devices, hardware: Hardware) -> StageUse | None:
    """Return the use of the rollout's devices: forward alone, of generated tokens. Prompts are left out."""
    if not active_ns or hardware.flops_per_token is None:
        return None
    flops = tokens * hardware.flops_per_token / 3
    label = "rollout", "generated tokens"
    return _use(label, flops, "flops_per_token", active_ns * devices.number, devices, hardware)


def _given(timeline: Timeline, hardware: Hardware, trained: Count | None) -> Iterator[StageUse]:
    if hardware.flops_per_token is None:
        return
    tokens = stage_tokens(timeline)
    outermost = _outermost(timeline)
    if trained is not None and len(outermost) == 1:
        tokens.setdefault(outermost.pop(), trained.tokens)
    by_label = grouped(timeline.spans, label_of)
    for label, number in tokens.items():
        spans = by_label[label]
        one = ((span.start_ns, timeline.until_ns(span)) for span in spans if span.process == spans[0].process)
        busy_ns = union_ns(placed(timeline, spans) or one)  # of one process if none is aligned
        devices = hardware.of_spans(is_of(label))
        if label[0] in _OTHER_MODELS or devices is None or not busy_ns:
            continue
        part = 1.0 if all(map(trains, spans)) else 1 / 3
        flops = number * hardware.flops_per_token * part
        yield _use(label, flops, "flops_per_token", busy_ns * devices.number, devices, hardware)


def _outermost(timeline: Timeline) -> set[Label]:
    """Return the stages that train and run below none that does."""
    training = (span for span in timeline.spans if trains(span) and span.role not in _OTHER_MODELS)
    return {label_of(span) for span in training if not any(map(trains, above(timeline, span)))}


def _traced(
    timeline: Timeline, activities: Sequence[TraceActivity], hardware: Hardware
) -> Iterator[StageUse]:
    """Yield the stages of processes whose traces have shapes, while these recorded."""
    if not any(activity.content.flops.counts for activity in activities):
        return
    flops: dict[Label, float] = defaultdict(float)
    device_ns: dict[Label, int] = defaultdict(int)
    devices: dict[Label, dict[int, Devices]] = defaultdict(dict)
    spans = grouped(timeline.spans, lambda span: span.process)
    for activity in activities:
        index = activity.process
        if index is None or activity.unaligned is not None or not activity.content.flops.counts:
            continue
        own = hardware.of_process.get(index) or Devices(1, "process")
        for label, calls in grouped(spans.get(index, ()), label_of).items():
            stretches = _recorded(timeline, activity, calls)
            counted = sum(
                activity.content.flops.between(_us(activity, start), _us(activity, end))
                for start, end in stretches
            )
            if counted:
                flops[label] += counted
                device_ns[label] += own.number * sum(end - start for start, end in stretches)
                devices[label][index] = own
    for label, number in flops.items():
        own = together(list(devices[label].values()))
        yield _use(label, number, "operators", device_ns[label], own, hardware)


def _recorded(timeline: Timeline, activity: TraceActivity, calls: Sequence[Span]) -> list[Pair]:
    """Return the time of the calls in which the trace recorded, disjoint and in order."""
    content = activity.content
    first_ns, last_ns = activity.unix_ns(content.first_us or 0.0), activity.unix_ns(content.last_us or 0.0)
    pairs = ((span.start_ns, timeline.until_ns(span)) for span in calls)
    return clipped(joined(pairs), first_ns, last_ns)


def _us(activity: TraceActivity, unix_ns: int) -> float:
    return (unix_ns - activity.shift_ns) / 1000


def _use(
    label: Label, flops: float, source: str, device_ns: int, devices: Devices, hardware: Hardware
) -> StageUse:
    peak = hardware.peak_tflops or _TFLOPS.get(devices.name or "")
    tflops = flops / device_ns / 1000
    return StageUse(
        role=label[0],
        stage=label[1],
        flops=flops,
        source=source,
        device_ns=device_ns,
        devices=devices.number,
        unit=devices.unit,
        device=devices.name,
        tflops_each=float(f"{tflops:.4g}"),
        peak_tflops=peak,
        mfu=None if peak is None else float(f"{tflops / peak:.4g}"),
    )
