"""The captured step beside uncaptured ones, in words."""

from __future__ import annotations

from stepscope_report.formatting import count, duration, numbers, percentage, signed
from stepscope_report.tables.baseline import ENOUGH, Baseline


def say_usual(baseline: Baseline | None) -> str:
    """Return the times of uncaptured steps: `20 uncaptured steps (3-12, 14-23): median 4.10 s, ...`."""
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
    """Compare the captured step with them. Empty if there is nothing to compare with."""
    if baseline is None:
        return ""
    if baseline.excess_ns is None:
        return "Not compared: it ended early"
    by = f"{signed(baseline.excess_ns)}, {percentage(baseline.excess_ns, baseline.p50_ns)} %"
    text = f"This one: {by}, {_rank(baseline)}"
    if baseline.cost_ns is not None and baseline.cost_ns > 0:
        text += f". With opening and closing, the capture cost about {duration(baseline.cost_ns)}"
    if len(baseline.steps) < ENOUGH:
        text += f". {_few(len(baseline.steps))} too few for a comparison"
    if baseline.next_ns is not None:
        text += f". The step after it took {duration(baseline.next_ns)}"
    return text


def _few(steps: int) -> str:
    """Return `One uncaptured step is`, `Two uncaptured steps are`, up to less than `ENOUGH`."""
    word = ("No", "One", "Two", "Three", "Four")[steps] if steps < 5 else f"{steps:,}"
    return f"{word} uncaptured step{' is' if steps == 1 else 's are'}"


def _rank(baseline: Baseline) -> str:
    number, longer = len(baseline.steps), baseline.longer
    if longer == 0:
        return "longer than any of them" if number > 1 else "longer than that"
    if longer == number:
        return "shorter than all of them" if number > 1 else "shorter than that"
    return f"longer than {number - longer} of the {number}"
