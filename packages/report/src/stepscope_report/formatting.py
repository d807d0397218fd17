"""Numbers and names as they are printed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise

from stepscope.files.clock import duration as duration

LISTED = 12
"""Number of lines of a list that are printed. The number of further lines follows, and `--json` has them
all."""
STRETCHES = 4
"""Number of stretches of step numbers that are printed."""
PROFILED = "*: a profiler recorded this process and slowed it."
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def percents(parts: Sequence[int], total: int) -> list[str]:
    """Return each part's percentage with one decimal, rounded half to even.

    Parts that make up the whole total are rounded by largest remainder instead, so that they add up to 100.0.
    If `total` is not positive, each percentage is `-`.
    """
    if total <= 0:
        return ["-"] * len(parts)
    if sum(parts) != total:
        return [f"{tenth // 10}.{tenth % 10}" for tenth in (tenths(part, total) for part in parts)]
    cut = [part * 1000 // total for part in parts]
    missing = 1000 - sum(cut)
    lost = sorted(range(len(parts)), key=lambda at: -(parts[at] * 1000 % total))
    for at in lost[:missing]:
        cut[at] += 1
    return [f"{tenth // 10}.{tenth % 10}" for tenth in cut]


def percent_of(part: int, total: int) -> str:
    """Return the percentage of one part, rounded as in `percents`."""
    return percents([part], total)[0]


def tenths(part: int, total: int) -> int:
    """Return part / total in tenths of a percent, rounded half to even, exactly. `total` must be positive."""
    whole, rest = divmod(part * 1000, total)
    return whole + (2 * rest > total or (2 * rest == total and whole % 2 == 1))


def middle(values: Iterable[int]) -> int:
    """Return the median, rounded; for an even number of values, the mean of the middle two.

    Raises:
        statistics.StatisticsError: there is no value.
    """
    return round(statistics.median(values))


def moment(unix_ns: int) -> str:
    """Return a unix time as text: `2025-06-15 15:06:40 UTC`."""
    try:
        return f"{_EPOCH + timedelta(microseconds=unix_ns // 1000):%Y-%m-%d %H:%M:%S} UTC"
    except OverflowError:  # beyond the year 9999: a damaged file
        return f"{unix_ns} ns after 1970"


def plain(text: str) -> str:
    """Return `text` on one line and without control characters, which terminals obey."""
    return visible(re.sub(r"[\t\r\n]+", " ", text))


def visible(text: str) -> str:
    """Return `text` with an escape in place of each unprintable character (C0, C1, bidirectional).

    Newlines stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def turn(trajectory: str | None, index: int | None) -> str:
    """Return the id of a trajectory and the turn, as far as they are known: `math-17 turn 3`."""
    return (trajectory or "") + ("" if index is None else f" turn {index}")


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 span`, `2,345 spans`, `3 processes`, `4 trajectories`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def the_last(number: int, total: int) -> str:
    """Return `the last of 9`, or `the last 2 of 9`."""
    return f"the last {f'{number:,} ' if number > 1 else ''}of {total:,}"


def size(number: int) -> str:
    """Return a number of bytes as text: `812 B`, `4.5 kB`, `1.2 GB`. Units are powers of 1000."""
    value, units = float(number), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def few(names: Sequence[str], most: int) -> str:
    """Return the first `most` names as text, with dots if there are more: `a, b ...`."""
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def numbers(steps: Iterable[int]) -> str:
    """Return step numbers as text, in order: `3, 5-9, 12`. After `STRETCHES` stretches, dots follow."""
    ordered = sorted(set(steps))
    breaks = [0, *(at for at, (a, b) in enumerate(pairwise(ordered), 1) if b > a + 1), len(ordered)]
    stretches = [
        str(ordered[first]) if end - first == 1 else f"{ordered[first]}-{ordered[end - 1]}"
        for first, end in pairwise(breaks)
    ]
    return few(stretches, STRETCHES)


def both(a: str, b: str) -> str:
    """Return `a` if both texts are equal, else `a → b`."""
    return a if a == b else f"{a} → {b}"


def signed(ns: int) -> str:
    """Return a duration with its sign: `+1.20 s`, `-3.00 ms`, `0`."""
    return f"+{duration(ns)}" if ns > 0 else duration(ns)


def percentage(part: int, whole: int) -> str:
    """Return `part` as a signed percentage of `whole`: `+12.3`, `-4.0` or `0.0`; `-` if `whole` is not
    positive.
    """
    if whole <= 0:
        return "-"
    rounded = tenths(part, whole)
    return f"{rounded / 10:+.1f}" if rounded else "0.0"


DOUBTED = "?: see Can these traces be believed?"


def doubt(name: str, doubted: bool) -> str:
    """Return the name, with a `?` if the numbers beside it are in doubt."""
    return f"{name} ?" if doubted else name


def say_doubted(doubted: Iterable[bool]) -> str:
    """Return the note that explains the `?` of `doubt`, or "" if nothing is in doubt."""
    return f" {DOUBTED}" if any(doubted) else ""


def starred(name: str, profiled: bool) -> str:
    """Return the name of a process, with a `*` if a profiler recorded it."""
    return f"{name}*" if profiled else name


def say_profiled(*profiled: bool) -> str:
    """Return the note that explains the `*` of `starred`, or "" if no name has a `*`."""
    return PROFILED if any(profiled) else ""
