"""Table of the steps that torch's profiler marked in a trace, and a sentence on the slowest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import msgspec

from stepscope_report.formatting import doubt, duration, say_doubted
from stepscope_report.table import Table, TextTable, grouped
from stepscope_report.timeline import TraceActivity
from stepscope_report.timeline.activity.device_idle import GapKind

SHOWN = 10
"""Largest number of steps of a process that are printed. The longest steps are printed."""
_PROCESSES = 4
"""Largest number of processes whose steps are printed."""


class ProfilerStepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a process, with times in ns. Times of devices are None if the trace has no device."""

    process: str
    step: int
    dur_ns: int
    busy_ns: int | None
    idle_ns: int | None
    """Time of the step in which no device was busy. None without a device."""
    gaps: dict[GapKind, int] = {}
    """Idle time of the devices within the step by cause, added up over the devices."""
    exposed_ns: int | None
    loading_ns: int
    h2d_ns: int | None = None
    """Time of copies from the host to a device. None if the trace has none."""
    forward_ns: int | None = None
    """Time on the CPU in ranges named after the forward pass. None if the trace has none."""
    backward_ns: int | None = None
    """Time on the CPU in the backward pass. None if the trace does not show the pass."""
    optimizer_ns: int
    doubted: bool = False
    """True if a trace of the process is in doubt, so that the times of its device may be wrong."""


def profiler_steps(activities: Iterable[TraceActivity]) -> Table[ProfilerStepRow]:
    """Return the steps that torch's profiler marked, in the order of the traces. Empty if there are none."""
    return Table(
        ProfilerStepRow(
            process=activity.name,
            step=step.number,
            dur_ns=_ns(step.dur_us),
            busy_ns=None if step.busy_us is None else _ns(step.busy_us),
            idle_ns=None if step.busy_us is None else _ns(step.dur_us - step.busy_us),
            gaps={kind: _ns(us) for kind, us in step.idle.items()},
            exposed_ns=None if step.exposed_us is None else _ns(step.exposed_us),
            loading_ns=_ns(step.loading_us),
            h2d_ns=_known(step.h2d_us),
            forward_ns=_known(step.forward_us),
            backward_ns=_known(step.backward_us),
            optimizer_ns=_ns(step.optimizer_us),
        )
        for activity in activities
        for step in activity.content.steps
    )


def _ns(us: float) -> int:
    return round(us * 1000)


def _known(us: float | None) -> int | None:
    return None if us is None else _ns(us)


def step_tables(rows: Sequence[ProfilerStepRow]) -> Iterator[TextTable]:
    """Yield a table of the steps of each process. If there are more than `_PROCESSES` processes, only those
    with the longest steps have a table.
    """
    by_process = grouped(rows, lambda row: row.process)
    order = sorted(by_process, key=lambda name: -max(row.dur_ns for row in by_process[name]))
    chosen = [name for name in by_process if name in order[:_PROCESSES]]
    for process in chosen:
        own = by_process[process]
        longest = sorted(own, key=lambda row: -row.dur_ns)[:SHOWN]
        shown = sorted(longest, key=lambda row: row.step)
        known = [(name, of) for name, of in _COLUMNS.items() if any(of(row) is not None for row in own)]
        less = f"The {SHOWN} longest of {len(own):,}. " if len(own) > SHOWN else ""
        cells = [(f"{row.step:,}", *(duration(of(row)) for _, of in known)) for row in shown]
        columns = (">step", *(f">{name}" for name, _ in known))
        if any(row.gaps for row in own):
            cells = [(*cell, _because(row)) for cell, row in zip(cells, shown, strict=True)]
            columns = (*columns, "idle because")
        if len(own) > 2:
            middle = ("median", *(duration(_median(own, of)) for _, of in known), "")
            cells.append(middle[: len(columns)])
        doubted = own[0].doubted
        note = f"{less}{_slowest(own)}{say_doubted([doubted])}".strip()
        if process == chosen[-1] and len(by_process) > len(chosen):
            note = f"{note} {len(chosen)} of {len(by_process)} processes, with the longest steps.".strip()
        yield TextTable(f"Steps of {doubt(process, doubted)}", columns, tuple(cells), note)


def _median(rows: Sequence[ProfilerStepRow], of: Callable[[ProfilerStepRow], int | None]) -> int:
    return round(median(value for row in rows if (value := of(row)) is not None))


def _because(row: ProfilerStepRow) -> str:
    """Return the largest causes of gaps as text: as many as explain half of the gaps' time. Empty without
    gaps.
    """
    total, known, named = sum(row.gaps.values()), 0, []
    for kind, ns in sorted(row.gaps.items(), key=lambda item: -item[1]):
        if known * 2 < total:
            known += ns
            named.append(f"{kind} {duration(ns)}")
    return ", ".join(named)


def _slowest(rows: Sequence[ProfilerStepRow]) -> str:
    """Return a sentence that compares the slowest step with the median. Empty with fewer than three steps."""
    if len(rows) < 3:
        return ""
    slowest = max(rows, key=lambda row: row.dur_ns)
    longer_ns = slowest.dur_ns - round(median(row.dur_ns for row in rows))
    grew = {}
    for name, of in _PARTS.items():
        usual = [value for row in rows if (value := of(row)) is not None]
        own = of(slowest)
        if own is not None and usual:
            grew[name] = own - round(median(usual))
    name, most_ns = max(grew.items(), key=lambda item: item[1])
    if longer_ns <= 0:
        return ""
    part = f"; {name} grew most, by {duration(most_ns)}" if most_ns * 2 > longer_ns else ""
    return f"Slowest: step {slowest.step}, {duration(longer_ns)} longer than the median{part}."


_PARTS: dict[str, Callable[[ProfilerStepRow], int | None]] = {
    "data loading": lambda row: row.loading_ns,
    "the forward pass": lambda row: row.forward_ns,
    "the backward pass": lambda row: row.backward_ns,
    "the optimizer": lambda row: row.optimizer_ns,
    "exposed communication": lambda row: row.exposed_ns,
    "device time": lambda row: row.busy_ns,
    "idle time of the device": lambda row: row.idle_ns,
}
_COLUMNS: dict[str, Callable[[ProfilerStepRow], int | None]] = {
    "took": lambda row: row.dur_ns,
    "device busy": lambda row: row.busy_ns,
    "idle": lambda row: row.idle_ns,
    "exposed": lambda row: row.exposed_ns,
    "data loading": lambda row: row.loading_ns or None,
    "host to device": lambda row: row.h2d_ns,
    "forward": lambda row: row.forward_ns,
    "backward": lambda row: row.backward_ns,
    "optimizer": lambda row: row.optimizer_ns or None,
}
"""{column of the table: function that returns its time in ns, or None}. A column without any time is left
out."""
