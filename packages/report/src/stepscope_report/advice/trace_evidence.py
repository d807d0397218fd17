"""The figures that rules of advice read from traces, and texts about times for these rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import msgspec

from stepscope_report.advice import percentage_of
from stepscope_report.formatting import duration
from stepscope_report.sections.gaps import GapRow
from stepscope_report.sections.labels import LabelRow
from stepscope_report.sections.traces import TraceTables
from stepscope_report.timeline import TraceActivity
from stepscope_report.timeline.activity.doubts import DOUBTS

SMALL_US = 10.0
"""Time in us below which a kernel or operator is small."""


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

    def beside(self, process: str, names: Collection[str]) -> set[str]:
        """Return the other processes in `names` whose recording overlaps in time with that of `process`, as
        processes of one run do.
        """
        extents = [
            (one.name, one.unix_ns(one.content.first_us or 0.0), one.unix_ns(one.content.last_us or 0.0))
            for one in self.activities
        ]
        own = [extent for extent in extents if extent[0] == process]
        return {
            name
            for name, start_ns, end_ns in extents
            if name != process and name in names and any(start_ns < b and a < end_ns for _, a, b in own)
        }


def longest_process(times: Iterable[tuple[str, float]]) -> tuple[str, int]:
    """Return the process with the longest sum of `times` (us), and the sum in ns; ("", 0) without times.

    The sum over all ranks would not be a time that a step could save, because ranks run at the same time.
    """
    sums: dict[str, float] = defaultdict(float)
    for name, us in times:
        sums[name] += us
    process = max(sums, key=lambda name: sums[name], default="")
    return process, round(sums.get(process, 0.0) * 1000)


def share(process: str, ns: int, evidence: TraceEvidence) -> str:
    recorded_ns = evidence.recorded_ns(process)
    return f"{process}: {duration(ns)}, {percentage_of(ns, recorded_ns)} of the time recorded"


def is_little(ns: int, process: str, evidence: TraceEvidence) -> bool:
    return ns * 100 < evidence.recorded_ns(process)


def say_us(us: float) -> str:
    return duration(round(us * 1000))
