"""Advice as remarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.advice.evidence import Advice
from stepscope_report.advice.settings import SettingChange
from stepscope_report.blocks.block import Block, Remark, Remarks
from stepscope_report.formatting import duration, percent_of
from stepscope_report.model import StepReport


def advice_blocks(advice: Sequence[Advice], report: StepReport) -> Iterator[Block]:
    """Yield what could be done, the most urgent first. Nothing if no rule speaks."""
    if advice:
        total_ns = report.breakdown.window_ns
        yield Remarks("What to do", tuple(_remark(item, total_ns) for item in advice))


def _remark(advice: Advice, total_ns: int) -> Remark:
    mark = "!" if advice.kind == "alarm" else "-"
    saves = f" (at most {savings(advice, total_ns)} of the step)" if advice.saves_ns else ""
    because = ("; ".join(advice.because), f"Try: {advice.do}")
    return Remark(f"{mark} {advice.what}{saves}", (*because, *map(say_change, advice.settings)))


def say_change(change: SettingChange) -> str:
    """Return `verl: trainer.balance_batch: False -> True`. An unset value has no arrow."""
    target = change.direction if change.suggested is None else change.suggested
    values = f"{target}" if change.present is None else f"{change.present} -> {target}"
    saving = ""
    if change.predicted_saving_ns is not None:
        error = "" if change.error_ns is None else f" +- {duration(change.error_ns)}"
        saving = f" (what-if: {duration(change.predicted_saving_ns)}{error} less)"
    return f"{change.framework}: {change.setting}: {values}{saving}"


def savings(advice: Advice, total_ns: int) -> str:
    """Return `1.20 s, 12.0 %`. Empty if the advice names no savings."""
    if not advice.saves_ns:
        return ""
    return f"{duration(advice.saves_ns)}, {percent_of(min(advice.saves_ns, total_ns), total_ns)} %"
