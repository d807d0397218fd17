"""Advice from traces alone: rules on gaps, labels, kernels, streams and ranks, each with the time that could
be saved.

Thresholds are shares of the recorded time of a process, because traces do not show the steps of a whole run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import msgspec

from stepscope_report.advice import Advice, percentage_of
from stepscope_report.formatting import count, duration, few, size
from stepscope_report.sections.gaps import REMEDIES, GapRow
from stepscope_report.sections.labels import LabelRow
from stepscope_report.sections.traces import DeviceRow, TraceTables
from stepscope_report.table import grouped
from stepscope_report.timeline import TraceActivity
from stepscope_report.timeline.activity.content import Kernel
from stepscope_report.timeline.activity.device_idle import GapKind
from stepscope_report.timeline.activity.doubts import DOUBTS, LINKS


class TraceEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of traces that the rules read."""

    gaps: Sequence[GapRow]
    labels: Sequence[LabelRow]
    traces: TraceTables
    activities: Sequence[TraceActivity]

    @property
    def untrusted(self) -> frozenset[str]:
        """Return the names of processes whose trace lost device work or has wrong times for it. Their gaps
        are not used.
        """
        return frozenset(one.name for one in self.activities if DOUBTS & one.content.problems.keys())

    def recorded_ns(self, process: str) -> int:
        return sum(row.recorded_ns for row in self.traces.traces if row.process == process)


IN_DOUBT = "in doubt: see Can these traces be believed?"


def trace_advice(evidence: TraceEvidence) -> tuple[Advice, ...]:
    """Return the advice of all rules: alarms first, then the largest possible saving."""
    said: Iterable[Advice] = (advice for rule in RULES for advice in rule(evidence))
    if any(activity.content.problems.keys() - LINKS for activity in evidence.activities):
        said = (msgspec.structs.replace(advice, because=(*advice.because, IN_DOUBT)) for advice in said)
    return tuple(sorted(said, key=lambda advice: (advice.kind != "alarm", -(advice.saves_ns or 0))))


def _share(process: str, ns: int, evidence: TraceEvidence) -> str:
    recorded_ns = evidence.recorded_ns(process)
    return f"{process}: {duration(ns)}, {percentage_of(ns, recorded_ns)} of the time recorded"


def _longest(times: Iterable[tuple[str, float]]) -> tuple[str, int]:
    """Return the process with the longest sum of times in us, and the sum in ns. Ranks run at once, so that a
    sum over ranks is no time that a step could save.
    """
    sums: dict[str, float] = defaultdict(float)
    for name, us in times:
        sums[name] += us
    process = max(sums, key=lambda name: sums[name], default="")
    return process, round(sums.get(process, 0.0) * 1000)


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
)
_STEP = "ProfilerStep"
OWN_DATA = "num_workers is 0, so that the training loads its data itself: "
_LOOP = 5
"""Number of gaps per step from one call at one place with which advice says that the call is in a loop."""


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
        where = ", ".join(filter(None, (worst.call, worst.place)))
        because = [
            _share(process, totals[process], evidence),
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
        yield f"most in {name}: {_say(times[name])}"


def _say_gaps(rows: Sequence[GapRow]) -> str:
    longest_ns = max(row.longest_ns for row in rows)
    return f"{count(sum(row.count for row in rows), 'gap')}, the longest {duration(longest_ns)}"


_SMALL_US = 10.0
_MANY = 200
"""Number of kernels that a process must have for advice on small kernels."""


def small_kernels(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if nine of ten kernels take under 10 us on average, and a tenth of the time is between them."""
    worst: tuple[int, str, int, int] | None = None
    for name, own in grouped(evidence.activities, lambda activity: activity.name).items():
        kernels = [kernel for one in own for kernel in one.content.kernels if kernel.work == "compute"]
        total = sum(kernel.count for kernel in kernels)
        small = sum(kernel.count for kernel in kernels if kernel.total_us < _SMALL_US * kernel.count)
        between_ns = sum(
            row.total_ns
            for row in evidence.gaps
            if row.process == name and row.kind in ("queued", "slow launches")
        )
        if (
            name in evidence.untrusted
            or total < _MANY
            or small * 10 < total * 9
            or between_ns * 10 < evidence.recorded_ns(name)
        ):
            continue
        if worst is None or between_ns > worst[0]:
            worst = between_ns, name, small, total
    if worst is not None:
        between_ns, name, small, total = worst
        yield Advice(
            rule="small-kernels",
            what="nearly all kernels are small, so that the time between them counts",
            because=(f"{small:,} of {total:,} kernels take under 10 us", _share(name, between_ns, evidence)),
            do="torch.compile or fused kernels, CUDA graphs (mode='reduce-overhead'), larger batches",
            saves_ns=between_ns,
        )


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
        if not operator.outer and operator.count >= _OFTEN and operator.self_us < _SMALL_US * operator.count
    )
    self_us, number, name, process = max(called, default=(0.0, 0, "", ""))
    own_ns = round(self_us * 1000)
    if number and own_ns * 10 >= evidence.recorded_ns(process):
        yield Advice(
            rule="small-operators",
            what=f"{name} is called again and again, for little work each time",
            because=(
                f"{count(number, 'call')}, each {duration(own_ns // number)}",
                _share(process, own_ns, evidence),
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
    process, ns = _longest((name, label.cpu_us) for name, label in roots)
    if ns and ns * 20 >= evidence.recorded_ns(process):
        times = sum(label.count for name, label in roots if name == process)
        yield Advice(
            rule="recompilation",
            what="torch.compile compiles within the recorded time",
            because=(count(times, "time"), _share(process, ns, evidence)),
            do=REMEDIES["compilation"],
            saves_ns=ns,
        )


_PAGEABLE = re.compile(".*Pageable")


def unpinned_copies(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if copies between a device and memory that is not pinned took 1 % of a process' time."""
    copies = [copy for copy in _copies(evidence) if _PAGEABLE.match(copy[1].name)]
    process, ns = _longest((name, kernel.total_us) for name, kernel in copies)
    if ns and ns * 100 >= evidence.recorded_ns(process):
        yield Advice(
            rule="unpinned-copies",
            what="memory that is not pinned is copied",
            because=(_share(process, ns, evidence), _most_copied(process, copies)),
            do="pin_memory=True in the DataLoader, tensor.pin_memory(), and non_blocking=True",
            saves_ns=ns,
        )


def exposed_copies(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a device did nothing but copy, mostly pinned memory, for a tenth of its time."""
    alone = {row: row.busy_ns - row.compute_ns - row.exposed_ns for row in evidence.traces.devices}
    row = max(alone, key=lambda row: alone[row], default=None)
    if row is None or alone[row] * 10 < row.recorded_ns:
        return
    most = _most_copied(row.process, _copies(evidence))
    if not _PAGEABLE.match(most):
        yield Advice(
            rule="exposed-copies",
            what="copies are not hidden behind computation",
            because=(_share(row.process, alone[row], evidence), most),
            do="pinned memory, non_blocking=True and a stream of its own, a layer ahead; less offloading",
            saves_ns=alone[row],
        )


def _copies(evidence: TraceEvidence) -> list[tuple[str, Kernel]]:
    """Return the copies of each process by its name."""
    of_all = ((one.name, kernel) for one in evidence.activities for kernel in one.content.kernels)
    return [(name, kernel) for name, kernel in of_all if kernel.work == "memory"]


def _most_copied(process: str, copies: Iterable[tuple[str, Kernel]]) -> str:
    most = max((kernel for name, kernel in copies if name == process), key=lambda kernel: kernel.total_us)
    return f"{most.name}: {count(most.count, 'copy')}, {_say(most.total_us)}"


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
        because=(_share(worst.process, worst.exposed_ns, evidence), *([before] if waited else [])),
        do="even out the work of the ranks"
        if late
        else "larger buckets, prefetch (forward_prefetch and backward_prefetch of FSDP), smaller groups",
        saves_ns=worst.exposed_ns,
    )


def stragglers(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if others waited in collectives for one process: 5 ms per step, a twentieth of their time."""
    totals: dict[str, int] = defaultdict(int)
    for row in evidence.traces.stragglers:
        totals[row.process] += row.others_waited_ns
    if len(totals) < 2:
        return
    process = max(totals, key=lambda name: totals[name])
    each_ns = totals[process] // (len(totals) - 1)
    least_ns = max(evidence.recorded_ns(process) / 20, _SCHEDULED_NS * _steps_of(process, evidence))
    if each_ns < least_ns or totals[process] * 2 < sum(totals.values()):
        return
    part = percentage_of(each_ns, evidence.recorded_ns(process))
    yield Advice(
        rule="stragglers",
        what=f"the other ranks wait for {process} in collectives",
        because=(
            f"each for {duration(each_ns)}, {part} of the time recorded",
            *_longer_there(process, each_ns, evidence),
        ),
        do=f"look at {process}: its data (tokens in a micro-batch), work that it does alone, its host",
        saves_ns=each_ns,
    )


_SCHEDULED_NS = 5_000_000
"""Time in ns per step by which busy cores alone may delay a rank; 1.8 ms in steps of 3 to 10 ms were seen."""


def _steps_of(process: str, evidence: TraceEvidence) -> int:
    """Return the number of steps in a process' trace; without steps, of calls of its rarest collective."""
    steps = sum(row.process == process for row in evidence.traces.steps)
    return steps or min(row.calls for row in evidence.traces.stragglers if row.process == process)


def _longer_there(process: str, each_ns: int, evidence: TraceEvidence) -> Iterator[str]:
    """Yield a sentence on the label in which a process took longer than others of its role, if that explains
    half of the others' waiting.
    """
    (role,) = {activity.info.role for activity in evidence.activities if activity.name == process}
    times: dict[str, dict[tuple[str, ...], float]] = {}
    for activity in evidence.activities:
        if activity.info.role == role:
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
    yield f"{path[-1]}: {_say(mine[path])} there, {_say(usual)} on the others"


def uneven_work(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if the device of one rank computed for a fifth longer than the median of its role."""
    for role, rows in grouped(evidence.traces.devices, lambda row: row.role).items():
        ordered = sorted(rows, key=lambda row: row.compute_ns)
        if len(ordered) < 2:
            continue
        middle, longest = ordered[(len(ordered) - 1) // 2], ordered[-1]
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


_OPTIMIZER = "Optimizer.step#"
_FEW_KERNELS = 20


def unfused_optimizer(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if steps of the optimizer launch many kernels, none of them fused, and take 3 % of the time."""
    fused = any(row.name.startswith("aten::_fused_") for row in evidence.traces.operators)
    steps = (
        (max(label.cpu_us, label.busy_us or 0.0), activity.name, label)
        for activity in evidence.activities
        for label in activity.content.labels
        if label.path[-1].startswith(_OPTIMIZER) and label.count
    )
    us, process, label = max(steps, key=lambda step: step[0], default=(0.0, "", None))
    if fused or label is None:
        return
    each, ns = label.kernels // label.count, round(us * 1000)
    if each >= _FEW_KERNELS and ns * 100 >= 3 * evidence.recorded_ns(process):
        yield Advice(
            rule="unfused-optimizer",
            what="the optimizer launches many kernels, none of them fused",
            because=(
                f"{label.path[-1]}: {each:,} kernels a step",
                f"{process}: {_say(label.cpu_us)} on the CPU, {_say(label.busy_us or 0.0)} on the device",
            ),
            do="fused=True in torch's Adam, AdamW and SGD, else foreach=True",
            saves_ns=ns,
        )


_FP32 = re.compile(r".*(?<![a-z])sgemm|.*f32f32_f32f32|.*tf32|Cijk_\w+_SB_|.*s1688gemm", re.IGNORECASE)
_HALF = re.compile(r".*(b|_|p)f16|.*half|.*fp16", re.IGNORECASE)
"""Names of matrix products in half precision, as cuBLAS, cutlass and Tensile name them."""
_TF32 = re.compile(r".*tf32|.*s1688gemm", re.IGNORECASE)


def is_single(kernel: str) -> bool:
    """Return True if a kernel is a matrix product in single precision."""
    return _FP32.match(kernel) is not None and _HALF.match(kernel) is None


def single_precision(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if matrix products in single precision took a fifth of a process' computation, and half of them
    1 % of its time.
    """
    single = [
        (activity.name, kernel)
        for activity in evidence.activities
        for kernel in activity.content.kernels
        if kernel.work == "compute" and is_single(kernel.name)
    ]
    process, ns = _longest((name, kernel.total_us) for name, kernel in single)
    compute_ns = sum(row.compute_ns for row in evidence.traces.devices if row.process == process)
    if ns == 0 or ns * 5 < compute_ns or _is_little(ns // 2, process, evidence):
        return
    worst = max((kernel for name, kernel in single if name == process), key=lambda kernel: kernel.total_us)
    yield Advice(
        rule="single-precision",
        what="matrix products run in single precision",
        because=(f"{process}: {duration(ns)} of {duration(compute_ns)} computation", f"{worst.name[:60]}"),
        do="torch.autocast(dtype=torch.bfloat16), or BF16 weights"
        + ("" if _TF32.match(worst.name) else "; at least torch.set_float32_matmul_precision('high')"),
        saves_ns=ns // 2,
    )


def _is_little(ns: int, process: str, evidence: TraceEvidence) -> bool:
    return ns * 100 < evidence.recorded_ns(process)


def serial_streams(evidence: TraceEvidence) -> Iterator[Advice]:
    """Advise if a device has several streams of computation, 1 % of the time beside the busiest, that hardly
    ever run at once.
    """
    for activity in evidence.activities:
        for device, streams in grouped(activity.content.streams, lambda stream: stream.device).items():
            usage = next((one for one in activity.content.devices if one.name == device), None)
            ordered = sorted((stream.compute_us for stream in streams), reverse=True)
            if usage is None or len(ordered) < 2 or ordered[1] * 5 < ordered[0]:
                continue
            at_once_us = sum(ordered) - usage.compute_us
            others_us = sum(ordered[1:])
            if at_once_us * 10 > others_us or _is_little(round(others_us * 1000), activity.name, evidence):
                continue
            yield Advice(
                rule="uneven-streams",
                what="streams that could compute at once run one after the other",
                because=(
                    f"{activity.name}: {len(ordered)} streams",
                    f"the busiest {_say(ordered[0])}, the others {_say(others_us)}",
                    f"at once {_say(max(0.0, at_once_us))}",
                ),
                do="look for events and synchronisations between them; else one stream does as well",
                saves_ns=round(others_us * 1000),
            )
            return


def _say(us: float) -> str:
    return duration(round(us * 1000))


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
