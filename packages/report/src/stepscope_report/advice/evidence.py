"""The figures that rules of advice use, and the advice that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from stepscope_report.advice.demand import Demand
from stepscope_report.advice.settings import SettingChange, Settings
from stepscope_report.formatting import duration, percent_of
from stepscope_report.profiling import Profiling
from stepscope_report.sections.baseline import Baseline
from stepscope_report.sections.batches import Batches
from stepscope_report.sections.breakdown import Breakdown
from stepscope_report.sections.cause import OtherCause
from stepscope_report.sections.counters import CounterRow, Counters
from stepscope_report.sections.critical_path import CriticalPath
from stepscope_report.sections.engines import Engine
from stepscope_report.sections.health import Health
from stepscope_report.sections.idle import Idle
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.operators import MemoryRow, TraceTables
from stepscope_report.sections.stages import Stage
from stepscope_report.sections.vain_waits import VainWait
from stepscope_report.spans import ManyNames
from stepscope_report.table import Table
from stepscope_report.whatif.prediction import WhatIf, no_saving


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step that rules use. Shares are of the step without the capture's opening and
    closing.
    """

    breakdown: Breakdown
    critical_path: CriticalPath
    causes: Sequence[OtherCause] = ()
    """The causes within the step, the largest saving first."""
    baseline: Baseline | None
    stages: Table[Stage]
    long_tail: LongTail | None
    batches: tuple[Batches, ...] = ()
    idle: Table[Idle]
    syncing_ns: Mapping[str, int] = {}  # never written
    """Time in collectives that moved weights, by the name of the process."""
    vain_waits: Table[VainWait] = Table()
    engines: Table[Engine]
    traces: TraceTables | None
    counters: Counters | None = None
    health: Health
    profiling: Profiling = Profiling()
    cut: frozenset[str] = frozenset()
    """Names of processes whose recording ended before their work did, so that some of their calls were cut
    off."""
    over_budget: frozenset[str] = frozenset()
    """The profilers that a budget ended."""
    demand: Demand = Demand()
    settings: Settings = {}
    """Settings of the framework at hand; empty if no framework is known."""
    what_if: WhatIf = no_saving
    names: ManyNames | None = None
    """The limit on stage names that was reached; None if each stage and role has a row."""

    @property
    def counter_rows(self) -> Sequence[CounterRow]:
        return () if self.counters is None else self.counters.rows

    @property
    def memory(self) -> Sequence[MemoryRow]:
        return () if self.traces is None else self.traces.memory


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    """Name of the rule, which does not change, for scripts."""
    kind: Literal["alarm", "hint"] = "hint"
    """`alarm`: something is wrong, or the numbers mislead. `hint`: time could be saved."""
    what: str
    because: tuple[str, ...]
    """The numbers that the advice is based on."""
    do: str
    saves_ns: int | None = None
    """An upper bound of what the step would be shorter by if the cause took no time and everything else kept
    its duration and order. None if unknown."""
    settings: tuple[SettingChange, ...] = ()
    """Settings of the framework at hand to change; empty if none is known."""


def is_unedited(evidence: Evidence) -> bool:
    """Return whether the reader can change only the configuration, and no code."""
    return evidence.health.opened_by == "instrument"


def share_of_step(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {percentage_of(wall_ns, evidence.breakdown.window_ns)} of the step"


def percentage_of(part: int, whole: int) -> str:
    return f"{percent_of(part, whole)} %"
