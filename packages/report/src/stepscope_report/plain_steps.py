"""Steps of traces that stepscope did not write, as parts that are compared between two recordings.

The parts of a step add up to it: computation and copies, exposed communication, and each cause of its
device's idle time; or, without a device, the step alone. Forward, backward and the like overlap these: a gate
can limit them, and the account leaves them out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from stepscope_report.diff import Change, Diff, Figures, Side
from stepscope_report.gate import STEP, GateSteps
from stepscope_report.sections.profiler_steps import ProfilerStepRow

COMPUTES = "computation and copies"
EXPOSED = "exposed communication"
ON_HOST = "not on a device"
_BESIDE: dict[str, Callable[[ProfilerStepRow], int | None]] = {
    "data loading": lambda row: row.loading_ns,
    "host to device": lambda row: row.h2d_ns,
    "forward": lambda row: row.forward_ns,
    "backward": lambda row: row.backward_ns,
    "optimizer": lambda row: row.optimizer_ns,
}


class PlainSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one recording: means over the processes that recorded a step."""

    name: str
    parts: Mapping[int, Mapping[str, float]]
    """{number of the step: {part: ns}}. The parts of a step add up to it."""
    beside: Mapping[int, Mapping[str, float]]
    """{number of the step: {name: ns}} of times that overlap the parts."""
    complete: bool

    @property
    def took(self) -> dict[int, float]:
        return {number: sum(parts.values()) for number, parts in self.parts.items()}

    def gate(self) -> GateSteps:
        """Return the steps as the gate compares them, in seconds."""
        captured = [
            {STEP: self.took[number] / 1e9}
            | {name: ns / 1e9 for name, ns in (*parts.items(), *self.beside[number].items())}
            for number, parts in self.parts.items()
        ]
        return GateSteps(whole=False, captured=captured)


def plain_steps(
    name: str, rows: Sequence[ProfilerStepRow], wanted: Callable[[int], bool], *, complete: bool
) -> PlainSteps:
    """Return the steps that are wanted. Empty if there are none."""
    by_number: dict[int, list[ProfilerStepRow]] = defaultdict(list)
    for row in rows:
        if wanted(row.step):
            by_number[row.step].append(row)
    return PlainSteps(
        name=name,
        parts={number: _mean(map(_parts, own), len(own)) for number, own in sorted(by_number.items())},
        beside={number: _mean(map(_beside, own), len(own)) for number, own in by_number.items()},
        complete=complete,
    )


def _mean(of_rows: Iterator[Mapping[str, float]], number: int) -> dict[str, float]:
    sums = Counter[str]()
    for parts in of_rows:
        for name, ns in parts.items():
            sums[name] += ns  # type: ignore[assignment]  # a Counter holds any number
    return {name: ns / number for name, ns in sums.items()}


def _parts(row: ProfilerStepRow) -> dict[str, float]:
    if row.busy_ns is None or row.idle_ns is None:
        return {ON_HOST: row.dur_ns}
    exposed_ns = row.exposed_ns or 0
    # Of several devices each gap counts, and the step's idle time is that of all at once.
    share = row.idle_ns / max(1, sum(row.gaps.values()))
    idle = {f"idle: {kind}": ns * share for kind, ns in row.gaps.items()}
    known_ns = sum(idle.values())
    parts = {COMPUTES: float(row.busy_ns - exposed_ns), EXPOSED: float(exposed_ns), **idle}
    return parts | ({"idle": row.idle_ns - known_ns} if row.idle_ns - known_ns > 1 else {})


def _beside(row: ProfilerStepRow) -> dict[str, float]:
    return {name: float(ns) for name, of in _BESIDE.items() if (ns := of(row)) is not None}


def plain_diff(a: PlainSteps, b: PlainSteps) -> Diff:
    """Return the change of each part, the largest first."""
    names = dict.fromkeys(name for side in (a, b) for parts in side.parts.values() for name in parts)
    changes = [_change(name, a, b) for name in names]
    changes.sort(key=lambda change: (-abs(change.delta_ns), change.stage or ""))
    sides = _side(a), _side(b)
    return Diff(a=sides[0], b=sides[1], delta_ns=sides[1].step_ns - sides[0].step_ns, changes=tuple(changes))


def _side(steps: PlainSteps) -> Side:
    took = list(steps.took.values())
    return Side(
        steps=tuple(steps.parts),
        runs=(steps.name,),
        step_ns=round(sum(took) / len(took)),
        opening_ns=0,
        closing_ns=0,
        complete=steps.complete,
    )


def _change(name: str, a: PlainSteps, b: PlainSteps) -> Change:
    one, other = ([parts.get(name, 0.0) for parts in side.parts.values()] for side in (a, b))
    figures = _figures(one), _figures(other)
    apart = len(one) > 1 and len(other) > 1 and (max(one) < min(other) or max(other) < min(one))
    return Change(
        kind="stage",
        role="device" if name != ON_HOST else "host",
        stage=name,
        a=figures[0],
        b=figures[1],
        delta_ns=figures[1].wall_ns - figures[0].wall_ns,
        apart=apart,
    )


def _figures(values: Sequence[float]) -> Figures:
    mean = sum(values) / len(values)
    return Figures(wall_ns=round(mean), min_ns=round(min(values)), max_ns=round(max(values)))
