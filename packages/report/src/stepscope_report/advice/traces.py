"""Advice from traces alone: rules on gaps, labels and ranks, and a list of all rules, each with the time that
could be saved.

Thresholds are shares of the recorded time of a process, because traces do not show the steps of a whole run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import median

import msgspec

from stepscope_report.advice import Advice, percentage_of
from stepscope_report.advice.kernels import (
    exposed_copies,
    serial_streams,
    single_precision,
    small_kernels,
    unfused_optimizer,
    unpinned_copies,
)
from stepscope_report.advice.trace_evidence import SMALL_US, TraceEvidence, longest_process, say_us, share
from stepscope_report.formatting import count, duration, few, size
from stepscope_report.sections.gaps import REMEDIES, GapRow
from stepscope_report.sections.traces import DeviceRow
from stepscope_report.table import grouped
from stepscope_report.timeline.activity.device_idle import GapKind
from stepscope_report.timeline.activity.doubts import is_doubt

IN_DOUBT = "in doubt: see Can these traces be believed?"


def trace_advice(evidence: TraceEvidence) -> tuple[Advice, ...]:
    """Return the advice of all rules: alarms first, then the largest possible saving."""
    said: Iterable[Advice] = (advice for rule in RULES for advice in rule(evidence))
    if any(is_doubt(problem) for activity in evidence.activities for problem in activity.content.problems):
        said = (msgspec.structs.replace(advice, because=(*advice.because, IN_DOUBT)) for advice in said)
    return tuple(sorted(said, key=lambda advice: (advice.kind != "alarm", -(advice.saves_ns or 0))))


class _Gaps(msgspec.Struct, frozen=True):
    """A rule on gaps of the device that have one cause."""

    kind: GapKind
    rule: str
    share: float
    """Share of the recorded time that the gaps must have for advice."""
    what: str


OF_GAPS = (
    _Gaps("synchronisation", "synchronisation", 0.02, "the device ran dry because the program waited for it"),
    _Gaps("data loader", "data-loader", 0.05, "the device waits for the data loader"),
    _Gaps("garbage collection", "garbage-collection", 0.02, "the device waits while Python collects garbage"),
    _Gaps("compilation", "recompilation", 0.02, "the device waits while code is compiled"),
    _Gaps("memory allocation", "allocation", 0.02, "the device waits while its memory is allocated or freed"),
    _Gaps("copies", "blocking-copies", 0.02, "the device waits while the program is in a call that copies"),
    _Gaps("collective", "host-collectives", 0.02, "the device waits for collectives on the CPU"),
    _Gaps("slow launches", "slow-launches", 0.1, "the CPU launches more slowly than the device runs"),
    _Gaps("no operator", "no-operator", 0.1, "the device waits while the CPU runs no operator"),
    _Gaps("queued", "queued", 0.1, "kernels wait on the device long after their launch"),
)
_STEP = "ProfilerStep"
OWN_DATA = "num_workers is 0, so that the training loads its data itself: "
_HELD_NS = 1_000_000
"""Length in ns that the longest `queued` gap must have for advice."""
_LOOP = 5
"""Least number of gaps per step at one call in the code for advice to say that the call is in a loop."""


def idle_causes(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise on each cause of gaps that left the devices of a process idle for a large enough share of its
    time.
    """
    untrusted = evidence.untrusted
    by_kind = grouped((row for row in evidence.gaps if row.process not in untrusted), lambda row: row.kind)
    steps = Counter(row.process for row in evidence.traces.steps)
    for rule in OF_GAPS:
        rows = by_kind.get(rule.kind, ())
        totals: dict[str, int] = defaultdict(int)
        for row in rows:
            totals[row.process] += row.total_ns
        process = max(totals, key=lambda name: totals[name], default=None)
        if process is None or totals[process] < rule.share * evidence.recorded_ns(process):
            continue
        own = [row for row in rows if row.process == process]
        worst = max(own, key=lambda row: row.total_ns)
        if rule.kind == "queued" and worst.longest_ns < _HELD_NS:
            continue
        where = ", ".join(filter(None, (worst.call, worst.place)))
        because = [
            share(process, totals[process], evidence),
            _say_gaps(own),
            *([f"most in {where}: {duration(worst.total_ns)}"] if where else _in_label(own, evidence)),
        ]
        loops = rule.kind == "synchronisation" and worst.count >= _LOOP * max(1, steps[process])
        do = REMEDIES[rule.kind]
        if rule.kind == "data loader" and "_SingleProcess" in worst.call:
            do = OWN_DATA + do
        yield Advice(
            rule="sync-in-loop" if loops else rule.rule,
            what="a synchronisation in a loop empties the device's queue again and again"
            if loops
            else rule.what,
            because=tuple(because),
            do=do,
            saves_ns=totals[process],
        )


def _in_label(rows: Sequence[GapRow], evidence: TraceEvidence) -> Iterator[str]:
    """Yield a sentence on the label in which at least half of a process' gaps of one cause were."""
    process, kind = rows[0].process, rows[0].kind
    times: dict[str, float] = defaultdict(float)
    for activity in evidence.activities:
        for label in activity.content.labels if activity.name == process else ():
            times[label.path[-1]] += min(label.idle.get(kind, 0.0), label.idle_us or 0.0)
    name = max(times, key=lambda name: times[name], default=_STEP)
    if not name.startswith(_STEP) and times[name] * 2000 >= sum(row.total_ns for row in rows):
        yield f"most in {name}: {say_us(times[name])}"


def _say_gaps(rows: Sequence[GapRow]) -> str:
    longest_ns = max(row.longest_ns for row in rows)
    return f"{count(sum(row.count for row in rows), 'gap')}, the longest {duration(longest_ns)}"


def host_data_loader(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a process without a device waited for its data loader for a tenth of its steps."""
    steps = grouped((row for row in evidence.traces.steps if row.busy_ns is None), lambda row: row.process)
    waited = {name: sum(row.loading_ns for row in rows) for name, rows in steps.items()}
    took = {name: sum(row.dur_ns for row in rows) for name, rows in steps.items()}
    late = sorted((name for name in steps if waited[name] * 10 >= took[name]), key=lambda name: -waited[name])
    if not late:
        return
    alone, first = len(late) == 1, late[0]
    own = (one.content.labels for one in evidence.activities if one.name == first)
    in_loop = any("_SingleProcess" in label.path[-1] for labels in own for label in labels)
    yield Advice(
        rule="data-loader",
        what=f"{few(late, 4)} {'waits for its data loader' if alone else 'wait for their data loaders'}",
        because=(f"{first}: {duration(waited[first])} of the {duration(took[first])} of its steps",),
        do=(OWN_DATA if in_loop else "") + REMEDIES["data loader"],
        saves_ns=waited[first],
    )


_OFTEN = 1000
"""Number of calls that an operator must have for advice on small calls."""


def small_operators(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a process without a device called one operator at least 1,000 times, with a mean below 10 us,
    for a tenth of its time.
    """
    called = (
        (operator.self_us, operator.count, operator.name, activity.name)
        for activity in evidence.activities
        if not activity.content.devices
        for operator in activity.content.operators
        if not operator.outer and operator.count >= _OFTEN and operator.self_us < SMALL_US * operator.count
    )
    self_us, number, name, process = max(called, default=(0.0, 0, "", ""))
    own_ns = round(self_us * 1000)
    if number and own_ns * 10 >= evidence.recorded_ns(process):
        yield Advice(
            rule="small-operators",
            what=f"{name} is called again and again, for little work each time",
            because=(
                f"{count(number, 'call')}, each {duration(own_ns // number)}",
                share(process, own_ns, evidence),
            ),
            do="one operator on a larger tensor instead of a loop; torch.compile, which fuses them",
            saves_ns=own_ns,
        )


_COMPILES = re.compile(r".*\(dynamo_timed\)")


def compiled_again(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if torch.compile compiled for a twentieth of the recorded time, and no gaps of a device show
    this.
    """
    if any(row.kind == "compilation" for row in evidence.gaps):
        return
    roots = [
        (activity.name, label)
        for activity in evidence.activities
        for label in activity.content.labels
        if _COMPILES.match(label.path[-1]) and not any(_COMPILES.match(name) for name in label.path[:-1])
    ]
    process, ns = longest_process((name, label.cpu_us) for name, label in roots)
    if ns and ns * 20 >= evidence.recorded_ns(process):
        times = sum(label.count for name, label in roots if name == process)
        yield Advice(
            rule="recompilation",
            what="torch.compile compiles within the recorded time",
            because=(count(times, "time"), share(process, ns, evidence)),
            do=REMEDIES["compilation"],
            saves_ns=ns,
        )


def exposed_communication(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if communication that no computation hides took a tenth of a device's time."""
    worst = max(evidence.traces.devices, key=lambda row: row.exposed_ns, default=None)
    if worst is None or worst.exposed_ns * 10 < worst.recorded_ns:
        return
    waited = [row for row in evidence.traces.stragglers if row.process == worst.process]
    waited_ns = min(sum(row.waited_ns for row in waited), worst.exposed_ns)
    late = waited_ns * 2 >= worst.exposed_ns
    before = f"{duration(waited_ns)} of it before the last rank had entered"
    yield Advice(
        rule="exposed-communication",
        what="communication is not hidden behind computation",
        because=(share(worst.process, worst.exposed_ns, evidence), *([before] if waited else [])),
        do="even out the work of the ranks"
        if late
        else "larger buckets, prefetch (forward_prefetch and backward_prefetch of FSDP), smaller groups",
        saves_ns=worst.exposed_ns,
    )


def stragglers(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if other processes waited in collectives for one process. Their mean wait must be at least 5 ms
    per step and a twentieth of the recorded time.
    """
    totals: dict[str, int] = defaultdict(int)
    for row in evidence.traces.stragglers:
        totals[row.process] += row.others_waited_ns
    process = max(totals, key=lambda name: totals[name], default="")
    collectives = {row.collective for row in evidence.traces.stragglers if row.process == process}
    met = {row.process for row in evidence.traces.stragglers if row.collective in collectives}
    run = evidence.beside(process, met)
    if not run:
        return
    each_ns = totals[process] // len(run)
    least_ns = max(evidence.recorded_ns(process) / 20, _SCHEDULED_NS * _steps_of(process, evidence))
    if each_ns < least_ns or totals[process] < sum(totals[name] for name in run):
        return
    part = percentage_of(each_ns, evidence.recorded_ns(process))
    yield Advice(
        rule="stragglers",
        what=f"the other ranks wait for {process} in collectives",
        because=(
            f"each for {duration(each_ns)}, {part} of the time recorded",
            *_longer_there(process, run, each_ns, evidence),
        ),
        do=f"look at {process}: its data (tokens in a micro-batch), work that it does alone, its host",
        saves_ns=each_ns,
    )


_SCHEDULED_NS = 5_000_000
"""Time in ns per step by which busy cores alone may delay a rank. Delays of 1.8 ms
were measured in steps of 3 to 10 ms."""


def _steps_of(process: str, evidence: TraceEvidence) -> int:
    """Return the number of steps in a process' trace; without steps, the number of calls of the process'
    rarest collective.
    """
    steps = sum(row.process == process for row in evidence.traces.steps)
    return steps or min(row.calls for row in evidence.traces.stragglers if row.process == process)


def _longer_there(process: str, run: Collection[str], each_ns: int, evidence: TraceEvidence) -> Iterator[str]:
    """Yield a sentence on the label in which a process took longer than processes of its role in `run`, if
    the label explains half of the wait of these processes.
    """
    (role,) = {activity.info.role for activity in evidence.activities if activity.name == process}
    times: dict[str, dict[tuple[str, ...], float]] = {}
    for activity in evidence.activities:
        if activity.info.role == role and activity.name in {process, *run}:
            own = times.setdefault(activity.name, {})
            for label in activity.content.labels:
                own[label.path] = own.get(label.path, 0.0) + label.cpu_us
    more: dict[tuple[str, ...], tuple[float, float]] = {}
    mine = times.pop(process)
    for path, us in mine.items():
        usual = median(of.get(path, 0.0) for of in times.values()) if times else us
        more[path] = us - usual, usual
    most = max((extra for extra, _ in more.values()), default=0.0)
    if most * 2000 < each_ns:
        return
    path = max((path for path in more if more[path][0] * 2 >= most), key=len)  # the innermost one
    usual = more[path][1]
    yield f"{path[-1]}: {say_us(mine[path])} there, {say_us(usual)} on the others"


def uneven_work(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if the device of one rank computed for a fifth longer than the median of its role."""
    for role, rows in grouped(evidence.traces.devices, lambda row: row.role).items():
        longest = max(rows, key=lambda row: row.compute_ns)
        run = {longest.process, *evidence.beside(longest.process, {row.process for row in rows})}
        ordered = sorted((row for row in rows if row.process in run), key=lambda row: row.compute_ns)
        if len(ordered) < 2:
            continue
        middle = ordered[(len(ordered) - 1) // 2]
        more_ns = longest.compute_ns - middle.compute_ns
        if more_ns * 5 < middle.compute_ns or more_ns * 50 < longest.recorded_ns or not _together(ordered):
            continue
        yield Advice(
            rule="uneven-work",
            what=f"{longest.process} computes for longer than the other ranks",
            because=(f"{duration(longest.compute_ns)}, median of {role} {duration(middle.compute_ns)}",),
            do="balance the batch by tokens, or the layers of pipeline stages; else look at the device",
            saves_ns=more_ns,
        )


def _together(rows: Sequence[DeviceRow]) -> bool:
    """Return True if the devices were recorded for about the same time, as ranks of one run are."""
    recorded = [row.recorded_ns for row in rows]
    return max(recorded) * 4 <= min(recorded) * 5


def memory_headroom(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if torch's allocator held at least 95 % of a device's memory."""
    full = [
        row
        for row in evidence.traces.memory
        if row.capacity_bytes and row.reserved_bytes >= 0.95 * row.capacity_bytes
    ]
    for row in sorted(full, key=lambda row: -row.reserved_bytes)[:1]:
        fragments = row.reserved_bytes - row.allocated_bytes > 0.2 * row.reserved_bytes
        yield Advice(
            rule="memory-headroom",
            kind="alarm",
            what=f"{row.process} held nearly all memory of {row.device}",
            because=(
                f"{size(row.reserved_bytes)} of {size(row.capacity_bytes or 0)} reserved",
                f"{size(row.allocated_bytes)} in use at most",
            ),
            do="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the rest is fragments"
            if fragments
            else "smaller micro-batches, or activation checkpointing, before a longer sequence ends the run",
        )


RULES: tuple[Callable[[TraceEvidence], Iterable[Advice]], ...] = (
    idle_causes,
    small_kernels,
    compiled_again,
    host_data_loader,
    small_operators,
    unpinned_copies,
    exposed_copies,
    exposed_communication,
    stragglers,
    uneven_work,
    memory_headroom,
    unfused_optimizer,
    single_precision,
    serial_streams,
)
