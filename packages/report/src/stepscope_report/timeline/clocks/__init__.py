"""Placement of the times of spans, which are monotonic, on the wall clock of the capture's owner.

`collectives` and `refine` make offsets between hosts more exact.

Traces have wall-clock times, which `rows.offset_at` places. An uncertainty covers everything that the samples
allow: each steady drift up to `DRIFT_PPM` that fits the samples, and each jump of a wall clock that the
anchors at the opening and the closing show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from stepscope.files.clock import DRIFT_PPM, ClockAnchor, ClockOffset
from stepscope_report.timeline.model import ProcessClock

_JUMP_NS = 1_000_000
_JUMP_PPM = 1000
"""A wall clock was set if it departs from the monotonic clock by more than `_JUMP_PPM` and by more than
`_JUMP_NS`: Linux adjusts a clock's rate by at most 500 ppm."""
_MOST_SAMPLES = 8
"""Number of samples to use if a clock was set: half from the start and half from the end of the step. Each
sample may be from before or after the jump."""
WANDER_PPM = (0, 1, 15)
"""Allowed deviations from a steady drift, in ppm of the step's length, which are tried in ascending order.
The last is PHI of RFC 5905."""
REACH_NS = 3_600_000_000_000
"""Largest error of a sample, or of the first collective."""
_ROUNDING_NS = 1.0
"""Times are whole ns, so a bound can be off by one."""
_Corner = tuple[float, float]


class Line(NamedTuple):
    """Lead of one wall clock over another. It changes steadily between two times on the first clock."""

    first_ns: int
    last_ns: int
    first_offset_ns: int
    last_offset_ns: int

    def at(self, wall_ns: int) -> int:
        change_ns = self.last_offset_ns - self.first_offset_ns
        lasted_ns = max(self.last_ns - self.first_ns, 1)
        return self.first_offset_ns + (wall_ns - self.first_ns) * change_ns // lasted_ns

    def inverse(self, first_ns: int, last_ns: int) -> Line:
        """Return the lead of the other clock over this one, between two times on the other clock."""
        return Line(first_ns, last_ns, -self._of_other(first_ns), -self._of_other(last_ns))

    def then(self, other: Line) -> Line:
        """Return the first clock's lead over a third one, given the second clock's lead over the third."""
        first, last = (at - offset for at, offset in zip(self[:2], self[2:], strict=True))
        return self._replace(
            first_offset_ns=self.first_offset_ns + other.at(first),
            last_offset_ns=self.last_offset_ns + other.at(last),
        )

    def _of_other(self, other_ns: int) -> int:
        wall_ns = other_ns
        for _ in range(4):  # each iteration makes the error 2,000 times smaller
            wall_ns = other_ns + self.at(wall_ns)
        return self.at(wall_ns)


class Sample(NamedTuple):
    """Lead of a clock over the owner's at the time `wall_ns`, true within +- `within_ns`.

    `samples_of` returns times on the owner's clock, and `_on_its_clock` times on the other clock.
    """

    wall_ns: int
    offset_ns: int
    within_ns: int


class _Fit(NamedTuple):
    """The middle of a band in ns, at its two ends. The true line is within +- `within_ns` of the middle."""

    first_ns: int
    last_ns: int
    within_ns: int


class Band:
    """The lines that fit all bounds so far. A line is a point (value at 0, value at 1), and all these points
    are a convex polygon.

    Only the corners of this polygon are kept. Values are ns, at most some hours from 0, where
    doubles are exact to a fraction of a ns.
    """

    def __init__(self, reach_ns: float, change_ns: float) -> None:
        """Start with all lines within `reach_ns` of 0 that change by at most `change_ns` from 0 to 1."""
        self._corners: list[_Corner] = [
            (-reach_ns, -reach_ns), (reach_ns, -reach_ns), (reach_ns, reach_ns), (-reach_ns, reach_ns),
        ]  # fmt: skip
        self._keep(1, -1, change_ns)
        self._keep(-1, 1, change_ns)

    def __bool__(self) -> bool:
        """Return whether any line is left."""
        return bool(self._corners)

    def copy(self) -> Band:
        made = Band.__new__(Band)
        made._corners = list(self._corners)
        return made

    def cut(self, at: float, low_ns: float, high_ns: float) -> None:
        """Keep the lines whose value at `at` is between the two bounds."""
        self._keep(1 - at, at, _ROUNDING_NS - low_ns)
        self._keep(at - 1, -at, _ROUNDING_NS + high_ns)

    def fit(self) -> _Fit:
        """Return the middle line. The band must not be empty."""
        firsts, lasts = zip(*self._corners, strict=True)
        halves = [(max(values) - min(values)) / 2 for values in (firsts, lasts)]
        return _Fit(
            round((max(firsts) + min(firsts)) / 2),
            round((max(lasts) + min(lasts)) / 2),
            round(max(halves)) + 1,
        )

    def _keep(self, by_first: float, by_last: float, least: float) -> None:
        """Keep lines with `by_first * first + by_last * last + least` of at least 0 (Sutherland-Hodgman)."""
        corners = self._corners
        above = [by_first * first + by_last * last + least for first, last in corners]
        if not above or min(above) >= 0:
            return
        kept: list[_Corner] = []
        for corner, following, high, next_high in zip(
            corners, corners[1:] + corners[:1], above, above[1:] + above[:1], strict=True
        ):
            if high >= 0:
                kept.append(corner)
            if (high >= 0) != (next_high >= 0):
                share = high / (high - next_high)
                kept.append(
                    (
                        corner[0] + share * (following[0] - corner[0]),
                        corner[1] + share * (following[1] - corner[1]),
                    )
                )
        self._corners = kept


def fitted(
    samples: Sequence[Sample], first_ns: int, last_ns: int, change_ns: float
) -> tuple[Line, int] | None:
    """Return (middle of all lines that fit the samples, largest distance of the true line in ns).

    Return None if no line fits.

    Args:
        first_ns: First time of the line, on the clock of the samples. `last_ns` is the last.
        change_ns: Largest change of the offset between these two times.
    """
    lasted_ns, near_ns = max(last_ns - first_ns, 1), samples[0].offset_ns
    for ppm in WANDER_PPM:
        slack_ns = lasted_ns * ppm // 1_000_000
        band = Band(REACH_NS, change_ns)
        for at_ns, offset_ns, within_ns in samples:
            apart_ns, known_ns = offset_ns - near_ns, within_ns + slack_ns
            band.cut((at_ns - first_ns) / lasted_ns, apart_ns - known_ns, apart_ns + known_ns)
        if band:
            fit = band.fit()
            line = Line(first_ns, last_ns, near_ns + fit.first_ns, near_ns + fit.last_ns)
            return line, fit.within_ns + slack_ns
    return None


class Placement:
    """Mapping from monotonic ns to unix ns: linear between two knots, at the clock's own pace elsewhere."""

    def __init__(self, knots: Sequence[tuple[int, int]]) -> None:
        self._first, self._last = knots[0], knots[-1]
        self._mono_ns = self._last[0] - self._first[0]
        self._wall_ns = self._last[1] - self._first[1]

    def __call__(self, mono_ns: int) -> int:
        since = mono_ns - self._first[0]
        if since <= 0 or self._mono_ns <= 0:
            return self._first[1] + since
        if since >= self._mono_ns:
            return self._last[1] + since - self._mono_ns
        return self._first[1] + since * self._wall_ns // self._mono_ns


class Reference(NamedTuple):
    """The owner's clock, to which a step's processes are aligned."""

    host: str
    place: Placement | None
    """The owner's placement; None when the owner left no anchor."""
    uncertainty_ns: int
    offsets: Sequence[ClockOffset]
    first_ns: int = 0
    last_ns: int = 0
    """`first_ns` and `last_ns` are the start and end of the owner's capture; 0 if unknown."""
    jump_ns: int = 0
    """Jump of the owner's wall clock during the capture."""


class Aligned(NamedTuple):
    place: Placement
    clock: ProcessClock


def align_owner(opened: ClockAnchor, closed: ClockAnchor | None) -> Aligned:
    """Return the owner's placement, by its own anchors."""
    knots, drift_ns, jumped = _knots(opened, closed)
    uncertainty_ns = anchored(opened, closed)
    clock = ProcessClock(alignment="owner", uncertainty_ns=uncertainty_ns, drift_ns=drift_ns, jumped=jumped)
    return Aligned(Placement(knots), clock)


def anchored(opened: ClockAnchor, closed: ClockAnchor | None) -> int:
    """Return how far apart, in ns, the wall clock and the monotonic clock may place one moment.

    Linux slews both clocks alike, so a difference is a jump of the wall clock at an unknown moment.
    The jump affects traces, which use the wall clock, as well as spans, which use the monotonic clock.
    """
    if closed is None:
        return opened.uncertainty_ns
    _, drift_ns, _ = _knots(opened, closed)
    return max(opened.uncertainty_ns, closed.uncertainty_ns) + abs(drift_ns)


def align(
    key: str,
    host: str,
    opened: ClockAnchor,
    closed: ClockAnchor | None,
    reference: Reference,
    latest_ns: int | None = None,
) -> Aligned:
    """Return the placement of another process, by its anchors and the owner's samples of its clock.

    On the owner's host the offset is 0, because a measured offset is only noise. If the samples exclude 0,
    two machines share one name, and the samples count. On another host the offset follows the middle of all
    straight lines that fit the samples.

    Args:
        latest_ns: Latest time of the process on its monotonic clock.
    """
    knots, drift_ns, jumped = _knots(opened, closed)
    samples = samples_of(key, reference)
    same_host = host == reference.host
    if same_host and (
        jumped or reference.jump_ns or all(abs(offset) <= within for _, offset, within in samples)
    ):
        samples = []
    line, within_ns = Line(0, 1, 0, 0), 0
    if samples:
        end_ns = max(latest_ns or opened.mono_ns, opened.mono_ns) if closed is None else closed.mono_ns
        extent = opened.wall_ns, knots[-1][1] if len(knots) > 1 else opened.wall_ns + end_ns - opened.mono_ns
        line, within_ns = _fit(samples, extent, reference, drift_ns if jumped else 0)
    offsets_ns = [line.at(wall_ns) for _, wall_ns in knots]
    known_ns = anchored(opened, closed) + reference.uncertainty_ns + within_ns
    if len(knots) == 1:  # positions follow the process' own clock from its opening on
        known_ns += abs(line.last_offset_ns - line.first_offset_ns)
    clock = ProcessClock(
        alignment="measured" if samples else "same host" if same_host else "unaligned",
        offset_ns=offsets_ns[0],
        closing_offset_ns=offsets_ns[-1],
        uncertainty_ns=known_ns if same_host or samples else None,
        drift_ns=drift_ns,
        jumped=jumped,
        drift_ppm=_ppm(knots, offsets_ns[-1] - offsets_ns[0]) if len(samples) > 1 else None,
    )
    return Aligned(_moved(knots, offsets_ns), clock)


def samples_of(key: str, reference: Reference) -> list[Sample]:
    """Return samples of a process' clock in order of the owner's time; empty if the owner has no anchor."""
    place = reference.place
    if place is None:
        return []
    return sorted(
        Sample(place(offset.at_mono_ns), offset.offset_ns, offset.uncertainty_ns)
        for offset in reference.offsets
        if offset.process == key
    )


def _fit(
    samples: list[Sample], extent: tuple[int, int], reference: Reference, jump_ns: int
) -> tuple[Line, int]:
    """Return the lead of a process' clock over the owner's during the process' life and the owner's capture,
    and the uncertainty of that lead.

    Args:
        extent: First and last time of the process, as its clock would have shown them without a jump.
        jump_ns: Jump of the process' clock.
    """
    if jump_ns or reference.jump_ns:
        samples = samples[: _MOST_SAMPLES // 2] + samples[max(_MOST_SAMPLES // 2, len(samples) - 4) :]
    near_ns = min(samples, key=lambda sample: sample.within_ns).offset_ns
    first_ns, last_ns = extent
    if reference.last_ns > reference.first_ns:
        drift_ns = (reference.last_ns - reference.first_ns) * DRIFT_PPM // 1_000_000
        first_ns = min(first_ns, reference.first_ns + near_ns - drift_ns)
        last_ns = max(last_ns, reference.last_ns + near_ns + drift_ns)
    last_ns = max(last_ns, first_ns + 1)
    cases = list(_without_steps(samples, reference, jump_ns))
    # The length is on the process' own clock, which drifts.
    change_ns = (last_ns - first_ns) * DRIFT_PPM / (1_000_000 - DRIFT_PPM)
    lines = (fitted(list(map(_on_its_clock, case)), first_ns, last_ns, change_ns) for case in cases)
    fits = [(*line[2:], within_ns) for line, within_ns in filter(None, lines)]
    if not fits:  # the samples contradict each other, so any value between them is possible
        offsets = [(offset - within, offset + within) for case in cases for _, offset, within in case]
        fits = [(*bounds, DRIFT_PPM * (last_ns - first_ns) // 1_000_000) for bounds in offsets]
    ends = []
    for end in (0, 1):
        lowest, highest = min(fit[end] - fit[2] for fit in fits), max(fit[end] + fit[2] for fit in fits)
        ends.append(((lowest + highest) // 2, (highest - lowest + 1) // 2))
    (first_offset_ns, one_ns), (last_offset_ns, other_ns) = ends
    return Line(first_ns, last_ns, first_offset_ns, last_offset_ns), max(one_ns, other_ns)


def _on_its_clock(sample: Sample) -> Sample:
    """Return a sample with its time on the process' clock. The drift during the uncertain time is added to
    `within_ns`.
    """
    owner_ns, offset_ns, within_ns = sample
    return Sample(owner_ns + offset_ns, offset_ns, within_ns + within_ns * DRIFT_PPM // 1_000_000)


def _without_steps(samples: list[Sample], reference: Reference, jump_ns: int) -> Iterator[list[Sample]]:
    """Yield the samples as they would be without the jump, once for each moment at which it may have
    happened.
    """
    many = len(samples)
    own = range(many + 1) if jump_ns else (many,)
    owners = range(many + 1) if reference.jump_ns else (many,)
    for before_own, before_owners in product(own, owners):
        if reference.jump_ns and any(
            at_ns > reference.last_ns if number < before_owners else at_ns < reference.first_ns
            for number, (at_ns, _, _) in enumerate(samples)
        ):
            continue
        yield [
            Sample(
                at_ns,
                offset_ns
                - (jump_ns if number >= before_own else 0)
                + (reference.jump_ns if number >= before_owners else 0),
                within_ns,
            )
            for number, (at_ns, offset_ns, within_ns) in enumerate(samples)
        ]


def align_at(
    opened: ClockAnchor,
    closed: ClockAnchor | None,
    opening_ns: int,
    closing_ns: int,
    known_ns: int,
    matched: int,
) -> Aligned:
    """Return a placement with offsets from `matched` collectives, true within +- `known_ns`."""
    knots, drift_ns, jumped = _knots(opened, closed)
    clock = ProcessClock(
        alignment="collectives",
        offset_ns=opening_ns,
        closing_offset_ns=closing_ns if len(knots) > 1 else opening_ns,
        uncertainty_ns=known_ns,
        drift_ns=drift_ns,
        jumped=jumped,
        drift_ppm=_ppm(knots, closing_ns - opening_ns),
        matched=matched,
    )
    return Aligned(_moved(knots, [opening_ns, closing_ns]), clock)


def _ppm(knots: Sequence[tuple[int, int]], gained_ns: int) -> float | None:
    lasted_ns = knots[-1][1] - knots[0][1]
    return None if lasted_ns <= 0 else round(gained_ns / lasted_ns * 1_000_000, 3)


def _moved(knots: Sequence[tuple[int, int]], offsets_ns: Sequence[int]) -> Placement:
    return Placement([(mono, wall - offset) for (mono, wall), offset in zip(knots, offsets_ns, strict=False)])


def _knots(opened: ClockAnchor, closed: ClockAnchor | None) -> tuple[list[tuple[int, int]], int, bool]:
    """Return (knots on the process' own wall clock, drift in ns, True if the clock was set in between)."""
    knots = [(opened.mono_ns, opened.wall_ns)]
    if closed is None or closed.mono_ns <= opened.mono_ns:
        return knots, 0, False
    mono_ns = closed.mono_ns - opened.mono_ns
    drift_ns = closed.wall_ns - opened.wall_ns - mono_ns
    jumped = abs(drift_ns) > max(_JUMP_NS, mono_ns * _JUMP_PPM // 1_000_000)
    if not jumped:
        knots.append((closed.mono_ns, closed.wall_ns))
    return knots, drift_ns, jumped


MARGIN_NS = 3_600_000_000_000
"""Largest plausible distance of a time from its step: an hour."""
MARGIN_US = MARGIN_NS / 1000
_WALL_NS = range(946_684_800 * 10**9, 4_102_444_800 * 10**9)
"""The years 2000 to 2099, in unix ns."""
FARTHEST_NS = 1 << 62
"""Times beyond 146 years (of uptime, or since 1970) count as invalid."""
FEW = 50
"""Number of timestamps that suffice to find the clock of a file. If a file has fewer, all are used."""
NOT_NEAR = "events more than an hour from the step, or from all others"
OWN_CLOCK = "its times are of no wall clock (before 2000, no baseTimeNanoseconds)"


def is_wall(at_ns: int) -> bool:
    """Return whether a time in ns is one that a wall clock shows."""
    return at_ns in _WALL_NS


def wall_base(base_ns: int | None, at_us: float | None) -> int | None:
    """Return the unix ns at which a trace's times are 0, or None if the trace has a clock of its own.

    Args:
        base_ns: The base that the file states, or None if it states none. Its times may then count from 1970.
        at_us: A time in the file, or None if the file has no times.
    """
    since_ns = base_ns or 0
    return since_ns if is_wall(since_ns + round((at_us or 0.0) * 1000)) else None


def middle(times: Iterable[float]) -> float | None:
    """Return the upper median of some times, or None if there are no times. A wrong time hardly moves it,
    because wrong times are more often 0 than in the future.
    """
    ordered = sorted(times)
    return ordered[len(ordered) // 2] if ordered else None


def is_near(start_ns: int, end_ns: int, window: tuple[int, int]) -> bool:
    """Return whether a time from `start_ns` to `end_ns` lies in the step, or at most an hour beside it."""
    return window[0] - MARGIN_NS <= start_ns and end_ns <= window[1] + MARGIN_NS


class Hours:
    """The hours in which the events of one file began, to find events that are far from all others."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def add(self, starts_us: Iterable[float]) -> None:
        self._counts.update(int(start // MARGIN_US) for start in starts_us)

    def near(self) -> tuple[float, float]:
        """Return the first and the last plausible time in us: the consecutive hours with the most events, and
        an hour on each side.
        """
        runs: list[list[int]] = []
        for hour in sorted(self._counts):
            if runs and hour - runs[-1][-1] <= 1:
                runs[-1].append(hour)
            else:
                runs.append([hour])
        most = max(runs, key=lambda run: sum(map(self._counts.__getitem__, run)), default=[0])
        return (most[0] - 1) * MARGIN_US, (most[-1] + 2) * MARGIN_US
