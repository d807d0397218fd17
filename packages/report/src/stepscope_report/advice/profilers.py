"""Advice on the cost of profilers, inside the step and outside of it."""

from __future__ import annotations

from stepscope_report.advice.evidence import Advice, Evidence, is_unedited, percentage_of, share_of_step
from stepscope_report.formatting import count, duration
from stepscope_report.profiling import Profiled
from stepscope_report.sections.baseline import ENOUGH
from stepscope_report.sections.health import Health, ProcessRow

LARGE_TRACE = 100_000
"""A trace with at least this many events is a likely reason for a long closing."""

_STALLED = (
    "Engines write after the step if neither iterations.count nor by_stage is set, and write less with a "
    "smaller count"
)


def not_typical(evidence: Evidence) -> Advice | None:
    """Advise if the step took a tenth more than uncaptured ones near it, and more than nine tenths of them.
    Also if it took a tenth less, and less than all.

    Also advise if engines stood still for a tenth of it because their own profilers wrote.
    """
    baseline, stalled_ns = evidence.baseline, evidence.breakdown.stalled_most_ns
    if baseline is None or baseline.excess_ns is None or len(baseline.steps) < ENOUGH:
        return _stalled(evidence)
    if not baseline.alike and evidence.health.recorder is None:
        return _stalled(evidence)
    took_ns = baseline.p50_ns + baseline.excess_ns
    slow, fast = took_ns > baseline.p90_ns, took_ns < baseline.min_ns
    if abs(baseline.excess_ns) * 10 < baseline.p50_ns or not (slow or fast):
        return _stalled(evidence)
    others = "steps that are not captured" if evidence.health.recorder is None else "the steps near it"
    share = percentage_of(abs(baseline.excess_ns), baseline.p50_ns)
    usual = f"median {duration(baseline.p50_ns)}, {duration(baseline.min_ns)} to {duration(baseline.max_ns)}"
    because = [f"{duration(took_ns)}; {count(len(baseline.steps), 'uncaptured step')} near it: {usual}"]
    if stalled_ns:
        because += _stood_still(evidence, took_ns)
    if stalled_ns and stalled_ns * 2 >= baseline.excess_ns:
        why_slow = _write_less(evidence)
    elif _has_a_cause(evidence, baseline.excess_ns):
        why_slow = "see its cause, in the first line: it is not the capture"
    else:
        why_slow = _slowed(evidence)
    return Advice(
        rule="not-typical",
        kind="alarm",
        what=f"the step took {share} {'longer' if slow else 'less'} than {others}",
        because=tuple(because),
        do=why_slow if slow else "capture another step: this one had less to do",
    )


def _has_a_cause(evidence: Evidence, excess_ns: int) -> bool:
    """Return whether something that is longer than its like in this step explains half of an excess. A
    profiler slows all alike.
    """
    return any((cause.ns or 0) * 2 >= excess_ns for cause in evidence.causes)


def _slowed(evidence: Evidence) -> str:
    """Return the remedy for a step that took longer than uncaptured ones."""
    if evidence.health.recorder is not None:
        return "see below what took the time. `stepscope diff` with a usual step shows what grew"
    if not evidence.profiling.recorded:
        return (
            "no profiler ran in it, and a span takes microseconds: see below what is slow, or capture another"
        )
    less = ", ".join(_less(evidence))
    return (
        "trust shares more than times. If other captures are as slow, it is the profiler"
        f"{': record ' if less else ''}{less}"
    )


def _less(evidence: Evidence, process: str | None = None) -> list[str]:
    """Return the ways to record less that apply to what was recorded. A schedule needs an edited program.

    Args:
        process: The process, or the replica, that the advice names; None if it is about the whole step.
    """
    recorded, ways = _recorded(evidence, process), []
    if any(one.has_peers for one in recorded):
        ways.append("fewer ranks")
    heavy = dict.fromkeys(word for one in recorded for word in one.heavy)
    if heavy:
        ways.append(f"without {' and '.join(heavy)}")
    if any(one.by_torch for one in recorded) and not is_unedited(evidence):
        ways.append("a part of the step (torch.schedule)")
    if any(one.engine for one in recorded):
        ways.append("fewer iterations of an engine (iterations.count)")
    return ways


def _recorded(evidence: Evidence, process: str | None) -> list[Profiled]:
    return [one for one in evidence.profiling.recorded if process in (None, one.name)]


def is_stalled(evidence: Evidence) -> bool:
    """Return whether engines stood still for a tenth of the step, because their own profilers wrote.

    True also if they may have stood still, because no span names the engine that its work waited for.
    """
    return evidence.breakdown.stalled_most_ns * 10 >= max(evidence.breakdown.window_ns, 1)


def _stalled(evidence: Evidence) -> Advice | None:
    if not is_stalled(evidence):
        return None
    took = "took" if _knows_who_stalled(evidence) else "may have taken"
    return Advice(
        rule="not-typical",
        kind="alarm",
        what=f"the step {took} longer than it would without the profilers of its engines",
        because=_stood_still(evidence),
        do=_write_less(evidence),
    )


def _stood_still(evidence: Evidence, took_ns: int | None = None) -> tuple[str, ...]:
    """Return how long engines stood still, and how long the step (which took `took_ns`) took without that
    time.
    """
    sure_ns, most_ns = evidence.breakdown.stalled_ns, evidence.breakdown.stalled_most_ns
    without = "" if took_ns is None else f". Without that it took {duration(took_ns - sure_ns)}"
    sure = f"engines served nothing for {share_of_step(sure_ns, evidence)}: their profilers wrote{without}"
    unnamed = (
        f"some engines served nothing for {share_of_step(most_ns - sure_ns, evidence)}: their profilers wrote"
        ". No span says whether the work of that time waited for these engines"
    )
    return (*([sure] if sure_ns else []), *([unnamed] if most_ns > sure_ns else []))


def _write_less(evidence: Evidence) -> str:
    """Return the advice for engines that write their traces within the step."""
    if _knows_who_stalled(evidence):
        return f"trust the other lines; the line `profiler` holds the cost. {_STALLED}"
    return (
        f"name each request's engine: span(..., attrs={{'replica': 1}}), or turn.set(replica=1). {_STALLED}"
    )


def _knows_who_stalled(evidence: Evidence) -> bool:
    return evidence.breakdown.stalled_ns == evidence.breakdown.stalled_most_ns


def profiler_cost(evidence: Evidence) -> Advice | None:
    """Advise if opening and closing the capture took a tenth of the step or more."""
    spent_ns = evidence.breakdown.opening_ns + evidence.breakdown.closing_ns
    if spent_ns * 10 < max(evidence.breakdown.window_ns, 1):
        return None
    worst = _slowest_to_record(evidence.health, spent_ns)
    traces = () if evidence.traces is None else evidence.traces.traces
    largest = max(traces, key=lambda trace: trace.events, default=None)
    because = [f"{duration(spent_ns)} beside a step of {duration(evidence.breakdown.window_ns)}"]
    whose = None if worst is None or worst.owner else worst.name
    engine, wrote_ns = next(iter(evidence.profiling.writers), ("", 0))
    waited = wrote_ns * 2 >= spent_ns and whose is None  # the owner for an engine
    if waited:
        because.append(f"{engine} took longest: its profiler started and wrote for {duration(wrote_ns)}")
        worst, whose = None, engine
    elif worst is not None:
        because += _name_slowest(worst, evidence.health)
    if largest is not None and largest.events >= LARGE_TRACE:
        because.append(f"the largest trace is that of {largest.process}: {count(largest.events, 'event')}")
        whose = whose if waited else largest.process
    return Advice(
        rule="profiler-cost",
        what="opening and closing the capture took long next to this step; other steps do not pay it",
        because=tuple(because),
        do=_make_cheaper(evidence, worst, whose),
    )


def _name_slowest(worst: ProcessRow, health: Health) -> list[str]:
    """Return how long a process took to open and close.

    The owner waits for the other processes, so for the owner also name the slowest of these.
    """
    if worst.cost is None:
        return []
    took = f"{duration(worst.cost.start_ns)} to open, {duration(worst.cost.stop_ns)} to close"
    if not worst.owner:
        return [f"{worst.name} took longest: {took}"]
    others = [(row.cost, row.name) for row in health.processes if row.cost is not None and not row.owner]
    waited = " (waiting for workers and engines included)" if others else ""
    facts = [f"{worst.name} took longest: {took}{waited}"]
    if others:
        ns, name = max((cost.start_ns + cost.stop_ns, name) for cost, name in others)
        facts.append(f"slowest of the others: {name}, {duration(ns)} for both")
    return facts


def _make_cheaper(evidence: Evidence, worst: ProcessRow | None, whose: str | None) -> str:
    """Return the remedies that fit what was recorded.

    Args:
        worst: The process that took longest to open and close.
        whose: The process, or the replica, that made the others wait; None if that is unknown.
    """
    remedies = []
    cost = None if worst is None else worst.cost
    prepared = evidence.profiling.prepared or is_unedited(evidence)
    if cost is not None and cost.start_ns >= cost.stop_ns and not prepared:
        remedies.append("prepare() before the first step pays the one-off part of opening")
    ways, recorded = _less(evidence, whose), _recorded(evidence, whose)
    if ways and (whose or not remedies):
        of = f" for {whose}" if whose else ""
        remedies.append(f"record less{of}: {', '.join(ways)}; or export.when: deferred")
    if recorded and not remedies and is_unedited(evidence):
        role = recorded[0].role if whose else "'*'"
        remedies.append(f"spans alone cost next to nothing: roles: {{{role}: {{profiler: off}}}}")
    if not remedies:
        remedies.append("look at `Processes`: a busy worker, or a slow folder, makes all others wait")
    return "; ".join(remedies)


def _slowest_to_record(health: Health, wall_ns: int) -> ProcessRow | None:
    """Return a worker that explains half of the time that the owner spent, because the owner waits for the
    worker; else return the owner.
    """
    costs = [(row.cost.start_ns + row.cost.stop_ns, row) for row in health.processes if row.cost is not None]
    workers = [pair for pair in costs if not pair[1].owner and pair[0] * 2 >= wall_ns]
    return max(workers or costs, key=lambda pair: pair[0], default=(0, None))[1]
