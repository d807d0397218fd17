"""Uncaptured steps near this one, in the head of a report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.files.uncaptured import comparable
from stepscope_report.accounting import rank_of
from stepscope_report.formatting import count, duration, middle, numbers, percentage, signed
from stepscope_report.section import Section
from stepscope_report.sections.breakdown import BREAKDOWN, Breakdown
from stepscope_report.sections.health import is_truncated
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.completeness import is_running

ENOUGH = 5
"""Least number of uncaptured steps for a comparison."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest steps of the same loop and kind that were not captured. Their times are without a capture's
    opening and closing, as `Breakdown.window_ns` is.
    """

    steps: tuple[int, ...]
    """The numbers of these steps. The first step after a capture, during which traces may have been written,
    is included only if there are fewer than `ALONE` others."""
    alike: bool
    """False if `steps` are of other kinds, because no step near the captured one is of its kind."""
    min_ns: int
    p50_ns: int
    """Median time of these steps."""
    p90_ns: int
    """90th percentile by nearest rank, so it is the time of one of these steps."""
    max_ns: int
    longer: int
    """Number of these steps that took longer than the captured one."""
    next_ns: int | None
    """Time of the first step after the capture, or None if that is unknown, or if that step was captured
    too."""
    excess_ns: int | None
    """Time of the captured one beyond their median: what its cause took, the profiler, and chance.
    None if its capture ended before the step did."""
    between_ns: int | None
    """Median time from the end of one of these steps to the start of the next: data loading, evaluation, or
    the framework's own work. None if no two of them follow each other."""
    between_p90_ns: int | None
    """The 90th percentile of these times."""
    before_ns: int | None
    """Time from the end of the step before to the opening of this capture; None if that step is unknown."""
    cost_ns: int | None
    """The cost of the capture: opening and closing it, and profilers inside the step. None for a step
    that the flight recorder wrote, because nothing opened."""


def step_baseline(timeline: Timeline, breakdown: Breakdown) -> Baseline | None:
    """Return the uncaptured steps near this one, or None if no known step compares with it."""
    recorder = None if timeline.manifest is None else timeline.manifest.recorder
    near = [step for step in timeline.uncaptured if recorder is None or step.step != timeline.step]
    used = comparable(near)
    if not used:
        return None
    took = sorted(step.dur_ns for step in used)
    end_ns, p50_ns = timeline.window.end_ns, middle(took)
    after = (
        step.dur_ns
        for step in timeline.uncaptured
        if (step.first if recorder is None else step.step == timeline.step + 1) and step.start_ns >= end_ns
    )
    whole, between = _whole(timeline), _between(timeline)
    return Baseline(
        between_ns=middle(between) if between else None,
        between_p90_ns=between[rank_of(90, len(between))] if between else None,
        before_ns=_before(timeline, breakdown),
        steps=tuple(step.step for step in used),
        alike=used[0].alike,
        min_ns=took[0],
        p50_ns=p50_ns,
        p90_ns=took[rank_of(90, len(took))],
        max_ns=took[-1],
        longer=sum(ns > breakdown.window_ns for ns in took),
        next_ns=next(after, None),
        excess_ns=breakdown.window_ns - p50_ns if whole else None,
        cost_ns=_cost_ns(breakdown) if recorder is None else None,
    )


def between_near(timeline: Timeline) -> int | None:
    """Return the median time between two uncaptured steps near this one; None if no two follow each other."""
    times = _between(timeline)
    return middle(times) if times else None


def _between(timeline: Timeline) -> list[int]:
    """Return the times between two uncaptured steps near this one that follow each other, in order."""
    near = {step.step: step for step in timeline.uncaptured if step.step != timeline.step}
    return sorted(
        max(0, near[number + 1].start_ns - step.start_ns - step.dur_ns)
        for number, step in near.items()
        if number + 1 in near and not step.warm_up
    )


def _before(timeline: Timeline, breakdown: Breakdown) -> int | None:
    opened_ns, ended_ns = timeline.window.start_ns - breakdown.opening_ns, timeline.previous_end_ns
    return None if ended_ns is None else max(0, opened_ns - ended_ns)


def _cost_ns(breakdown: Breakdown) -> int:
    inside_ns = sum(line.wall_ns for line in breakdown.lines if line.kind == "profiler")
    return breakdown.opening_ns + breakdown.closing_ns + inside_ns


def _whole(timeline: Timeline) -> bool:
    """Return whether the recording lasted as long as the step: neither an exception nor a budget ended it
    early.
    """
    parts = () if timeline.manifest is None else timeline.manifest.processes
    cut = any(part.ended_by is not None or is_truncated(part) for part in parts if part.owner)
    return timeline.window.closed and not cut and not is_running(timeline.manifest)


def say_usual(baseline: Baseline | None, captured: Sequence[int] = ()) -> str:
    """Return the times of uncaptured steps: `20 uncaptured steps (3-12, 14-23): median 4.10 s, ...`.

    Args:
        captured: Numbers of the captured steps that it was compared with instead, if any.
    """
    if baseline is None and captured:
        return f"Compared with {count(len(captured), 'captured step')} near it ({numbers(captured)})"
    if baseline is None:
        return (
            "There is no uncaptured step to compare it with. A loop that opens capture(step) for every step "
            "records them, after the first, which warms up"
        )
    kind = "" if baseline.alike else " of other kinds"
    steps = f"{count(len(baseline.steps), 'uncaptured step')}{kind} near it ({numbers(baseline.steps)})"
    if len(baseline.steps) == 1:
        return f"{steps} took {duration(baseline.p50_ns)}"
    extent = f"{duration(baseline.min_ns)} to {duration(baseline.max_ns)}"
    return f"{steps} took {duration(baseline.p50_ns)} (median; p90 {duration(baseline.p90_ns)}; {extent})"


def say_beside(baseline: Baseline | None) -> str:
    """Compare the captured step with the uncaptured ones. Empty if there is nothing to compare with."""
    if baseline is None:
        return ""
    if baseline.excess_ns is None:
        return "Not compared: it ended early"
    by = f"{signed(baseline.excess_ns)}, {percentage(baseline.excess_ns, baseline.p50_ns)} %"
    text = f"This one: {by}{_rank(baseline)}" if baseline.alike else "Not compared: none of its kind is known"
    if baseline.cost_ns is not None and baseline.cost_ns > 0:
        text += f". Opening, closing and profilers took {duration(baseline.cost_ns)}"
    if not baseline.alike:
        return text
    if say_between(baseline):
        text += f". {say_between(baseline)}"
    if len(baseline.steps) < ENOUGH:
        text += f". {_few(len(baseline.steps))} too few for a comparison"
    if baseline.next_ns is not None:
        text += f". The step after it took {duration(baseline.next_ns)}"
    return text


def say_between(baseline: Baseline | None) -> str:
    """Return the time between two steps, in no step's account; empty below 1 % of the step."""
    if baseline is None or baseline.between_ns is None:
        return ""
    ns, before_ns = baseline.between_ns, baseline.before_ns
    if max(ns, before_ns or 0) * 100 < baseline.p50_ns:
        return ""
    own = "" if before_ns is None else f", {duration(before_ns)} before this one"
    return f"Between two steps pass {duration(ns)} (median){own}"


def _few(steps: int) -> str:
    """Return `One uncaptured step is`, `Two uncaptured steps are`, up to less than `ENOUGH`."""
    word = ("No", "One", "Two", "Three", "Four")[steps] if steps < 5 else f"{steps:,}"
    return f"{word} uncaptured step{' is' if steps == 1 else 's are'}"


def _rank(baseline: Baseline) -> str:
    """Return the place among several steps. Empty for one, of which the difference says all."""
    number, longer = len(baseline.steps), baseline.longer
    if number == 1:
        return ""
    if longer == 0:
        return ", longer than any of them"
    if longer == number:
        return ", shorter than all of them"
    return f", longer than {number - longer} of the {number}"


BASELINE = Section(
    name="baseline",  # drawn in the head of the report
    compute=lambda sources: step_baseline(sources.timeline, sources.value_of(BREAKDOWN)),
)
COMPARED: Section[tuple[int, ...]] = Section(
    name="compared",  # drawn in the head of the report
    compute=lambda sources: tuple(sorted(step.step for step in sources.near)),
)
