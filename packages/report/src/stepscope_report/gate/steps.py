"""Durations of a side's steps: captured ones, and those that a run recorded or timed beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from stepscope.files.layout import RunLayout, safe
from stepscope.files.recorder import read_step_lines
from stepscope.files.uncaptured import alike, comparable, read_uncaptured, rhythms
from stepscope_report.model import StepReport

Durations = Mapping[str, float]
"""Seconds by `role/stage`; `step` is the whole step."""
STEP = "step"
_MOST_KINDS = 50
"""With more kinds of steps than this, the kinds are ignored: their stage names then hold ids, and none
repeats."""


class GateSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the gate."""

    whole: bool
    """True if a whole run was given: its other steps are compared as well if there are enough."""
    captured: Sequence[Durations] = ()
    """Each stage's share of the step. Opening and closing the capture is in none of them."""
    recorded: Sequence[Durations] = ()
    """The durations in the recorder's lines: their stages are the top spans of the process that bounds
    steps."""
    timed: Sequence[Durations] = ()
    """Uncaptured steps of which only the whole is known. Those that are not of the usual
    kind have a stage that is named for their kind."""

    def stages(self) -> set[str]:
        """Return the names of the stages of all steps."""
        return {name for step in (*self.captured, *self.recorded) for name in step} - {STEP}

    def unprofiled(self, name: str) -> list[float]:
        """Return one stage's times in the steps without a capture. Empty if these do not tell the stage's
        time.
        """
        steps = max(self.recorded, self.timed, key=len) if name == STEP else self.recorded
        return [step.get(name, 0) for step in steps] if any(name in step for step in steps) else []


def like_with_like(a: GateSteps, b: GateSteps) -> tuple[GateSteps, GateSteps]:
    """Return both sides with equal proportions of each kind of step."""
    recorded, timed = _matched(a.recorded, b.recorded), _matched(a.timed, b.timed)
    return (
        msgspec.structs.replace(a, recorded=recorded[0], timed=timed[0]),
        msgspec.structs.replace(b, recorded=recorded[1], timed=timed[1]),
    )


def _matched(
    a: Sequence[Durations], b: Sequence[Durations]
) -> tuple[Sequence[Durations], Sequence[Durations]]:
    """Leave out steps so that each kind has the same proportion on both sides. Kinds that one side lacks
    stay.
    """
    kinds = list[tuple[Durations, tuple[list[int], list[int]]]]()
    for side, steps in enumerate((a, b)):
        for at, step in enumerate(steps):
            stages = {name: seconds for name, seconds in step.items() if name != STEP}
            same = next((held for of, held in kinds if alike(of, stages)), None)
            if same is None:
                kinds.append((stages, same := ([], [])))
                if len(kinds) > _MOST_KINDS:
                    return a, b
            same[side].append(at)
    both = [held for _, held in kinds if held[0] and held[1]]
    if len(both) < 2:
        return a, b
    more_a = max(1, min(len(of_a) // len(of_b) for of_a, of_b in both))
    more_b = max(1, min(len(of_b) // len(of_a) for of_a, of_b in both))
    left_out: tuple[set[int], set[int]] = (set(), set())
    for of_a, of_b in both:
        number = min(len(of_a) // more_a, len(of_b) // more_b)
        left_out[0].update(of_a[: len(of_a) - number * more_a])
        left_out[1].update(of_b[: len(of_b) - number * more_b])
    return _without(a, left_out[0]), _without(b, left_out[1])


def _without(steps: Sequence[Durations], left_out: Set[int]) -> list[Durations]:
    return [step for at, step in enumerate(steps) if at not in left_out]


def read_gate_steps(
    folder: Path,
    run: str,
    reports: Sequence[StepReport],
    wanted: Callable[[int], bool],
    *,
    whole: bool,
) -> GateSteps:
    """Return the steps of a side.

    Args:
        folder: The run's.
        run: The id of the run whose steps count.
        reports: Of the captured steps.
        wanted: Whether a step that was not captured counts, by its number.
        whole: Whether the side is a run.
    """
    layout = RunLayout(folder)
    return GateSteps(
        whole=whole,
        captured=[_of_report(report) for report in reports],
        recorded=list(_recorded(layout, run, wanted)),
        timed=_timed(layout, run, wanted),
    )


def _of_report(report: StepReport) -> Durations:
    shares = {
        f"{line.role}/{line.stage}" if line.kind == "stage" else line.kind: line.wall_ns / 1e9
        for line in report.breakdown.lines
        if line.kind != "profiler"
    }
    return {**shares, STEP: report.breakdown.window_ns / 1e9}


def _recorded(layout: RunLayout, run: str, wanted: Callable[[int], bool]) -> Iterator[Durations]:
    lines = read_step_lines(layout.step_lines(run))[1:]  # the first one warms up
    for line in lines:
        if wanted(line.step) and not line.captured and line.error is None and line.dur_ns > 0:
            yield {**line.stages, STEP: line.dur_ns / 1e9}


def _timed(layout: RunLayout, run: str, wanted: Callable[[int], bool]) -> list[Durations]:
    """Return the duration of each uncaptured step. If several owners timed a step, the slowest one counts."""
    slowest: dict[int, int] = defaultdict(int)
    for path in layout.uncaptured_files():
        if path.stem.endswith(f"_{safe(run)}"):
            for step in comparable(read_uncaptured(path)):
                slowest[step.step] = max(slowest[step.step], step.dur_ns)
    took = {step: ns for step, ns in sorted(slowest.items()) if wanted(step) and ns > 0}
    apart = {step: f"kind {at}" for at, (group, _) in enumerate(rhythms(took)) for step in group}
    return [
        {STEP: ns / 1e9, **({apart[step]: ns / 1e9} if step in apart else {})} for step, ns in took.items()
    ]
