"""Changes between two steps or two runs: of each line of the account, and of kernels in the traces."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Literal, TypeAlias, TypedDict

import msgspec

from stepscope_report.accounting import Label
from stepscope_report.formatting import percentage, signed
from stepscope_report.model import StepReport
from stepscope_report.sections.breakdown import LineKind
from stepscope_report.table import TextTable
from stepscope_report.timeline import TraceActivity

KERNELS = 10
"""Number of operators and kernels that are listed."""
SHAPES = 3
"""Number of shapes that are listed for an operator."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison."""

    steps: tuple[int, ...]
    runs: tuple[str, ...]
    step_ns: int
    """Mean time of a step, without opening and closing its capture. The lines of this side add up to it."""
    opening_ns: int
    """Mean time that opening the capture takes before each step."""
    closing_ns: int
    """Mean time that closing the capture takes after each step."""
    complete: bool
    """True if every step is complete."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one side. All numbers are zero if the side does not have the line."""

    wall_ns: int = 0
    """Mean time per step, in whole ns."""
    min_ns: int = 0
    max_ns: int = 0
    """The longest time in a step; equal to the mean if the side has one step."""
    calls: float = 0.0
    """Mean number of calls per step."""
    mean_ns: int | None = None
    """Mean duration of the calls that ended, in ns. None if no call ended."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the account on both sides."""

    kind: LineKind
    role: str | None
    stage: str | None
    a: Figures
    b: Figures
    delta_ns: int
    """Change of the line's share of the step, b - a. The changes of all lines add up to the step's change."""
    apart: bool
    """True if both sides have several steps, and the ranges of their times do not overlap."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    a: Side
    b: Side
    delta_ns: int
    """Change of `Side.step_ns`, b - a. It does not include opening and closing the capture."""
    changes: tuple[Change, ...]
    """All lines, the largest change first, whatever its sign."""
    phases: tuple[Change, ...] = ()
    """Changes of times that overlap the lines, such as the forward pass. Empty unless both sides are traces
    that stepscope did not write."""
    labels: tuple[Change, ...] = ()
    """Changes of the CPU time of labels, the largest change first. Empty in the same cases as `phases`."""
    kernels: KernelDiff | None = None
    """The changes of kernels, or None if the traces were not read."""


KernelKind: TypeAlias = Literal["operator", "kernel"]
Place: TypeAlias = tuple[str, str | None]
"""(role, stage) of traces. The stage is None for traces of the whole step."""


class ShapeChange(msgspec.Struct, frozen=True, kw_only=True):
    """The time of an operator in the calls whose inputs had the shapes `shapes`."""

    shapes: str
    """The shapes in torch's form: `[[64, 128], [128, 32]]`."""
    a_ns: int
    b_ns: int
    delta_ns: int
    a_calls: float
    b_calls: float


class KernelChange(msgspec.Struct, frozen=True, kw_only=True):
    """The self time of an operator, or the time of a kernel, per step and profiled process on both sides."""

    role: str
    stage: str | None
    kind: KernelKind
    name: str
    a_ns: int
    b_ns: int
    delta_ns: int
    a_calls: float
    b_calls: float
    shapes: tuple[ShapeChange, ...] = ()
    """The `SHAPES` largest changes of an operator, largest first. Empty if a side's traces have no shapes."""


class KernelDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Operators and kernels of the traces of both sides."""

    changes: tuple[KernelChange, ...]
    """The `KERNELS` largest changes, the largest first, whatever its sign."""
    compared: tuple[Place, ...]
    """Places that have traces on both sides."""
    only_a: tuple[Place, ...]
    """Places that have traces only on side a. They are not compared."""
    only_b: tuple[Place, ...]


_Key = tuple[LineKind, str | None, str | None]


def diff(a: Sequence[StepReport], b: Sequence[StepReport], *, kernels: KernelDiff | None = None) -> Diff:
    """Compare the reports of two sides. A side of several steps is compared by the mean of these steps.

    Args:
        kernels: The comparison of the same steps' traces, from `kernel_diff`.

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
    return Diff(a=one, b=other, delta_ns=other.step_ns - one.step_ns, changes=tuple(changes), kernels=kernels)


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
    """Return the number of calls that ended, and the sum of their times, by label."""
    calls, total_ns = Counter[Label](), Counter[Label]()
    for report in reports:
        for stage in report.stages:
            calls[stage.role, stage.stage] += stage.calls
            total_ns[stage.role, stage.stage] += stage.total_ns
    return calls, total_ns


_Name: TypeAlias = tuple[KernelKind, str, str]
"""(kind, name, shapes). The shapes of a kernel are empty."""
_Times: TypeAlias = tuple[float, float]
"""(microseconds, calls)."""
KernelTimes: TypeAlias = Mapping[Place, Mapping[_Name, _Times]]
"""The times of each operator and kernel in one step, per profiled process."""
_NONE = (0.0, 0.0)


def kernel_times(activities: Iterable[TraceActivity]) -> KernelTimes:
    """Return the times of one step's operators and kernels, without marks, which are not operators."""
    processes: dict[Place, set[str]] = defaultdict(set)
    sums: dict[Place, dict[_Name, _Times]] = defaultdict(dict)
    for activity in activities:
        place, content = (activity.info.role, activity.stage), activity.content
        processes[place].add(activity.name)
        own: list[tuple[_Name, float, int]] = [
            (("operator", item.name, item.shapes), item.self_us, item.count)
            for item in content.operators
            if not item.outer
        ]
        own += [(("kernel", item.name, ""), item.total_us, item.count) for item in content.kernels]
        for name, us, calls in own:
            sums[place][name] = _plus(sums[place].get(name, _NONE), (us, calls))
    return {
        place: {name: (us / len(names), calls / len(names)) for name, (us, calls) in sums[place].items()}
        for place, names in processes.items()
    }


def kernel_diff(a: Sequence[KernelTimes], b: Sequence[KernelTimes]) -> KernelDiff:
    """Compare the operators and kernels of two sides, each by the mean of its steps that have traces.

    Times are per profiled process, so that a different number of profiled processes is not a change.
    """
    left, right = _means(a), _means(b)
    changes = [
        change
        for place in left
        if place in right
        for change in _kernel_changes(place, left[place], right[place])
        if change.delta_ns
    ]
    changes.sort(key=lambda change: (-abs(change.delta_ns), change.role, change.stage or "", change.name))
    return KernelDiff(
        changes=tuple(changes[:KERNELS]),
        compared=tuple(place for place in left if place in right),
        only_a=tuple(place for place in left if place not in right),
        only_b=tuple(place for place in right if place not in left),
    )


def _means(steps: Sequence[KernelTimes]) -> KernelTimes:
    means: dict[Place, dict[_Name, _Times]] = {}
    for place in dict.fromkeys(place for step in steps for place in step):
        traced = [step[place] for step in steps if place in step]
        names = dict.fromkeys(name for times in traced for name in times)
        means[place] = {
            name: (
                sum(times.get(name, _NONE)[0] for times in traced) / len(traced),
                sum(times.get(name, _NONE)[1] for times in traced) / len(traced),
            )
            for name in names
        }
    return means


def _plus(one: _Times, other: _Times) -> _Times:
    return one[0] + other[0], one[1] + other[1]


_ByShapes: TypeAlias = dict[str, _Times]


def _kernel_changes(
    place: Place, a: Mapping[_Name, _Times], b: Mapping[_Name, _Times]
) -> Iterator[KernelChange]:
    left, right = _by_name(a), _by_name(b)
    for kind, name in dict.fromkeys((*left, *right)):
        one, other = left.get((kind, name), {}), right.get((kind, name), {})
        numbers = _numbers(reduce(_plus, one.values(), _NONE), reduce(_plus, other.values(), _NONE))
        yield KernelChange(
            role=place[0], stage=place[1], kind=kind, name=name, shapes=_shape_changes(one, other), **numbers
        )


def _by_name(times: Mapping[_Name, _Times]) -> dict[tuple[KernelKind, str], _ByShapes]:
    named: dict[tuple[KernelKind, str], _ByShapes] = defaultdict(dict)
    for (kind, name, shapes), took in times.items():
        named[kind, name][shapes] = took
    return named


def _shape_changes(a: _ByShapes, b: _ByShapes) -> tuple[ShapeChange, ...]:
    """Return the shapes that changed most; empty if a side ran the operator without shapes in its trace."""
    if "" in a or "" in b:
        return ()
    changes = [
        ShapeChange(shapes=shapes, **_numbers(a.get(shapes, _NONE), b.get(shapes, _NONE)))
        for shapes in dict.fromkeys((*a, *b))
    ]
    changes.sort(key=lambda change: (-abs(change.delta_ns), change.shapes))
    return tuple(change for change in changes[:SHAPES] if change.delta_ns)


def _numbers(a: _Times, b: _Times) -> _Numbers:
    a_ns, b_ns = round(1000 * a[0]), round(1000 * b[0])
    return {
        "a_ns": a_ns,
        "b_ns": b_ns,
        "delta_ns": b_ns - a_ns,
        "a_calls": round(a[1], 3),
        "b_calls": round(b[1], 3),
    }


class _Numbers(TypedDict):
    a_ns: int
    b_ns: int
    delta_ns: int
    a_calls: float
    b_calls: float


CHANGES = 4
"""Number of changes from the previous step that are listed for each step, the largest first."""


def step_changes(reports: Sequence[StepReport]) -> TextTable:
    """Return a table with a row for each pair of neighbouring steps: the change of the whole step, and the
    lines of the account that changed most.
    """
    rows = []
    for before, after in pairwise(reports):
        step_change = diff([before], [after])
        largest = [
            f"{' '.join(filter(None, (change.role, change.stage or change.kind)))} {signed(change.delta_ns)}"
            for change in step_change.changes[:CHANGES]
            if change.delta_ns
        ]
        percent = percentage(step_change.delta_ns, step_change.a.step_ns)
        steps = f"{before.step} → {after.step}"
        rows.append((steps, signed(step_change.delta_ns), percent, ", ".join(largest)))
    note = "stepscope diff compares any two steps or runs, line by line."
    return TextTable("What changed", ("steps", ">step", ">%", "the most"), tuple(rows), note)
