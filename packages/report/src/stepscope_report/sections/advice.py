"""*What to do*: the advice of a report, alarms first.

Each rule is a pure function of the report's figures. It returns advice if the figures support the advice,
else None. Advice names these figures, and an upper bound of the possible saving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stepscope_report.advice import (
    Advice,
    Evidence,
    SettingChange,
    step_demand,
    step_profilers,
    step_settings,
)
from stepscope_report.advice.processes import (
    collectives,
    full_kv_cache,
    garbage_collection,
    idle_device,
    idle_device_of_tools,
    late_event_loop,
    memory_nearly_full,
    straggler,
    uneven_profiling,
)
from stepscope_report.advice.recording import (
    between_steps,
    blind_spot,
    dropped,
    ids_in_names,
    never_ended,
    no_rollout,
    not_typical,
    profiler_cost,
    shared_number,
    unaligned,
)
from stepscope_report.advice.rollout import (
    long_tail,
    prefill_alone,
    queueing,
    slow_tools,
    thin_batches,
    vain_wait,
    weight_sync,
)
from stepscope_report.formatting import duration, percent_of
from stepscope_report.html import EMPTY, Html, section, tag
from stepscope_report.sections import OVERVIEW, Section
from stepscope_report.sections.baseline import BASELINE
from stepscope_report.sections.batches import BATCHES
from stepscope_report.sections.breakdown import BREAKDOWN
from stepscope_report.sections.cause import PARTS, beside_profiled, is_explained
from stepscope_report.sections.counters import COUNTERS
from stepscope_report.sections.critical_path import CRITICAL_PATH, VAIN_WAITS
from stepscope_report.sections.engines import ENGINES
from stepscope_report.sections.health import HEALTH, cut_processes, has_deaths, was_cut_off
from stepscope_report.sections.idle import IDLE, collectives_of_sync
from stepscope_report.sections.long_tail import LONG_TAIL
from stepscope_report.sections.stages import STAGES
from stepscope_report.sections.traces import TRACES
from stepscope_report.table import Block, Remark, Remarks, Table
from stepscope_report.whatif.prediction import savings_of

if TYPE_CHECKING:
    from stepscope_report.model import StepReport
    from stepscope_report.sections import Page, Sources


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


NEEDS_ALL: frozenset[Rule] = frozenset({collectives, vain_wait, blind_spot, no_rollout})
"""Rules on work that no process seems to do. A process that died or left nothing may have done this work."""


def step_advice(evidence: Evidence) -> Table[Advice]:
    """Return the advice of all rules: alarms, then hints by possible saving (largest first), then the advice
    on the cost of the capture itself. Advice with equal savings keeps the order of `RULES`.

    There are no hints if the death of a process ended the step, because other processes then waited for that
    process.
    """
    health = evidence.health
    lacks_one = has_deaths(health) or bool(health.absent)
    rules = [rule for rule in RULES if not (lacks_one and rule in NEEDS_ALL)]
    given = [advice for rule in rules if (advice := rule(evidence)) is not None]
    if has_deaths(health) and was_cut_off(health):
        given = [advice for advice in given if advice.kind == "alarm"]

    def place(advice: Advice) -> tuple[bool, bool, int]:
        own = advice.rule == "profiler-cost"  # only captured steps pay this cost
        return own, advice.kind != "alarm", -(advice.saves_ns or 0)

    return Table(sorted(given, key=place))


def advice_blocks(advice: Sequence[Advice], report: StepReport, of: str = "step") -> Iterator[Block]:
    """Yield the advice in order of urgency, if there is any. Savings are shown as shares of `of`."""
    if advice:
        total_ns = report.breakdown.window_ns
        yield Remarks("What to do", tuple(_remark(item, total_ns, of) for item in advice))


def _remark(advice: Advice, total_ns: int, of: str) -> Remark:
    mark = "!" if advice.kind == "alarm" else "-"
    saves = f" (at most {savings(advice, total_ns)} of the {of})" if advice.saves_ns else ""
    because = ("; ".join(advice.because), f"Try: {advice.do}")
    return Remark(f"{mark} {advice.what}{saves}", (*because, *map(say_change, advice.settings)))


def say_change(change: SettingChange) -> str:
    """Return one change of a setting as text: `verl: trainer.balance_batch: False -> True`. The present value
    and the arrow are left out if the present value is unknown.
    """
    target = change.direction if change.suggested is None else change.suggested
    values = f"{target}" if change.present is None else f"{change.present} -> {target}"
    saving = ""
    if change.predicted_saving_ns is not None:
        error = "" if change.error_ns is None else f" +- {duration(change.error_ns)}"
        saving = f" (what-if: {duration(change.predicted_saving_ns)}{error} less)"
    return f"{change.framework}: {change.setting}: {values}{saving}"


def savings(advice: Advice, total_ns: int) -> str:
    """Return the possible saving, as time and share of the step: `1.20 s, 12.0 %`. Empty if the advice has no
    saving.
    """
    if not advice.saves_ns:
        return ""
    return f"{duration(advice.saves_ns)}, {percent_of(min(advice.saves_ns, total_ns), total_ns)} %"


def draw_advice(advice: Sequence[Advice], page: Page) -> Iterator[Html]:
    """Yield the section *What to do* of the page, or nothing if there is no advice."""
    if advice:
        items = [_item(item, page.report.breakdown.window_ns) for item in advice]
        note = "Savings are upper bounds and do not add up."
        yield section("todo", "What to do", tag("ul", *items, class_="todo"), note=note)


def _item(advice: Advice, total_ns: int) -> Html:
    saves = savings(advice, total_ns)
    what = tag("b", advice.what, class_="bad" if advice.kind == "alarm" else None)
    because = tag("div", "; ".join(advice.because), class_="note")
    bound = tag("b", saves, class_="saves") if saves else EMPTY
    settings = (tag("div", tag("code", say_change(change))) for change in advice.settings)
    return tag("li", bound, what, because, tag("div", advice.do), *settings, class_=advice.kind)


def _advice(sources: Sources) -> tuple[Advice, ...]:
    timeline = sources.timeline
    return step_advice(
        Evidence(
            breakdown=sources.value_of(BREAKDOWN),
            causes=sources.value_of(PARTS),
            beside_ns=beside_profiled(sources),
            is_explained=is_explained(sources),
            critical_path=sources.value_of(CRITICAL_PATH),
            baseline=sources.value_of(BASELINE),
            stages=sources.value_of(STAGES),
            long_tail=sources.value_of(LONG_TAIL),
            batches=sources.value_of(BATCHES),
            idle=sources.value_of(IDLE),
            syncing_ns=collectives_of_sync(timeline, sources.activities),
            vain_waits=sources.value_of(VAIN_WAITS),
            engines=sources.value_of(ENGINES),
            traces=sources.value_of(TRACES),
            counters=sources.value_of(COUNTERS),
            health=sources.value_of(HEALTH),
            profiling=step_profilers(timeline, sources.activities),
            cut=cut_processes(timeline),
            over_budget=cut_processes(timeline, by_a_budget=True),
            demand=step_demand(timeline),
            settings=step_settings(timeline.manifest),
            what_if=savings_of(sources.whole),
            names=sources.names,
        )
    )


ADVICE = Section(
    name="advice",
    title="What to do",
    compute=_advice,
    terminal=advice_blocks,
    html=draw_advice,
    page=OVERVIEW,
)
