"""Advice based on counters: event loops, the garbage collector, idle devices, full KV caches."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.files.counters import GC, KV_CACHE, PREEMPTIONS
from stepscope_report.advice.demand import FULL
from stepscope_report.advice.evidence import Advice, Evidence, share_of_step
from stepscope_report.advice.remedies import changes
from stepscope_report.formatting import count, duration
from stepscope_report.sections.counters import CounterRow

COLLECTING = 5
"""Advice is given if the garbage collector takes this percentage of the step."""


def _rows(evidence: Evidence, name: str) -> Sequence[CounterRow]:
    return [row for row in evidence.counter_rows if row.name == name]


def late_event_loop(evidence: Evidence) -> Advice | None:
    """Advise if calls waited for an event loop that was late by more than 100 ms."""
    late = () if evidence.counters is None else evidence.counters.late_loops
    if not late:
        return None
    worst = late[0]
    because = [f"a callback on its thread {worst.thread} waited for {duration(worst.late_ns)}"]
    if worst.line:
        because.append(f"meanwhile the call was at {worst.line}")
    elif worst.blocker is not None:
        because.append(f"the loop ran again when {' '.join(worst.blocker)} ended")
    if len(late) > 1:
        because.append(f"so it was on {count(len(late), 'loop')}")
    return Advice(
        rule="late-event-loop",
        what=f"{'something' if worst.blocker is None else ' '.join(worst.blocker)} blocks the event loop of "
        f"{worst.process}",
        because=tuple(because),
        do=(
            "find the call that does not await (a tool, a tokenizer, a file) and run it in a thread: "
            "asyncio.to_thread; PYTHONASYNCIODEBUG=1 names slow callbacks"
            if worst.blocker is None
            else "run it in a thread (asyncio.to_thread), or await what it waits for: other calls of that "
            "process stand still meanwhile"
        ),
        settings=changes(f"late-event-loop: {worst.role}", evidence),
    )


def garbage_collection(evidence: Evidence) -> Advice | None:
    """Advise if a process spent 5 % of the step in Python's garbage collector."""
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
    """Advise if a device was at 0 % for 5 % of the step or more while tools ran."""
    devices = () if evidence.counters is None else evidence.counters.idle_devices
    worst = max(devices, key=lambda device: device.tools_ns, default=None)
    if worst is None or worst.tools_ns * 20 < evidence.breakdown.window_ns:
        return None
    others = sum(device.tools_ns * 20 >= evidence.breakdown.window_ns for device in devices) - 1
    because = [f"{share_of_step(worst.tools_ns, evidence)}, of {duration(worst.idle_ns)} at 0 %"]
    if others:
        because.append(f"so were {count(others, 'other device')}, for 5 % of the step or more")
    return Advice(
        rule="idle-while-tools-run",
        what=f"{worst.device} of {worst.host} was at 0 % while the rollout waited for tools",
        because=tuple(because),
        do="run more tools at once, or let other trajectories generate meanwhile: more prompts in flight",
        saves_ns=worst.tools_ns,
        settings=changes("idle-while-tools-run", evidence),
    )


def full_kv_cache(evidence: Evidence) -> Advice | None:
    """Advise if an engine preempted requests while its KV cache was full."""
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
