"""Advice on missing parts of a recording, and on parts that make its numbers mislead."""

from __future__ import annotations

from stepscope_report.advice.evidence import Advice, Evidence, is_unedited, share_of_step
from stepscope_report.formatting import count, duration, few, percent_of
from stepscope_report.sections.breakdown import name_gap
from stepscope_report.sections.stages import Stage
from stepscope_report.spans import GENERATES, MOVES_WEIGHTS, ROLLOUT

_NAME = 60
"""Length to which a name is cut in advice."""


def never_ended(evidence: Evidence) -> Advice | None:
    """Advise on calls of processes that never closed their capture, else on calls that were still open when
    their process closed its own.

    Calls that a budget cut off do not count. A process that hangs is ended by SIGTERM.
    """
    spans = [span for span in evidence.health.open_spans if span.process not in evidence.over_budget]
    if not spans:
        return None
    gone = {process.name for process in evidence.health.processes if not process.closed}
    killed = [span for span in spans if span.process in gone]
    if killed:
        whose = "its" if len(killed) == 1 else "their"
        what = f"{count(len(killed), 'call')} never ended: {whose} process was killed, or still runs"
        remedy = "look at that process' log and at what it waited for, under `Never ended`"
    else:
        what = (
            f"{count(len(spans), 'call')} had not ended when the capture closed: a hang, or work that goes on"
        )
        remedy = "see `Never ended`"
        if not is_unedited(evidence):
            remedy += "; work for a later step should say so: trajectory(step=...)"
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
            "1 process is in no wall time, because its clock was not measured"
            if len(names) == 1
            else f"{count(len(names), 'process')} are in no wall time, because their clocks were not measured"
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
    """Advise if more than a tenth of the loop's time passes between its steps."""
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
        because=(f"{duration(ns)} (median), {percent_of(ns, period_ns)} of the period{before}",),
        do=(
            "open the step before data loading, evaluation and checkpoints, with a span for each; then load "
            "the next batch beside the step"
        ),
        saves_ns=ns,
    )


def ids_in_names(evidence: Evidence) -> Advice | None:
    """Advise if stages or roles have many names that hold ids."""
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
    """Advise if several processes that served different trajectories at the same time have the same replica
    number.
    """
    engine = next((engine for engine in evidence.engines if engine.rivals), None)
    if engine is None:
        return None
    return Advice(
        rule="shared-number",
        what=f"{count(len(engine.rivals), 'process')} are counted as one: {engine.replica}",
        because=(f"at the same time, each served other trajectories: {few(engine.rivals, 4)}",),
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
        do="raise the budget, or record fewer spans: not one for each token",
    )


def no_rollout(evidence: Evidence) -> Advice | None:
    """Advise if no process recorded the rollout of a step of RL."""
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
    """Return whether a stage shows that the step trains on rollouts. Supervised training has none."""
    if stage.waits or MOVES_WEIGHTS.search(stage.stage):
        return stage.role in ROLLOUT
    return stage.role == "critic" or "advantage" in stage.stage.lower()


def blind_spot(evidence: Evidence) -> Advice | None:
    """Advise if a tenth of the step is outside of all spans."""
    line = next(line for line in evidence.breakdown.lines if line.kind == "unaccounted")
    if line.wall_ns * 10 < evidence.breakdown.window_ns:
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
