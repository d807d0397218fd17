"""Tokens per second and MFU as tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import LISTED, count, duration
from stepscope_report.model import StepReport
from stepscope_report.throughput.rates import Rate, Throughput
from stepscope_report.throughput.use import StageUse

_RATES = ("phase", ">tokens", "from", ">tokens/s", ">active", ">while active", ">each", "of")
_USES = ("role", "stage", "FLOPs from", ">TFLOP/s each", ">peak", ">MFU", "device")


def throughput_blocks(throughput: Throughput | None, report: StepReport) -> Iterator[Block]:
    """Yield the tokens per second, and the stages whose FLOPs are known."""
    if throughput is None:
        return
    if throughput.rates:
        note = "tokens/s: of the step's time; each: that of one GPU, or of what is known."
        yield TextTable("Throughput", _RATES, tuple(map(_rate, throughput.rates)), note)
    if throughput.uses:
        shown = throughput.uses[:LISTED]
        yield TextTable("Use of devices (MFU)", _USES, tuple(map(_use, shown)), _note(throughput))


def _rate(rate: Rate) -> tuple[str, ...]:
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
