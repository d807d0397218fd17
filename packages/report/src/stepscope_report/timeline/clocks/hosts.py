"""Wall clocks of a step's hosts, with their processes and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from stepscope.files.clock import DRIFT_PPM
from stepscope_report.timeline.clocks.align import Aligned, Reference, samples_of
from stepscope_report.timeline.clocks.drift_bounds import Sample
from stepscope_report.timeline.sources import Source

MOST_DRIFT_PPM = 500
"""Largest drift at which collectives are matched: as fast as kernels slew a clock."""


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
        """Return the offset at this time by the sample that is most exact there, or None without a sample."""
        known = ((s.within_ns + abs(wall_ns - s.wall_ns) * DRIFT_PPM // 1_000_000, s) for s in self.samples)
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
            Sample(owner_ns + offset_ns, offset_ns, _with_time(within_ns))
            for index in indices
            for owner_ns, offset_ns, within_ns in samples_of(sources[index].info.key, reference)
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
