"""Tokens per second of a step's rollout and training, and the use of devices by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope_report.accounting import clipped, union_ns
from stepscope_report.block import Block, TextTable
from stepscope_report.formatting import LISTED, count, duration
from stepscope_report.section import ROLLOUT, Section
from stepscope_report.sections.counters import COUNTERS, Counters
from stepscope_report.sections.engines import ENGINES, Engine
from stepscope_report.spans import generates, placed, trains
from stepscope_report.table import Table
from stepscope_report.throughput import (
    Count,
    Devices,
    Hardware,
    StageUse,
    rollout_tokens,
    rollout_use,
    stage_uses,
    train_tokens,
)
from stepscope_report.timeline import Span, Timeline, TraceActivity

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.section import Sources


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the rollout, or of training."""

    phase: str
    """`rollout` or `train`."""
    role: str | None = None
    """The role of the spans that state the tokens, in training; None for the whole step."""
    tokens: int
    source: str
    """The source of the tokens, as text: `step_tokens`, `spans turn`, `requests`, `engines' counters`."""
    per_s: float
    """Tokens per second of the step's time."""
    active_ns: int | None
    """Time in which any process was in this phase, or None if no span tells."""
    active_per_s: float | None
    """Tokens per second of the active time."""
    devices: int | None
    """Number of the units named by `unit`, or None if unknown."""
    unit: str | None
    """`GPU`, `NPU`, `rank`, `process` or `replica`."""
    per_s_each: float | None
    """`per_s` divided by `devices`, or None if that is unknown."""


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
    """Return the tokens per second and the use of devices; None if neither tokens nor FLOPs are known."""
    hardware = Hardware(timeline, activities)
    generated, trained = rollout_tokens(timeline, engines, counters), train_tokens(timeline)
    engine_devices = hardware.of_rollout(engines)
    rates = list(_rates(timeline, hardware, engine_devices, generated, trained))
    uses = stage_uses(timeline, activities, hardware, trained.get(""))
    if generated is not None and engine_devices is not None and engine_devices.unit != "replica":
        rollout = rollout_use(generated.tokens, rates[0].active_ns, engine_devices, hardware)
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
    """Yield the tokens per second, and the stages whose FLOPs are known."""
    if throughput is None:
        return
    if throughput.rates:
        note = "tokens/s: of the step's time; each: that of one GPU, or of what is known."
        yield TextTable("Throughput", _RATES, tuple(map(_said_rate, throughput.rates)), note)
    if throughput.uses:
        shown = throughput.uses[:LISTED]
        yield TextTable("Use of devices (MFU)", _USES, tuple(map(_use, shown)), _note(throughput))


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


def _use(use: StageUse) -> tuple[str, ...]:
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
