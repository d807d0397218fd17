"""Advice on the trajectories that the others wait for, by what they did for longer."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, TypeAlias

from stepscope_report.advice.evidence import Advice, Evidence, percentage_of, share_of_step
from stepscope_report.advice.remedies import changes
from stepscope_report.formatting import duration
from stepscope_report.sections.long_tail import Excess, LongTail, Wait
from stepscope_report.spans import GENERATES, is_tool

ENOUGH = 3
"""Trajectories from which on the last one can be told from the others."""

_Kind: TypeAlias = Literal["tool", "queue", "generation", "reward", "later", "other"]

_REMEDIES: dict[_Kind, str] = {
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
    "other": "open a span around what it awaits there: what that is, nothing says",
}


class _Cause(NamedTuple):
    kind: _Kind
    facts: tuple[str, ...] = ()


def long_tail(evidence: Evidence) -> Advice | None:
    """Advise if the last tenth of three or more trajectories took 15 % of the rollout or more, and 2 % of the
    step.
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
        return None  # a profiler made these the last ones, as far as anybody can tell
    cause = _cause(tail.excess, evidence)
    return Advice(
        rule="long-tail",
        what="the step waits for its slowest trajectories",
        because=(*_tail_facts(tail, tail.held_ns, tail.rollout_ns), *cause.facts),
        do=_REMEDIES[cause.kind],
        saves_ns=held_ns,
        settings=changes(f"long-tail: {cause.kind}", evidence),
    )


def _tail_facts(tail: LongTail, held_ns: int, rollout_ns: int) -> list[str]:
    because = [
        (
            f"the last {tail.last} of {tail.trajectories} trajectories ended {duration(held_ns)} after "
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
    """Advise if, of three or more trajectories that the step consumes, the last tenth had begun before and
    went on for 2 % of it.
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
            f"of the {tail.consumed} that it consumes, {late.trajectories} went on when it began",
            f"the last, {late.last}, for {share_of_step(late.until_ns, evidence)}",
        ),
        do=_REMEDIES["generation"],
        saves_ns=late.until_ns,
        settings=changes("long-tail: generation", evidence),
    )


def _cause(excess: Excess | None, evidence: Evidence) -> _Cause:
    """Return what the last trajectory did for longer than a usual one. Without any, it generated."""
    if excess is None:
        return _Cause("generation")
    waits = {(stage.role, stage.stage) for stage in evidence.stages if stage.waits}
    times: Counter[_Kind] = Counter({"later": excess.later_ns})
    longest: dict[_Kind, Wait] = {}
    for wait in excess.stages:
        kind = _kind(wait, waits=(wait.role, wait.stage) in waits)
        times[kind] += wait.wall_ns
        longest.setdefault(kind, wait)
    kind, ns = times.most_common(1)[0]
    if not ns:
        return _Cause("generation")
    if kind == "later":
        return _Cause(
            kind, (f"the last to end, {excess.trajectory}, began {duration(ns)} after a usual one",)
        )
    wait = longest[kind]
    took = f"{wait.role} {wait.title} took {duration(wait.wall_ns)} longer than in one of median length"
    return _Cause(kind, (f"in the last to end, {excess.trajectory}, {took}",))


def _kind(wait: Wait, *, waits: bool) -> _Kind:
    if wait.role == "reward" or (waits and "reward" in wait.stage):
        return "reward"
    if waits:
        return "queue"
    if is_tool(wait.role, wait.stage):
        return "tool"
    unnamed = wait.stage in ("trajectory", "turn")
    return "generation" if wait.role in GENERATES and not unnamed else "other"
