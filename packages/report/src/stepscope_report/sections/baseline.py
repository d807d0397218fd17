"""Uncaptured steps near this one, in the head of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from stepscope.files.steps import UncapturedStep, comparable
from stepscope_report.accounting import rank_of
from stepscope_report.formatting import count, duration, middle, numbers, percentage, signed
from stepscope_report.sections import Section
from stepscope_report.sections.breakdown import BREAKDOWN, Breakdown
from stepscope_report.sections.health import is_truncated
from stepscope_report.spans import whole
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.model import is_running

TOKENS = ("rollout", "train")
"""Kinds of tokens that `step_tokens` counts."""
ENOUGH = 5
"""Least number of uncaptured steps for a comparison. If fewer are known, the report says that their number is
too small."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Uncaptured steps near the captured one, of the same loop and, if possible, of the same kind. Like
    `Breakdown.window_ns`, their durations contain no opening or closing of a capture.
    """

    steps: tuple[int, ...]
    """Numbers of the uncaptured steps. The first step after a capture may be slowed by the writing of traces.
    That step is included only if there are fewer than `stepscope.files.steps.ALONE` other steps."""
    alike: bool
    """True if `steps` are of the captured step's kind. False if no uncaptured step of that kind is near."""
    min_ns: int
    p50_ns: int
    """Median duration of the uncaptured steps, in ns."""
    p90_ns: int
    """90th percentile of the durations in ns, by nearest rank: the duration of one of the steps."""
    max_ns: int
    longer: int
    """Number of uncaptured steps that took longer than the captured step."""
    next_ns: int | None
    """Duration of the first step after the capture. None if the duration is unknown or that step was captured
    too."""
    excess_ns: int | None
    """Duration of the captured step minus `p50_ns`. Negative if the step was shorter. None if the recording
    ended before the step."""
    between_ns: int | None
    """Median time between the end of an uncaptured step and the start of the next one: data loading,
    evaluation, or other work of the framework. None if no two uncaptured steps are consecutive."""
    between_p90_ns: int | None
    """90th percentile of the times whose median is `between_ns`. None if `between_ns` is None."""
    before_ns: int | None
    """Time from the end of the previous step to the opening of this capture. None if the previous step was
    not recorded."""
    tokens_ratio: float | None = None
    """Tokens that `step_tokens` counted in the loop's process, divided by the median of the uncaptured steps.
    The ratio is of rollout or of training tokens, whichever differs more. None if unknown."""
    warms_up: bool = False
    """`Timeline.warms_up`."""
    cost_ns: int | None
    """Cost of the capture: its opening, its closing, and profilers inside the step. None for a step that the
    flight recorder wrote, because no capture was opened for that step."""


def step_baseline(timeline: Timeline, breakdown: Breakdown) -> Baseline | None:
    """Return the uncaptured steps near this one, or None if no comparable step is known."""
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
        tokens_ratio=_tokens_ratio(timeline, used),
        warms_up=timeline.warms_up,
        cost_ns=_cost_ns(breakdown) if recorder is None else None,
    )


def _tokens_ratio(timeline: Timeline, used: Sequence[UncapturedStep]) -> float | None:
    own = Counter[str]()
    for mark in timeline.tokens:
        if mark.process == 0:
            own.update({kind: number for kind in TOKENS if (number := whole(mark, kind)) is not None})
    usual = {kind: middle(step.tokens.get(kind, 0) for step in used) for kind in own}
    ratios = [own[kind] / number for kind, number in usual.items() if number]
    return max(ratios, key=lambda ratio: max(ratio, 1 / max(ratio, 0.001)), default=None)


def between_near(timeline: Timeline) -> int | None:
    """Return the median time between consecutive uncaptured steps near this one, in ns. None if no two of
    these steps are consecutive.
    """
    times = _between(timeline)
    return middle(times) if times else None


def _between(timeline: Timeline) -> list[int]:
    """Return the times between consecutive uncaptured steps near this one, in ns, in ascending order."""
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
    """Return True if the recording lasted until the end of the step. False if an exception or a budget ended
    the recording earlier, or if the step still runs.
    """
    parts = () if timeline.manifest is None else timeline.manifest.processes
    cut = any(part.ended_by is not None or is_truncated(part) for part in parts if part.owner)
    return timeline.window.closed and not cut and not is_running(timeline.manifest)


def say_usual(baseline: Baseline | None, captured: Sequence[int] = ()) -> str:
    """Return the durations of uncaptured steps as text: `20 uncaptured steps near it (3-12, 14-23) took 4 s
    (median; ...)`.

    Args:
        captured: Numbers of the captured steps that this step was compared with instead, if any.
    """
    if baseline is None and captured:
        steps = f"{count(len(captured), 'captured step')} near it ({numbers(captured)})"
        return f"This one was compared with {steps}"
    if baseline is None:
        return (
            "There is no uncaptured step to compare this one with. A loop that opens capture(step) for every "
            "step also records the length of uncaptured steps, except for the first, which warms up"
        )
    kind = "" if baseline.alike else " of other kinds"
    steps = f"{count(len(baseline.steps), 'uncaptured step')}{kind} near it ({numbers(baseline.steps)})"
    if len(baseline.steps) == 1:
        return f"{steps} took {duration(baseline.p50_ns)}"
    extent = f"{duration(baseline.min_ns)} to {duration(baseline.max_ns)}"
    return f"{steps} took {duration(baseline.p50_ns)} (median; p90 {duration(baseline.p90_ns)}; {extent})"


def say_beside(baseline: Baseline | None) -> str:
    """Return the comparison of the captured step with the uncaptured steps. Empty without a baseline."""
    if baseline is None:
        return ""
    if baseline.excess_ns is None:
        return "Not compared: the recording ended before the step did"
    by = f"{signed(baseline.excess_ns)}, {percentage(baseline.excess_ns, baseline.p50_ns)} %"
    text = (
        f"This one: {by}{_rank(baseline)}"
        if baseline.alike
        else "Not compared: no uncaptured step of its kind is known"
    )
    if baseline.warms_up:
        text += ". It is the first step of its run, which warms up"
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
    """Return the median time between two steps and the time before this step, as text. Empty if both times
    are below 1 % of a step, or if the median is unknown.
    """
    if baseline is None or baseline.between_ns is None:
        return ""
    ns, before_ns = baseline.between_ns, baseline.before_ns
    if max(ns, before_ns or 0) * 100 < baseline.p50_ns:
        return ""
    own = "" if before_ns is None else f", {duration(before_ns)} before this one"
    return f"Time between two steps: {duration(ns)} (median){own}"


def _few(steps: int) -> str:
    """Return the beginning of `Two uncaptured steps are too few`, up to the verb, for any number of steps."""
    word = ("No", "One", "Two", "Three", "Four")[steps] if steps < 5 else f"{steps:,}"
    return f"{word} uncaptured step{' is' if steps == 1 else 's are'}"


def _rank(baseline: Baseline) -> str:
    """Return `, longer than 7 of the 9`: the place of the captured step among the uncaptured steps. Empty if
    there is only one uncaptured step.
    """
    number, longer = len(baseline.steps), baseline.longer
    if number == 1:
        return ""
    if longer == 0:
        return ", longer than any of them"
    if longer == number:
        return ", shorter than all of them"
    return f", longer than {number - longer} of the {number}"


BASELINE = Section(
    name="baseline",  # shown in the head of the report, not as a section of its own
    compute=lambda sources: step_baseline(sources.timeline, sources.value_of(BREAKDOWN)),
)
COMPARED: Section[tuple[int, ...]] = Section(
    name="compared",  # shown in the head of the report, not as a section of its own
    compute=lambda sources: tuple(sorted(step.step for step in sources.near)),
)
