"""Comparison of a step with other steps of its run.

`Neighbours` finds the captured steps near a step. `grown_stages` and `grown_at_the_top` find the stages that
took longer than in those steps, and than in uncaptured steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files.counters import GC
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.spans import SEQUENCE, only_waits
from stepscope.files.steps import alike, comparable
from stepscope.files.storage import read_records
from stepscope_report.accounting import Label, Pair, common_ns
from stepscope_report.formatting import count, duration, middle, numbers
from stepscope_report.holds import held_ns, preempted_requests
from stepscope_report.spans import MOVES_WEIGHTS, ToolNames, above, few_names, is_tool, whole
from stepscope_report.suspects import LEAST_OF_CALLS, NO_WORK, CauseKind, StepPath, Suspect, step_path
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.timeline.model import held_values

MORE_TOKENS = 1.25
"""Smallest ratio of the tokens of two steps, or of calls in two steps, at which the report names the tokens
beside the longer time."""
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
        timeline.processes[counter.process].name: held_ns(held_values(counter, timeline))
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


def grown_stages(path: StepPath, near: Sequence[NearStep]) -> Iterator[Suspect]:
    """Yield a suspect for each stage with more time on the critical path than in the captured neighbouring
    steps.
    """
    timeline, graph = path.graph.timeline, path.graph
    own, names = near_step(path), ToolNames(timeline)
    steps = numbers(step.step for step in near)
    before = all(step.step < timeline.step for step in near)
    beside = "in the steps before" if before else "in the steps near it"
    for label, ns in own.path_ns.items():
        usual_ns = middle(step.path_ns.get(label, 0) for step in near)
        if (ns - usual_ns) * LEAST_OF_CALLS < timeline.window.wall_ns:
            continue
        nodes = [
            node for node, span in enumerate(timeline.spans)
            if span.dur_ns is not None and names.label_of(span) == label
        ]  # fmt: skip
        times = [step.call_ns[label] for step in near if label in step.call_ns]
        longest = max(nodes, key=lambda node: timeline.spans[node].dur_ns or 0, default=None)
        on_path = Counter[int]()
        for piece in path.pieces:
            span = graph.span_of(piece.node)
            if span is not None and names.label_of(span) == label:
                on_path[piece.node] += piece.wall_ns
        node = max(on_path, key=lambda node: on_path[node]) if on_path else longest
        if node is None:
            continue
        call, usual_call_ns = timeline.spans[node], middle(times) if times else 0
        if call.dur_ns is None:
            longer = False
        elif times and is_tool(*label):
            longer = is_longer(call.dur_ns, usual_call_ns)
        else:  # many calls, each a little longer, or more calls than usual
            longer = (call.dur_ns - usual_call_ns) * 4 >= (ns - usual_ns) * 3
        cut_off = any(  # the death of the process ended the call, so its real duration is unknown
            names.label_of(span) == label
            for span in timeline.spans
            if span.end_ns is None and timeline.processes[span.process].closed_ns is None
        )
        tokens = _more_tokens(label, own, near)
        places = [] if cut_off or tokens else _grown_ranks(timeline, label, own, near)
        kind = _kind_of(label, waits=call.waits and SEQUENCE not in (call.attrs or {}))
        if (
            kind == "slow-stage"
            and len(places) == 1
            and len({timeline.spans[one].process for one in nodes}) > 1
        ):
            meets = any(graph.spans[one].process == places[0] for one in graph.last_of)
            kind = "late-rank" if meets else "slow-rank"
        yield Suspect(
            kind,
            ns - usual_ns,
            ns - usual_ns,
            label,
            places[0] if len(places) == 1 else None,
            call.dur_ns if longer else ns,
            usual_call_ns if longer else usual_ns,
            beside,
            call.trajectory,
            call.turn,
            (f"{duration(ns)} of the critical path, {duration(usual_ns)} in step {steps}",),
            nodes=tuple(one for one, _ in on_path.most_common()) or (node,),
            because=tokens,
            on_path=not longer,
        )


def _more_tokens(label: Label, own: NearStep, near: Sequence[NearStep]) -> str:
    """Return words for the tokens of a stage, if the stage had more tokens than in the captured neighbours
    and took about as long per token. Empty otherwise.
    """
    usual = middle(step.tokens.get(label, 0) for step in near)
    tokens, ns = own.tokens.get(label, 0), own.stage_ns(label)
    usual_ns = middle(step.stage_ns(label) for step in near)
    if not usual or tokens < usual * MORE_TOKENS or ns * usual > usual_ns * tokens * MORE_TOKENS:
        return ""
    return f"{tokens:,} tokens, {usual:,} there"


def _grown_ranks(timeline: Timeline, label: Label, own: NearStep, near: Sequence[NearStep]) -> list[int]:
    """Return the indices of the processes in which a stage grew by at least half of the largest growth. Empty
    if the stage grew in no process.

    If processes share calls, as those of a pool do, only calls that are longer than usual count as growth.
    """
    grew, calls, usual_calls = dict[int, int](), dict[int, int](), dict[int, int]()
    for index, process in enumerate(timeline.processes):
        key = label, process.name
        if key in own.rank_ns:
            grew[index] = own.rank_ns[key] - middle(step.rank_ns.get(key, 0) for step in near)
            calls[index] = own.rank_calls[key]
            usual_calls[index] = middle(step.rank_calls.get(key, 0) for step in near)
    if calls != usual_calls and sum(calls.values()) == sum(usual_calls.values()):
        usual_ns = middle(step.call_ns.get(label, 0) for step in near)
        grew = {
            index: own.rank_ns[label, timeline.processes[index].name] - number * usual_ns
            for index, number in calls.items()
        }
    most_ns = max(grew.values(), default=0)
    return [index for index, ns in grew.items() if ns * 2 >= most_ns > 0]


def grown_at_the_top(path: StepPath, except_of: Set[str] = frozenset()) -> Iterator[Suspect]:
    """Yield a suspect for each top stage of the owner that took longer than in the uncaptured neighbouring
    steps.

    A stage's growth counts up to the stage's time on the critical path. If the stage only waits, its whole
    growth counts, because the critical path does not run through waits.

    Args:
        except_of: Stages to leave out, as `role/stage`.
    """
    timeline, on_path = path.graph.timeline, _top_on_path(path)
    extents = _top_extents(timeline)
    used = [step for step in comparable(timeline.uncaptured) if step.stages and step.step != timeline.step]
    if not used:
        return
    profiled = any(process.profiled for process in timeline.processes)
    without = ", without profilers" if profiled else ""
    for name, seconds in top_stages(timeline).items():
        if name in except_of:
            continue
        usual_ns = middle(round(step.stages.get(name, 0.0) * 1e9) for step in used)
        took_ns = round(seconds * 1e9)
        role, _, stage = name.partition("/")
        waits = only_waits(stage, None)
        longer_ns = took_ns - usual_ns if waits else min(took_ns - usual_ns, on_path[name])
        if longer_ns * LEAST_OF_CALLS < timeline.window.wall_ns:
            continue
        beside = f"in {count(len(used), 'step')} near it{without}"
        part = _grown_part(path, (role, stage), usual_ns + longer_ns // 2)
        if part is None:
            kind = _kind_of((role, stage), waits=waits)
            suspect = Suspect(kind, longer_ns, longer_ns, (role, stage), 0, took_ns, usual_ns, beside)
            yield suspect._replace(within=tuple(extents[name]))
            continue
        # In the neighbours the whole stage took less than this part of the stage takes in this step, so the
        # difference is growth.
        label, process, part_ns = part
        grew_ns = part_ns - usual_ns
        beside = f"in all of {role} {stage} {beside}"
        suspect = Suspect(_kind_of(label), grew_ns, grew_ns, label, process, part_ns, usual_ns, beside)
        yield suspect._replace(within=tuple(extents[name]))


def _grown_part(path: StepPath, top: Label, least_ns: int) -> tuple[Label, int | None, int] | None:
    """Return (stage, process, ns on the critical path) of the longest stage below a top stage of the owner.
    The process is None if several processes ran the stage. Return None if the stage has less than `least_ns`.
    """
    names, during = ToolNames(path.graph.timeline), _top_extents(path.graph.timeline)["/".join(top)]
    on_path, processes = defaultdict[Label, list[Pair]](list), defaultdict[Label, set[int]](set)
    for piece in path.pieces:
        span = path.graph.span_of(piece.node)
        if span is not None and span.stage not in NO_WORK:
            on_path[names.label_of(span)].append((piece.start_ns, piece.end_ns))
            processes[names.label_of(span)].add(span.process)
    took_ns = {label: common_ns(pairs, during) for label, pairs in on_path.items()}
    label = max(took_ns, key=lambda label: took_ns[label], default=top)
    if label == top or took_ns[label] < least_ns:
        return None
    return label, processes[label].pop() if len(processes[label]) == 1 else None, took_ns[label]


def _top_extents(timeline: Timeline) -> Mapping[str, list[Pair]]:
    """Return the (start, end) pairs of the owner's top spans by `role/stage`."""
    extents = defaultdict[str, list[Pair]](list)
    for span in timeline.spans:
        if span.process == 0 and (span.parent is None or timeline.spans[span.parent].process != 0):
            extents[f"{span.role}/{span.stage}"].append((span.start_ns, timeline.until_ns(span)))
    return extents


def _top_on_path(path: StepPath) -> Counter[str]:
    """Return {`role/stage` of the owner's top spans: ns on the critical path}.

    The time of a top span includes the spans below it. Time of another process that is not below a span of
    the owner counts for the top spans that ran meanwhile.
    """
    spans, on_path, elsewhere = path.graph.timeline.spans, Counter[str](), list[Pair]()
    for piece in path.pieces:
        span = path.graph.span_of(piece.node)
        while span is not None and span.parent is not None:
            span = spans[span.parent]
        if span is not None and span.process == 0:
            on_path[f"{span.role}/{span.stage}"] += piece.wall_ns
        elif span is not None:
            elsewhere.append((piece.start_ns, piece.end_ns))
    for name, extents in _top_extents(path.graph.timeline).items():
        on_path[name] += common_ns(elsewhere, extents)
    return on_path


def _kind_of(label: Label, *, waits: bool = False) -> CauseKind:
    if waits:
        return "queue"
    if is_tool(*label):
        return "slow-tool"
    return "weight-sync" if MOVES_WEIGHTS.search(label[1]) else "slow-stage"
