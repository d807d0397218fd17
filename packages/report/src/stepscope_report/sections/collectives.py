"""*Collectives*: size, algorithm bandwidth and bus bandwidth of collective calls, by process group.

The formulas are those of nccl-tests (doc/PERFORMANCE.md). Algorithm bandwidth is size divided by time. Bus
bandwidth is algorithm bandwidth times a factor that depends on the operation and the number of ranks. A call
includes the wait for the last rank to enter, so the mean contains waiting, and the fastest call is closest to
the speed of the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from stepscope_report.formatting import duration, size
from stepscope_report.sections import DEVICES, Section
from stepscope_report.table import Block, Table, TextTable
from stepscope_report.timeline import TraceActivity

if TYPE_CHECKING:
    from stepscope_report.model import StepReport

Reach: TypeAlias = Literal["one host", "several hosts"]
_REACHES: tuple[Reach, Reach] = ("one host", "several hosts")
KEPT = 64
"""Largest number of rows in a report. Rows with the most total time are kept."""


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one collective operation in one process group with one size, over all traced processes."""

    op: str
    group: str
    """Name of the process group."""
    ranks: int
    """Number of ranks in the group."""
    reach: Reach | None
    """Distance of the group's ranks: on one host or on several. None if the host of some rank is unknown."""
    host: str | None
    """The host of the group's ranks. None if the ranks are on several hosts, or if the host is unknown."""
    bytes: int
    """Size of a call in bytes, as nccl-tests counts it. For a gather or an all-gather, this is the size that
    a rank has at the end; for other operations, the size that a rank has at the start."""
    processes: int
    calls: int
    mean_ns: int
    best_ns: int
    algorithm_gbs: float
    """Algorithm bandwidth of the fastest call, in GB/s."""
    bus_gbs: float
    """Bus bandwidth of the fastest call, in GB/s."""
    mean_bus_gbs: float
    """Bus bandwidth computed from the mean duration, which includes waiting for other ranks."""


def bus_factor(op: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth (see the top of this module)."""
    name = op.lower().replace("_", "")
    if ranks < 2:
        return 1.0
    if "allreduce" in name:
        return 2 * (ranks - 1) / ranks
    if any(part in name for part in ("allgather", "reducescatter", "alltoall", "all2all")):
        return (ranks - 1) / ranks
    return 1.0


def collective_rows(activities: Sequence[TraceActivity]) -> Table[CollectiveRow]:
    """Return the collectives whose size is known, the most total time first, at most `KEPT`."""
    hosts = {one.info.rank: one.info.host for one in activities if one.info.rank is not None}
    sums: dict[tuple[str, str, int, int, int], _Sum] = {}
    for activity in activities:
        for calls in activity.content.sized:
            key = calls.op, calls.group, calls.ranks, calls.bytes, calls.nodes or 0
            own = sums.setdefault(key, _Sum())
            own.processes.add(activity.name)
            own.hosts.add(activity.info.host)
            own.count += calls.count
            own.total_us += calls.total_us
            own.best_us = min(own.best_us, calls.best_us)
    ordered = sorted(sums.items(), key=lambda item: (-item[1].total_us, item[0]))
    return Table(_row(*key, own, hosts) for key, own in ordered[:KEPT])


class _Sum:
    def __init__(self) -> None:
        self.processes: set[str] = set()
        self.hosts: set[str] = set()
        self.count, self.total_us, self.best_us = 0, 0.0, float("inf")


def _row(
    op: str, group: str, ranks: int, total: int, nodes: int, own: _Sum, hosts: dict[int, str]
) -> CollectiveRow:
    mean_us, factor = own.total_us / own.count, bus_factor(op, ranks)
    name, _, members = group.partition(" ") if not nodes else (group, "", "")
    reach: Reach | None = _reach(members, hosts) if not nodes else _REACHES[nodes > 1]
    return CollectiveRow(
        op=op,
        group=name,
        ranks=ranks,
        reach=reach,
        host=next(iter(own.hosts)) if reach == "one host" and len(own.hosts) == 1 else None,
        bytes=total,
        processes=len(own.processes),
        calls=own.count,
        mean_ns=round(mean_us * 1000),
        best_ns=round(own.best_us * 1000),
        algorithm_gbs=_gbs(total, own.best_us),
        bus_gbs=_gbs(total, own.best_us) * factor,
        mean_bus_gbs=_gbs(total, mean_us) * factor,
    )


def _gbs(total: int, us: float) -> float:
    return total / us / 1000 if us > 0 else 0.0


def _reach(members: str, hosts: dict[int, str]) -> Reach | None:
    try:
        ranks = msgspec.json.decode(members, type=list[int])
    except msgspec.DecodeError:
        return None
    known = {hosts.get(rank) for rank in ranks}
    if not ranks or None in known:
        return "several hosts" if len(known - {None}) > 1 else None
    return "one host" if len(known) == 1 else "several hosts"


def collective_blocks(rows: Sequence[CollectiveRow], report: StepReport) -> Iterator[Block]:
    if rows:
        times = (">calls", ">mean", ">fastest", ">algorithm GB/s", ">bus GB/s", ">bus, mean")
        columns = ("collective", "group", ">ranks", "within", ">size", *times)
        note = "GB/s of the fastest call; the mean includes waiting for the last rank."
        several = len({row.host for row in rows} - {None}) > 1
        cells = tuple(_cells(row, row.host if several else None) for row in rows)
        yield TextTable("Collectives", columns, cells, note, noun="row")


def _cells(row: CollectiveRow, host: str | None) -> tuple[str, ...]:
    within = host or row.reach or ""
    place = (row.op, row.group, f"{row.ranks:,}", within, size(row.bytes), f"{row.calls:,}")
    rates = (f"{rate:.2f}" for rate in (row.algorithm_gbs, row.bus_gbs, row.mean_bus_gbs))
    return (*place, duration(row.mean_ns), duration(row.best_ns), *rates)


COLLECTIVES = Section(
    name="collectives",
    title="Collectives",
    compute=lambda sources: collective_rows(sources.activities),
    terminal=collective_blocks,
    page=DEVICES,
)
