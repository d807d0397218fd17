"""The cause of a slow step, as one sentence: the first line of a report.

`suspects.suspects_of` finds suspects within the step. `explain` compares the step with captured steps near it
(`near`) and with uncaptured steps (`baseline`), adds stages that took longer than in those steps, and orders
all suspects. `Holds.unless_held` drops a suspect whose calls may only have lacked a free core, or names the
program that took the cores. `step_cause` makes the first suspect the cause.

This file is longer than 500 lines because the choice of a cause and its sentence belong together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from stepscope.files.counters import GC
from stepscope_report.accounting import Label, Pair, common_ns, union_ns
from stepscope_report.event_loops import say_blocks
from stepscope_report.formatting import duration, middle
from stepscope_report.holds import BusyHost, Holds
from stepscope_report.near import (
    MORE_TOKENS,
    NearStep,
    collected_times,
    grown_at_the_top,
    grown_stages,
    is_longer,
    outside_ns,
    path_times,
    top_stages,
)
from stepscope_report.sections import Section, Sources
from stepscope_report.sections.baseline import BASELINE, ENOUGH, Baseline
from stepscope_report.sections.breakdown import BREAKDOWN
from stepscope_report.sections.counters import COUNTERS, Counters
from stepscope_report.sections.health import HEALTH, cut_processes, has_deaths, was_cut_off
from stepscope_report.sections.idle import IDLE, awaited_rank
from stepscope_report.sections.long_tail import LONG_TAIL
from stepscope_report.spans import ToolNames, is_tool
from stepscope_report.suspects import (
    LEAST_OF_CALLS,
    CauseKind,
    StepPath,
    Suspect,
    ranked,
    suspects_of,
)
from stepscope_report.timeline import Timeline

OTHERS = 4
"""Largest number of further causes that a report keeps."""
_LATE: frozenset[CauseKind] = frozenset({"late-rank", "uneven-batch", "skipped-collective"})
_SURE: frozenset[CauseKind] = frozenset({"event-loop", "skipped-collective"})
"""Kinds of suspects that stay suspects even if the neighbouring steps have the same suspects."""
_NOT_OF_CORES: frozenset[CauseKind] = frozenset({"slow-host", "between-steps", "profiler"})
"""Kinds of suspects that are kept, besides `_SURE`, if a lack of cores may explain the step's excess."""


class CauseProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process in which the slow calls were."""

    name: str
    role: str
    rank: int | None
    host: str


class OtherCause(msgspec.Struct, frozen=True, kw_only=True):
    """A possible cause: a call, rank or process that took longer than similar calls, ranks or processes."""

    kind: CauseKind
    ns: int | None
    """Time by which the step would be shorter without the excess, from a replay of the critical path. None if
    it is unknown whether the step waited for the slow part."""
    longer_ns: int
    """Time by which the slow part itself was longer."""
    took_ns: int | None
    """Time of the slow part, or None if no span measures it."""
    usual_ns: int | None
    """Usual time of the same work, or None if unknown. `sentence` names the calls or steps from which that
    time comes."""
    process: CauseProcess | None
    role: str | None
    stage: str | None
    """The stage, or the name of a tool. `stage` and `role` are None if the cause is no stage."""
    trajectory: str | None
    turn: int | None
    sentence: str
    evidence: tuple[str, ...]


class Cause(OtherCause, frozen=True, kw_only=True):
    """The cause of a slow step."""

    others: tuple[OtherCause, ...] = ()
    """The next causes, by importance. Their possible savings do not add up."""


class Explained(NamedTuple):
    """The suspects of a step, and the steps that the step was compared with."""

    suspects: Sequence[Suspect]
    unexplained_ns: int | None
    """Part of `excess_ns` that no suspect explains. None, like `usual_ns` and `excess_ns`, if there is no
    step to compare with."""
    usual_ns: int | None
    excess_ns: int | None
    steps: Sequence[int]
    """Numbers of the steps that this step was compared with."""
    tokens_ratio: float | None = None
    """`Baseline.tokens_ratio`."""


def explain(
    timeline: Timeline,
    path: StepPath,
    suspects: list[Suspect],
    baseline: Baseline | None,
    near: Sequence[NearStep] = (),
    profiler_ns: int = 0,
    busy_hosts: Sequence[BusyHost] = (),
) -> Explained:
    """Return the suspects of a step, in order of importance.

    Suspects come from a comparison of similar calls within the step, and from neighbouring steps.

    Args:
        suspects: Suspects found within the step alone.
        baseline: Neighbouring steps that were not captured.
        near: Neighbouring steps that were captured.
        profiler_ns: Time that profilers took inside the step.
        busy_hosts: Hosts whose cores were all busy.
    """
    window_ns = max(1, timeline.window.wall_ns)
    usual_ns, steps = _usual(path, baseline, near)
    varies_ns = _varies_ns(baseline)
    found = [one for one in suspects if one.kind in _SURE or (one.ns or one.longer_ns) >= varies_ns]
    found += _between(window_ns, baseline)
    if profiler_ns * LEAST_OF_CALLS >= window_ns:
        found.append(Suspect("profiler", profiler_ns, profiler_ns))
    if usual_ns is None:
        return Explained(ranked(found), None, None, None, ())
    excess_ns = window_ns - usual_ns
    if not is_longer(window_ns, usual_ns) or not _is_unusual(window_ns, baseline, near):
        return Explained(ranked(found), max(0, excess_ns), usual_ns, excess_ns, steps)
    holds = Holds(timeline, busy_hosts, middle(step.preempted for step in near) if near else 0)
    longer = list(grown_stages(path, near) if near else grown_at_the_top(path))
    held = filter(None, map(holds.unless_held, longer))
    # A stage may have grown on the path at the expense of others, by more than the step.
    grown = [one._replace(ns=min(one.ns or one.longer_ns, excess_ns)) for one in held]
    if not near:
        grown = [one for one in grown if not _may_lack_cores(one, path, holds)]
    blocked = Counter[int | None]()
    for one in found:
        if one.kind == "event-loop":
            blocked[one.process] += one.ns or 0
    within = [*_late_outside(found, path, near), *_collected(found, timeline, near)] if near else found[:]
    within = [one for one in within if one.kind != "between-steps"]  # that time is not in the step
    """Suspects within the step that count as an explanation of the step's excess. If there are captured
    neighbours, few suspects count, because the neighbours may have the same suspects."""
    host = holds.busy_host(path)
    grown = [one for one in _joined(grown) if not _stood_still(one, found, timeline)]
    known = any(
        one.kind == "slow-host" or (one.because and one.longer_ns * 2 >= excess_ns)
        for one in (*found, *grown)
    )
    hosts = [host] if host is not None and host.longer_ns * 2 >= excess_ns and not known else []
    found += hosts
    explained_ns = max(
        [
            sum(one.longer_ns for one in grown),
            *(one.ns or 0 for one in (*within, *hosts)),
            *blocked.values(),
        ]
    )
    found += [one for one in grown if not _is_known(one, found, within)]
    found = _told_once(ranked(found))
    unexplained_ns = max(0, excess_ns - explained_ns)
    doubtful_ns = sum(one.longer_ns for one in longer) - sum(one.longer_ns for one in grown)
    doubtful_ns += holds.may_lack_ns(path)
    # A lack of cores may explain the excess as well.
    if unexplained_ns * 2 > excess_ns and doubtful_ns * 2 >= unexplained_ns:
        found = [one for one in found if one.kind in _SURE or one.kind in _NOT_OF_CORES]
    elif unexplained_ns * 2 > excess_ns:
        gap = _longest_gap(path, unexplained_ns // 2)
        label, took_ns = (None, None) if near or gap else _longest_unknown(path, unexplained_ns // 2)
        found.append(
            Suspect("unexplained", unexplained_ns, unexplained_ns, label, took_ns=took_ns, because=gap)
        )
    grows = {one.label for one in grown}
    ordered = ranked(found)
    if near:  # a part that took as long in the neighbouring steps does not explain this one
        ordered.sort(
            key=lambda one: one.label is not None and one.label not in grows and one.kind not in _SURE
        )
    lacked = next((one for one in ordered if one.kind == "slow-host"), None)
    if lacked and holds.is_unsampled(ordered[0]) and lacked.longer_ns * 2 >= ordered[0].longer_ns:
        ordered.remove(lacked)
        ordered.insert(0, lacked)
    ratio = None if baseline is None else baseline.tokens_ratio
    return Explained(ordered, unexplained_ns, usual_ns, excess_ns, steps, ratio)


def _late_outside(found: Iterable[Suspect], path: StepPath, near: Sequence[NearStep]) -> Iterator[Suspect]:
    """Return the suspects for late ranks whose delay lies in no span, if time in no span grew by at least
    half of the delay over the captured neighbouring steps.
    """
    longer_ns = outside_ns(path) - middle(step.outside_ns for step in near)
    return (
        one
        for one in found
        if (one.kind == "late-rank" or one.spells)
        and one.kind != "event-loop"
        and one.label is None
        and one.longer_ns <= 2 * longer_ns
    )


def _collected(found: Iterable[Suspect], timeline: Timeline, near: Sequence[NearStep]) -> Iterator[Suspect]:
    """Return the suspects for Python's garbage collector, if it stopped their process for at least twice as
    long as in the captured neighbouring steps.
    """
    names = [process.name for process in timeline.processes]
    return (
        one
        for one in found
        if one.kind == "gc"
        and one.process is not None
        and one.longer_ns >= 2 * middle(step.collected_ns.get(names[one.process], 0) for step in near)
    )


def _may_lack_cores(grown: Suspect, path: StepPath, holds: Holds) -> bool:
    """Return True if a lack of cores may explain at least half of the growth of a top stage, in any process
    that the step waited for during the stage.
    """
    return holds.may_lack_ns(path, grown.within) * 2 >= grown.longer_ns


def _longest_unknown(path: StepPath, least_ns: int) -> tuple[Label | None, int | None]:
    """Return (stage, ns on the critical path) of the stage with the most time on the path.

    Return (None, None) if the time is below `least_ns`, or if the stage is a top span of the owner: the usual
    time of such a stage is known from uncaptured steps.
    """
    times, known = path_times(path), top_stages(path.graph.timeline)
    label = max(times, key=lambda label: times[label], default=None)
    if label is None or times[label] < least_ns or "/".join(label) in known:
        return None, None
    return label, times[label]


def _longest_gap(path: StepPath, least_ns: int) -> str:
    """Return a phrase on the longest stretch of the critical path in which no span ran, with the stages
    around it. Empty if the stretch is shorter than `least_ns`.
    """
    graph, names = path.graph, ToolNames(path.graph.timeline)
    stages = [graph.span_of(piece.node) for piece in path.pieces]
    at = max(
        (place for place, span in enumerate(stages) if span is None),
        key=lambda place: path.pieces[place].wall_ns,
        default=None,
    )
    if at is None or path.pieces[at].wall_ns < least_ns:
        return ""
    before = next((names.label_of(span) for span in reversed(stages[:at]) if span is not None), None)
    after = next((names.label_of(span) for span in stages[at:] if span is not None), None)
    where = [f"after {' '.join(before)}"] if before else []
    where += [f"before {' '.join(after)}"] if after else []
    return f"{duration(path.pieces[at].wall_ns)} passed in no span, {' and '.join(where)}".rstrip(", ")


def _stood_still(suspect: Suspect, found: Iterable[Suspect], timeline: Timeline) -> bool:
    """Return True if calls took longer because the event loop of their process was blocked."""
    calls = defaultdict[int, list[Pair]](list)
    for node in suspect.nodes:
        span = timeline.spans[node]
        calls[span.process].append((span.start_ns, timeline.until_ns(span)))
    if not calls and suspect.process is not None:
        calls[suspect.process] += (*suspect.within, *suspect.spells)
    stood_ns = sum(
        common_ns(calls[one.process], one.spells)
        for one in found
        if one.kind == "event-loop" and one.process is not None
    )
    return suspect.kind != "event-loop" and (suspect.ns or suspect.longer_ns) * 4 <= stood_ns * 5


def _told_once(found: Iterable[Suspect]) -> list[Suspect]:
    """Return the suspects, with at most one suspect for the garbage collector of each process: the first."""
    first: dict[int | None, Suspect] = {}
    return [one for one in found if one.kind != "gc" or first.setdefault(one.process, one) is one]


def _joined(grown: Sequence[Suspect]) -> list[Suspect]:
    """Return the suspects. All suspects for preempted requests are joined into one suspect, which comes
    first.
    """
    preempted = [one for one in grown if one.kind == "preemption"]
    if not preempted:
        return list(grown)
    ns = sum(one.longer_ns for one in preempted)
    first = max(preempted, key=lambda one: one.longer_ns)._replace(ns=ns, longer_ns=ns)
    return [first, *(one for one in grown if one.kind != "preemption")]


def _between(window_ns: int, baseline: Baseline | None) -> Iterator[Suspect]:
    """Yield a suspect for the time since the previous step, if this time is at least a tenth above the 90th
    percentile of the times between steps.
    """
    if baseline is None or baseline.before_ns is None or not baseline.between_ns:
        return
    before_ns, usual_ns, most_ns = baseline.before_ns, baseline.between_ns, baseline.between_p90_ns or 0
    longer_ns = before_ns - usual_ns
    capture_ns = baseline.cost_ns or 0  # a captured previous step also closes its capture in this time
    if longer_ns * 10 >= window_ns and longer_ns > 2 * capture_ns and is_longer(before_ns, most_ns):
        beside = "between most others"
        yield Suspect("between-steps", longer_ns, longer_ns, None, 0, before_ns, usual_ns, beside)


def _usual(
    path: StepPath, baseline: Baseline | None, near: Sequence[NearStep]
) -> tuple[int | None, Sequence[int]]:
    if baseline is not None and baseline.alike and baseline.excess_ns is not None:
        return baseline.p50_ns, baseline.steps
    if near and path.graph.timeline.window.closed:
        return middle(step.wall_ns for step in near), [step.step for step in near]
    if baseline is not None and baseline.excess_ns is not None:  # the neighbours are of another kind
        grown = grown_at_the_top(path, path.graph.timeline.regular)
        new_ns = sum(one.longer_ns for one in grown if one.usual_ns == 0)
        if new_ns * 2 >= baseline.excess_ns:
            return baseline.p50_ns, baseline.steps
    return None, ()


def _varies_ns(baseline: Baseline | None) -> int:
    """Return the 90th percentile of the uncaptured steps' durations minus the median, in ns. 0 if fewer than
    `ENOUGH` uncaptured steps are known.
    """
    if baseline is None or not baseline.alike or len(baseline.steps) < ENOUGH:
        return 0
    return baseline.p90_ns - baseline.p50_ns


def _is_unusual(window_ns: int, baseline: Baseline | None, near: Sequence[NearStep]) -> bool:
    """Return True if the step is longer than nearly all of its neighbours.

    If there are uncaptured neighbours, the limit is p90 + (p90 - p50) of their durations. If not, the step
    must be longer than each captured neighbour.
    """
    if baseline is not None and baseline.alike and baseline.excess_ns is not None:
        return window_ns > baseline.p90_ns + (baseline.p90_ns - baseline.p50_ns)
    return all(is_longer(window_ns, step.wall_ns) for step in near)


def _is_known(grown: Suspect, found: Sequence[Suspect], within: Sequence[Suspect]) -> bool:
    """Return True if another suspect already explains half of a stage's growth: any suspect in `within`, or a
    suspect of the same stage in `found`.
    """
    grew_ns = grown.ns or grown.longer_ns
    half = any((one.ns or 0) * 2 >= grew_ns for one in within)
    return half or any(one.label == grown.label and one.longer_ns * 2 >= grew_ns for one in found)


def step_cause(timeline: Timeline, explained: Explained) -> Cause | None:
    """Return the cause of a slow step, or None if the step has no suspects."""
    if not explained.suspects:
        return None
    names = ToolNames(timeline)
    first, *others = (_other(timeline, one, names) for one in explained.suspects[: OTHERS + 1])
    fields = {name: getattr(first, name) for name in first.__struct_fields__}
    joint = ";" if first.kind == "between-steps" else ":"  # that time lies before the step
    fields["sentence"] = f"{_say_length(timeline, explained)}{joint} {first.sentence}"
    return Cause(**fields, others=tuple(others))


def _other(timeline: Timeline, suspect: Suspect, names: ToolNames) -> OtherCause:
    process = None if suspect.process is None else timeline.processes[suspect.process]
    label = suspect.label
    return OtherCause(
        kind=suspect.kind,
        ns=suspect.ns,
        longer_ns=suspect.longer_ns,
        took_ns=suspect.took_ns,
        usual_ns=suspect.usual_ns,
        process=None
        if process is None
        else CauseProcess(
            name=process.name, role=process.info.role, rank=process.info.rank, host=process.info.host
        ),
        role=None if label is None else label[0],
        stage=None if label is None else names.parts(label)[1] or label[1],
        trajectory=suspect.trajectory,
        turn=suspect.turn,
        sentence=_say(timeline, suspect),
        evidence=suspect.evidence,
    )


def _say_length(timeline: Timeline, explained: Explained) -> str:
    """Return the step's duration and the usual duration: `1.16 s, 853 ms longer than usual` or `1.16 s
    (usual: 1.15 s)`. If there is a single step to compare with, the number of that step replaces `usual`.
    """
    took = duration(timeline.window.wall_ns)
    if explained.usual_ns is None or explained.excess_ns is None:
        return took
    usual = "usual" if len(explained.steps) != 1 else f"step {explained.steps[0]}"
    if is_longer(timeline.window.wall_ns, explained.usual_ns):
        ratio = explained.tokens_ratio or 1
        more = f" with {ratio:.1f} times the tokens" if ratio >= MORE_TOKENS else ""
        return f"{took}, {duration(explained.excess_ns)} longer than {usual}{more}"
    return f"{took} ({usual}: {duration(explained.usual_ns)})"


def _say(timeline: Timeline, suspect: Suspect) -> str:
    """Return the clause that names the slow part, its usual time and its process."""
    if suspect.kind == "between-steps":
        took, usual = duration(suspect.took_ns), duration(suspect.usual_ns)
        return f"{took} passed between the step before and this one ({usual} {suspect.beside})"
    if suspect.kind == "profiler":
        return f"profilers took {duration(suspect.ns)} of it"
    is_of_path = suspect.label is None and suspect.awaited_in is None
    if suspect.kind == "slow-host" and is_of_path and suspect.process is not None:
        info = timeline.processes[suspect.process].info
        lacked = duration(suspect.longer_ns)
        return f"processes of host {info.host} had work and no free core for {lacked}{suspect.because}"
    if suspect.kind in ("gc", "event-loop") and suspect.process is not None and not suspect.because:
        name, longer = timeline.processes[suspect.process].name, duration(suspect.longer_ns)
        if suspect.kind == "gc":
            return f"Python's garbage collector stopped {name} for {longer}"
        what = "something" if suspect.label is None else _what(timeline, suspect)
        often = f" {len(suspect.spells):,} times" if len(suspect.spells) > 1 else ""
        line = f", at {suspect.beside}" if suspect.beside else ""
        return (
            f"{what} blocked the event loop of {name}{often} for {longer}{' in all' if often else ''}{line}"
        )
    if suspect.kind == "preemption" and suspect.process is not None:
        name = timeline.processes[suspect.process].name
        return f"{suspect.because} of {name}, which took {duration(suspect.longer_ns)}"
    if suspect.kind == "unexplained" and suspect.label is not None:
        took, what = duration(suspect.took_ns), " ".join(suspect.label)
        return f"{what} took {took} of it, and uncaptured steps do not show how long that usually takes"
    if suspect.kind == "unexplained":
        where = f" ({suspect.because})" if suspect.because else ""
        return f"no recorded stage explains {duration(suspect.ns)} of it{where}"
    if suspect.kind == "skipped-collective" and suspect.process is not None and suspect.label is not None:
        name, longer = timeline.processes[suspect.process].name, duration(suspect.longer_ns)
        return f"{name} skipped {' '.join(suspect.label)}, and {suspect.beside} waited for {longer}"
    if suspect.kind == "late-rank" and is_of_path and suspect.process is not None:
        name, longer = timeline.processes[suspect.process].name, duration(suspect.longer_ns)
        return f"{suspect.beside} waited for {name} in collectives for {longer}"
    what, where = _what(timeline, suspect), _where(timeline, suspect)
    if suspect.took_ns is None:
        return f"{what}{f': {suspect.because}' if suspect.because else ''}{_waited(suspect)}"
    usual = duration(suspect.usual_ns)
    beside = f"{usual} {suspect.beside}" if suspect.beside.startswith("in ") else f"{suspect.beside}: {usual}"
    because = f": {suspect.because}" if suspect.because else ""
    took = duration(suspect.took_ns)
    says = f"the step waited {took} for {what}" if suspect.on_path else f"{what} took {took}"
    return f"{says} ({beside}){where}{because}{_waited(suspect)}"


def _what(timeline: Timeline, suspect: Suspect) -> str:
    if suspect.kind == "long-trajectory" and suspect.trajectory is not None:
        return f"trajectory {suspect.trajectory}"
    if suspect.label is None:
        process = "" if suspect.process is None else timeline.processes[suspect.process].name
        stage = " ".join(suspect.awaited_in or ())
        apart = duration(suspect.apart_ns or suspect.longer_ns)
        return f"{process} began {stage} {apart} after {suspect.beside}"
    role, stage = suspect.label
    if suspect.kind in ("slow-tool", "event-loop") and is_tool(role, stage):
        return f"{role} tool" if stage == "tool" else f"tool {stage.removeprefix('tool ')}"
    return f"{role} {stage}"


def _where(timeline: Timeline, suspect: Suspect) -> str:
    if suspect.process is None or len(timeline.processes) == 1:
        return ""
    process, hosts = timeline.processes[suspect.process], {one.info.host for one in timeline.processes}
    if suspect.kind == "slow-host":
        return f", on host {process.info.host}"
    if suspect.kind == "slow-stage" and process.owner:
        return ""
    return f", on {process.name}" + (f" of host {process.info.host}" if len(hosts) > 1 else "")


def _waited(suspect: Suspect) -> str:
    """Return the clause on how much shorter the step would be, and on the stage in which other ranks waited.
    Empty if there is no such stage and the step would be shorter by about the growth of the slow part.
    """
    if suspect.ns is None:
        return "; whether the step waited for it is not known"
    met = suspect.label is not None and suspect.awaited_in is not None
    waited = f", and the others waited in {' '.join(suspect.awaited_in or ())}" if met else ""
    longer = [suspect.longer_ns if suspect.apart_ns is None else suspect.apart_ns]
    if suspect.took_ns is not None and suspect.usual_ns is not None:
        longer.append(suspect.took_ns - suspect.usual_ns)
    if any(abs(suspect.ns - ns) * 10 <= ns for ns in longer):
        return waited
    return f"{waited}; without that the step would be {duration(suspect.ns)} shorter"


def _explained(sources: Sources) -> Explained:
    return explain(
        sources.timeline,
        sources.path,
        sources.value_of(SUSPECTS),
        sources.value_of(BASELINE),
        sources.near,
        sum(line.wall_ns for line in sources.value_of(BREAKDOWN).lines if line.kind == "profiler"),
        _busy_hosts(sources),
    )


def _cause(sources: Sources) -> Cause | None:
    health = sources.value_of(HEALTH)
    if has_deaths(health) and was_cut_off(health):
        return None  # the death is the cause, and the report names it first
    return step_cause(sources.timeline, sources.value_of(_EXPLAINED))


def _busy_hosts(sources: Sources) -> Sequence[BusyHost]:
    counters = sources.value_of(COUNTERS)
    return () if counters is None else counters.busy_hosts


def _suspects(sources: Sources) -> list[Suspect]:
    tail = sources.value_of(LONG_TAIL)
    slowed = tail is not None and tail.trajectories > 0 and tail.last_profiled == tail.last
    holds = Holds(sources.timeline, _busy_hosts(sources))
    inside = suspects_of(sources.path, cut_processes(sources.timeline), tail=not slowed)
    found = [one for one in map(holds.unless_held, inside) if one is not None]
    found += _awaited(sources, {one.process for one in inside if one.kind in _LATE})
    stopped = list(_stopped(sources.path, sources.value_of(COUNTERS)))
    others = [one for one in found if not _stood_still(one, stopped, sources.timeline)]
    held = {one.process for one in others if one.kind == "gc"}
    return ranked([*(one for one in stopped if one.kind != "gc" or one.process not in held), *others])


def _awaited(sources: Sources, known: Set[int | None]) -> Iterator[Suspect]:
    """Yield a suspect for the rank for which another rank waited in collectives, according to traces. Nothing
    if the awaited rank's process is in `known`, or if spans already show that others waited for this rank:
    the spans then also show its work.
    """
    if not sources.activities:
        return
    rows = sources.value_of(IDLE)
    pair = awaited_rank(rows)
    if pair is None:
        return
    waits, last = pair
    graph = sources.path.graph
    at = [process.name for process in sources.timeline.processes].index(last.process)
    ns = waits.awaited_ns - (last.skew_ns or 0)
    collected_ns = collected_times(sources.timeline).get(last.process, 0)
    if ns * LEAST_OF_CALLS < sources.timeline.window.wall_ns or at in known:
        return
    if collected_ns * 2 >= ns:
        yield Suspect("gc", min(ns, collected_ns), collected_ns, process=at)
    elif at not in {graph.process_of(node) for node in graph.last_of.values()}:
        yield Suspect("late-rank", ns, ns, process=at, beside=waits.process)


def _stopped(path: StepPath, counters: Counters | None) -> Iterator[Suspect]:
    """Yield a suspect for each process on the critical path that was stopped by a blocked event loop or by
    Python's garbage collector.
    """
    if counters is None:
        return
    timeline = path.graph.timeline
    places = {process.name: index for index, process in enumerate(timeline.processes)}
    on_path = defaultdict[int, list[Pair]](list)
    for piece in path.pieces:
        on_path[path.graph.process_of(piece.node)].append((piece.start_ns, piece.end_ns))
    for row in counters.rows:
        if row.name == GC:
            index, paused_ns = places[row.process], round(row.mean / 100 * row.covered_ns)
            suspect = Suspect("gc", min(paused_ns, union_ns(on_path[index])), paused_ns, process=index)
            yield from _stop(timeline, suspect)
    for loop in counters.late_loops:
        index = places[loop.process]
        suspect = Suspect(
            "event-loop",
            common_ns(loop.blocks, on_path[index]),
            loop.late_ns,
            loop.blocker,
            index,
            beside=loop.line,
            evidence=(say_blocks(loop),),
            spells=loop.blocks,
        )
        yield from _stop(timeline, suspect)


def _stop(timeline: Timeline, suspect: Suspect) -> Iterator[Suspect]:
    if (suspect.ns or 0) * LEAST_OF_CALLS >= max(1, timeline.window.wall_ns):
        yield suspect


SUSPECTS = Section(
    name="_suspects",
    compute=_suspects,
)
PARTS: Section[Sequence[OtherCause]] = Section(
    name="_parts",
    compute=lambda sources: tuple(
        _other(sources.timeline, one, ToolNames(sources.timeline)) for one in sources.value_of(SUSPECTS)
    ),
)
"""The causes found within the step alone, on which advice is based."""
_EXPLAINED = Section(name="_explained", compute=_explained)
CAUSE: Section[Cause | None] = Section(
    name="cause",  # shown in the head of the report, not as a section of its own
    compute=_cause,
)


def beside_profiled(sources: Sources) -> int | None:
    """Return the ns of the step's excess that a comparison with profiled steps explains. None if no captured
    step near this one took less time, or if a step of the comparison was not profiled.
    """
    explained = sources.value_of(_EXPLAINED)
    known = bool(sources.near) and all(step.profiled for step in sources.near)
    if not known or explained.excess_ns is None or explained.unexplained_ns is None:
        return None
    return explained.excess_ns - explained.unexplained_ns


UNEXPLAINED = Section(
    name="unexplained_ns",
    compute=lambda sources: sources.value_of(_EXPLAINED).unexplained_ns,
)


def is_explained(sources: Sources) -> bool:
    """Return True if the causes explain at least half of the time by which the step was longer than usual."""
    explained = sources.value_of(_EXPLAINED)
    excess_ns, rest_ns = explained.excess_ns, explained.unexplained_ns
    return excess_ns is not None and rest_ns is not None and rest_ns * 2 <= excess_ns


def cause_of(timeline: Timeline, near: Sequence[NearStep] = ()) -> Cause | None:
    """Return the cause of a slow step, the same as in the step's report. None if there is no suspect.

    Args:
        near: Other captured steps of the same kind, from `Neighbours`.
    """
    return Sources(timeline, None, near).value_of(CAUSE)
