"""Advice on processes and their devices: slow processes, memory, collectives, idle time, event loops, garbage
collection, and KV caches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.files.counters import GC, KV_CACHE, PREEMPTIONS
from stepscope_report.advice import FULL, Advice, Evidence, SettingChange, percentage_of, share_of_step
from stepscope_report.advice.remedies import changes
from stepscope_report.event_loops import LateLoop, say_blocks
from stepscope_report.formatting import count, duration, size
from stepscope_report.sections.counters import CounterRow
from stepscope_report.sections.idle import awaited_rank
from stepscope_report.sections.stages import Share, Stage
from stepscope_report.spans import GENERATES, ROLLOUT

_LOADS_DATA = re.compile(
    r"^(load|fetch|next)$|^(load|fetch|read|next|get)_\w*(data|batch|sample)|data_?load", re.IGNORECASE
)
"""Names of stages that fetch training data."""
_STRAGGLERS = frozenset({"late-rank", "slow-rank", "slow-replica", "slow-host", "uneven-batch"})


def straggler(evidence: Evidence) -> Advice | None:
    """Advise if a process takes 25 % longer than others of its role, or if others wait for it, and this costs
    at least 2 % of the step.
    """
    cause = next((cause for cause in evidence.causes if cause.kind in _STRAGGLERS), None)
    if cause is None or cause.process is None:
        return None
    name, role = cause.process.name, cause.role or cause.process.role
    because = [cause.sentence, *cause.evidence]
    stage = next(
        (stage for stage in evidence.stages if (stage.role, stage.title) == (role, cause.stage)), None
    )
    if stage is not None and stage.uneven:
        profiled = any(share.profiled for share in stage.processes if share.process == name)
        because.append(
            "a profiler recorded all processes of this comparison; those without a profiler are left out"
            if profiled
            else "no profiler recorded this process, though it recorded some of the others"
        )
    more = "has more to do" if cause.kind == "uneven-batch" else "is slower"
    return Advice(
        rule="straggler",
        what=f"{name} comes later than the others"
        if cause.stage is None
        else f"{name} {more} than the others in {role} {cause.stage}",
        because=tuple(because),
        do=_remedy(name, role, cause.stage),
        saves_ns=cause.ns,
        settings=_changes(role, evidence),
    )


def _remedy(name: str, role: str, stage: str | None) -> str:
    if stage is None:
        return f"see what {name} did before, such as fetching data; a span around that names it here"
    if role in GENERATES:
        return "balance requests by length and load, not in turn"
    if role in ROLLOUT:
        return "spread its calls over the others; if it is always that process, look at its host"
    if _LOADS_DATA.search(stage):
        return "let its data loader prefetch in more workers; if it is always that rank, look at its storage"
    return "balance the batch by tokens, not by samples; if it is always that rank, look at its host"


def _changes(role: str, evidence: Evidence) -> tuple[SettingChange, ...]:
    if role in GENERATES:
        return changes("straggler: rollout", evidence)
    return () if role in ROLLOUT else changes("straggler: training", evidence)


def uneven_profiling(evidence: Evidence) -> Advice | None:
    """Advise if a profiled process is slower than processes of its role that ran without a profiler, so that
    the profiler may be the reason.
    """
    gaps = [
        gap
        for stage in _comparable(evidence)
        if stage.uneven
        for gap in [_gap_to_unprofiled(stage)]
        if _is_large(gap, evidence)
    ]
    worst = max(gaps, key=lambda gap: gap.lost_ns, default=None)
    if worst is None or (evidence.beside_ns or 0) * 2 >= worst.lost_ns:
        return None  # the first line compares the process with other profiled steps
    stage, slowest = worst.stage, worst.slowest
    alike = (
        "ranks: all, or no engines in the capture"
        if any(one.engine and one.name == slowest.process for one in evidence.profiling.recorded)
        else "ranks: all, or profiler: off"
    )
    return Advice(
        rule="uneven-profiling",
        what=(
            f"{slowest.process} took longer in {stage.role} {stage.title}, and a profiler slowed it and not "
            "the others"
        ),
        because=(
            (
                f"busy for {duration(slowest.worked_ns)}; {duration(worst.mean_ns)} on average over "
                f"{count(len(worst.compared), 'process')} without a profiler"
            ),
        ),
        do=(
            "this step cannot tell a slow process from its profiler: record all processes of the role or "
            f"none (roles.{stage.role}: {alike})"
        ),
    )


class _Gap(NamedTuple):
    """Time by which one process exceeds the processes that it is compared with, in one stage."""

    stage: Stage
    slowest: Share
    compared: Sequence[Share]

    @property
    def mean_ns(self) -> int:
        return sum(share.worked_ns for share in self.compared) // len(self.compared)

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
    return large and gap.slowest.worked_ns * 4 >= gap.mean_ns * 5


def _gap_to_unprofiled(stage: Stage) -> _Gap:
    profiled = [share for share in stage.processes if share.profiled]
    slowest = max(profiled, key=lambda share: share.worked_ns)
    return _Gap(stage, slowest, [share for share in stage.processes if not share.profiled])


def _cut_off(stage: Stage, evidence: Evidence) -> bool:
    """Return True if calls of the stage were cut off because a recording ended early. The processes of the
    stage cannot be compared then.
    """
    if any(
        (span.role, span.stage) == (stage.role, stage.stage) and span.process in evidence.cut
        for span in evidence.health.open_spans
    ):
        return True
    cut = any(share.process in evidence.cut for share in stage.processes)
    return cut and len({share.calls for share in stage.processes}) > 1


_TRAINS = ("actor", "trainer")
_PLACES = 3
"""Largest number of further blocking places that advice on an event loop names."""
COLLECTING = 5
"""Percentage of the step that the garbage collector must take for advice."""


def memory_nearly_full(evidence: Evidence) -> Advice | None:
    """Advise if torch's allocator held at least 95 % of a device's memory."""
    full = [
        row
        for row in evidence.memory
        if row.capacity_bytes and row.reserved_bytes >= 0.95 * row.capacity_bytes
    ]
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
        settings=()
        if gap > 0.2 * worst.reserved_bytes
        else changes(f"memory-nearly-full: {_side(worst.process, evidence)}", evidence, worst.process),
    )


def collectives(evidence: Evidence) -> Advice | None:
    """Advise if a process spent a tenth of its busy time, and 2 % of the step, in collectives that no
    computation hides. Collectives that move weights are left out, because `weight_sync` gives advice on them.
    """
    spent = (
        (max(0, (row.collective_ns or 0) - evidence.syncing_ns.get(row.process, 0)), row)
        for row in evidence.idle
    )
    collective_ns, worst = max(spent, key=lambda pair: pair[0], default=(0, None))
    if worst is None or collective_ns * 10 < worst.busy_ns:
        return None
    if not collective_ns or collective_ns * 50 < evidence.breakdown.window_ns:
        return None
    late = worst.skew_ns is not None and worst.skew_ns * 2 >= collective_ns
    because = [f"{worst.process}: {share_of_step(collective_ns, evidence)}"]
    pair = awaited_rank(evidence.idle)
    one = late and pair is not None and pair[0] is worst
    if worst.skew_ns is not None:
        because.append(f"{duration(worst.skew_ns)} before the last rank had entered")
        if one:
            because.append(f"{worst.awaited} was last for {duration(worst.awaited_ns)} of it")
    whom = worst.awaited if one else "each other"
    if worst.skew_ns is None and _has_unprofiled_peers(evidence, worst.role):
        return _may_wait(worst.role, tuple(because), collective_ns)
    return Advice(
        rule="collectives",
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
        saves_ns=collective_ns,
        settings=changes(
            f"collectives: {'late' if late else _side(worst.process, evidence)}", evidence, worst.process
        ),
    )


def _side(process: str, evidence: Evidence) -> str:
    """Return `rollout` for a process that generates, `training` for a process that updates the policy, and
    otherwise its role.
    """
    role = next((row.role for row in evidence.idle if row.process == process), "")
    return "rollout" if role in GENERATES else "training" if role in _TRAINS else role


def _has_unprofiled_peers(evidence: Evidence, role: str) -> bool:
    """Return True if some processes of this role have no trace. Then it is unknown when they entered
    collectives.
    """
    profiled = {row.name for row in evidence.health.processes if row.profiled}
    return any(row.role == role and row.process not in profiled for row in evidence.idle)


def _may_wait(role: str, because: tuple[str, ...], collective_ns: int) -> Advice:
    return Advice(
        rule="collectives",
        what="a rank spends time in collectives: it communicates, or it waits for ranks without a trace",
        because=because,
        do=f"capture a step with a profiler on all ranks, to see which: roles: {{{role}: {{ranks: all}}}}",
        saves_ns=collective_ns,
    )


def idle_device(evidence: Evidence) -> Advice | None:
    """Advise if a device was busy for less than half of the time between its first and its last kernel, and
    its idle time is at least 5 % of the step.
    """
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
        what=f"{worst.device} of {worst.process} waits for the host, or for other stages",
        because=(
            (
                f"busy for {duration(worst.busy_ns)} of the {duration(worst.span_ns)} from the first to the "
                f"last kernel: {percentage_of(worst.busy_ns, worst.span_ns)}"
            ),
        ),
        do="`Idle` says what the process waited for; inside a stage: larger micro-batches, "
        + ("graph mode" if evidence.profiling.npu else "CUDA graphs"),
        saves_ns=worst.span_ns - worst.busy_ns,
        settings=changes(f"idle-device: {_side(worst.process, evidence)}", evidence, worst.process),
    )


def _rows(evidence: Evidence, name: str) -> Sequence[CounterRow]:
    return [row for row in evidence.counter_rows if row.name == name]


def late_event_loop(evidence: Evidence) -> Advice | None:
    """Advise if an event loop was late by more than 100 ms while calls waited for it."""
    late = () if evidence.counters is None else evidence.counters.late_loops
    if not late:
        return None
    worst = late[0]
    because = [say_blocks(worst)]
    if worst.line:
        because.append(f"meanwhile the call was at {worst.line}")
    elif worst.blocker is not None:
        because.append(f"the loop ran again when {' '.join(worst.blocker)} ended")
    saves_ns = (
        cause.ns or 0
        for cause in evidence.causes
        if cause.kind == "event-loop" and cause.process is not None and cause.process.name == worst.process
    )
    loops = {(loop.process, loop.thread) for loop in late}
    others = [loop for loop in late[1:] if (loop.process, loop.thread) == (worst.process, worst.thread)]
    for loop in others[:_PLACES]:
        line = f", at {loop.line}" if loop.line else ""
        because.append(f"{_say_blocker(loop)} blocked it for {duration(loop.late_ns)}{line}")
    if len(loops) > 1:
        because.append(f"in all, {count(len(loops), 'loop')} were late")
    return Advice(
        rule="late-event-loop",
        what=f"{_say_blocker(worst)} blocks the event loop of {worst.process}",
        because=tuple(because),
        do=(
            "find the call that does not await (a tool, a tokenizer, a file) and run it in a thread: "
            "asyncio.to_thread; PYTHONASYNCIODEBUG=1 names slow callbacks"
            if worst.blocker is None
            else "run it in a thread (asyncio.to_thread), or await what it waits for: other calls of that "
            "process stand still meanwhile"
        ),
        saves_ns=sum(saves_ns) or None,
        settings=changes(f"late-event-loop: {worst.role}", evidence),
    )


def _say_blocker(loop: LateLoop) -> str:
    return "something" if loop.blocker is None else " ".join(loop.blocker)


def garbage_collection(evidence: Evidence) -> Advice | None:
    """Advise if a process spent more than 5 % of the step in Python's garbage collector."""
    worst = max(_rows(evidence, GC), key=lambda row: row.mean, default=None)
    if worst is None or worst.mean <= COLLECTING:
        return None
    paused_ns = round(worst.mean / 100 * worst.covered_ns)
    return Advice(
        rule="garbage-collection",
        what=f"Python's garbage collector stops {worst.process}",
        because=(share_of_step(paused_ns, evidence),),
        do=(
            "gc.freeze() after the set-up, so that it does not look at what stays; or gc.disable(), and "
            "gc.collect() between steps"
        ),
        saves_ns=paused_ns,
    )


def idle_device_of_tools(evidence: Evidence) -> Advice | None:
    """Advise if a device was at 0 % for at least 5 % of the step while tools ran."""
    devices = () if evidence.counters is None else evidence.counters.idle_devices
    worst = max(devices, key=lambda device: device.tools_ns, default=None)
    if worst is None or worst.tools_ns * 20 < evidence.breakdown.window_ns:
        return None
    others = sum(device.tools_ns * 20 >= evidence.breakdown.window_ns for device in devices) - 1
    because = [f"{share_of_step(worst.tools_ns, evidence)}, of {duration(worst.idle_ns)} at 0 %"]
    if others:
        because.append(f"also for 5 % of the step or more: {count(others, 'other device')}")
    return Advice(
        rule="idle-while-tools-run",
        what=f"{worst.device} of {worst.host} was at 0 % while the rollout waited for tools",
        because=tuple(because),
        do="run more tools at once, or let other trajectories generate meanwhile: more prompts in flight",
        saves_ns=worst.tools_ns,
        settings=changes("idle-while-tools-run", evidence),
    )


def full_kv_cache(evidence: Evidence) -> Advice | None:
    """Advise if an engine preempted requests and its KV cache was full at some time."""
    preempted = {(row.process, row.of): row.increase for row in _rows(evidence, PREEMPTIONS) if row.increase}
    full = [
        row for row in _rows(evidence, KV_CACHE) if row.most >= FULL and (row.process, row.of) in preempted
    ]
    if not full:
        return None
    worst = max(full, key=lambda row: preempted[row.process, row.of])
    number = round(preempted[worst.process, worst.of])
    return Advice(
        rule="full-kv-cache",
        what=f"the KV cache of {worst.of or worst.process} is full, and requests start again",
        because=(f"up to {worst.most:.0f} % in use", f"{count(number, 'preemption')} in the step"),
        do=(
            "fewer requests at once (vLLM: max_num_seqs, SGLang: max_running_requests), more memory for the "
            "cache (gpu_memory_utilization, mem_fraction_static), or shorter answers"
        ),
        settings=changes("full-kv-cache", evidence),
    )
