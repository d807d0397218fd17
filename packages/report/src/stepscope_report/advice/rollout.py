"""Advice on the rollout: slow trajectories, queues, tools, engines, and weight syncs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from stepscope.files.counters import KV_CACHE, RUNNING_REQUESTS, WAITING_REQUESTS
from stepscope_report.advice import FULL, Advice, Evidence, percentage_of, share_of_step
from stepscope_report.advice.recording import is_stalled
from stepscope_report.advice.remedies import changes
from stepscope_report.formatting import count, duration, few, the_last
from stepscope_report.sections.batches import Batches, thin_end
from stepscope_report.sections.cause import OtherCause
from stepscope_report.sections.critical_path import PathPart
from stepscope_report.sections.engines import Engine
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.sections.stages import Stage
from stepscope_report.spans import GENERATES, MOVES_WEIGHTS, TRANSFER, is_tool
from stepscope_report.suspects import ENOUGH
from stepscope_report.whatif.changes import Options

_NAMED = 3
"""Largest number of stages that a sentence names."""
_QUEUE = "requests wait for a place in the engine"
_SHORTEN_QUEUE = (
    "more replicas, or more requests at once in each (vLLM: max_num_seqs, SGLang: max_running_requests)"
)

_TailKind: TypeAlias = Literal["tool", "queue", "generation", "reward", "later", "other"]

_TAIL_REMEDIES: dict[_TailKind, str] = {
    "tool": "give its tools a deadline, run calls of a turn at once, or enlarge the pool that serves them",
    "queue": (
        "more requests at once in each replica (vLLM: max_num_seqs, SGLang: max_running_requests), more "
        "replicas, or long prompts first"
    ),
    "generation": (
        "limit turns and tokens, start long prompts first, or train on what there is and keep the rest"
    ),
    "reward": "give its judge a deadline, or more workers, or score while other trajectories generate",
    "later": "begin more trajectories at once, or those with long prompts first",
    "other": "open a span around what it awaits there, because nothing recorded names that",
}


def long_tail(evidence: Evidence) -> Advice | None:
    """Advise if the last tenth of at least three trajectories took 15 % of the rollout and 2 % of
    the step.
    """
    tail = evidence.long_tail
    if tail is not None and not tail.trajectories:
        return _begun_before(tail, evidence)
    if tail is None or tail.held_ns is None or not tail.rollout_ns or tail.trajectories < ENOUGH:
        return None
    held_ns = tail.held_ns - tail.stalled_ns
    if held_ns * 100 < 15 * tail.rollout_ns or held_ns * 50 < evidence.breakdown.window_ns:
        return None
    if tail.last_profiled == tail.last:
        return None  # a profiler may have made these trajectories the last
    cause = next((cause for cause in evidence.causes if cause.trajectory is not None), None)
    if cause is None:
        return None
    kind = _tail_kind(cause)
    facts = _tail_facts(tail, tail.held_ns, tail.rollout_ns)
    said = [line for line in cause.evidence if not facts[0].startswith(line)]
    return Advice(
        rule="long-tail",
        what="the step waits for its slowest trajectories",
        because=(*facts, *_thin_facts(evidence), cause.sentence, *said),
        do=_TAIL_REMEDIES[kind],
        saves_ns=cause.ns,
        settings=changes(f"long-tail: {kind}", evidence),
    )


def thin_batches(evidence: Evidence) -> Advice | None:
    """Advise if few requests ran in every replica during the last tenth of the rollout, for at least 2 % of
    the step. No advice if `long_tail` gives some.
    """
    thin = thin_end(evidence.batches)
    if thin is None or long_tail(evidence) is not None:
        return None
    thin_ns, sentence = thin
    if thin_ns * 10 < evidence.batches[0].rollout_ns or thin_ns * 50 < evidence.breakdown.window_ns:
        return None
    saving = evidence.what_if(Options(cut_tail="p90"))
    return Advice(
        rule="thin-batches",
        what="the engines run nearly empty at the end of the rollout",
        because=(sentence,),
        do="train once nine tenths of the trajectories ended, and drop the others or go on with them in the "
        "next step; or let the next rollout begin meanwhile",
        saves_ns=thin_ns if saving is None else max(0, min(thin_ns, saving.saving_ns)),
        settings=changes("long-tail: generation", evidence),
    )


def _thin_facts(evidence: Evidence) -> list[str]:
    thin = thin_end(evidence.batches)
    return [] if thin is None else [thin[1]]


def _tail_facts(tail: LongTail, held_ns: int, rollout_ns: int) -> list[str]:
    because = [
        (
            f"{the_last(tail.last, tail.trajectories)} trajectories ended {duration(held_ns)} after "
            f"the others: {percentage_of(held_ns, rollout_ns)} of the rollout"
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
    """Advise if trajectories that began before the step ran on for 2 % of the step. No advice if more than a
    tenth of the trajectories that the step consumes began before it, or if it consumes fewer than three.
    """
    late = tail.late
    if late is None or tail.consumed < ENOUGH or late.trajectories > -(-tail.consumed // 10):
        return None
    if late.until_ns * 50 < evidence.breakdown.window_ns:
        return None
    return Advice(
        rule="long-tail",
        what="the step waits for its slowest trajectories, begun before it",
        because=(
            f"{late.trajectories} of the {tail.consumed} trajectories that it consumes ran when it began",
            f"the last one, {late.last}, ran on for {share_of_step(late.until_ns, evidence)}",
        ),
        do=_TAIL_REMEDIES["generation"],
        saves_ns=late.until_ns,
        settings=changes("long-tail: generation", evidence),
    )


def _tail_kind(cause: OtherCause) -> _TailKind:
    """Return the kind of work that made the last trajectory longer than the other trajectories."""
    if cause.stage is None or cause.role is None:
        return "later"
    if cause.role == "reward" or (cause.kind == "queue" and "reward" in cause.stage):
        return "reward"
    if cause.kind == "queue":
        return "queue"
    if cause.kind == "slow-tool":
        return "tool"
    unnamed = cause.stage in ("trajectory", "turn")
    return "generation" if cause.role in GENERATES and not unnamed else "other"


def queueing(evidence: Evidence) -> Advice | None:
    """Advise if requests queued for a fifth of the time of a replica's passes. If no engine recorded its
    passes, advise if requests queued for a fifth of the trajectories' time.

    If no queue was recorded either, advise if an engine's counters show that one in five requests waited on
    average while its KV cache had room. No advice if engines wrote traces for a tenth of the step.
    """
    if is_stalled(evidence):
        return None
    if any(engine.limit is not None for engine in evidence.batches):
        return _queueing_by_passes(evidence)
    return _queueing_by_spans(evidence) or _queueing_by_counters(evidence)


def _queueing_by_passes(evidence: Evidence) -> Advice | None:
    """Advise if requests waited during a fifth of the time of a replica's passes.

    The advice is more requests at once or more replicas, whichever saves more by the measured service curve.
    No advice if that is less than 2 % of the step. More requests at once are not advised if the KV cache is
    full.
    """
    rows = [
        engine
        for engine in evidence.batches
        if engine.limit is not None and engine.waiting_ns * 5 >= engine.busy_ns
    ]
    if not rows:
        return None
    worst = max(rows, key=lambda engine: engine.waiting_ns)
    is_full = (worst.kv_use or 0) * 100 >= FULL
    larger = None if is_full else evidence.what_if(Options(max_requests=str(worst.demand)))
    more = evidence.what_if(Options(replicas="+1"))
    known = [saving.saving_ns for saving in (larger, more) if saving is not None]
    if known and max(known) * 50 < evidence.breakdown.window_ns:
        return None
    do = _SHORTEN_QUEUE
    if is_full:
        do = "more replicas, or more memory for the KV cache, which is full"
    elif more is not None and larger is not None and more.saving_ns > larger.saving_ns:
        do = "more replicas, which save more than more requests at once in each"
    return Advice(
        rule="queueing",
        what=_QUEUE,
        because=(
            (
                f"replica {worst.replica}: requests waited for {duration(worst.waiting_ns)} of the "
                f"{duration(worst.busy_ns)} of its passes, while it served {worst.limit} at once"
            ),
            *_curve_facts(worst),
        ),
        do=do,
        saves_ns=max(known, default=None),
        settings=changes("queueing", evidence),
    )


def _curve_facts(engine: Batches) -> Iterator[str]:
    """Yield a sentence on the service curve: `by its passes, 4 requests at once write 310 tokens/s, and 8
    write 520`.
    """
    if len(engine.sizes) >= 2:
        fewer, most = engine.sizes[-2:]
        yield (
            f"by its passes, {fewer.most} requests at once write {fewer.per_s:,.0f} tokens/s, and "
            f"{most.most} write {most.per_s:,.0f}"
        )


def _queueing_by_spans(evidence: Evidence) -> Advice | None:
    return _in_trajectories(
        evidence,
        lambda stage: stage.waits and stage.role == "rollout",
        rule="queueing",
        what=_QUEUE,
        do=_SHORTEN_QUEUE,
        saves_ns=evidence.critical_path.queues_save_ns,
    )


def _queueing_by_counters(evidence: Evidence) -> Advice | None:
    if any(stage.waits and stage.role == "rollout" for stage in evidence.stages):
        return None  # spans record the queues of engines, so `_queueing_by_spans` has judged them
    named = {(row.process, row.of, row.name): row for row in evidence.counter_rows}
    queues = [
        (row, running, cache)
        for row in evidence.counter_rows
        if row.name == WAITING_REQUESTS
        and (running := named.get((row.process, row.of, RUNNING_REQUESTS))) is not None
        and (cache := named.get((row.process, row.of, KV_CACHE))) is not None
        and row.mean >= 1
        and row.mean * 4 >= running.mean
        and cache.most < FULL
    ]
    if not queues:
        return None
    waiting, running, cache = max(queues, key=lambda queue: queue[0].mean)
    replica = waiting.of or waiting.process
    return Advice(
        rule="queueing",
        what=_QUEUE,
        because=(
            f"{replica}: {waiting.mean:.1f} requests waited on average, and {running.mean:.1f} ran",
            f"its KV cache was used to {cache.most:.0f} % at most",
        ),
        do=_SHORTEN_QUEUE,
        settings=changes("queueing", evidence),
    )


def slow_tools(evidence: Evidence) -> Advice | None:
    """Advise on a tool with calls that took longer than its other calls. If no such tool exists, advise if
    tools, except those that blocked an event loop, took a fifth of the trajectories' time.
    """
    do = "run more of them at once, give them a deadline, or let other trajectories generate meanwhile"
    cause = next((cause for cause in evidence.causes if cause.kind == "slow-tool"), None)
    late = () if evidence.counters is None else evidence.counters.late_loops
    blockers = {loop.blocker for loop in late}
    if cause is None:
        return _in_trajectories(
            evidence,
            lambda stage: is_tool(stage.role, stage.stage) and (stage.role, stage.title) not in blockers,
            rule="slow-tools",
            what="trajectories wait for their tools",
            do=do,
            saves_ns=evidence.critical_path.tools_save_ns,
            at_most_ns=evidence.demand.tools_ns,
        )
    return Advice(
        rule="slow-tools",
        what=f"trajectories wait for slow calls of {cause.role} {cause.stage}",
        because=(cause.sentence, *cause.evidence),
        do=do,
        saves_ns=cause.ns,
        settings=changes("slow-tools", evidence),
    )


def _in_trajectories(
    evidence: Evidence,
    counts: Callable[[Stage], bool],
    *,
    rule: str,
    what: str,
    do: str,
    saves_ns: int | None,
    at_most_ns: int | None = None,
) -> Advice | None:
    """Advise if the calls of some stages took a fifth of the trajectories' total time, and faster calls would
    save 2 % of the step. If the saving is unknown, the first condition is enough.

    Args:
        counts: Returns True for a stage whose calls count.
        at_most_ns: Total duration of the outermost of these calls, in ns. None if none of the calls is inside
            another.
    """
    tail = evidence.long_tail
    whole_ns = sum(stage.total_ns for stage in evidence.stages if stage.stage == "trajectory")
    inside = set() if tail is None else {(spread.role, spread.stage) for spread in tail.spreads}
    parts = [stage for stage in evidence.stages if counts(stage) and (stage.role, stage.stage) in inside]
    part_ns = sum(stage.total_ns for stage in parts)
    part_ns = part_ns if at_most_ns is None else min(part_ns, at_most_ns)
    if not whole_ns or part_ns * 5 < whole_ns:
        return None
    if saves_ns is not None and saves_ns * 50 < evidence.breakdown.window_ns:
        return None
    names = few([f"{stage.role} {stage.title}" for stage in parts], _NAMED)
    share = (
        f"spans {names}: {duration(part_ns)} of the {duration(whole_ns)} that all "
        f"trajectories took in sum, {percentage_of(part_ns, whole_ns)}"
    )
    return Advice(
        rule=rule,
        what=what,
        because=(share, *(["whether the step waited for them is not known"] if saves_ns is None else [])),
        do=do,
        saves_ns=saves_ns,
        settings=changes(rule, evidence),
    )


def prefill_alone(evidence: Evidence) -> Advice | None:
    """Advise if an engine did nothing but prefill for a quarter or more of its recorded time. If no recording
    shows that, judge by the noted passes.

    Recordings of less than half of the rollout are not used: the first passes of a rollout are prefills, and
    `by_stage` records as many prefill passes as decode passes.
    """
    rows = [
        row
        for row in evidence.engines
        if row.prefill_ns * 4 >= row.recorded_ns > 0 and row.recorded_ns * 2 >= row.window_ns
    ]
    if not rows:
        return _prefill_by_passes(evidence)
    worst = max(rows, key=lambda row: row.prefill_ns)
    return Advice(
        rule="prefill-alone",
        what=f"{worst.replica} reads prompts while no request gets tokens",
        because=(
            (
                f"{duration(worst.prefill_ns)} of {duration(worst.recorded_ns)}: "
                f"{percentage_of(worst.prefill_ns, worst.recorded_ns)}"
            ),
        ),
        do="prefix caching (the turns of a trajectory share theirs), chunked prefill",
        saves_ns=_prefill_ns(evidence.engines),
        settings=changes("prefill-alone", evidence),
    )


def _prefill_by_passes(evidence: Evidence) -> Advice | None:
    """Advise if a replica spent a quarter of the time of its passes, and 2 % of the step, in passes that only
    prefilled while other requests waited for their next token.
    """
    worst = max(evidence.batches, key=lambda engine: engine.held_ns, default=None)
    if worst is None or worst.held_ns * 4 < worst.busy_ns:
        return None
    if worst.held_ns * 50 < evidence.breakdown.window_ns:
        return None
    return Advice(
        rule="prefill-alone",
        what=f"replica {worst.replica} reads prompts while requests wait for their next token",
        because=(
            (
                f"{duration(worst.held_ns)} of the {duration(worst.busy_ns)} of its passes: "
                f"{percentage_of(worst.held_ns, worst.busy_ns)}"
            ),
        ),
        do="chunked prefill, which reads prompts in passes that also write tokens; prefix caching",
        saves_ns=worst.held_ns,
        settings=changes("prefill-alone", evidence),
    )


def _prefill_ns(engines: Sequence[Engine]) -> int:
    """Return the time in which at least one request was in prefill, in ns.

    For each bin of the load, the requests of all replicas are added up, because a request that goes from one
    replica to another waits for the prefill of both.
    """
    reading: Counter[int] = Counter()
    """Requests in prefill by start of the bin, in hundredths of a request."""
    width_ns = 0
    for row in engines:
        for load, following in pairwise(row.load):
            width_ns = following.start_ns - load.start_ns
        for load in row.load:
            reading[load.start_ns] += round(100 * load.prefilling)
    return sum(min(hundredths, 100) * width_ns // 100 for hundredths in reading.values())


def weight_sync(evidence: Evidence) -> Advice | None:
    """Advise if moving weights took at least 5 % of the step."""
    weights = evidence.critical_path.weights
    between_ns = sum(line.wall_ns for line in evidence.breakdown.lines if line.stage == TRANSFER)
    wall_ns = between_ns + (0 if weights is None else weights.wall_ns)
    if not wall_ns or wall_ns * 20 < evidence.breakdown.window_ns:
        return None
    parts = () if weights is None else weights.parts
    longest = parts[0] if parts and parts[0].wall_ns * 2 > wall_ns else None
    if longest is not None and MOVES_WEIGHTS.search(longest.stage):
        longest = None
    local = _stays_in_its_process(evidence)
    profiling = evidence.profiling
    over = "HCCL or " if profiling.npu else "NCCL or " if profiling.gpu else ""
    return Advice(
        rule="weight-sync",
        what=f"moving weights to the {'engine in the same process' if local else 'replicas'} takes long",
        because=(share_of_step(wall_ns, evidence), *_shares(parts, between_ns)),
        do=f"begin with {longest.role} {longest.stage}: most of the time passes there, before weights move"
        if longest is not None
        else "load all tensors in one call, in the layout and type that the engine keeps"
        if local
        else f"send them over {over}shared memory in buckets, and overlap that with the end of the update",
        saves_ns=between_ns + (0 if weights is None else weights.saves_ns),
        settings=() if local else changes("weight-sync", evidence),
    )


def _shares(parts: Sequence[PathPart], between_ns: int) -> Iterator[str]:
    """Yield one text with the times of the longest stages and of the transfer between them.

    An example is `trainer sync_weights 2.00 s, rollout load_weights 40.0 ms`.
    """
    named = [f"{part.role} {part.stage} {duration(part.wall_ns)}" for part in parts[:_NAMED]]
    if between_ns:
        named.append(f"{TRANSFER} {duration(between_ns)}")
    yield ", ".join(named)


def _stays_in_its_process(evidence: Evidence) -> bool:
    """Return True if each process that moves weights also generates and no engines were given to
    the capture.
    """
    if evidence.profiling.given:
        return False
    moves, generates = set[str](), set[str]()
    for stage in evidence.stages:
        names = {share.process for share in stage.processes}
        if MOVES_WEIGHTS.search(stage.stage):
            moves |= names
        elif stage.role in GENERATES:
            generates |= names
    return moves <= generates


def vain_wait(evidence: Evidence) -> Advice | None:
    """Advise if a process waited for at least 5 % of the step while no process did work that could end the
    wait.
    """
    worst = max(evidence.vain_waits, key=lambda wait: wait.vain_ns, default=None)
    if worst is None or worst.vain_ns * 20 < evidence.breakdown.window_ns:
        return None
    who = worst.processes[0] if len(worst.processes) == 1 else count(len(worst.processes), "process")
    return Advice(
        rule="vain-wait",
        what=f"{who} waited in {worst.role} {worst.stage} while no process worked that could end the wait",
        because=(
            share_of_step(worst.vain_ns, evidence),
            f"all waits there: {duration(worst.wall_ns)}",
        ),
        do=(
            "wake it when the work is done, or let it poll more often; if a process that is not recorded did "
            "the work, give it to the capture"
        ),
        saves_ns=worst.vain_ns,
    )
