"""Changes between two steps, or between two runs: the accounts of both, line by line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stepscope.report.accounting import Label
from stepscope.report.model import StepReport
from stepscope.report.tables.breakdown import LineKind


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two that are compared."""

    steps: tuple[int, ...]
    runs: tuple[str, ...]
    step_ns: int
    """Per step, the step alone: the sum of this side's lines."""
    opening_ns: int
    """Per step, what opening its capture took before it."""
    closing_ns: int
    """The same of closing, after it."""
    complete: bool
    """Of every step."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one side. Zeros where the side has no such line."""

    wall_ns: int = 0
    """Per step: the mean, in whole ns."""
    min_ns: int = 0
    max_ns: int = 0
    """Of any of its steps. The same as the mean for one step."""
    calls: float = 0.0
    """Per step."""
    mean_ns: int | None = None
    """Of a call that ended."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the account on both sides."""

    kind: LineKind
    role: str | None
    stage: str | None
    a: Figures
    b: Figures
    delta_ns: int
    """Of the share of the step, b - a. Over all lines these add up to the change of the step."""
    apart: bool
    """Both sides have several steps, and their ranges do not meet: it is more than steps differ anyway."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    a: Side
    b: Side
    delta_ns: int
    """Of the step alone. What opening and closing its capture took is in `a` and `b`."""
    changes: tuple[Change, ...]
    """The largest first, whichever its sign."""


_Key = tuple[LineKind, str | None, str | None]


def diff(a: Sequence[StepReport], b: Sequence[StepReport]) -> Diff:
    """Compare the reports of one step, or of several per side by the mean of its steps.

    Raises:
        ValueError: a side has no step.
    """
    if not a or not b:
        raise ValueError("a side without a step: nothing to compare")
    left, right = _figures(a), _figures(b)
    keys = dict.fromkeys((*left, *right))
    several = len(a) > 1 and len(b) > 1
    changes = [_change(key, left.get(key, Figures()), right.get(key, Figures()), several) for key in keys]
    changes.sort(
        key=lambda change: (-abs(change.delta_ns), change.kind, change.role or "", change.stage or "")
    )
    one, other = _side(a, left), _side(b, right)
    return Diff(a=one, b=other, delta_ns=other.step_ns - one.step_ns, changes=tuple(changes))


def _change(key: _Key, a: Figures, b: Figures, several: bool) -> Change:
    kind, role, stage = key
    return Change(
        kind=kind,
        role=role,
        stage=stage,
        a=a,
        b=b,
        delta_ns=b.wall_ns - a.wall_ns,
        apart=several and (a.max_ns < b.min_ns or b.max_ns < a.min_ns),
    )


def _side(reports: Sequence[StepReport], figures: Mapping[_Key, Figures]) -> Side:
    return Side(
        steps=tuple(report.step for report in reports),
        runs=tuple(dict.fromkeys(report.run_id for report in reports)),
        step_ns=sum(line.wall_ns for line in figures.values()),
        opening_ns=sum(report.breakdown.opening_ns for report in reports) // len(reports),
        closing_ns=sum(report.breakdown.closing_ns for report in reports) // len(reports),
        complete=all(report.health.complete for report in reports),
    )


def _figures(reports: Sequence[StepReport]) -> dict[_Key, Figures]:
    walls: dict[_Key, list[int]] = defaultdict(list)
    for report in reports:
        for line in report.breakdown.lines:
            walls[line.kind, line.role, line.stage].append(line.wall_ns)
    calls, total_ns = _calls(reports)
    return {key: _line(key, wall_ns, len(reports), calls, total_ns) for key, wall_ns in walls.items()}


def _line(
    key: _Key, walls_ns: list[int], steps: int, calls: Mapping[Label, int], total_ns: Mapping[Label, int]
) -> Figures:
    kind, role, stage = key
    label = (role or "", stage or "")
    number = calls.get(label, 0) if kind == "stage" else 0
    return Figures(
        wall_ns=sum(walls_ns) // steps,
        min_ns=min(walls_ns) if len(walls_ns) == steps else 0,
        max_ns=max(walls_ns),
        calls=round(number / steps, 3),
        mean_ns=total_ns[label] // number if number else None,
    )


def _calls(reports: Iterable[StepReport]) -> tuple[Counter[Label], Counter[Label]]:
    """Return the calls that ended, and their times."""
    calls, total_ns = Counter[Label](), Counter[Label]()
    for report in reports:
        for stage in report.stages:
            calls[stage.role, stage.stage] += stage.calls
            total_ns[stage.role, stage.stage] += stage.total_ns
    return calls, total_ns
