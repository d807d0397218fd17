"""Alignment of clocks of different hosts by collectives, which is more exact than the capture's samples.

No rank leaves an all-reduce before the last rank has entered it. Each all-reduce of two hosts therefore
bounds the lead of one clock over the other from both sides. All all-reduces and the clock samples together
narrow these bounds. The offset is assumed to change steadily during the step, because the crystals of two
hosts differ. `Band` finds the lines that fit. If no line fits, clocks may deviate from a line as far as
`WANDER_PPM` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import DRIFT_PPM
from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout
from stepscope.files.sidecar import Sidecar
from stepscope.files.storage import read_record
from stepscope_report.timeline.clocks import (
    REACH_NS,
    WANDER_PPM,
    Aligned,
    Band,
    Line,
    Reference,
    Sample,
    align_at,
    anchored,
    fitted,
    samples_of,
)
from stepscope_report.timeline.clocks.collectives import (
    Collectives,
    Kind,
    Refused,
    Series,
    Times,
    join,
    match,
    read_collectives,
)
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.processes import Lost, files_elsewhere, results
from stepscope_report.timeline.readers.chrome import SUFFIXES
from stepscope_report.timeline.sources import Source

Known = Mapping[int, Mapping[Kind, Series | Refused]]
"""{index of a source: its collectives by kind}."""
_MOST_DRIFT_PPM = 500
"""Largest drift at which collectives are matched. Linux slews no clock faster."""
_SHIFTS = (1, -1, 2, -2, 3, -3)
"""Positions by which the windows of two ranks may differ although they contain equally many collectives."""
Pairs = Mapping[int, tuple[Times, Times]]
"""{number of a collective: (its times on the first clock, its times on the other clock)}."""


def _collectives_of(
    source: Source, traces: Sequence[Path], digests: Digests | None
) -> dict[Kind, Series | Refused]:
    """Return {kind: collectives of one process}, from the digests if these have the collectives."""
    world = _world(source)
    kept = None if digests is None else digests.kept(traces, Collectives, world)
    if kept is not None:
        return dict(kept)
    stamps = () if digests is None else digests.stamps(traces)
    collectives = read_collectives(world, traces)
    if digests is not None:
        digests.keep(traces, list(collectives.items()), stamps, world)
    return collectives


def _world(source: Source) -> str:
    replica = "" if source.info.replica is None else f" replica {source.info.replica}"
    return source.info.role + replica


def read_world(part: tuple[str, list[Path]]) -> Collectives:
    """Return the collectives of one process of a world, from its traces. Runs on the machine that has the
    traces.
    """
    return list(read_collectives(*part).items())


def _collectives_elsewhere(
    sources: Sequence[Source], traces: Mapping[int, list[Path]], executor: Executor | None
) -> Known:
    """Return the collectives of processes whose traces are only on other machines, by index of the source.

    A process has no collectives if its machine is lost.
    """
    elsewhere = files_elsewhere(executor).keys()
    far = {index: paths for index, paths in traces.items() if not elsewhere.isdisjoint(paths)}
    if executor is None or not far:
        return {}
    parts = [(_world(sources[index]), paths) for index, paths in far.items()]
    with closing(results(executor, read_world, parts, list(far.values()))) as read:
        return {
            index: {} if isinstance(collectives, Lost) else dict(collectives)
            for index, collectives in zip(far, read, strict=True)
        }


class _HostClock(msgspec.Struct, eq=False):
    """The wall clock of one host."""

    host: str
    owner: bool
    """True if this is the owner's clock, to which the other clocks are aligned. It needs no samples."""
    processes: list[int]
    """Indices of the sources on this host."""
    first_ns: int
    last_ns: int
    """`first_ns` and `last_ns` are the first and last time of these sources, on this clock."""
    samples: list[Sample]

    def guess(self, wall_ns: int) -> Sample | None:
        """Return the offset at this time by the sample that is most exact there, or None without a sample."""
        known = ((s.within_ns + abs(wall_ns - s.wall_ns) * DRIFT_PPM // 1_000_000, s) for s in self.samples)
        best = min(known, default=None)
        return None if best is None else Sample(wall_ns, best[1].offset_ns, best[0])


def _clocks_of(
    sources: Sequence[Source], aligned: Sequence[Aligned], reference: Reference
) -> Iterator[_HostClock]:
    """Yield the clock of the reference's host, then the clocks of the other hosts by name.

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
        extents = [_extent(sources[index], aligned[index], reference) for index in indices]
        clock = _HostClock(
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
    """Return the uncertainty of a measurement, plus the drift that is possible within `uncertainty_ns`."""
    return uncertainty_ns + uncertainty_ns * _MOST_DRIFT_PPM // 1_000_000 + 2


def _one_clock(samples: Sequence[Sample]) -> bool:
    return all(
        abs(a.offset_ns - b.offset_ns)
        <= a.within_ns + b.within_ns + abs(a.wall_ns - b.wall_ns) * _MOST_DRIFT_PPM // 1_000_000
        for a, b in pairwise(samples)
    )


def _extent(source: Source, aligned: Aligned, reference: Reference) -> tuple[int, int]:
    """Return the first and last time of a process on its own wall clock. If its capture was never closed, the
    last time is an upper bound.
    """
    opened, closed = source.opened, source.closed
    if closed is not None:
        return opened.wall_ns, closed.wall_ns
    latest_ns = opened.mono_ns if source.file is None else source.file.latest_ns or opened.mono_ns
    last_ns = reference.last_ns + aligned.clock.offset_ns
    if aligned.clock.alignment == "unaligned":
        last_ns = opened.wall_ns + reference.last_ns - reference.first_ns
    return opened.wall_ns, max(last_ns, opened.wall_ns + latest_ns - opened.mono_ns)


class Lead(NamedTuple):
    """Lead of one clock over another, by collectives."""

    line: Line
    within_ns: int
    matched: int
    """Number of collectives that the lead is based on."""


def refine(
    sources: Sequence[Source],
    aligned: Sequence[Aligned],
    reference: Reference,
    traces_of: Callable[[], Mapping[int, list[Path]]],
    digests: Digests | None = None,
    executor: Executor | None = None,
) -> list[Aligned]:
    """Return the placements, improved for hosts whose traces contain collectives with other hosts.

    If all processes are on one host, no trace is read. Traces are searched for collectives, not parsed.

    Args:
        traces_of: Returns the traces of each source, by its index. It is called only if there are two clocks.
        digests: Cache of the results for traces that were searched before, or None to search all traces.
        executor: Its workers search the traces that only the workers have.
    """
    clocks = list(_clocks_of(sources, aligned, reference))
    if len(clocks) < 2 or aligned[0].clock.jumped:
        return list(aligned)
    notes: dict[str, list[str]] = {clock.host: [] for clock in clocks}
    traces = traces_of()
    far = _collectives_elsewhere(sources, traces, executor)
    leads = _against_each_other(clocks, sources, traces, far, notes, digests)
    refined = list(aligned)
    for clock, known in _against_owner(clocks, leads, notes):
        for index in clock.processes:
            refined[index] = _better(sources[index], aligned[index], known, reference)
    for clock in clocks[1:]:
        if why := "; ".join(dict.fromkeys(notes[clock.host])):
            for index in clock.processes:
                refined[index] = _noted(refined[index], why)
    return refined


def traces_by_source(
    sources: Sequence[Source], layout: StepLayout, earlier_files: Collection[str]
) -> dict[int, list[Path]]:
    """Return {index of a source: its traces}. Traces without the sidecar of a source are left out.

    Args:
        earlier_files: Artifacts of earlier captures of the step, relative to its folder. They are left out.
    """
    by_key = {source.info.key: index for index, source in enumerate(sources)}
    traces: dict[int, list[Path]] = {}
    for path in sorted(layout.sidecars()):
        try:
            sidecar = read_record(path, Sidecar)
        except (OSError, RecordError):
            continue  # the reader of the traces reports a damaged sidecar
        index = by_key.get(sidecar.process or "")
        if sidecar.artifact.path in earlier_files:
            continue
        if (
            index is not None
            and sidecar.run_id == sources[0].run_id
            and sidecar.artifact.path.endswith(SUFFIXES)
        ):
            traces.setdefault(index, []).append(path.with_name(path.name.removesuffix(SIDECAR_SUFFIX)))
    return traces


def _against_each_other(
    clocks: Sequence[_HostClock],
    sources: Sequence[Source],
    traces: Mapping[int, list[Path]],
    far: Known,
    notes: Mapping[str, list[str]],
    digests: Digests | None,
) -> list[tuple[_HostClock, _HostClock, Lead]]:
    """Return (first clock, second clock, lead of the second) for hosts with common collectives.

    Memory holds the collectives of one host at a time, and for each kind the collectives of one further host,
    the first with this kind.
    """
    firsts: dict[Kind, tuple[_HostClock, Series | Refused]] = {}
    leads = []
    for clock in clocks:
        ranks = [
            far[index] if index in far else _collectives_of(sources[index], traces[index], digests)
            for index in clock.processes
            if index in traces
        ]
        pairs: dict[str, list[tuple[_HostClock, Kind, Series | Refused, Series | Refused]]] = {}
        for kind in dict.fromkeys(chain.from_iterable(ranks)):
            series = join(kind, ranks)
            first, theirs = firsts.setdefault(kind, (clock, series))
            if first is not clock:
                pairs.setdefault(first.host, []).append((first, kind, theirs, series))
        for matches in pairs.values():
            first = matches[0][0]
            known = _Search(first, clock).search([pair[1:] for pair in matches], notes[clock.host])
            if known is not None:
                leads.append((first, clock, known))
    return leads


class _Search:
    """Search for the lead of one clock over another."""

    def __init__(self, first: _HostClock, clock: _HostClock) -> None:
        self._clock = clock
        self._lasted_ns = max(clock.last_ns - clock.first_ns, 1)
        self._samples = list(_differences(first, clock))
        self._near_ns = self._samples[0].offset_ns if self._samples else 0
        """Approximate offset of the two clocks in ns. Values in bands are relative to this offset."""
        self._matched = 0

    def search(
        self, matches: Sequence[tuple[Kind, Series | Refused, Series | Refused]], notes: list[str]
    ) -> Lead | None:
        """Narrow the bands by the collectives of each kind, the most exact kind first. Skip a kind that
        contradicts earlier kinds.

        Args:
            notes: List to which the reason for each skipped kind is appended.

        Returns:
            The lead of the second clock, or None if no kind could be used.
        """
        bands: list[Band] = []
        for kind, theirs, ours in sorted(matches, key=_unsure):
            pairs = match(theirs, ours)
            if isinstance(pairs, str):
                notes.append(_say(kind, pairs))
                continue
            bands = bands or self._begin(pairs)
            cut = [
                self._cut(band, pairs, slack_ns) for band, slack_ns in zip(bands, self._slacks, strict=True)
            ]
            tier = next((tier for tier, band in enumerate(cut) if band), None)
            if tier is None:
                notes.append(
                    _say(kind, "they contradict the clock samples, or each other: not the same ones")
                )
            elif self._ambiguous(theirs, ours, bands[tier], self._slacks[tier]):
                notes.append(_say(kind, "nothing tells which one is which: their windows may differ"))
            else:
                bands = cut
                self._matched += len(pairs)
        return self._lead(bands) if self._matched else None

    @property
    def _slacks(self) -> list[int]:
        return [self._lasted_ns * ppm // 1_000_000 for ppm in WANDER_PPM]

    def _begin(self, pairs: Pairs) -> list[Band]:
        """Return one band for each value of `WANDER_PPM`, of lines relative to `_near_ns`."""
        if not self._samples:
            theirs, ours = next(iter(pairs.values()))
            self._near_ns = (ours.entered_ns + ours.left_ns - theirs.entered_ns - theirs.left_ns) // 2
        bands = []
        for slack_ns in self._slacks:
            band = Band(REACH_NS, self._lasted_ns * _MOST_DRIFT_PPM // 1_000_000)
            for at_ns, offset_ns, within_ns in self._samples:
                self._bound(band, at_ns, offset_ns - within_ns - slack_ns, offset_ns + within_ns + slack_ns)
            bands.append(band)
        return bands

    def _cut(self, band: Band, pairs: Pairs, slack_ns: int) -> Band:
        """Return the band cut by the rule that no rank leaves a collective before all have entered it."""
        cut = band.copy()
        for theirs, ours in pairs.values():
            if not cut:
                break
            self._bound(cut, ours.entered_ns, ours.entered_ns - theirs.left_ns - slack_ns, None)
            self._bound(cut, ours.left_ns, None, ours.left_ns - theirs.entered_ns + slack_ns)
        return cut

    def _bound(self, band: Band, at_ns: int, low_ns: int | None, high_ns: int | None) -> None:
        low = -2.0 * REACH_NS if low_ns is None else low_ns - self._near_ns
        high = 2.0 * REACH_NS if high_ns is None else high_ns - self._near_ns
        band.cut((at_ns - self._clock.first_ns) / self._lasted_ns, low, high)

    def _ambiguous(self, theirs: Series | Refused, ours: Series | Refused, band: Band, slack_ns: int) -> bool:
        """Return whether series without numbers also match when one of them is shifted by a few positions."""
        if isinstance(theirs, Refused) or isinstance(ours, Refused) or ours.numbered:
            return False
        for shift in _SHIFTS:
            shifted = match(theirs, ours, shift) if abs(shift) < max(ours.count, 2) else {}
            if not isinstance(shifted, str) and self._cut(band, shifted, slack_ns):
                return True
        return False

    def _lead(self, bands: Sequence[Band]) -> Lead:
        band, slack_ns = next((b, slack) for b, slack in zip(bands, self._slacks, strict=True) if b)
        fit, near_ns, clock = band.fit(), self._near_ns, self._clock
        line = Line(clock.first_ns, clock.last_ns, near_ns + fit.first_ns, near_ns + fit.last_ns)
        return Lead(line, fit.within_ns + slack_ns, self._matched)


def _unsure(match: tuple[Kind, Series | Refused, Series | Refused]) -> tuple[bool, int]:
    ours = match[2]
    return (True, 0) if isinstance(ours, Refused) else (not ours.numbered, -ours.count)


def _say(kind: Kind, why: str) -> str:
    return f"{kind.op.removeprefix('gloo:')} of {kind.world}: {why}"


def _differences(first: _HostClock, clock: _HostClock) -> Iterator[Sample]:
    """Yield samples of the offset of `clock` against `first`, computed from the samples of both clocks
    against the owner's. If `first` is the owner's clock, these are `clock.samples`.
    """
    for sample in clock.samples:
        owner_ns = sample.wall_ns - sample.offset_ns
        known = first.guess(owner_ns + (first.samples[0].offset_ns if first.samples else 0))
        if known is not None:
            yield Sample(
                sample.wall_ns, sample.offset_ns - known.offset_ns, sample.within_ns + known.within_ns
            )
        elif first.owner:
            yield sample


def _against_owner(
    clocks: Sequence[_HostClock],
    leads: Sequence[tuple[_HostClock, _HostClock, Lead]],
    notes: Mapping[str, list[str]],
) -> Iterator[tuple[_HostClock, Lead]]:
    """Yield each clock's lead over the owner's. Hosts with common collectives are placed as one group.

    If the owner's host is not in a group, all samples of the group's hosts together place the group.
    """
    left = list(clocks)
    while left:
        root = left[0]  # the owner's clock, if it is not in an earlier group
        known = _around(root, leads)
        left = [clock for clock in left if clock not in known]
        if len(known) == 1:
            continue
        base = Lead(Line(root.first_ns, root.last_ns, 0, 0), 0, 0) if root.owner else _anchored(root, known)
        for clock, own in known.items():
            if isinstance(base, str):
                notes[clock.host].append(base)
            elif not clock.owner:
                within_ns = own.within_ns + base.within_ns
                matched = own.matched or max(lead.matched for lead in known.values())
                yield clock, Lead(own.line.then(base.line), within_ns, matched)


def _around(root: _HostClock, leads: Sequence[tuple[_HostClock, _HostClock, Lead]]) -> dict[_HostClock, Lead]:
    """Return {clock: its lead over `root`} of all clocks that `leads` connect to the root.

    Each lead is summed along the path with the smallest uncertainty (Dijkstra's algorithm).
    """
    known: dict[_HostClock, Lead] = {}
    open_ = {root: Lead(Line(root.first_ns, root.last_ns, 0, 0), 0, 0)}
    while open_:
        near = min(open_, key=lambda clock: open_[clock].within_ns)
        known[near] = open_.pop(near)
        for one, other, lead in leads:
            if near not in (one, other):
                continue
            far = other if near is one else one
            if far in known:
                continue
            line = lead.line if near is one else lead.line.inverse(far.first_ns, far.last_ns)
            within_ns = known[near].within_ns + lead.within_ns
            if far not in open_ or within_ns < open_[far].within_ns:
                open_[far] = Lead(line.then(known[near].line), within_ns, lead.matched)
    return known


def _anchored(root: _HostClock, known: Mapping[_HostClock, Lead]) -> Lead | str:
    """Return the root's lead over the owner's clock by all samples, or why it is unknown."""
    samples = [
        Sample(wall_ns - line.at(wall_ns), offset_ns - line.at(wall_ns), own_ns + within_ns)
        for clock, (line, within_ns, _) in known.items()
        for wall_ns, offset_ns, own_ns in clock.samples
    ]
    if not samples:
        return "collectives align it to other hosts, but nothing to the owner's"
    change_ns = max(root.last_ns - root.first_ns, 1) * _MOST_DRIFT_PPM // 1_000_000
    fit = fitted(samples, root.first_ns, root.last_ns, change_ns)
    if fit is not None:
        return Lead(*fit, matched=0)
    return "its host's clock samples contradict those of hosts that it had collectives with"


def _better(source: Source, before: Aligned, lead: Lead, reference: Reference) -> Aligned:
    """Return the placement by collectives, unless the placement by samples (`before`) is more exact and
    agrees with it.
    """
    line, within_ns, matched = lead
    offsets = [line.at(wall_ns) for wall_ns in _extent(source, before, reference)]
    known_ns = anchored(source.opened, source.closed) + reference.uncertainty_ns + within_ns
    was = before.clock
    if source.closed is None:
        known_ns += abs(offsets[1] - offsets[0])  # positions follow the process' own clock
    if was.uncertainty_ns is not None and was.uncertainty_ns <= known_ns:
        apart = (was.offset_ns - offsets[0], was.closing_offset_ns - offsets[1])
        if max(map(abs, apart)) <= known_ns:
            return before
    return align_at(source.opened, source.closed, offsets[0], offsets[1], known_ns, matched)


def _noted(placed: Aligned, why: str) -> Aligned:
    return placed._replace(clock=msgspec.structs.replace(placed.clock, note=why))
