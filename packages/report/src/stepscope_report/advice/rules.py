"""The rules of advice as one list. A rule gives advice only if the report's figures support it.

A rule is a pure function of the figures. Its advice names the numbers, and an upper bound of the saving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from stepscope_report.advice.balance import straggler, uneven_profiling
from stepscope_report.advice.counters import (
    full_kv_cache,
    garbage_collection,
    idle_device_of_tools,
    late_event_loop,
)
from stepscope_report.advice.devices import collectives, idle_device, memory_nearly_full
from stepscope_report.advice.evidence import Advice, Evidence
from stepscope_report.advice.long_tail import long_tail, thin_batches
from stepscope_report.advice.profilers import not_typical, profiler_cost
from stepscope_report.advice.recording import (
    between_steps,
    blind_spot,
    dropped,
    ids_in_names,
    never_ended,
    no_rollout,
    shared_number,
    unaligned,
)
from stepscope_report.advice.rollout import (
    prefill_alone,
    queueing,
    slow_tools,
    vain_wait,
    weight_sync,
)
from stepscope_report.table import Table

Rule: TypeAlias = Callable[[Evidence], Advice | None]

RULES: Sequence[Rule] = (
    never_ended,
    unaligned,
    dropped,
    not_typical,
    profiler_cost,
    memory_nearly_full,
    slow_tools,
    long_tail,
    thin_batches,
    straggler,
    uneven_profiling,
    collectives,
    idle_device,
    queueing,
    prefill_alone,
    weight_sync,
    vain_wait,
    late_event_loop,
    garbage_collection,
    idle_device_of_tools,
    full_kv_cache,
    between_steps,
    no_rollout,
    ids_in_names,
    shared_number,
    blind_spot,
)


def step_advice(evidence: Evidence) -> Table[Advice]:
    """Return the advice: alarms first, then by possible savings, and last the capture's own cost. Of equal
    ones, the first rule's.
    """
    given = [advice for rule in RULES if (advice := rule(evidence)) is not None]

    def place(advice: Advice) -> tuple[bool, bool, int]:
        own = advice.rule == "profiler-cost"  # no other step pays it
        return own, advice.kind != "alarm", -(advice.saves_ns or 0)

    return Table(sorted(given, key=place))
