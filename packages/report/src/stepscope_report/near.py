"""Other captured steps of a run, read for the comparison with a step that took longer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files.counters import GC
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.spans import SEQUENCE
from stepscope.files.steps import alike
from stepscope.files.storage import read_records
from stepscope_report.accounting import Label
from stepscope_report.formatting import middle
from stepscope_report.holds import held_ns, preempted_requests
from stepscope_report.sections.counters import pieces_of
from stepscope_report.spans import ToolNames, above, few_names, whole
from stepscope_report.suspects import StepPath, step_path
from stepscope_report.timeline import Timeline, load_step

_BESIDE = 4
"""Number of the nearest captured steps whose length is compared."""
_READ = 2
"""Number of near captured steps whose spans are read."""


class NearStep(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a captured step, by stage. Tools with different names are separate stages."""

    step: int
    wall_ns: int
    stages: Mapping[str, float]
    """{`role/stage`: seconds} of the top spans of the step's owner."""
    path_ns: Mapping[Label, int]
    """Own time in ns of each stage on the critical path."""
    outside_ns: int = 0
    """Time in ns on the critical path in which no span ran."""
    call_ns: Mapping[Label, int]
    """Median time in ns of a call of each stage, over all processes."""
    rank_ns: Mapping[tuple[Label, str], int] = {}
    """{(stage, name of a process): sum in ns of the stage's calls in this process, without their waits for
    other ranks}."""
    rank_calls: Mapping[tuple[Label, str], int] = {}
    """{(stage, name of a process): number of the stage's calls in this process}."""
    tokens: Mapping[Label, int] = {}
    """Sum of the attribute `tokens` of each stage's calls, for stages in which all calls have it."""
    preempted: int = 0
    """Number of requests that engines preempted."""
    collected_ns: Mapping[str, int] = {}
    """{name of a process: time in ns for which Python's garbage collector stopped the process}."""
    profiled: bool = False
    """True if a profiler recorded a process of the step."""

    def stage_ns(self, label: Label) -> int:
        """Return the sum in ns of the stage's calls in all processes."""
        return sum(ns for (stage, _), ns in self.rank_ns.items() if stage == label)


def near_step(path: StepPath) -> NearStep:
    """Return the figures of a step, for a comparison with another step."""
    timeline, names, calls = (
        path.graph.timeline,
        ToolNames(path.graph.timeline),
        defaultdict[Label, list[int]](list),
    )
    ranks, rank_calls = Counter[tuple[Label, str]](), Counter[tuple[Label, str]]()
    tokens, without = Counter[Label](), set[Label]()
    for span in timeline.spans:
        if span.dur_ns is None:
            continue
        label, process = names.label_of(span), timeline.processes[span.process].name
        if span.waits and SEQUENCE in (span.attrs or {}):
            for around in above(timeline, span):
                if around.process == span.process and around.dur_ns is not None:
                    ranks[names.label_of(around), process] -= span.dur_ns
        calls[label].append(span.dur_ns)
        ranks[label, process] += span.dur_ns
        rank_calls[label, process] += 1
        number = whole(span, "tokens")
        tokens[label] += number or 0
        if number is None:
            without.add(label)
    return NearStep(
        step=timeline.step,
        wall_ns=timeline.window.wall_ns,
        stages=top_stages(timeline),
        path_ns=path_times(path),
        outside_ns=outside_ns(path),
        call_ns={label: middle(times) for label, times in calls.items()},
        rank_ns=ranks,
        rank_calls=rank_calls,
        tokens={label: number for label, number in tokens.items() if label not in without},
        preempted=sum(preempted_requests(timeline).values()),
        collected_ns=collected_times(timeline),
        profiled=any(process.profiled for process in timeline.processes),
    )


def path_times(path: StepPath) -> Mapping[Label, int]:
    """Return {stage: its own time in ns on the critical path}."""
    names, times = ToolNames(path.graph.timeline), Counter[Label]()
    for piece in path.pieces:
        span = path.graph.span_of(piece.node)
        if span is not None and piece.kind != "not known":
            times[names.label_of(span)] += piece.wall_ns
    return times


def outside_ns(path: StepPath) -> int:
    """Return the time in ns on the critical path in which no span ran."""
    return sum(piece.wall_ns for piece in path.pieces if path.graph.span_of(piece.node) is None)


def collected_times(timeline: Timeline) -> dict[str, int]:
    """Return {name of a process: ns for which Python's garbage collector stopped the process}."""
    return {
        timeline.processes[counter.process].name: held_ns(pieces_of(counter, timeline))
        for counter in timeline.counters
        if counter.name == GC
    }


def top_stages(timeline: Timeline) -> dict[str, float]:
    """Return {`role/stage`: seconds} of the owner's top spans that began in the step. The recorder's lines
    contain the same figures.
    """
    stages, start_ns = Counter[str](), timeline.window.start_ns
    for span in timeline.spans:
        is_top = span.parent is None or timeline.spans[span.parent].process != span.process
        is_own = span.process == 0 and span.step == timeline.step
        if is_own and is_top and span.dur_ns is not None and span.start_ns >= start_ns:
            stages[f"{span.role}/{span.stage}"] += span.dur_ns
    return {stage: ns / 1e9 for stage, ns in stages.items()}


class Neighbours:
    """The captured steps of runs. Figures that were read are cached for later steps."""

    def __init__(self) -> None:
        self._walls: dict[tuple[Path, str], int | None] = {}
        self._read: dict[tuple[Path, str], NearStep | None] = {}

    def of(self, folder: Path, timeline: Timeline) -> Sequence[NearStep]:
        """Return the nearest captured steps of the same kind that took less time. Empty if most near steps
        took as long.

        The spans of another step are read only if that step took less time.
        """
        stages = top_stages(timeline)
        read = (self._step(root, timeline.run_id) for root in self.shorter(folder, timeline)[:_READ])
        return tuple(step for step in read if step is not None and alike(step.stages, stages))

    def shorter(self, folder: Path, timeline: Timeline) -> list[Path]:
        """Return the folders of near captured steps that took less time, the nearest first. Empty if most
        near steps took as long, or if the step never closed.
        """
        run = RunLayout(folder.absolute().parent)
        others = sorted(
            (number for number in run.steps() if number != timeline.step),
            key=lambda number: (abs(number - timeline.step), number),
        )[:_BESIDE]
        roots = [run.step(number).root for number in others]
        walls = {root: wall for root in roots if (wall := self._wall_ns(root, timeline.run_id)) is not None}
        shorter = [root for root, wall in walls.items() if is_longer(timeline.window.wall_ns, wall)]
        return shorter if timeline.window.closed and len(shorter) * 2 >= len(walls) else []

    def _wall_ns(self, root: Path, run_id: str) -> int | None:
        """Return the duration of a step from its manifest, or None if the step is of another run or ended
        early.
        """
        if (root, run_id) not in self._walls:
            layout = StepLayout(root)
            whole = read_records([layout.manifest], Manifest)
            parts = [part for manifest in whole for part in manifest.processes]
            try:
                parts = parts or read_records(layout.processes.glob("*.json"), ProcessPart)
            except OSError:  # a folder without permission
                return None
            took = [
                part.closed.mono_ns - part.opened.mono_ns
                for part in parts
                if part.owner and part.run_id == run_id
                if part.closed is not None and part.error is None and part.ended_by is None
            ]
            self._walls[root, run_id] = took[0] if took else None
        return self._walls[root, run_id]

    def _step(self, root: Path, run_id: str) -> NearStep | None:
        if (root, run_id) not in self._read:
            try:
                timeline, _ = few_names(load_step(root, run_id=run_id))
                self._read[root, run_id] = near_step(step_path(timeline))
            except RecordError:
                self._read[root, run_id] = None
        return self._read[root, run_id]


def is_longer(ns: int, usual_ns: int) -> bool:
    """Return True if `ns` is at least a tenth longer than `usual_ns`."""
    return ns * 10 >= usual_ns * 11
