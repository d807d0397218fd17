"""Wall clocks of a step's hosts, with their processes and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from stepscope.timeline.clocks.align import Aligned, Reference, aged, sampled
from stepscope.timeline.sources import Source

MOST_DRIFT_PPM = 500
"""Largest drift at which collectives are matched: as fast as kernels slew a clock."""


class Line(NamedTuple):
    """Lead of a wall clock over another: it changes steadily between two times of that clock."""

    first_ns: int
    last_ns: int
    first_offset_ns: int
    last_offset_ns: int

    def at(self, wall_ns: int) -> int:
        change_ns = self.last_offset_ns - self.first_offset_ns
        lasted_ns = max(self.last_ns - self.first_ns, 1)
        return self.first_offset_ns + (wall_ns - self.first_ns) * change_ns // lasted_ns

    def inverse(self, first_ns: int, last_ns: int) -> Line:
        """Return the lead of the other clock over this one, by times that the other shows."""
        return Line(first_ns, last_ns, -self._of_other(first_ns), -self._of_other(last_ns))

    def then(self, other: Line) -> Line:
        """Return its lead over a third clock, where `other` is the second's lead over the third."""
        first, last = (at - offset for at, offset in zip(self[:2], self[2:], strict=True))
        return self._replace(
            first_offset_ns=self.first_offset_ns + other.at(first),
            last_offset_ns=self.last_offset_ns + other.at(last),
        )

    def _of_other(self, other_ns: int) -> int:
        wall_ns = other_ns
        for _ in range(4):  # each time 2,000 times more exact
            wall_ns = other_ns + self.at(wall_ns)
        return self.at(wall_ns)


class Sample(NamedTuple):
    """Lead of a clock over the owner's when it showed `wall_ns`, true within +- `within_ns`."""

    wall_ns: int
    offset_ns: int
    within_ns: int


class Clock(msgspec.Struct, eq=False):
    """One wall clock: a host's."""

    host: str
    owner: bool
    """Reference of the other hosts; it needs no samples."""
    processes: list[int]
    """Indices of the sources on this host."""
    first_ns: int
    last_ns: int
    """First and last time of these sources, on this clock."""
    samples: list[Sample]

    def guess(self, wall_ns: int) -> Sample | None:
        """Return the offset at this time by the sample that is most exact there. None: no sample."""
        known = ((aged(s.within_ns, wall_ns - s.wall_ns), s) for s in self.samples)
        best = min(known, default=None)
        return None if best is None else Sample(wall_ns, best[1].offset_ns, best[0])


def clocks_of(sources: Sequence[Source], aligned: Sequence[Aligned], reference: Reference) -> Iterator[Clock]:
    """Yield the clock of the reference's host, then the others by host.

    A host is left out if the samples of its processes contradict each other, or if its clock was set.
    """
    hosts: dict[str, list[int]] = {reference.host: []}
    for index in sorted(range(len(sources)), key=lambda index: sources[index].info.host):
        if sources[index].info.host != reference.host or aligned[index].clock.alignment != "measured":
            hosts.setdefault(sources[index].info.host, []).append(index)
    for host, indices in hosts.items():
        if not indices:
            continue
        samples = [
            Sample(at_ns, offset.offset_ns, _with_time(offset.uncertainty_ns))
            for index in indices
            for at_ns, offset in sampled(sources[index].info.key, reference).items()
            if host != reference.host
        ]
        extents = [extent(sources[index], aligned[index], reference) for index in indices]
        clock = Clock(
            host,
            host == reference.host,
            indices,
            min(e[0] for e in extents),
            max(e[1] for e in extents),
            samples,
        )
        if _one_clock(samples) and not any(aligned[index].clock.jumped for index in indices):
            yield clock


def _with_time(uncertainty_ns: int) -> int:
    """Add the drift during the uncertain time of a measurement to its uncertainty."""
    return uncertainty_ns + uncertainty_ns * MOST_DRIFT_PPM // 1_000_000 + 2


def _one_clock(samples: Sequence[Sample]) -> bool:
    return all(
        abs(a.offset_ns - b.offset_ns)
        <= a.within_ns + b.within_ns + abs(a.wall_ns - b.wall_ns) * MOST_DRIFT_PPM // 1_000_000
        for a, b in pairwise(samples)
    )


def extent(source: Source, aligned: Aligned, reference: Reference) -> tuple[int, int]:
    """From when until when it lived, by its own wall clock; at most, where it was not closed."""
    opened, closed = source.opened, source.closed
    if closed is not None:
        return opened.wall_ns, closed.wall_ns
    latest_ns = opened.mono_ns if source.file is None else source.file.latest_ns or opened.mono_ns
    last_ns = reference.last_ns + aligned.clock.offset_ns
    if aligned.clock.alignment == "unaligned":
        last_ns = opened.wall_ns + reference.last_ns - reference.first_ns
    return opened.wall_ns, max(last_ns, opened.wall_ns + latest_ns - opened.mono_ns)
