"""Advice on the recording itself: missing parts, misleading numbers, and the cost of profilers."""

from __future__ import annotations

from stepscope_report.advice import (
    Advice,
    Evidence,
    Profiled,
    is_unedited,
    percentage_of,
    share_of_step,
)
from stepscope_report.formatting import count, duration, few
from stepscope_report.holds import say_busy_host
from stepscope_report.sections.baseline import ENOUGH
from stepscope_report.sections.breakdown import name_gap
from stepscope_report.sections.health import Health, ProcessRow, has_deaths, say_deaths, was_cut_off
from stepscope_report.sections.stages import Stage
from stepscope_report.spans import GENERATES, MOVES_WEIGHTS, ROLLOUT

_LARGE_TRACE = 100_000
"""Number of events from which a trace is a probable reason for a slow closing."""

_STALLED = (
    "Engines write after the step if neither iterations.count nor by_stage is set, and write less with a "
    "smaller count"
)
_NAME = 60
"""Number of characters to which a name is cut in advice."""


def never_ended(evidence: Evidence) -> Advice | None:
    """Advise on calls without an end: calls of processes that never closed their capture, or else calls that
    were running when their process closed its capture.

    Calls that a budget cut off are left out.
    """
    spans = [span for span in evidence.health.open_spans if span.process not in evidence.over_budget]
    if not spans:
        return None
    gone = {process.name for process in evidence.health.processes if not process.closed}
    killed = [span for span in spans if span.process in gone]
    if killed:
        whose = "its" if len(killed) == 1 else "their"
        what = f"{count(len(killed), 'call')} never ended: {whose} process was killed, or still runs"
        remedy = "look at that process' log, and at the call in the list `Never ended`"
    else:
        cut = was_cut_off(evidence.health)
        why = say_deaths(evidence.health) or f"a hang, or work that {'was cut off' if cut else 'goes on'}"
        what = f"{count(len(spans), 'call')} had not ended when the capture closed: {why}"
        remedy = "see the list `Never ended`"
        if has_deaths(evidence.health):
            remedy = "look at the log of the process that died"
        elif not cut and not is_unedited(evidence):
            remedy += "; name the step of work for a later one: trajectory(step=...)"
    first = (killed or spans)[0]
    began = "" if first.start_ns is None else f" began at {duration(first.start_ns)},"
    seen = f"seen for {duration(first.wall_ns)}"
    return Advice(
        rule="never-ended",
        kind="alarm",
        what=what,
        because=(f"the longest: {first.process}, {first.role} {first.stage},{began} {seen}",),
        do=remedy,
    )


def unaligned(evidence: Evidence) -> Advice | None:
    names = evidence.breakdown.left_out
    if not names:
        return None
    return Advice(
        rule="unaligned",
        kind="alarm",
        what=(
            "the times of 1 process are left out, because its clock was not measured"
            if len(names) == 1
            else f"the times of {count(len(names), 'process')} are left out: their clocks were not measured"
        ),
        because=(f"unaligned: {few(names, 4)}",),
        do=(
            "they were given to the capture, and the exchange of clocks with them failed: look at their logs"
            if evidence.profiling.met.issuperset(names)
            else "name these processes under `workers` of the `instrument` entry with `step`: their clocks "
            "are measured then"
            if is_unedited(evidence)
            else "give these processes to capture(workers=...), which measures their clocks"
        ),
    )


def between_steps(evidence: Evidence) -> Advice | None:
    """Advise if the time between two steps is more than a tenth of the time from one step to the next."""
    baseline = evidence.baseline
    if baseline is None or baseline.between_ns is None:
        return None
    ns = baseline.between_ns
    period_ns = ns + baseline.p50_ns
    if ns * 10 <= period_ns:
        return None
    before = "" if baseline.before_ns is None else f"; {duration(baseline.before_ns)} before this one"
    return Advice(
        rule="between-steps",
        what="the loop spends much time between its steps, which is in no step's account",
        because=(f"{duration(ns)} (median), {percentage_of(ns, period_ns)} of the period{before}",),
        do=(
            "open the step before data loading, evaluation and checkpoints, with a span for each; then load "
            "the next batch beside the step"
        ),
        saves_ns=ns,
    )


def ids_in_names(evidence: Evidence) -> Advice | None:
    """Advise if names of stages or roles contain ids, so that there are too many names."""
    many = evidence.names
    if many is None or not many.ids:
        return None
    role, stage = many.example
    return Advice(
        rule="ids-in-names",
        what="stage names, or roles, hold ids: most of them share a row",
        because=(f"{many.names:,} names, for instance {role} {stage[:_NAME]}",),
        do="put what differs from call to call into an attribute: span('generate', attrs={'id': ...})",
    )


def shared_number(evidence: Evidence) -> Advice | None:
    """Advise if several processes with the same replica number served different trajectories at the same
    time.
    """
    engine = next((engine for engine in evidence.engines if engine.rivals), None)
    if engine is None:
        return None
    return Advice(
        rule="shared-number",
        what=f"{count(len(engine.rivals), 'process')} are counted as one: {engine.replica}",
        because=(f"they served different trajectories at the same time: {few(engine.rivals, 4)}",),
        do=(
            "if they are engines of their own, give each a number: `replica` of its `instrument` entry"
            if is_unedited(evidence)
            else "if they are engines of their own, give each a number: span(..., attrs={'replica': 1})"
        ),
    )


def dropped(evidence: Evidence) -> Advice | None:
    if not evidence.health.dropped:
        return None
    return Advice(
        rule="dropped",
        kind="alarm",
        what="spans were dropped, so that times are too short",
        because=(f"{count(evidence.health.dropped, 'span')} dropped",),
        do="raise budget.spans (or make room, if the disk was full), or record fewer spans",
    )


def no_rollout(evidence: Evidence) -> Advice | None:
    """Advise if a step of reinforcement learning has no recorded rollout."""
    if evidence.engines:
        return None
    work = [stage for stage in evidence.stages if not stage.waits]
    if any(stage.role in GENERATES and not MOVES_WEIGHTS.search(stage.stage) for stage in work):
        return None
    signs = [stage for stage in evidence.stages if _of_rl(stage)]
    if not signs:
        return None
    engines = "" if evidence.profiling.given else ", its engines as engines"
    return Advice(
        rule="no-rollout",
        what="no process recorded the rollout of this step",
        because=(f"it has {', '.join(f'{stage.role} {stage.stage}' for stage in signs[:3])}",),
        do=(
            "list what generates under `instrument` (role: rollout), and name its Ray actors under `workers` "
            "of the entry with `step`"
            if is_unedited(evidence)
            else "decorate what generates (role rollout, in the process that does it), and give its Ray "
            f"actors to the capture as workers{engines}"
        ),
    )


def _of_rl(stage: Stage) -> bool:
    """Return True if a stage shows that the step trains on a rollout. Supervised training has no
    such stage.
    """
    if stage.waits or MOVES_WEIGHTS.search(stage.stage):
        return stage.role in ROLLOUT
    return stage.role == "critic" or "advantage" in stage.stage.lower()


def blind_spot(evidence: Evidence) -> Advice | None:
    """Advise if no span covers a tenth of the step."""
    line = next(line for line in evidence.breakdown.lines if line.kind == "unaccounted")
    if line.wall_ns * 10 < max(1, evidence.breakdown.window_ns):
        return None
    because = [share_of_step(line.wall_ns, evidence)]
    if evidence.breakdown.gaps:
        largest = evidence.breakdown.gaps[0]
        because.append(f"of that {duration(largest.wall_ns)} {name_gap(largest)}")
    unaligned = len(evidence.breakdown.left_out)
    if unaligned:
        because.append(
            f"it may be the work of the {count(unaligned, 'process')} whose clock was not measured"
        )
    return Advice(
        rule="blind-spot",
        what="a part of the step is in no span",
        because=tuple(because),
        do=(
            "have their clocks measured first"
            if unaligned
            else "list more functions of the loop under `instrument`"
            if is_unedited(evidence)
            else "decorate more stages with profile_step, or open a span() around what the driver does"
        ),
        saves_ns=line.wall_ns,
    )


def not_typical(evidence: Evidence) -> Advice | None:
    """Advise if the step is not typical. A long step is 10 % longer than the median of uncaptured steps, and
    longer than nine tenths of them. A short step is 10 % shorter than the median, and shorter than all of
    them by more than the capture took to open, because work that runs ahead goes on during the opening.

    Otherwise advise if engines served nothing for a tenth of the step because their own profilers wrote.
    """
    baseline, stalled_ns = evidence.baseline, evidence.breakdown.stalled_most_ns
    if has_deaths(evidence.health):
        return None  # the report's first line names the deaths, which make the step unlike others
    if baseline is None or baseline.excess_ns is None or len(baseline.steps) < ENOUGH:
        return _stalled(evidence)
    if baseline.warms_up or (not baseline.alike and evidence.health.recorder is None):
        return _stalled(evidence)
    took_ns = baseline.p50_ns + baseline.excess_ns
    slow, fast = took_ns > baseline.p90_ns, took_ns + evidence.breakdown.opening_ns < baseline.min_ns
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
    elif slow and _has_a_cause(evidence, baseline.excess_ns):
        return None  # the report's first line names this cause, and the capture is not to blame
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
    """Return True if causes explain half of the excess. A profiler slows all similar calls, and all captured
    steps, alike. If a profiler ran, only three causes count: those within the step, a comparison with other
    profiled steps, and the number of tokens.
    """
    if evidence.is_explained and not evidence.profiling.recorded:
        return True
    ratio = (evidence.baseline and evidence.baseline.tokens_ratio) or 1
    by_tokens_ns = round((ratio - 1) * evidence.baseline.p50_ns) if evidence.baseline is not None else 0
    explained = [by_tokens_ns, evidence.beside_ns or 0, *(cause.ns or 0 for cause in evidence.causes)]
    return max(explained) * 2 >= excess_ns


def _slowed(evidence: Evidence) -> str:
    """Return the advice for a step that took longer than uncaptured steps."""
    if evidence.health.recorder is not None:
        return "see below what took the time. `stepscope diff` with a usual step shows what grew"
    if not evidence.profiling.recorded:
        return (
            "no profiler ran in it, and a span takes microseconds: see below what is slow, or capture another"
        )
    if evidence.beside_ns is not None:
        return "see below what took the time: other captured steps took less, so it is not the profiler"
    busy = evidence.counters.busy_hosts if evidence.counters is not None else ()
    if busy and busy[0].processes and busy[0].cores < 1:
        return f"{say_busy_host(busy[0])}: end what else runs there, or capture another step"
    less = ", ".join(_less(evidence))
    return (
        "trust shares more than times. If other captures are as slow, it is the profiler"
        f"{': record ' if less else ''}{less}"
    )


def _less(evidence: Evidence, process: str | None = None) -> list[str]:
    """Return the ways in which less could be recorded. `torch.schedule` is among them only for edited
    programs.

    Args:
        process: Name of the process or replica that the advice is about. None for the whole step.
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
    """Return True if engines served nothing for a tenth of the step because their own profilers wrote.

    Work whose spans name no engine counts as if it had waited for these engines.
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
    """Return sentences on how long engines served nothing because their profilers wrote.

    Args:
        took_ns: Duration of the step in ns, to state it without the time of these writes too. None to leave
            that out.
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
    """Return the advice for engines that write their traces during the step."""
    if _knows_who_stalled(evidence):
        return f"trust the other lines; the line `profiler` holds the cost. {_STALLED}"
    return (
        f"name each request's engine: span(..., attrs={{'replica': 1}}), or turn.set(replica=1). {_STALLED}"
    )


def _knows_who_stalled(evidence: Evidence) -> bool:
    return evidence.breakdown.stalled_ns == evidence.breakdown.stalled_most_ns


def profiler_cost(evidence: Evidence) -> Advice | None:
    """Advise if opening and closing the capture took at least a tenth of the step's duration."""
    spent_ns = evidence.breakdown.opening_ns + evidence.breakdown.closing_ns
    if spent_ns * 10 < max(evidence.breakdown.window_ns, 1):
        return None
    worst = _slowest_to_record(evidence.health, spent_ns)
    traces = () if evidence.traces is None else evidence.traces.traces
    largest = max(traces, key=lambda trace: trace.events, default=None)
    because = [f"{duration(spent_ns)} beside a step of {duration(evidence.breakdown.window_ns)}"]
    whose = None if worst is None or worst.owner else worst.name
    engine, wrote_ns = next(iter(evidence.profiling.writers), ("", 0))
    waited = wrote_ns * 2 >= spent_ns and whose is None  # the owner waited for an engine
    if waited:
        because.append(f"{engine} took longest: its profiler started and wrote for {duration(wrote_ns)}")
        worst, whose = None, engine
    elif worst is not None:
        because += _name_slowest(worst, evidence.health)
    if largest is not None and largest.events >= _LARGE_TRACE:
        because.append(f"the largest trace is that of {largest.process}: {count(largest.events, 'event')}")
        whose = whose if waited else largest.process
    return Advice(
        rule="profiler-cost",
        what="opening and closing the capture took long for this step; uncaptured steps do not pay it",
        because=tuple(because),
        do=_make_cheaper(evidence, worst, whose),
    )


def _name_slowest(worst: ProcessRow, health: Health) -> list[str]:
    """Return sentences on how long a process took to open and close.

    The owner waits for the other processes. For the owner, a second sentence names the slowest other
    process.
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
    """Return what would make the capture cheaper, as one sentence.

    Args:
        worst: The process that took longest to open and close. None if unknown.
        whose: Name of the process or replica that the other processes waited for. None if unknown.
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
    """Return the slowest worker that opened and closed for at least half of `wall_ns`. Without such a worker,
    return the slowest process, mostly the owner. None if no cost is known.
    """
    costs = [(row.cost.start_ns + row.cost.stop_ns, row) for row in health.processes if row.cost is not None]
    workers = [pair for pair in costs if not pair[1].owner and pair[0] * 2 >= wall_ns]
    return max(workers or costs, key=lambda pair: pair[0], default=(0, None))[1]
