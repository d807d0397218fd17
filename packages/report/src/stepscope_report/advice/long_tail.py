"""Advice on the trajectories that the others wait for, by the work that took longer in them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from stepscope_report.advice.evidence import Advice, Evidence, percentage_of, share_of_step
from stepscope_report.advice.remedies import changes
from stepscope_report.formatting import duration
from stepscope_report.sections.batches import thin_end
from stepscope_report.sections.cause import OtherCause
from stepscope_report.sections.long_tail import LongTail
from stepscope_report.spans import GENERATES
from stepscope_report.whatif.changes import Options

ENOUGH = 3
"""Least number of trajectories with which the last one can be told from the others."""

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
    cause = next((cause for cause in evidence.causes if cause.trajectory is not None), None)
    if cause is None:
        return None
    kind = _kind(cause)
    facts = _tail_facts(tail, tail.held_ns, tail.rollout_ns)
    said = [line for line in cause.evidence if not facts[0].startswith(line)]
    return Advice(
        rule="long-tail",
        what="the step waits for its slowest trajectories",
        because=(*facts, *_thin_facts(evidence), cause.sentence, *said),
        do=_REMEDIES[kind],
        saves_ns=cause.ns,
        settings=changes(f"long-tail: {kind}", evidence),
    )


def thin_batches(evidence: Evidence) -> Advice | None:
    """Advise if the last tenth of the rollout or more, and 2 % of the step, ran with few requests in every
    replica, and `long_tail` says nothing.
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


def _kind(cause: OtherCause) -> _Kind:
    """Return what the last trajectory did for longer than the others."""
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
