"""Devices and engines of a run at this moment: one row each, or for many of them the spread and the worst
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.counters import (
    GPU,
    GPU_MEMORY,
    KV_CACHE,
    NPU,
    NPU_MEMORY,
    RUNNING_REQUESTS,
    TORCH_RESERVED,
    WAITING_REQUESTS,
)
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import CounterNow
from stepscope_report.accounting import rank_of

MOST_ROWS = 64
"""Up to this many devices, or engines, get a row each; of more, spreads are shown."""

Group: TypeAlias = Literal["devices", "engines"]


class Column(NamedTuple):
    """One figure of a device or engine."""

    title: str
    unit: str
    names: tuple[str, ...]
    """The names of the column's counters."""
    lowest_is_worst: bool = False


COLUMNS: Mapping[Group, tuple[Column, ...]] = {
    "devices": (
        Column("utilisation", "%", (GPU, NPU), lowest_is_worst=True),
        Column("memory", "B", (GPU_MEMORY, NPU_MEMORY)),
        Column("torch reserved", "B", (TORCH_RESERVED,)),
    ),
    "engines": (
        Column("running", "", (RUNNING_REQUESTS,), lowest_is_worst=True),
        Column("waiting", "", (WAITING_REQUESTS,)),
        Column("KV cache", "%", (KV_CACHE,)),
    ),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """`GPU 3 of node-a`, `replica 0`; or `actor 0, cuda:0` if only torch samples the device."""
    values: dict[str, float]
    """{title of a column: mean over the last seconds}."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One column over many devices or engines. Percentiles are values of some of them (nearest rank)."""

    column: str
    number: int
    """The number of devices or engines that have the counter."""
    p10: float
    median: float
    p90: float
    worst: float
    """The lowest utilisation, the fewest running requests, or the highest value of any other column."""
    whose: str


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    group: Group
    number: int
    step: int | None = None
    """The step on disk that the figures describe, or None if they describe the present."""
    rows: tuple[Row, ...] = ()
    """The rows; empty if there are more than `MOST_ROWS`."""
    spreads: tuple[Spread, ...] = ()


class Sampled(NamedTuple):
    process: ProcessInfo
    counters: Sequence[CounterNow]


def fleets(now: Sequence[Sampled], last: Sequence[Sampled], step: int | None) -> Iterator[Fleet]:
    """Yield the devices, then the engines, where there are any.

    Args:
        now: Counters of the processes that answered.
        last: Counters of the last step on disk that has some, for processes that did not answer.
        step: The number of that step.
    """
    groups = []
    for group in COLUMNS:
        rows, of_step = _rows(group, now), None
        if not rows:
            rows, of_step = _rows(group, last), step
        if rows:
            groups.append((group, of_step, rows))
    many = any(len(rows) > MOST_ROWS for _, _, rows in groups)
    for group, of_step, rows in groups:
        yield Fleet(
            group=group,
            number=len(rows),
            step=of_step,
            rows=() if many else tuple(rows),
            spreads=tuple(_spreads(group, rows)) if many else (),
        )


def _rows(group: Group, sampled: Iterable[Sampled]) -> list[Row]:
    titles = {name: column.title for column in COLUMNS[group] for name in column.names}
    values: dict[tuple[str, int, int, str], dict[str, float]] = {}
    for process, counters in sampled:
        for counter in counters:
            if counter.name in titles and counter.of:
                name = _name(process, counter)
                values.setdefault((*_order(process, counter), name), {})[titles[counter.name]] = counter.value
    rows = [Row(name=key[-1], values=own) for key, own in sorted(values.items())]
    whole = [row for row in rows if "utilisation" in row.values]
    return whole or rows  # the host's counters know more of a GPU than torch


def _name(process: ProcessInfo, counter: CounterNow) -> str:
    if counter.name == TORCH_RESERVED:
        rank = f"pid {process.pid}" if process.rank is None else str(process.rank)
        return f"{process.role} {rank}, {counter.of}"
    is_device = counter.name in {name for column in COLUMNS["devices"] for name in column.names}
    return f"{counter.of} of {process.host}" if is_device else counter.of


def _order(process: ProcessInfo, counter: CounterNow) -> tuple[str, int, int]:
    """Return the sort key of a row: GPU 10 comes after GPU 9."""
    number = counter.of.rpartition(" ")[2]
    host = "" if counter.of.startswith("replica") else process.host
    rank = -1 if process.rank is None or counter.name != TORCH_RESERVED else process.rank
    return host, int(number) if number.isdecimal() else -1, rank


def _spreads(group: Group, rows: Sequence[Row]) -> Iterator[Spread]:
    for column in COLUMNS[group]:
        own = sorted((row.values[column.title], row.name) for row in rows if column.title in row.values)
        if not own:
            continue
        p10, median, p90 = (own[rank_of(percent, len(own))][0] for percent in (10, 50, 90))
        worst, whose = own[0] if column.lowest_is_worst else own[-1]
        yield Spread(
            column=column.title, number=len(own), p10=p10, median=median, p90=p90, worst=worst, whose=whose
        )
