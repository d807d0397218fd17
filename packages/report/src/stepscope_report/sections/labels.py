"""*Labels*: time by the labels that the user and torch put on parts of the program, as a tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope_report.formatting import doubt, duration, say_doubted
from stepscope_report.sections import DEVICES, Section
from stepscope_report.table import Block, Table, TextTable, grouped
from stepscope_report.timeline import TraceActivity
from stepscope_report.timeline.activity.device_idle import GapKind
from stepscope_report.timeline.activity.doubts import is_doubt

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

_SHOWN = 15
"""Largest number of labels of a role that are printed. Labels with the most time are printed."""
KEPT = 256
"""Largest number of labels of a role in a report: those with the most time. The labels around them are kept
too, and are not counted."""


class LabelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One label with the labels around it, over all processes of a role."""

    role: str
    path: tuple[str, ...]
    """The labels around this label, the outermost first, and then the label itself."""
    processes: int
    count: int
    cpu_ns: int
    busy_ns: int | None
    """Time in which the device ran kernels that were launched within the label. None if the traces do not
    record launches."""
    communication_ns: int | None
    kernels: int
    idle_ns: int | None
    """Time within the label in which the device was idle. None without a device."""
    doubted: bool = False
    """True if the trace of some process of the role is in doubt."""
    gaps: dict[GapKind, int]
    """Idle time of the device in ns by cause. A gap counts for the innermost label within which the gap
    began."""


def label_rows(activities: Iterable[TraceActivity]) -> Table[LabelRow]:
    """Return the labels of each role. Each label is followed by the labels inside it, the longest first."""
    sums: dict[str, dict[tuple[str, ...], _Sum]] = {}
    doubted = set[str]()
    for activity in activities:
        if any(map(is_doubt, activity.content.problems)):
            doubted.add(activity.info.role)
        of_role = sums.setdefault(activity.info.role, {})
        for label in activity.content.labels:
            own = of_role.setdefault(label.path, _Sum())
            own.processes.add(activity.name)
            own.count += label.count
            own.cpu_us += label.cpu_us
            own.kernels += label.kernels
            own.launched |= label.busy_us is not None
            own.device |= label.idle_us is not None
            own.busy_us += label.busy_us or 0.0
            own.communication_us += label.communication_us or 0.0
            own.idle_us += label.idle_us or 0.0
            for kind, us in label.idle.items():
                own.gaps[kind] = own.gaps.get(kind, 0.0) + us
    return Table(
        row for role, labels in sums.items() for row in _of_role(role, labels, doubted=role in doubted)
    )


class _Sum:
    def __init__(self) -> None:
        self.processes: set[str] = set()
        self.count, self.cpu_us, self.device, self.launched = 0, 0.0, False, False
        self.kernels = 0
        self.busy_us = self.communication_us = self.idle_us = 0.0
        self.gaps: dict[GapKind, float] = {}


def _of_role(role: str, labels: dict[tuple[str, ...], _Sum], *, doubted: bool) -> Iterator[LabelRow]:
    longest = sorted(labels, key=lambda path: -labels[path].cpu_us)[:KEPT]
    chosen = {path[:depth] for path in longest for depth in range(1, len(path) + 1)}

    def order(path: tuple[str, ...]) -> list[tuple[float, str]]:
        around = (labels.get(path[:depth]) for depth in range(1, len(path) + 1))
        return [(-(0.0 if own is None else own.cpu_us), name) for own, name in zip(around, path, strict=True)]

    for path in sorted(chosen & labels.keys(), key=order):
        own = labels[path]
        yield LabelRow(
            role=role,
            path=path,
            processes=len(own.processes),
            count=own.count,
            cpu_ns=_ns(own.cpu_us),
            busy_ns=_ns(own.busy_us) if own.launched else None,
            communication_ns=_ns(own.communication_us) if own.launched else None,
            kernels=own.kernels,
            idle_ns=_ns(own.idle_us) if own.device else None,
            doubted=doubted,
            gaps={kind: _ns(us) for kind, us in own.gaps.items()},
        )


def _ns(us: float) -> int:
    return round(us * 1000)


def label_blocks(rows: Sequence[LabelRow], report: StepReport) -> Iterator[Block]:
    """Yield a table for each role: the labels with the most CPU time, as a tree."""
    for role, own in grouped(rows, lambda row: row.role).items():
        longest = sorted(own, key=lambda row: -row.cpu_ns)[:_SHOWN]
        shown = {row.path[:depth] for row in longest for depth in range(1, len(row.path) + 1)}
        on_device = any(row.idle_ns is not None for row in own)
        of_device = (">device", ">communication", ">idle inside", "mostly because") if on_device else ()
        columns = ("label", ">count", ">CPU", *of_device)
        cells = tuple(_cells(row, on_device=on_device) for row in own if row.path in shown)
        less = f"{len(cells)} of {len(own):,}. " if len(cells) < len(own) else ""
        note = "Sums over calls and processes." + (
            " device: kernels that were launched within." if on_device else ""
        )
        doubted = own[0].doubted
        note += say_doubted([doubted and on_device])
        yield TextTable(f"Labels: {doubt(role, doubted and on_device)}", columns, cells, less + note)


def _cells(row: LabelRow, *, on_device: bool) -> tuple[str, ...]:
    depth, name = len(row.path) - 1, row.path[-1]
    cells = (f"{'· ' * depth}{name[:60]}", f"{row.count:,}", duration(row.cpu_ns))
    if not on_device:
        return cells
    worst = max(row.gaps, key=lambda kind: row.gaps[kind], default=None)
    times = map(duration, (row.busy_ns, row.communication_ns, row.idle_ns))
    return (*cells, *times, worst if worst is not None and row.gaps[worst] * 20 >= (row.idle_ns or 0) else "")


LABELS = Section(
    name="labels",
    title="Labels",
    compute=lambda sources: label_rows(sources.activities),
    terminal=label_blocks,
    page=DEVICES,
)
