"""What is worth doing about a step: rules that speak only when the report's figures carry it.

A rule is a pure function of the figures. It names the numbers it rests on, and what it could save at most.

One file above 400 lines: the rules are read as one list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

from stepscope.report.baseline import ENOUGH, Baseline
from stepscope.report.breakdown import Breakdown, Line
from stepscope.report.devices import TraceTables
from stepscope.report.engine import Engine
from stepscope.report.figures import count, duration, percents, size
from stepscope.report.health import Health, ProcessRow
from stepscope.report.idle import MOVES_WEIGHTS, ROLLOUT, Idle
from stepscope.report.long_tail import LongTail
from stepscope.report.rows import Table
from stepscope.report.stages import Stage

LARGE_TRACE = 100_000
"""Events from which on a trace is a likely reason why closing took long."""

_SLOWED = (
    "trust shares more than times. If other captures are as slow, it is the profiler: record fewer ranks, "
    "without stacks, shapes and memory"
)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step that rules look at. Shares are of the step without opening and closing the
    capture.
    """

    breakdown: Breakdown
    baseline: Baseline | None
    stages: Table[Stage]
    long_tail: LongTail | None
    idle: Table[Idle]
    engines: Table[Engine]
    traces: TraceTables | None
    health: Health
    cut: frozenset[str] = frozenset()
    """Names of processes whose recording ended before their work did: it ended calls that went on."""
    over_budget: frozenset[str] = frozenset()
    """Those of them that a budget ended."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    """Its name: stable, for scripts."""
    kind: Literal["alarm", "hint"]
    """`alarm`: something is wrong, or the numbers mislead. `hint`: time could be saved."""
    what: str
    because: tuple[str, ...]
    """The numbers that it rests on."""
    do: str
    saves_ns: int | None
    """Of the step, at most. None: not to be said."""


Rule: TypeAlias = Callable[[Evidence], Advice | None]


def advise(evidence: Evidence) -> Table[Advice]:
    """What the rules have to say: alarms first, then by what could be saved."""
    found = [advice for rule in RULES if (advice := rule(evidence)) is not None]
    return Table(sorted(found, key=lambda each: (each.kind != "alarm", -(each.saves_ns or 0), each.rule)))


def never_ended(evidence: Evidence) -> Advice | None:
    """Calls of a process that never closed its capture, else those that went on when theirs closed. Not those
    that a budget cut off; who hangs is ended by SIGTERM.
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
        remedy = "see `Never ended`; work for a later step should say so: trajectory(step=...)"
    first = (killed or spans)[0]
    began = "" if first.start_ns is None else f" began at {duration(first.start_ns)},"
    seen = f"seen for {duration(first.wall_ns)}"
    return Advice(
        rule="never-ended",
        kind="alarm",
        what=what,
        because=(f"the longest: {first.process}, {first.role} {first.stage},{began} {seen}",),
        do=remedy,
        saves_ns=None,
    )


def unaligned(evidence: Evidence) -> Advice | None:
    names = evidence.breakdown.left_out
    if not names:
        return None
    return Advice(
        rule="unaligned",
        kind="alarm",
        what=(
            "1 process is in no wall time: its clock was not measured"
            if len(names) == 1
            else f"{count(len(names), 'process')} are in no wall time: their clocks were not measured"
        ),
        because=(f"unaligned: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}",),
        do="give these processes to capture(workers=...), which measures their clocks",
        saves_ns=None,
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
        saves_ns=None,
    )


def not_typical(evidence: Evidence) -> Advice | None:
    """The step took a tenth more than uncaptured ones near it, and more than nine tenths of them; or a tenth
    less, and less than all.
    """
    found = evidence.baseline
    if found is None or found.excess_ns is None or len(found.steps) < ENOUGH:
        return None
    took_ns = found.p50_ns + found.excess_ns
    slow, fast = took_ns > found.p90_ns, took_ns < found.min_ns
    if abs(found.excess_ns) * 10 < found.p50_ns or not (slow or fast):
        return None
    (share,) = percents([abs(found.excess_ns)], found.p50_ns)
    usual = f"median {duration(found.p50_ns)}, {duration(found.min_ns)} to {duration(found.max_ns)}"
    return Advice(
        rule="not-typical",
        kind="alarm",
        what=f"the step took {share} % {'longer' if slow else 'less'} than steps that are not captured",
        because=(f"{duration(took_ns)}; {count(len(found.steps), 'uncaptured step')} near it: {usual}",),
        do=_SLOWED if slow else "capture another step: this one had less to do",
        saves_ns=None,
    )


def profiler_cost(evidence: Evidence) -> Advice | None:
    """Opening and closing the capture took a tenth of the step or more."""
    line = _line(evidence, "profiler")
    if line.wall_ns * 10 < evidence.breakdown.window_ns:
        return None
    because = [_share(line.wall_ns, evidence)]
    remedies = []
    worst = _slowest_to_record(evidence.health, line.wall_ns)
    opening = False
    if worst is not None and worst.cost is not None:
        start_ns, stop_ns = worst.cost.start_ns, worst.cost.stop_ns
        opening = start_ns >= stop_ns
        because.append(
            f"{worst.name} took longest: {duration(start_ns)} to open, {duration(stop_ns)} to close"
            + (" (waiting for workers and engines included)" if worst.owner else "")
        )
        others = [row for row in evidence.health.processes if row.cost is not None and not row.owner]
        if worst.owner and others:
            ns, name = max((row.cost.start_ns + row.cost.stop_ns, row.name) for row in others if row.cost)
            because.append(f"of the others {name}: {duration(ns)} for both")
        if opening:
            remedies.append("prepare() before the first step pays the one-off part of opening")
    traces = () if evidence.traces is None else evidence.traces.traces
    largest = max(traces, key=lambda trace: trace.events, default=None)
    if largest is not None and largest.events >= LARGE_TRACE:
        because.append(f"the largest trace is of {largest.process}: {count(largest.events, 'event')}")
        whose = f" for {largest.process}"
    else:
        whose = "" if worst is None or worst.owner else f" for {worst.name}"
    if whose or not opening:
        remedies.append(
            f"record less{whose}: fewer ranks or roles, torch.schedule, of an engine some iterations; "
            "or export.when: deferred"
        )
    return Advice(
        rule="profiler-cost",
        kind="alarm",
        what="opening and closing the capture took long next to this step; other steps do not pay it",
        because=tuple(because),
        do="; ".join(remedies),
        saves_ns=None,
    )


def _slowest_to_record(health: Health, wall_ns: int) -> ProcessRow | None:
    """A worker that explains half of what the owner paid, for the owner waits for it; else the owner."""
    told = [(row.cost.start_ns + row.cost.stop_ns, row) for row in health.processes if row.cost is not None]
    workers = [each for each in told if not each[1].owner and each[0] * 2 >= wall_ns]
    return max(workers or told, key=lambda each: each[0], default=(0, None))[1]


def memory_nearly_full(evidence: Evidence) -> Advice | None:
    """An allocator held 95 % of its device or more."""
    rows = () if evidence.traces is None else evidence.traces.memory
    full = [row for row in rows if row.capacity_bytes and row.reserved_bytes >= 0.95 * row.capacity_bytes]
    if not full:
        return None
    worst = max(full, key=lambda row: row.reserved_bytes / (row.capacity_bytes or 1))
    gap = worst.reserved_bytes - worst.allocated_bytes
    return Advice(
        rule="memory-nearly-full",
        kind="alarm",
        what=f"{worst.process} held nearly all memory of {worst.device}",
        because=(
            (
                f"{size(worst.reserved_bytes)} of {size(worst.capacity_bytes or 0)} reserved, "
                f"{size(worst.allocated_bytes)} of it in use at most"
            ),
        ),
        do=(
            "the rest is fragments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            if gap > 0.2 * worst.reserved_bytes
            else "smaller micro-batches, or activation checkpointing, before a longer sequence ends the run"
        ),
        saves_ns=None,
    )


def long_tail(evidence: Evidence) -> Advice | None:
    """The last tenth of the trajectories took 15 % of the rollout or more, and 2 % of the step."""
    tail = evidence.long_tail
    if tail is not None and not tail.trajectories:
        return _begun_before(tail, evidence)
    if tail is None or tail.held_ns is None or not tail.rollout_ns or tail.trajectories < 10:
        return None
    if tail.held_ns * 100 < 15 * tail.rollout_ns or tail.held_ns * 50 < evidence.breakdown.window_ns:
        return None
    because = [
        (
            f"the last {tail.last} of {tail.trajectories} trajectories ended {duration(tail.held_ns)} after "
            f"the others: {_percent(tail.held_ns, tail.rollout_ns)} of the rollout"
        )
    ]
    if tail.bubble is not None and tail.bubble.replicas:
        because.append(
            f"{tail.bubble.in_flight:g} at once in that time, {tail.bubble.in_flight_before:g} "
            f"before; replicas idle for {duration(tail.bubble.idle_ns)} of it in sum"
        )
    return Advice(
        rule="long-tail",
        kind="hint",
        what="the step waits for its slowest trajectories",
        because=tuple(because),
        do="limit turns and tokens, start long prompts first, or train on what there is and keep the rest",
        saves_ns=tail.held_ns,
    )


def _begun_before(tail: LongTail, evidence: Evidence) -> Advice | None:
    """The last tenth of ten or more that the step consumes had begun before, and went on for 2 % of it."""
    late = tail.late
    if late is None or tail.consumed < 10 or late.trajectories > -(-tail.consumed // 10):
        return None
    if late.until_ns * 50 < evidence.breakdown.window_ns:
        return None
    return Advice(
        rule="long-tail",
        kind="hint",
        what="the step waits for its slowest trajectories, begun before it",
        because=(
            f"of the {tail.consumed} that it consumes, {late.trajectories} went on when it began",
            f"the last, {late.last}, for {_share(late.until_ns, evidence)}",
        ),
        do="limit turns and tokens, start long prompts first, or train on what there is and keep the rest",
        saves_ns=late.until_ns,
    )


def straggler(evidence: Evidence) -> Advice | None:
    """One process of a role is busy 1.2 times the mean of its stage, and that is 2 % of the step."""
    worst: tuple[int, Stage, int] | None = None
    for stage in evidence.stages:
        if len(stage.processes) < 2 or stage.slowest is None or _cut_off(stage, evidence):
            continue
        busy = [share.busy_ns for share in stage.processes]
        mean_ns, most_ns = sum(busy) // len(busy), max(busy)
        lost_ns = most_ns - mean_ns
        large = lost_ns * 50 >= evidence.breakdown.window_ns and most_ns * 5 >= mean_ns * 6
        if large and (worst is None or lost_ns > worst[0]):
            worst = lost_ns, stage, mean_ns
    if worst is None:
        return None
    lost_ns, stage, mean_ns = worst
    rollout = stage.role in ROLLOUT
    return Advice(
        rule="straggler",
        kind="hint",
        what=f"{stage.slowest} is slower than the others in {stage.role} {stage.stage}",
        because=(
            (
                f"busy for {duration(mean_ns + lost_ns)}, {duration(mean_ns)} on average over "
                f"{len(stage.processes)} processes"
            ),
        ),
        do=(
            "balance requests by length and load, not in turn"
            if rollout
            else "balance the batch by tokens, not by samples; if it is always that rank, look at its host"
        ),
        saves_ns=lost_ns,
    )


def _cut_off(stage: Stage, evidence: Evidence) -> bool:
    """Whether a recording that ended early cut off calls of the stage: they say nothing of who is slow."""
    if any(
        (span.role, span.stage) == (stage.role, stage.stage) and span.process in evidence.cut
        for span in evidence.health.open_spans
    ):
        return True
    cut = any(share.process in evidence.cut for share in stage.processes)
    return cut and len({share.calls for share in stage.processes}) > 1


def collectives(evidence: Evidence) -> Advice | None:
    """A process spent a tenth of its busy time in collectives that nothing hides, and 2 % of the step."""
    rows = [row for row in evidence.idle if row.collective_ns]
    worst = max(rows, key=lambda row: row.collective_ns or 0, default=None)
    if worst is None or worst.collective_ns is None:
        return None
    if worst.collective_ns * 10 < worst.busy_ns or worst.collective_ns * 50 < evidence.breakdown.window_ns:
        return None
    late = worst.skew_ns is not None and worst.skew_ns * 2 >= worst.collective_ns
    because = [f"{worst.process}: {duration(worst.collective_ns)} of {duration(worst.busy_ns)} busy"]
    one = late and worst.awaited is not None and worst.awaited_ns * 2 >= (worst.skew_ns or 0)
    if worst.skew_ns is not None:
        because.append(f"{duration(worst.skew_ns)} before the last rank had entered")
        if late and worst.awaited is not None:
            because.append(f"that was {worst.awaited} for {duration(worst.awaited_ns)} of it")
    whom = worst.awaited if one else "each other"
    return Advice(
        rule="collectives",
        kind="hint",
        what=(
            f"ranks wait for {whom} in collectives"
            if late
            else "communication is not hidden behind computation"
        ),
        because=tuple(because),
        do=(
            "even out what the ranks do before them: tokens in a micro-batch, work on one rank alone"
            + ("; if it is always that rank, look at its host" if one else "")
            if late
            else "larger buckets, overlap of gradient reduction and backward, or fewer ranks to a replica"
        ),
        saves_ns=worst.collective_ns,
    )


def idle_device(evidence: Evidence) -> Advice | None:
    """Between its first and last kernel a device was busy for less than half of the time."""
    rows = () if evidence.traces is None else evidence.traces.devices
    idle = [
        row
        for row in rows
        if row.busy_ns * 2 < row.span_ns and (row.span_ns - row.busy_ns) * 20 >= evidence.breakdown.window_ns
    ]
    if not idle:
        return None
    worst = max(idle, key=lambda row: row.span_ns - row.busy_ns)
    return Advice(
        rule="idle-device",
        kind="hint",
        what=f"{worst.device} of {worst.process} waits for the host, or for other stages",
        because=(
            (
                f"busy for {duration(worst.busy_ns)} of the {duration(worst.span_ns)} from the first to the "
                f"last kernel: {_percent(worst.busy_ns, worst.span_ns)}"
            ),
        ),
        do="`Idle` says what the process waited for; inside a stage: larger micro-batches, CUDA graphs",
        saves_ns=worst.span_ns - worst.busy_ns,
    )


def queueing(evidence: Evidence) -> Advice | None:
    return _in_trajectories(
        evidence,
        lambda stage: stage.stage in ("queue", "wait"),
        rule="queueing",
        what="requests wait for a place in the engine",
        do="more replicas, or more requests at once in each (max_num_seqs, max_running_requests)",
    )


def slow_tools(evidence: Evidence) -> Advice | None:
    return _in_trajectories(
        evidence,
        lambda stage: stage.role == "env",
        rule="slow-tools",
        what="trajectories wait for their tools",
        do="run more of them at once, give them a deadline, or let other trajectories generate meanwhile",
    )


def _in_trajectories(
    evidence: Evidence, counts: Callable[[Stage], bool], *, rule: str, what: str, do: str
) -> Advice | None:
    """Stages that are a fifth of the trajectories' time in sum, or more."""
    tail = evidence.long_tail
    whole_ns = sum(stage.total_ns for stage in evidence.stages if stage.stage == "trajectory")
    part_ns = sum(stage.total_ns for stage in evidence.stages if counts(stage))
    if tail is None or not tail.rollout_ns or not whole_ns or part_ns * 5 < whole_ns:
        return None
    return Advice(
        rule=rule,
        kind="hint",
        what=what,
        because=(
            (
                f"{duration(part_ns)} of the {duration(whole_ns)} that all trajectories took in sum: "
                f"{_percent(part_ns, whole_ns)}"
            ),
        ),
        do=do,
        saves_ns=tail.rollout_ns * part_ns // whole_ns,
    )


def prefill_alone(evidence: Evidence) -> Advice | None:
    """An engine read prompts, and wrote no token, for a quarter of its time."""
    rows = [row for row in evidence.engines if row.prefill_ns * 4 >= row.window_ns > 0]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.prefill_ns)
    return Advice(
        rule="prefill-alone",
        kind="hint",
        what=f"{worst.replica} reads prompts while nobody gets tokens",
        because=(
            (
                f"{duration(worst.prefill_ns)} of {duration(worst.window_ns)}: "
                f"{_percent(worst.prefill_ns, worst.window_ns)}"
            ),
        ),
        do="prefix caching (the turns of a trajectory share theirs), chunked prefill",
        saves_ns=worst.prefill_ns,
    )


def weight_sync(evidence: Evidence) -> Advice | None:
    """Moving weights took 5 % of the step or more."""
    lines = [line for line in evidence.breakdown.lines if line.stage and MOVES_WEIGHTS.search(line.stage)]
    wall_ns = sum(line.wall_ns for line in lines)
    if not lines or wall_ns * 20 < evidence.breakdown.window_ns:
        return None
    names = ", ".join(f"{line.role} {line.stage}" for line in lines[:3])
    return Advice(
        rule="weight-sync",
        kind="hint",
        what="moving weights to the replicas takes long",
        because=(f"{names}: {_share(wall_ns, evidence)}",),
        do="send them over NCCL or shared memory in buckets, and overlap that with the end of the update",
        saves_ns=wall_ns,
    )


def blind_spot(evidence: Evidence) -> Advice | None:
    """A tenth of the step is in no span."""
    line = _line(evidence, "unaccounted")
    if line.wall_ns * 10 < evidence.breakdown.window_ns:
        return None
    because = [_share(line.wall_ns, evidence)]
    unaligned = len(evidence.breakdown.left_out)
    if unaligned:
        because.append(
            f"it may be the work of the {count(unaligned, 'process')} whose clock was not measured"
        )
    return Advice(
        rule="blind-spot",
        kind="hint",
        what="a part of the step is in no span, and nobody knows what it is",
        because=tuple(because),
        do=(
            "have their clocks measured first"
            if unaligned
            else "decorate more stages with profile_step, or open a span() around what the driver does"
        ),
        saves_ns=line.wall_ns,
    )


RULES: Sequence[Rule] = (
    never_ended,
    unaligned,
    dropped,
    not_typical,
    profiler_cost,
    memory_nearly_full,
    long_tail,
    straggler,
    collectives,
    idle_device,
    queueing,
    slow_tools,
    prefill_alone,
    weight_sync,
    blind_spot,
)


def _line(evidence: Evidence, kind: str) -> Line:
    return next(line for line in evidence.breakdown.lines if line.kind == kind)


def _share(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {_percent(wall_ns, evidence.breakdown.window_ns)} of the step"


def _percent(part: int, whole: int) -> str:
    return f"{percents([part], whole)[0]} %"
