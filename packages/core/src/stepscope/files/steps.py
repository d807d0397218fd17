"""Files about all steps of a run, captured or not, and the comparison of steps with each other.

The flight recorder writes a line for each step of the run, and reads orders to write steps. Without the
recorder, the process that opens captures writes `uncaptured/*.jsonl`, one JSON object a line. These files
have only steps near a captured step, so their size grows with the number of captures and not with the length
of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import read_first, read_lines


class OrderedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step to write. Its times are in unix ns, on the clock of the process that made the order."""

    step: Int
    start_ns: Int
    end_ns: Int


WHY = "why"
"""The trigger of an order that asks for the states of processes, and not for steps."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order to every process of a run to write the recorded spans of `steps`."""

    format: Int = 1
    run_id: str
    """Id of the run, or empty for any run."""
    trigger: str
    """`slow`, `exception`, `hang`, `signal` or `request`; or `why`."""
    reason: str
    """The event that caused the order, as text."""
    made_ns: Int
    steps: tuple[OrderedStep, ...]
    offsets_ns: dict[str, Int] = {}
    """{`ProcessInfo.key` of a process: ns by which its wall clock is ahead of the clock of the process that
    made the order}."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step in `steps_<run>.jsonl`."""

    step: Int
    start_ns: Int
    """Start of the step in unix ns."""
    dur_ns: Int
    stages: dict[str, float] = {}
    """{`role/stage`: seconds} of the top-level spans of the process that runs the training loop."""
    counters: dict[str, float] = {}
    """{name: mean} of the counters of the process that runs the training loop, and of its host; empty if the
    step took less than a second."""
    tokens: dict[str, int] = {}
    """{`rollout` or `train`: tokens} as counted by `step_tokens` in the process that runs the training
    loop."""
    captured: bool = False
    """True if the step was captured, so that it has a folder."""
    error: str | None = None


def recorded_runs(folder: Path) -> dict[str, int]:
    """Return {run id: start of its first step in unix ns} of the runs with step lines in the folder, the
    newest first. Ids are spelled as in file names.
    """
    files = {path.stem.removeprefix("steps_"): path for path in folder.glob("steps_*.jsonl")}
    first = {run: read_first(path, StepLine) for run, path in files.items()}
    starts = {run: line.start_ns for run, line in first.items() if line is not None}
    return dict(sorted(starts.items(), key=lambda item: -item[1]))


def read_step_lines(path: Path) -> list[StepLine]:
    """Return the readable lines of `steps_<run>.jsonl`, in the order of writing; empty if there is no
    file.
    """
    return read_lines(path, StepLine)


Stages: TypeAlias = Mapping[str, float]
"""{`role/stage`: seconds} of the top-level spans of the process that runs the training loop."""
LARGE = 0.05
"""A stage is large if it takes more than this fraction of its step."""
FACTOR = 1.5
"""Two durations differ if their ratio is larger than this."""
GAP = 1.25
"""Smallest ratio of durations that separates two groups of steps."""
_MEMBERS = 3
"""Smallest number of steps that make a pattern."""
_FITTING = 0.8
"""Smallest fraction of a group's steps that must follow its pattern."""


def alike(one: Stages, other: Stages) -> bool:
    """Return whether two steps are of the same kind: each has the large stages of the other."""
    return _large(one) <= other.keys() and _large(other) <= one.keys()


def same_length(one_ns: float, other_ns: float, factor: float = FACTOR) -> bool:
    return max(one_ns, other_ns) <= factor * min(one_ns, other_ns)


def like(step: int, took: Mapping[int, int], stages: Mapping[int, Stages] = {}) -> set[int]:
    """Return the steps in `took` of the same kind as `step`. `step` itself is not in `took`.

    Args:
        took: {number of a step: its duration in ns}.
        stages: {number of a step: its stages}, for `step` and the steps in `took`, as far as known.
    """
    own = stages.get(step)
    if own is None:
        by_stages = set(took)
    else:
        by_stages = {number for number in took if alike(own, stages.get(number, own))}
    apart = rhythms({number: took[number] for number in by_stages})
    for group, (period, place) in apart:
        if step % period == place:
            return group
    return by_stages.difference(*(group for group, _ in apart))


def _large(stages: Stages) -> set[str]:
    least = LARGE * sum(stages.values())
    return {stage for stage, seconds in stages.items() if seconds > least}


def rhythms(took: Mapping[int, int]) -> list[tuple[set[int], tuple[int, int]]]:
    """Return the groups of steps of unusual duration that recur in every n-th step, such as evaluations.

    Each item is (numbers of the group's steps, (n, remainder of these numbers modulo n)).
    """
    ordered = sorted(took, key=lambda step: took[step])
    breaks = [at for at, (a, b) in enumerate(pairwise(ordered), 1) if took[b] > GAP * took[a]]
    groups = [ordered[first:end] for first, end in pairwise([0, *breaks, len(ordered)])]
    usual = ordered[len(ordered) // 2] if ordered else None
    unusual = [(set(group), _rhythm(group, took)) for group in groups if usual not in group]
    return [(group, rhythm) for group, rhythm in unusual if rhythm is not None]


def _rhythm(group: Sequence[int], took: Collection[int]) -> tuple[int, int] | None:
    """Return (period, remainder): most steps with this remainder are in the group, and most steps of the
    group have this remainder. Return None if no period fits.
    """
    for period in sorted({b - a for a, b in pairwise(sorted(group))} - {1}):
        ((place, hits),) = Counter(step % period for step in group).most_common(1)
        placed = sum(step % period == place for step in took)
        if hits >= _MEMBERS and hits >= _FITTING * max(len(group), placed):
            return period, place
    return None


class UncapturedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One uncaptured step, between the points at which its capture would have opened and closed."""

    step: Int
    start_ns: Int
    """Start of the step in unix ns, on the clock of the recording process."""
    dur_ns: Int
    """Duration by the monotonic clock."""
    first: bool = False
    """True for the first step after a capture, which may have been slowed by the export of traces."""
    warm_up: bool = False
    """True for the first step of the run, which includes compilation, allocation and connections."""
    alike: bool = True
    """True if the step is of the same kind as the captured step that it is compared with. Not stored in
    files."""
    stages: dict[str, float] = {}
    """{`role/stage`: seconds}, as in the flight recorder's step lines. Not stored in files."""
    tokens: dict[str, int] = {}
    """`StepLine.tokens`. Not stored in files."""


COMPARED = 40
"""Largest number of steps of the same kind, and of other kinds, that a captured step is compared with."""
ALONE = 3
"""The first steps after captures are left out if at least this many other steps remain."""


def comparable(near: Sequence[UncapturedStep]) -> Sequence[UncapturedStep]:
    """Return the steps to compare a captured step with: steps of its kind, or steps of all kinds if there are
    none of its kind.

    Warm-up steps are left out. The first step after each capture is left out if enough other steps remain.
    """
    warm = [step for step in near if not step.warm_up]
    alike = [step for step in warm if step.alike] or warm
    apart = [step for step in alike if not step.first]
    return apart if len(apart) >= ALONE else alike


_OPENING_NS = 60 * 10**9
"""Longest time that the opening of a capture may take. A step that a resumed run repeats begins later."""


class Surroundings(NamedTuple):
    """The steps around a captured step."""

    uncaptured: tuple[UncapturedStep, ...]
    """The nearest uncaptured steps, ordered by start."""
    ended_ns: int | None
    """End of the previous step in unix ns, or None if unknown."""
    regular: frozenset[str]
    """Large stages (`role/stage`) of the captured step that occur in every n-th step."""
    has_line: bool
    """True if the flight recorder has a line for this capture of the process."""
    is_first: bool
    """True if the flight recorder's first line is of the captured step, which therefore includes the
    warm-up."""


def uncaptured_near(
    step: StepLayout, process: ProcessInfo, run_id: str, opened_ns: int, number: int
) -> Surroundings:
    """Return the surroundings of the capture that `process` opened at `opened_ns`: the nearest steps of the
    same kind and of other kinds, and the end of the previous step.

    The files are in the run's folder, so a copy of a step's folder has no surroundings. With the flight
    recorder, all steps of the run are known.

    Args:
        number: Number of the captured step.
    """
    run = RunLayout(step.root.absolute().parent)
    lines = read_step_lines(run.step_lines(run_id))
    recorded = {step.step: step for step in _of_recorder(lines)}
    steps = dict(recorded)
    for other in read_uncaptured(run.uncaptured(process, run_id)):
        line = recorded.get(other.step)
        if line is not None:
            other = msgspec.structs.replace(other, stages=line.stages, tokens=line.tokens)
        steps[other.step] = other
    took = {
        other.step: other.dur_ns for other in steps.values() if other.step != number and not other.warm_up
    }
    ends = {other.step: other.start_ns + other.dur_ns for other in steps.values()}
    ends |= {line.step: line.start_ns + line.dur_ns for line in lines}
    same = like(number, took, {line.step: line.stages for line in lines})
    by_distance = sorted(steps.values(), key=lambda other: abs(other.start_ns - opened_ns))
    alike = [other for other in by_distance if other.step in same][:COMPARED]
    others = [other for other in by_distance if other.step not in same][:COMPARED]
    marked = (msgspec.structs.replace(other, alike=False) for other in others)
    near = tuple(sorted((*alike, *marked), key=lambda other: other.start_ns))
    own = [line for line in lines if line.captured and line.step == number]
    has_line = any(0 <= line.start_ns - opened_ns < _OPENING_NS for line in own)
    return Surroundings(
        near, ends.get(number - 1), _regular(number, lines), has_line, bool(lines) and lines[:1] == own[:1]
    )


def _regular(number: int, lines: Sequence[StepLine]) -> frozenset[str]:
    stages = {line.step: line.stages for line in lines}
    return frozenset(
        stage
        for stage in _large(stages.get(number, {}))
        if _rhythm([step for step, own in stages.items() if stage in own], stages) is not None
    )


def _of_recorder(lines: Sequence[StepLine]) -> Iterator[UncapturedStep]:
    for number, line in enumerate(lines):
        if not line.captured and line.error is None and line.dur_ns >= 0:
            yield UncapturedStep(
                step=line.step,
                start_ns=line.start_ns,
                dur_ns=line.dur_ns,
                warm_up=number == 0,
                stages=line.stages,
                tokens=line.tokens,
            )


def read_uncaptured(path: Path) -> list[UncapturedStep]:
    """Return the readable records of a file in `uncaptured/`, in the order of writing; empty if there is no
    file.
    """
    return [step for step in read_lines(path, UncapturedStep) if step.dur_ns >= 0]
