"""Advice on a step: rules that speak only if the report's figures support it.

A rule is a pure function of the figures. It names the numbers it rests on, and what it could save at most.

One file above 400 lines: the rules are read as one list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.report.formatting import count, duration, percents, size
from stepscope.report.stage_names import MOVES_WEIGHTS, is_tool
from stepscope.report.table import Table
from stepscope.report.tables.baseline import ENOUGH, Baseline
from stepscope.report.tables.breakdown import Breakdown, Line
from stepscope.report.tables.devices import TraceTables
from stepscope.report.tables.engine import Engine
from stepscope.report.tables.gaps import name_gap
from stepscope.report.tables.health import Health, ProcessRow
from stepscope.report.tables.idle import ROLLOUT, Idle
from stepscope.report.tables.long_tail import LongTail
from stepscope.report.tables.profiling import Profiling
from stepscope.report.tables.stages import Share, Stage
from stepscope.report.tables.waiting import VainWait

LARGE_TRACE = 100_000
"""Events from which on a trace is a likely reason why closing took long."""

_STALLED = (
    "trust the other lines: the line `profiler` has what it cost. Without iterations.count and by_stage, "
    "engines write after the step; with a smaller count they write less"
)
GENERATES = frozenset({"rollout", "agent_loop"})
"""Roles whose work is to generate, or holds what generates."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step that rules look at. Shares are of the step without opening and closing the
    capture.
    """

    breakdown: Breakdown
    baseline: Baseline | None
    stages: Table[Stage]
    long_tail: LongTail | None
    idle: Table[Idle]
    vain_waits: Table[VainWait] = Table()
    engines: Table[Engine]
    traces: TraceTables | None
    health: Health
    profiling: Profiling = Profiling()
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
    """Return the advice: alarms first, then by possible savings, and last the capture's own cost."""
    found = [advice for rule in RULES if (advice := rule(evidence)) is not None]

    def place(advice: Advice) -> tuple[bool, bool, int, str]:
        own = advice.rule == "profiler-cost"  # no other step pays it
        return own, advice.kind != "alarm", -(advice.saves_ns or 0), advice.rule

    return Table(sorted(found, key=place))


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
        remedy = "see `Never ended`"
        if not _is_unedited(evidence):
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
        do=(
            "they were given to the capture, and the exchange of clocks with them failed: look at their logs"
            if evidence.profiling.met.issuperset(names)
            else "name these processes under `workers` of the `instrument` entry with `step`: their clocks "
            "are measured then"
            if _is_unedited(evidence)
            else "give these processes to capture(workers=...), which measures their clocks"
        ),
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
    less, and less than all. Or engines stood still for a tenth of it, for their own profilers.
    """
    found, stalled_ns = evidence.baseline, evidence.breakdown.stalled_ns
    if found is None or found.excess_ns is None or len(found.steps) < ENOUGH:
        return _stalled(evidence)
    took_ns = found.p50_ns + found.excess_ns
    slow, fast = took_ns > found.p90_ns, took_ns < found.min_ns
    if abs(found.excess_ns) * 10 < found.p50_ns or not (slow or fast):
        return _stalled(evidence)
    (share,) = percents([abs(found.excess_ns)], found.p50_ns)
    usual = f"median {duration(found.p50_ns)}, {duration(found.min_ns)} to {duration(found.max_ns)}"
    because = [f"{duration(took_ns)}; {count(len(found.steps), 'uncaptured step')} near it: {usual}"]
    if stalled_ns:
        because.append(f"{_stood_still(evidence)}. Without that it took {duration(took_ns - stalled_ns)}")
    why_slow = _STALLED if stalled_ns and stalled_ns * 2 >= found.excess_ns else _slowed(evidence)
    return Advice(
        rule="not-typical",
        kind="alarm",
        what=f"the step took {share} % {'longer' if slow else 'less'} than steps that are not captured",
        because=tuple(because),
        do=why_slow if slow else "capture another step: this one had less to do",
        saves_ns=None,
    )


def _slowed(evidence: Evidence) -> str:
    """The remedy for a step that took longer than uncaptured ones."""
    if not evidence.profiling.ran:
        return (
            "no profiler ran in it, and spans take microseconds: see what is slow below, or capture another"
        )
    less = ", ".join(_less(evidence.profiling))
    return (
        "trust shares more than times. If other captures are as slow, it is the profiler"
        f"{': record ' if less else ''}{less}"
    )


def _less(profiling: Profiling) -> list[str]:
    """The ways to record less that fit what was recorded."""
    ways = []
    if profiling.several:
        ways.append("fewer ranks")
    if profiling.heavy:
        ways.append(f"without {' and '.join(profiling.heavy)}")
    if profiling.by_torch:
        ways.append("a part of the step (torch.schedule)")
    if profiling.engines:
        ways.append("fewer iterations of an engine (iterations.count)")
    return ways


def _is_stalled(evidence: Evidence) -> bool:
    """Whether engines stood still for a tenth of the step, for their own profilers."""
    return evidence.breakdown.stalled_ns * 10 >= max(evidence.breakdown.window_ns, 1)


def _stalled(evidence: Evidence) -> Advice | None:
    if not _is_stalled(evidence):
        return None
    return Advice(
        rule="not-typical",
        kind="alarm",
        what="the step took longer than it would without the profilers of its engines",
        because=(_stood_still(evidence),),
        do=_STALLED,
        saves_ns=None,
    )


def _stood_still(evidence: Evidence) -> str:
    return (
        f"engines served nothing for {_share(evidence.breakdown.stalled_ns, evidence)}: their profilers wrote"
    )


def profiler_cost(evidence: Evidence) -> Advice | None:
    """Opening and closing the capture took a tenth of the step or more."""
    spent_ns = evidence.breakdown.opening_ns + evidence.breakdown.closing_ns
    if spent_ns * 10 < max(evidence.breakdown.window_ns, 1):
        return None
    worst = _slowest_to_record(evidence.health, spent_ns)
    traces = () if evidence.traces is None else evidence.traces.traces
    largest = max(traces, key=lambda trace: trace.events, default=None)
    because = [f"{duration(spent_ns)} beside a step of {duration(evidence.breakdown.window_ns)}"]
    if worst is not None:
        because += _name_slowest(worst, evidence.health)
    whose = "" if worst is None or worst.owner else f" for {worst.name}"
    if largest is not None and largest.events >= LARGE_TRACE:
        because.append(f"the largest trace is of {largest.process}: {count(largest.events, 'event')}")
        whose = f" for {largest.process}"
    return Advice(
        rule="profiler-cost",
        kind="hint",
        what="opening and closing the capture took long next to this step; other steps do not pay it",
        because=tuple(because),
        do=_make_cheaper(evidence, worst, whose),
        saves_ns=None,
    )


def _name_slowest(worst: ProcessRow, health: Health) -> list[str]:
    """Say how long a process took to open and close; of the owner, which waits for others, also who did."""
    if worst.cost is None:
        return []
    took = f"{duration(worst.cost.start_ns)} to open, {duration(worst.cost.stop_ns)} to close"
    if not worst.owner:
        return [f"{worst.name} took longest: {took}"]
    facts = [f"{worst.name} took longest: {took} (waiting for workers and engines included)"]
    others = [(row.cost, row.name) for row in health.processes if row.cost is not None and not row.owner]
    if others:
        ns, name = max((cost.start_ns + cost.stop_ns, name) for cost, name in others)
        facts.append(f"of the others {name}: {duration(ns)} for both")
    return facts


def _make_cheaper(evidence: Evidence, worst: ProcessRow | None, whose: str) -> str:
    """Return the remedies that fit what was recorded."""
    remedies = []
    cost = None if worst is None else worst.cost
    prepared = _is_unedited(evidence)
    if cost is not None and cost.start_ns >= cost.stop_ns and not prepared:
        remedies.append("prepare() before the first step pays the one-off part of opening")
    ways = _less(evidence.profiling)
    if ways and (whose or not remedies):
        remedies.append(f"record less{whose}: {', '.join(ways)}; or export.when: deferred")
    if not remedies:
        remedies.append("look at `Processes`: a busy worker, or a slow folder, makes all others wait")
    return "; ".join(remedies)


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
            f"the rest is fragments: PYTORCH_{'NPU' if evidence.profiling.npu else 'CUDA'}_ALLOC_CONF="
            "expandable_segments:True"
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
    held_ns = tail.held_ns - tail.stalled_ns
    if held_ns * 100 < 15 * tail.rollout_ns or held_ns * 50 < evidence.breakdown.window_ns:
        return None
    if tail.last_profiled == tail.last:
        return None  # a profiler made these the last ones, as far as anybody can tell
    return Advice(
        rule="long-tail",
        kind="hint",
        what="the step waits for its slowest trajectories",
        because=tuple(_tail_facts(tail, tail.held_ns, tail.rollout_ns)),
        do="limit turns and tokens, start long prompts first, or train on what there is and keep the rest",
        saves_ns=held_ns,
    )


def _tail_facts(tail: LongTail, held_ns: int, rollout_ns: int) -> list[str]:
    because = [
        (
            f"the last {tail.last} of {tail.trajectories} trajectories ended {duration(held_ns)} after "
            f"the others: {_percent(held_ns, rollout_ns)} of the rollout"
        )
    ]
    if tail.stalled_ns:
        because.append(f"for {duration(tail.stalled_ns)} of that an engine's profiler wrote")
    if tail.bubble is not None and tail.bubble.replicas:
        because.append(
            f"{tail.bubble.in_flight:g} at once in that time, {tail.bubble.in_flight_before:g} "
            f"before; replicas idle for {duration(tail.bubble.idle_ns)} of it in sum"
        )
    if tail.last_profiled:
        because.append(f"a profiler slowed {tail.last_profiled} of them and not all others")
    return because


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
    """One process of a role is busy 1.2 times the mean of its stage, and that is 2 % of the step. One that a
    profiler recorded is compared with others of which that is true too.
    """
    gaps = [gap for stage in _comparable(evidence) for gap in _gaps(stage) if _is_large(gap, evidence)]
    worst = max(gaps, key=lambda gap: gap.lost_ns, default=None)
    if worst is None:
        return None
    stage, slowest = worst.stage, worst.slowest
    because = [
        (
            f"busy for {duration(slowest.worked_ns)}, {duration(worst.mean_ns)} on average over "
            f"{count(worst.processes, 'process')}"
        )
    ]
    if stage.uneven and slowest.profiled:
        because.append("a profiler recorded each of these; the others are not compared with it")
    elif stage.uneven:
        because.append("no profiler recorded it, though some of the others")
    return Advice(
        rule="straggler",
        kind="hint",
        what=f"{slowest.process} is slower than the others in {stage.role} {stage.stage}",
        because=tuple(because),
        do=(
            "balance requests by length and load, not in turn"
            if stage.role in GENERATES
            else "spread its calls over the others; if it is always that process, look at its host"
            if stage.role in ROLLOUT
            else "balance the batch by tokens, not by samples; if it is always that rank, look at its host"
        ),
        saves_ns=worst.lost_ns,
    )


def uneven_profiling(evidence: Evidence) -> Advice | None:
    """A process would be a straggler, if a profiler had recorded the others as well."""
    gaps = [
        gap
        for stage in _comparable(evidence)
        if stage.uneven
        for gap in [_gap_to_unprofiled(stage)]
        if _is_large(gap, evidence)
    ]
    worst = max(gaps, key=lambda gap: gap.lost_ns, default=None)
    if worst is None:
        return None
    stage, slowest = worst.stage, worst.slowest
    alike = (
        "ranks: all, or no engines in the capture"
        if evidence.profiling.engines and stage.role in GENERATES
        else "ranks: all, or profiler: off"
    )
    return Advice(
        rule="uneven-profiling",
        kind="hint",
        what=(
            f"{slowest.process} took longer in {stage.role} {stage.stage}, and a profiler slowed it and not "
            "the others"
        ),
        because=(
            (
                f"busy for {duration(slowest.worked_ns)}; {duration(worst.mean_ns)} on average over "
                f"{count(worst.processes, 'process')} without a profiler"
            ),
        ),
        do=(
            "this step cannot tell a slow process from its profiler: record all processes of the role or "
            f"none (roles.{stage.role}: {alike})"
        ),
        saves_ns=None,
    )


class _Gap(NamedTuple):
    """The excess of one process over those it is compared with, in one stage."""

    stage: Stage
    slowest: Share
    mean_ns: int
    processes: int
    """The number of processes in the mean."""

    @property
    def lost_ns(self) -> int:
        return self.slowest.worked_ns - self.mean_ns


def _comparable(evidence: Evidence) -> list[Stage]:
    return [
        stage
        for stage in evidence.stages
        if len(stage.processes) > 1 and not stage.waits and not _cut_off(stage, evidence)
    ]


def _is_large(gap: _Gap, evidence: Evidence) -> bool:
    large = gap.lost_ns * 50 >= evidence.breakdown.window_ns
    return large and gap.slowest.worked_ns * 5 >= gap.mean_ns * 6


def _gaps(stage: Stage) -> list[_Gap]:
    """The busiest process against the mean of all. Where profiling differs, two: the busiest profiled one
    against the profiled ones, and the busiest of the others against the mean of all if they are too few. What
    is slower than a profiled process, and is none, is slow.
    """
    profiled = [share for share in stage.processes if share.profiled]
    others = [share for share in stage.processes if not share.profiled]
    if not (profiled and others):
        return [_gap(stage, stage.processes, stage.processes)]
    gaps = [_gap(stage, others, others if len(others) > 1 else stage.processes)]
    return [*gaps, _gap(stage, profiled, profiled)] if len(profiled) > 1 else gaps


def _gap_to_unprofiled(stage: Stage) -> _Gap:
    profiled = [share for share in stage.processes if share.profiled]
    return _gap(stage, profiled, [share for share in stage.processes if not share.profiled])


def _gap(stage: Stage, candidates: Sequence[Share], compared: Sequence[Share]) -> _Gap:
    slowest = max(candidates, key=lambda share: share.worked_ns)
    mean_ns = sum(share.worked_ns for share in compared) // len(compared)
    return _Gap(stage, slowest, mean_ns, len(compared))


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
            else "fewer ranks to a replica"
            if worst.role in ROLLOUT
            else "larger buckets, and overlap of gradient reduction with backward"
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
        do="`Idle` says what the process waited for; inside a stage: larger micro-batches, "
        + ("graph mode" if evidence.profiling.npu else "CUDA graphs"),
        saves_ns=worst.span_ns - worst.busy_ns,
    )


def queueing(evidence: Evidence) -> Advice | None:
    """Requests queued for a fifth of the trajectories' time, and not for engines that wrote traces."""
    if _is_stalled(evidence):
        return None
    return _in_trajectories(
        evidence,
        lambda stage: stage.waits and stage.role == "rollout",
        rule="queueing",
        what="requests wait for a place in the engine",
        do=(
            "more replicas, or more requests at once in each (vLLM: max_num_seqs, SGLang: "
            "max_running_requests)"
        ),
    )


def slow_tools(evidence: Evidence) -> Advice | None:
    return _in_trajectories(
        evidence,
        lambda stage: is_tool(stage.role, stage.stage),
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
    inside = set() if tail is None else {(spread.role, spread.stage) for spread in tail.spreads}
    part_ns = sum(
        stage.total_ns for stage in evidence.stages if counts(stage) and (stage.role, stage.stage) in inside
    )
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
    """An engine read prompts, and wrote no token, for a quarter of its time. A recording of less than half of
    the rollout does not say so: its first passes read prompts, and by_stage records as many of each kind.
    """
    rows = [
        row
        for row in evidence.engines
        if row.prefill_ns * 4 >= row.recorded_ns > 0 and row.recorded_ns * 2 >= row.window_ns
    ]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.prefill_ns)
    return Advice(
        rule="prefill-alone",
        kind="hint",
        what=f"{worst.replica} reads prompts while nobody gets tokens",
        because=(
            (
                f"{duration(worst.prefill_ns)} of {duration(worst.recorded_ns)}: "
                f"{_percent(worst.prefill_ns, worst.recorded_ns)}"
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
    over = {"gpu": "NCCL or ", "npu": "HCCL or "}.get(_device(evidence), "")
    return Advice(
        rule="weight-sync",
        kind="hint",
        what="moving weights to the replicas takes long",
        because=(f"{names}: {_share(wall_ns, evidence)}",),
        do=f"send them over {over}shared memory in buckets, and overlap that with the end of the update",
        saves_ns=wall_ns,
    )


def vain_wait(evidence: Evidence) -> Advice | None:
    """A process waited for 5 % of the step or more while nobody was busy who could have ended the wait."""
    worst = max(evidence.vain_waits, key=lambda wait: wait.vain_ns, default=None)
    if worst is None or worst.vain_ns * 20 < evidence.breakdown.window_ns:
        return None
    who = worst.processes[0] if len(worst.processes) == 1 else count(len(worst.processes), "process")
    return Advice(
        rule="vain-wait",
        kind="hint",
        what=f"{who} waited in {worst.role} {worst.stage} while nobody it could wait for was busy",
        because=(
            _share(worst.vain_ns, evidence),
            f"in all it waited for {duration(worst.wall_ns)}",
        ),
        do=(
            "wake it when the work is done, or let it look more often; if somebody worked who is not "
            "recorded, give that process to the capture"
        ),
        saves_ns=worst.vain_ns,
    )


def no_rollout(evidence: Evidence) -> Advice | None:
    """A step of RL in which nobody recorded that anything was generated."""
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
        kind="hint",
        what="no process recorded the rollout of this step",
        because=(f"it has {', '.join(f'{stage.role} {stage.stage}' for stage in signs[:3])}",),
        do=(
            "list what generates under `instrument` (role: rollout), and name its Ray actors under `workers` "
            "of the entry with `step`"
            if _is_unedited(evidence)
            else "decorate what generates (role rollout, in the process that does it), and give its Ray "
            f"actors to the capture as workers{engines}"
        ),
        saves_ns=None,
    )


def _of_rl(stage: Stage) -> bool:
    """Whether a stage says that the step trains on rollouts. Supervised training has none of these."""
    if stage.waits or MOVES_WEIGHTS.search(stage.stage):
        return stage.role in ROLLOUT
    return stage.role == "critic" or "advantage" in stage.stage.lower()


def blind_spot(evidence: Evidence) -> Advice | None:
    """A tenth of the step is in no span."""
    line = _line(evidence, "unaccounted")
    if line.wall_ns * 10 < evidence.breakdown.window_ns:
        return None
    because = [_share(line.wall_ns, evidence)]
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
        kind="hint",
        what="a part of the step is in no span, and nobody knows what it is",
        because=tuple(because),
        do=(
            "have their clocks measured first"
            if unaligned
            else "list more functions of the loop under `instrument`"
            if _is_unedited(evidence)
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
    uneven_profiling,
    collectives,
    idle_device,
    queueing,
    slow_tools,
    prefill_alone,
    weight_sync,
    vain_wait,
    no_rollout,
    blind_spot,
)


def _is_unedited(evidence: Evidence) -> bool:
    """Whether the program's reader has a configuration to change, and no code."""
    return evidence.health.opened_by == "instrument"


def _device(evidence: Evidence) -> str:
    profiling = evidence.profiling
    return "npu" if profiling.npu else "gpu" if profiling.gpu else ""


def _line(evidence: Evidence, kind: str) -> Line:
    return next(line for line in evidence.breakdown.lines if line.kind == kind)


def _share(wall_ns: int, evidence: Evidence) -> str:
    return f"{duration(wall_ns)}, {_percent(wall_ns, evidence.breakdown.window_ns)} of the step"


def _percent(part: int, whole: int) -> str:
    return f"{percents([part], whole)[0]} %"
