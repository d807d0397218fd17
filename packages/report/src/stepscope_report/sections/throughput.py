"""*Throughput*: tokens per second of a step's rollout and training, and the use of devices (MFU) by stage.

Tokens come from `step_tokens`, else from attributes of spans, else from engines' counters. Number and names
of the devices come from the manifest and the traces.

MFU = FLOPs / (seconds of the stage * devices * peak FLOP/s). FLOPs are tokens * `flops_per_token`, of which
the forward pass is a third (PaLM, appendix B); or they are counted from the operators of traces with shapes.

This file is longer than 500 lines because hardware, tokens, FLOPs and their tables belong to one calculation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import GENERATION_TOKENS
from stepscope.files.spans import SERVED
from stepscope_report.accounting import Label, Pair, clipped, joined, union_ns
from stepscope_report.formatting import LISTED, count, duration
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.sections.counters import COUNTERS, Counters
from stepscope_report.sections.engines import ENGINES, Engine
from stepscope_report.spans import ROLLOUT as ROLLOUT_ROLES
from stepscope_report.spans import above, generates, is_of, label_of, placed, trains, whole
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import Span, Timeline, TraceActivity

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Sources

_Worker: TypeAlias = tuple[str, int, tuple[tuple[str, int], ...]]
"""(host, pid, position in the parallel layout) of a worker."""


class Devices(NamedTuple):
    """A number of devices, or of other units if the devices are unknown."""

    number: int
    unit: str
    """`GPU` or `NPU`. If the devices are unknown: `rank`, `process` or `replica`."""
    name: str | None = None
    """Name of the devices. None if the name is unknown or if there are several kinds."""


class Hardware:
    """Devices of the step's processes and replicas, read from the manifest and the traces."""

    def __init__(self, timeline: Timeline, activities: Sequence[TraceActivity]) -> None:
        self._timeline = timeline
        self.of_process: dict[int, Devices] = {}
        """Devices by index of the process. Processes without a known device are left out."""
        self.of_replica: dict[int, Devices] = {}
        """Devices by number of the replica, for replicas that were recorded."""
        self.flops_per_token: float | None = None
        self.peak_tflops: float | None = None
        """Peak TFLOP/s of one device from the configuration, or None if it is not configured."""
        self._read_manifest()
        self._read_traces(activities)
        self._read_replicas(activities)

    def of_spans(self, counts: Callable[[Span], bool]) -> Devices | None:
        """Return the devices of the processes that ran spans for which `counts` is True, or ran spans below
        these.

        If no device is known, return the number of ranks among these processes; without ranks, the number of
        processes. None if `counts` is True for no span.
        """
        below = _below(self._timeline, counts)
        indices = {span.process for span, inside in zip(self._timeline.spans, below, strict=True) if inside}
        if not indices:
            return None
        devices = [self.of_process[index] for index in indices if index in self.of_process]
        if devices:
            return _together(devices)
        processes = [self._timeline.processes[index] for index in indices]
        ranks = [process for process in processes if process.info.rank is not None]
        return Devices(len(ranks), "rank") if ranks else Devices(len(processes), "process")

    def of_rollout(self, engines: Sequence[Engine]) -> Devices | None:
        """Return the devices of the engines, or the number of replicas if some devices are unknown. Without
        engines, return the devices of the processes that generate. None if no device is known.
        """
        timeline = self._timeline
        numbers = {engine.number for engine in engines if engine.number is not None}
        numbers |= {
            process.info.replica for process in timeline.processes if process.info.replica is not None
        }
        replicas = max(len(numbers), timeline.replicas)
        if replicas:
            known = [self.of_replica[number] for number in numbers if number in self.of_replica]
            same = {devices.unit for devices in known}
            return (
                _together(known)
                if len(known) == replicas and len(same) == 1
                else Devices(replicas, "replica")
            )
        own = {span.process for span in timeline.spans if generates(span) and span.role == "rollout"}
        devices = [self.of_process[index] for index in own if index in self.of_process]
        return _together(devices) if devices else None

    def _read_manifest(self) -> None:
        places = {process.info.key: at for at, process in enumerate(self._timeline.processes)}
        manifest = self._timeline.manifest
        for part in manifest.processes if manifest is not None else ():
            hardware, at = part.hardware, places.get(part.process.key)
            if at is not None and hardware.device is not None:
                self.of_process[at] = _named(1, {hardware.device})
            self.flops_per_token = self.flops_per_token or hardware.flops_per_token
            self.peak_tflops = self.peak_tflops or hardware.peak_tflops

    def _read_traces(self, activities: Sequence[TraceActivity]) -> None:
        for activity in activities:
            content = activity.content
            if activity.process is not None and activity.replica is None and content.devices:
                known = self.of_process.get(activity.process)
                names = {known.name} if known is not None and known.name else set(content.device_names)
                number = max(len(content.devices), 0 if known is None else known.number)
                self.of_process[activity.process] = _named(number, names)

    def _read_replicas(self, activities: Sequence[TraceActivity]) -> None:
        """Count the ranks of each recorded replica: the workers that wrote a file, or the world size in the
        replica's artifacts, whichever is larger.
        """
        names: dict[int, set[str]] = defaultdict(set)
        workers: dict[int, set[_Worker]] = defaultdict(set)
        sizes: dict[int, int] = defaultdict(int)
        for activity in activities:
            if activity.replica is not None:
                info = activity.info
                workers[activity.replica].add(_worker(info.host, info.pid, activity.topology))
                if activity.content.devices:
                    names[activity.replica].update(activity.content.device_names)
        manifest = self._timeline.manifest
        for part in manifest.processes if manifest is not None else ():
            for made in (made for item in part.expected for made in item.artifacts):
                if made.replica is not None:
                    workers[made.replica].add(_worker(made.host, made.pid, made.topology))
                    sizes[made.replica] = max(sizes[made.replica], made.world_size or 0)
        for replica, own in workers.items():
            number = max(len(own), sizes[replica])
            named = names.get(replica)
            self.of_replica[replica] = _named(number, named) if named else Devices(number, "rank")


def _worker(host: str, pid: int | None, topology: Mapping[str, int] | None) -> _Worker:
    return host, pid or 0, tuple(sorted((topology or {}).items()))


def _named(number: int, names: set[str]) -> Devices:
    (name, *others) = sorted(names) or [""]
    unit = "NPU" if name.startswith("Ascend") else "GPU"
    return Devices(number, unit, name if name and not others else None)


def _together(devices: Sequence[Devices]) -> Devices:
    """Return the sum of the devices. The name of the sum is None if the names differ."""
    names, units = {own.name for own in devices}, [own.unit for own in devices]
    (name, *others) = names
    return Devices(sum(own.number for own in devices), units[0], None if others else name)


def _below(timeline: Timeline, counts: Callable[[Span], bool]) -> list[bool]:
    """Return for each span whether `counts` is True for the span or for a span above."""
    known: list[bool | None] = [True if counts(span) else None for span in timeline.spans]
    for index in range(len(known)):
        path, at = [], index
        while known[at] is None:
            path.append(at)
            parent = timeline.spans[at].parent
            if parent is None:
                known[at] = False
                break
            at = parent
        for place in path:
            known[place] = known[at]
    return [inside is True for inside in known]


class Count(NamedTuple):
    """A number of tokens, with its source as text."""

    tokens: int
    source: str


def _rollout_tokens(timeline: Timeline, engines: Sequence[Engine], counters: Counters | None) -> Count | None:
    """Return the tokens that were generated in the step, or None if unknown."""
    return (
        _counted(timeline, "rollout")
        or _of_spans(timeline, lambda span: generates(span) and span.stage not in SERVED).get("")
        or _of_engines(engines)
        or _of_counters(counters)
    )


def _train_tokens(timeline: Timeline) -> dict[str, Count]:
    """Return {role: tokens trained on}. If `step_tokens` counted the tokens, the only role is ""."""
    counted = _counted(timeline, "train")
    if counted is not None:
        return {"": counted}
    by_role = _of_spans(timeline, trains)
    by_role.pop("", None)
    return by_role


def _stage_tokens(timeline: Timeline) -> dict[Label, int]:
    """Return {stage: sum of the attribute `tokens` of its calls}. If calls of one stage are nested, only the
    outermost call with the attribute counts.
    """
    sums: Counter[Label] = Counter()
    for span in timeline.spans:
        own, label = _stated(span), label_of(span)
        if own is not None and not _is_stated_above(timeline, span, is_of(label)):
            sums[label] += own
    return dict(sums)


def _counted(timeline: Timeline, kind: str) -> Count | None:
    numbers = [value for mark in timeline.tokens if (value := _stated(mark, kind)) is not None]
    return Count(sum(numbers), "step_tokens") if numbers else None


def _of_spans(timeline: Timeline, counts: Callable[[Span], bool]) -> dict[str, Count]:
    """Return {role: tokens that its spans state}, with the total under the role "". If spans with tokens are
    nested, only the outermost counts.
    """
    sums: dict[str, int] = defaultdict(int)
    stages: dict[str, dict[str, None]] = defaultdict(dict)
    for span in timeline.spans:
        own = _stated(span) if counts(span) else None
        if own is None or _is_stated_above(timeline, span, counts):
            continue
        for role in ("", span.role):
            sums[role] += own
            stages[role][span.stage] = None
    return {role: Count(number, f"spans {', '.join(stages[role])}") for role, number in sums.items()}


def _of_engines(engines: Sequence[Engine]) -> Count | None:
    known = [engine for engine in engines if engine.output_tokens is not None]
    if not known:
        return None
    sources = {"requests" if engine.requests is not None else "engines' counters" for engine in known}
    return Count(sum(engine.output_tokens or 0 for engine in known), ", ".join(sorted(sources)))


def _of_counters(counters: Counters | None) -> Count | None:
    rows = () if counters is None else counters.rows
    grown = [row.increase for row in rows if row.name == GENERATION_TOKENS and row.increase is not None]
    return Count(round(sum(grown)), "engines' counters") if grown else None


def _is_stated_above(timeline: Timeline, span: Span, counts: Callable[[Span], bool]) -> bool:
    return any(counts(outer) and _stated(outer) is not None for outer in above(timeline, span))


def _stated(span: Span, name: str = "tokens") -> int | None:
    value = whole(span, name)
    return value if value is not None and value >= 0 else None


_OTHER_MODELS = ROLLOUT_ROLES | {"critic"}
"""Roles whose FLOPs do not follow from `flops_per_token`, because they run a different model or do more work
per token."""
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
"""Peak TFLOP/s in BF16 or FP16, dense, by the device's name in torch. From data sheets; figures with
sparsity, which are twice as high, are halved. A part of a device (MIG) has a different name and therefore no
peak. Huawei publishes no figure for Ascend 910B; other sources state 256 to 376."""


class StageUse(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of a stage, and their share of the devices' peak."""

    role: str
    stage: str
    flops: float
    source: str
    """Source of the FLOPs: `flops_per_token`, or `operators` (of traces)."""
    device_ns: int
    """Time for which the stage ran, added up over its devices, in ns."""
    devices: int
    unit: str
    """`GPU` or `NPU`. If no device is known: `rank` or `process`."""
    device: str | None
    """Name of the devices. None if it is unknown or if there are several kinds."""
    tflops_each: float
    """TFLOP/s of one device while the stage ran."""
    peak_tflops: float | None
    """Peak TFLOP/s of one device. None if it is neither known nor configured."""
    mfu: float | None
    """Model FLOPs utilisation, from 0 to 1. None if no peak is known."""


def _stage_uses(
    timeline: Timeline,
    activities: Sequence[TraceActivity],
    hardware: Hardware,
    trained: Count | None,
) -> tuple[StageUse, ...]:
    """Return the stages whose FLOPs are known, the most FLOPs first.

    Args:
        trained: Tokens that `step_tokens` counted. These tokens count for the outermost training stage, if
            there is only one such stage.
    """
    uses = [*_given(timeline, hardware, trained), *_traced(timeline, activities, hardware)]
    return tuple(sorted(uses, key=lambda use: (-use.flops, use.role, use.stage, use.source)))


def _rollout_use(tokens: int, active_ns: int | None, devices: Devices, hardware: Hardware) -> StageUse | None:
    """Return the use of the rollout's devices. Only generated tokens count, with the FLOPs of a forward pass.
    None if the active time or `flops_per_token` is unknown.
    """
    if not active_ns or hardware.flops_per_token is None:
        return None
    flops = tokens * hardware.flops_per_token / 3
    label = "rollout", "generated tokens"
    return _use(label, flops, "flops_per_token", active_ns * devices.number, devices, hardware)


def _given(timeline: Timeline, hardware: Hardware, trained: Count | None) -> Iterator[StageUse]:
    if hardware.flops_per_token is None:
        return
    tokens = _stage_tokens(timeline)
    outermost = _outermost(timeline)
    if trained is not None and len(outermost) == 1:
        tokens.setdefault(outermost.pop(), trained.tokens)
    by_label = grouped(timeline.spans, label_of)
    for label, number in tokens.items():
        spans = by_label[label]
        one = ((span.start_ns, timeline.until_ns(span)) for span in spans if span.process == spans[0].process)
        # If no clock is aligned, the time of one process is used.
        busy_ns = union_ns(placed(timeline, spans) or one)
        devices = hardware.of_spans(is_of(label))
        if label[0] in _OTHER_MODELS or devices is None or not busy_ns:
            continue
        part = 1.0 if all(map(trains, spans)) else 1 / 3
        flops = number * hardware.flops_per_token * part
        yield _use(label, flops, "flops_per_token", busy_ns * devices.number, devices, hardware)


def _outermost(timeline: Timeline) -> set[Label]:
    """Return the outermost training stages: those whose spans are never inside a span of another training
    stage.
    """
    training = (span for span in timeline.spans if trains(span) and span.role not in _OTHER_MODELS)
    return {label_of(span) for span in training if not any(map(trains, above(timeline, span)))}


def _traced(
    timeline: Timeline, activities: Sequence[TraceActivity], hardware: Hardware
) -> Iterator[StageUse]:
    """Yield the use of devices by each stage, from the traces that have shapes. Only the time that these
    traces cover counts.
    """
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
        own = _together(list(devices[label].values()))
        yield _use(label, number, "operators", device_ns[label], own, hardware)


def _recorded(timeline: Timeline, activity: TraceActivity, calls: Sequence[Span]) -> list[Pair]:
    """Return the (start, end) pairs of the calls within the time that the trace covers, disjoint and in
    order.
    """
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


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the rollout, or of training."""

    phase: str
    """`rollout` or `train`."""
    role: str | None = None
    """Role of the training spans that state the tokens. None for all roles together."""
    tokens: int
    source: str
    """Source of the tokens: `step_tokens`; `requests`, `engines' counters` or both; or `spans` and the stages
    that state the tokens, such as `spans turn`."""
    per_s: float
    """Tokens per second of the step's duration."""
    active_ns: int | None
    """Time in which at least one process was in this phase, in ns. None if no span shows the phase."""
    active_per_s: float | None
    """Tokens per second of `active_ns`, or None if that is unknown."""
    devices: int | None
    """Number of units, or None if unknown."""
    unit: str | None
    """`GPU`, `NPU`, `rank`, `process` or `replica`. None if unknown."""
    per_s_each: float | None
    """`per_s` divided by `devices`, or None if `devices` is unknown."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    rates: tuple[Rate, ...]
    uses: tuple[StageUse, ...]
    """Stages whose FLOPs are known, the most FLOPs first."""


def step_throughput(
    timeline: Timeline,
    activities: Sequence[TraceActivity],
    engines: Sequence[Engine],
    counters: Counters | None,
) -> Throughput | None:
    """Return the tokens per second and the use of devices. None if neither tokens nor FLOPs are known."""
    hardware = Hardware(timeline, activities)
    generated, trained = _rollout_tokens(timeline, engines, counters), _train_tokens(timeline)
    engine_devices = hardware.of_rollout(engines)
    rates = list(_rates(timeline, hardware, engine_devices, generated, trained))
    uses = _stage_uses(timeline, activities, hardware, trained.get(""))
    if generated is not None and engine_devices is not None and engine_devices.unit != "replica":
        rollout = _rollout_use(generated.tokens, rates[0].active_ns, engine_devices, hardware)
        uses = uses if rollout is None else (*uses, rollout)
    return Throughput(rates=tuple(rates), uses=uses) if rates or uses else None


def _rates(
    timeline: Timeline,
    hardware: Hardware,
    engine_devices: Devices | None,
    generated: Count | None,
    trained: dict[str, Count],
) -> Iterator[Rate]:
    if generated is not None:
        yield _rate(timeline, "rollout", None, generated, generates, engine_devices)
    for role, tokens in sorted(trained.items()):

        def counts(span: Span, role: str = role) -> bool:
            return trains(span) and role in ("", span.role)

        yield _rate(timeline, "train", role or None, tokens, counts, hardware.of_spans(counts))


def _rate(
    timeline: Timeline,
    phase: str,
    role: str | None,
    count: Count,
    counts: Callable[[Span], bool],
    devices: Devices | None,
) -> Rate:
    pairs = placed(timeline, filter(counts, timeline.spans))
    phase_ns = union_ns(clipped(pairs, timeline.window.start_ns, timeline.window.end_ns))
    per_s = _per_s(count.tokens, timeline.window.wall_ns) or 0.0
    return Rate(
        phase=phase,
        role=role,
        tokens=count.tokens,
        source=count.source,
        per_s=per_s,
        active_ns=phase_ns or None,
        active_per_s=_per_s(count.tokens, phase_ns),
        devices=None if devices is None else devices.number,
        unit=None if devices is None else devices.unit,
        per_s_each=None if devices is None else round(per_s / devices.number, 3),
    )


def _per_s(tokens: int, ns: int) -> float | None:
    return round(tokens * 1e9 / ns, 3) if ns else None


_RATES = ("phase", ">tokens", "from", ">tokens/s", ">active", ">while active", ">each", "of")
_USES = ("role", "stage", "FLOPs from", ">TFLOP/s each", ">peak", ">MFU", "device")


def throughput_blocks(throughput: Throughput | None, report: StepReport) -> Iterator[Block]:
    """Yield tables of the tokens per second and of the stages whose FLOPs are known."""
    if throughput is None:
        return
    if throughput.rates:
        note = "tokens/s: per second of the step. each: per GPU, or per unit in the last column."
        yield TextTable("Throughput", _RATES, tuple(map(_said_rate, throughput.rates)), note)
    if throughput.uses:
        shown = throughput.uses[:LISTED]
        yield TextTable("Use of devices (MFU)", _USES, tuple(map(_said_use, shown)), _note(throughput))


def _said_rate(rate: Rate) -> tuple[str, ...]:
    return (
        f"{rate.phase} {rate.role or ''}".rstrip(),
        f"{rate.tokens:,}",
        rate.source,
        _number(rate.per_s),
        duration(rate.active_ns),
        _number(rate.active_per_s),
        _number(rate.per_s_each),
        "unknown" if rate.unit is None else count(rate.devices or 0, rate.unit),
    )


def _said_use(use: StageUse) -> tuple[str, ...]:
    return (
        use.role,
        use.stage,
        use.source,
        f"{use.tflops_each:,.3g}",
        "unknown" if use.peak_tflops is None else f"{use.peak_tflops:,.5g}",
        "-" if use.mfu is None else f"{100 * use.mfu:.3g} %",
        f"{count(use.devices, use.unit)}, {use.device or 'of unknown name'}",
    )


def _note(throughput: Throughput) -> str:
    notes = []
    if any(use.source == "operators" for use in throughput.uses):
        notes.append("operators: matrix products and attention in traces.")
    if any(use.peak_tflops is None for use in throughput.uses):
        notes.append("An unknown peak is configured by throughput.device_peak_tflops.")
    if len(throughput.uses) > LISTED:
        notes.append(f"{count(len(throughput.uses) - LISTED, 'stage')} more: --json.")
    return " ".join(notes)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _throughput(sources: Sources) -> Throughput | None:
    engines: Table[Engine] = sources.value_of(ENGINES)
    return step_throughput(sources.timeline, sources.activities, engines, sources.value_of(COUNTERS))


THROUGHPUT = Section(
    name="throughput",
    title="Throughput",
    compute=_throughput,
    terminal=throughput_blocks,
    page=ROLLOUT,
)
