"""Reading of a step's folder into its timeline.

This file has more than 500 lines, because it computes each field of `Timeline`, or calls the function that
does.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files import passes
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.manifest_parts import fold, of_the_last
from stepscope.files.scalars import read_metrics
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.spans import BEGIN_ONLY, CONSUME, STEP_TOKENS, Open, only_waits
from stepscope.files.spans import Span as SpanLine
from stepscope.files.states import ProcessState
from stepscope.files.steps import uncaptured_near
from stepscope.files.storage import read_records, size_below
from stepscope_report.timeline.clocks import Aligned, Placement, Reference, align, align_owner
from stepscope_report.timeline.clocks.refine import refine, traces_by_source
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.foreign import add_foreign
from stepscope_report.timeline.model import Counter, EngineStall, FileProblem, Process, Span, Timeline, Window
from stepscope_report.timeline.passes import passes_of
from stepscope_report.timeline.processes import files_elsewhere
from stepscope_report.timeline.rows import clock_of, names_of, offset_at
from stepscope_report.timeline.sources import CounterFile, Source, read_sources
from stepscope_report.timeline.trace_files import GONE, find_traces, lost_files
from stepscope_report.timeline.tree import end_issued, parents_of, shared_numbers


def load_step(
    path: str | os.PathLike[str],
    *,
    run_id: str | None = None,
    on_read: Callable[[int], None] | None = None,
    digests: bool = True,
    executor: Executor | None = None,
    spans: bool = True,
) -> Timeline:
    """Return the timeline of one captured step. Damaged parts of files are left out and named in `problems`.

    Args:
        path: A step's folder (`.../step_000002`).
        run_id: The run to load, if several wrote into the folder, or None for the one that opened it last. If
            a process captured the step several times, the last capture counts (`Timeline.captures`).
        on_read: Called with the number of bytes of each read of the span files.
        digests: The same as in `load_traces`, for the traces that are searched for collectives, to align the
            clocks of several hosts.
        executor: An executor whose workers read the traces that this machine lacks. Other traces are read in
            this process.
        spans: False to read only the header and the end of complete span files, which is enough to decide
            whether the step is complete. Measured clocks are then not improved by traces.

    Raises:
        RecordError: no process left a record, or no process of the requested run did.
    """
    layout = StepLayout(path)
    sources, problems = read_sources(layout, on_read, spans=spans)
    runs = list(dict.fromkeys(source.run_id for source in sorted(sources, key=lambda s: s.opened.wall_ns)))
    if not runs:
        reasons = "; ".join(f"{problem.file}: {problem.what}" for problem in problems[:3])
        raise RecordError(
            f"{layout.root} holds no records of a captured process ({reasons or 'no such files'})"
        )
    if run_id is not None and run_id not in runs:
        raise RecordError(f"{layout.root} holds nothing of run {run_id!r}; it holds: {', '.join(runs)}")
    chosen = run_id or runs[-1]
    of_run = [source for source in sources if source.run_id == chosen]
    latest = of_the_last(of_run)
    used = set(map(id, latest))
    earlier = [source for source in of_run if id(source) not in used]
    unused = {path for source in sources if id(source) not in used for path in _own_files(layout, source)}
    problems = [problem for problem in problems if problem.file not in unused]
    made = list(_artifacts(latest))
    files = tuple(sorted({one.path for one in _artifacts(earlier)} - {one.path for one in made}))
    elsewhere = files_elsewhere(executor)
    found = find_traces(layout, chosen, files, elsewhere)
    problems += found.problems
    problems += chain(lost_files(layout, made, elsewhere), _lost_records(layout, latest))
    align_all = partial(
        _align,
        layout=layout,
        earlier_files=files,
        digests=digests,
        executor=executor,
        exact=spans,
    )
    timeline = _assemble(layout, sorted(latest, key=_order), tuple(runs), problems, align_all)
    timeline = add_foreign(layout, timeline)
    noted, unread = passes_of(found.passes if spans else [], timeline.processes)
    states = read_records(sorted(layout.states.glob("[!.]*.json")), ProcessState)
    timeline = msgspec.structs.replace(
        timeline,
        passes=noted,
        problems=(*timeline.problems, *unread),
        shared_numbers=shared_numbers(timeline),
        states=tuple(state for state in states if state.run_id == chosen),
    )
    if not earlier:
        return timeline
    captures = max(2, *(source.capture for source in latest))
    return msgspec.structs.replace(timeline, captures=captures, earlier_files=files)


def _artifacts(sources: Sequence[Source]) -> Iterator[Artifact]:
    for source in sources:
        for item in () if source.part is None else source.part.expected:
            yield from item.artifacts


def _lost_records(layout: StepLayout, sources: Sequence[Source]) -> Iterator[FileProblem]:
    """Yield a problem for each process whose files are missing here, or hold less than the process' part
    of the manifest states.
    """
    for source in sources:
        info, run_id, number, part = source.info, source.run_id, source.capture, source.part
        if part is None:
            continue
        whole = {item.kind for item in part.expected if item.state == "ok"}
        if source.file is None and (part.spans or "spans" in whole):
            yield FileProblem(file=_inside(layout, layout.spans_of(info, run_id, number)), what=GONE)
        elif source.file is not None and source.file.end is None and not source.file.problems:
            lost = part.spans - sum(isinstance(record, SpanLine) for record in source.file.spans.values())
            if lost > 0:
                what = f"spans lost: the manifest counts {part.spans}"
                yield FileProblem(file=_inside(layout, source.file.path), what=what, lines=lost)
        if source.counters is None and "counters" in whole:
            yield FileProblem(file=_inside(layout, layout.counters_of(info, run_id, number)), what=GONE)
        elif source.counters is not None and source.counters.end is None and "counters" in whole:
            what = "samples may be lost: its end is not here"
            yield FileProblem(file=_inside(layout, source.counters.path), what=what)
    for manifest in read_records([layout.manifest], Manifest):
        for part in manifest.processes if manifest.run_id == sources[0].run_id else ():
            file = layout.part_of(part.process, part.run_id, part.capture)
            if not file.exists():
                yield FileProblem(file=_inside(layout, file), what=GONE)


def _own_files(layout: StepLayout, source: Source) -> Iterator[str]:
    """Yield the names of a process' files of spans and counters."""
    for path_of in (layout.spans_of, layout.counters_of):
        yield _inside(layout, path_of(source.info, source.run_id, source.capture))


def _inside(layout: StepLayout, path: Path) -> str:
    return path.relative_to(layout.root).as_posix()


def span_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes of files of spans and counters that `load_step` will read."""
    layout = StepLayout(path)
    return size_below(layout.spans) + size_below(layout.counters)


def _order(source: Source) -> tuple[bool, bool, str, int, int]:
    """Return the sort key of a source: the owner first, then by role and rank.

    If each rank opened its own capture, an owner that recorded other processes comes first, else rank 0.
    """
    part, info = source.part, source.info
    alone = part is None or not (part.clocks or part.absent)
    rank = -1 if info.rank is None else info.rank
    return not source.owner, source.owner and alone, info.role, rank, source.opened.wall_ns


def _assemble(
    layout: StepLayout,
    sources: Sequence[Source],
    runs: tuple[str, ...],
    problems: list[FileProblem],
    align_all: Callable[[Sequence[Source]], list[Aligned]],
) -> Timeline:
    step, run_id = sources[0].step, sources[0].run_id
    strays = [source for source in sources if source.step != step]
    problems += [FileProblem(file=s.info.key, what=f"left out: it is of step {s.step}") for s in strays]
    sources = [source for source in sources if source.step == step]
    metrics = _metrics(layout, run_id, problems)
    aligned = align_all(sources)
    records = [_records(source) for source in sources]
    names = names_of([source.info for source in sources])
    parts = [source.part for source in sources if source.part is not None]
    profiled = profiled_keys(parts)
    processes = tuple(
        process_of(source, name, placed, own, source.info.key in profiled)
        for source, name, placed, own in zip(sources, names, aligned, records, strict=True)
    )
    spans = _spans(sources, records, [placed.place for placed in aligned], step)
    end_issued(spans, processes)
    spans, marks = _apart(spans)
    around = uncaptured_near(layout, sources[0].info, run_id, sources[0].opened.wall_ns, step)
    consumed = tuple(mark for mark in marks if mark.stage == CONSUME)
    return Timeline(
        step=step,
        run_id=run_id,
        runs=runs,
        window=window_of(processes),
        processes=processes,
        spans=spans,
        counters=tuple(_counters_of(sources, [placed.place for placed in aligned])),
        consumed=consumed,
        taken=_taken(consumed, spans, processes, step),
        tokens=tuple(mark for mark in marks if mark.stage == STEP_TOKENS),
        manifest=fold(parts) if parts else None,
        problems=tuple(problems),
        stalls=_stalls_of(parts, processes),
        replicas=_replicas_of(parts),
        metrics=metrics,
        uncaptured=around.uncaptured,
        previous_end_ns=around.ended_ns,
        regular=around.regular,
        owner_went_on=around.has_line,
        warms_up=around.is_first,
    )


def _metrics(layout: StepLayout, run_id: str, problems: list[FileProblem]) -> dict[str, float]:
    """Return {name: number} that the trainer logged; empty if the file is damaged (see `problems`)."""
    try:
        return read_metrics(layout, run_id)
    except (OSError, RecordError) as error:
        file = layout.metrics(run_id).name
        problems.append(FileProblem(file=file, what=f"no numbers of the trainer: {error}"))
        return {}


def _align(
    sources: Sequence[Source],
    layout: StepLayout,
    earlier_files: tuple[str, ...],
    digests: bool,
    executor: Executor | None,
    exact: bool,
) -> list[Aligned]:
    """Align each source, in order. The first source is the owner, if the owner left files."""
    owner = sources[0]
    if not owner.owner or owner.part is None:
        aligned, reference = align_without_owner(sources)
    else:
        placed = align_owner(owner.opened, owner.closed)
        reference = Reference(
            owner.info.host,
            placed.place,
            placed.clock.uncertainty_ns or 0,
            owner.part.clocks,
            first_ns=owner.opened.wall_ns,
            last_ns=placed.place(owner.opened.mono_ns + max(map(_lasted_ns, sources))),
            jump_ns=placed.clock.drift_ns if placed.clock.jumped else 0,
        )
        aligned = [placed, *(_align_one(source, reference) for source in sources[1:])]
    if not exact and all(one.clock.alignment != "unaligned" for one in aligned):
        return aligned
    traces_of = partial(traces_by_source, sources, layout, earlier_files)
    return refine(sources, aligned, reference, traces_of, Digests(layout) if digests else None, executor)


def align_without_owner(sources: Sequence[Source]) -> tuple[list[Aligned], Reference]:
    """Align each source with the host that most sources are on, and return that host's clock."""
    ((host, _),) = collections.Counter(source.info.host for source in sources).most_common(1)
    reference = Reference(host, place=None, uncertainty_ns=0, offsets=())
    return [_align_one(source, reference) for source in sources], reference


def _align_one(source: Source, reference: Reference) -> Aligned:
    latest_ns = None if source.file is None else source.file.latest_ns
    return align(source.info.key, source.info.host, source.opened, source.closed, reference, latest_ns)


def _lasted_ns(source: Source) -> int:
    """Return the time from a capture's opening to its closing, or to its latest record if it never closed."""
    latest_ns = None if source.file is None else source.file.latest_ns
    end_ns = latest_ns if source.closed is None else source.closed.mono_ns
    return 0 if end_ns is None else max(0, end_ns - source.opened.mono_ns)


def process_of(
    source: Source, name: str, aligned: Aligned, records: Sequence[Open], profiled: bool
) -> Process:
    """Return a source as a process of the timeline, with its times on the owner's clock."""
    place, file, part = aligned.place, source.file, source.part
    closed_ns = None if source.closed is None else place(source.closed.mono_ns)
    opened_ns = place(source.opened.mono_ns)
    latest_ns = opened_ns if file is None or file.latest_ns is None else place(file.latest_ns)
    if closed_ns is None and source.counters is not None and source.counters.samples:
        latest_ns = max(latest_ns, place(source.counters.samples[-1].at_ns))
    return Process(
        name=name,
        info=source.info,
        owner=source.owner,
        opened_ns=opened_ns,
        closed_ns=closed_ns,
        last_ns=max(latest_ns, opened_ns if closed_ns is None else closed_ns),
        clock=aligned.clock,
        spans=sum(isinstance(record, SpanLine) for record in records),
        dropped=_dropped(source),
        cost=None if part is None else part.cost,
        profiled=profiled,
    )


def _records(source: Source) -> list[Open]:
    """Return the records of a source in the order of opening, which is the order of their numbers."""
    spans = {} if source.file is None else source.file.spans
    return [spans[number] for number in sorted(spans)]


def _dropped(source: Source) -> int | None:
    if source.file is not None and source.file.end is not None:
        return source.file.end.dropped
    return None if source.part is None or source.part.closed is None else source.part.dropped


def _spans(
    sources: Sequence[Source], records: Sequence[Sequence[Open]], places: Sequence[Placement], step: int
) -> list[Span]:
    parents = iter(parents_of(records, [source.info.key for source in sources]))
    return [
        _span(record, process, next(parents), place, step)
        for process, (place, own) in enumerate(zip(places, records, strict=True))
        for record in own
    ]


def _counters_of(sources: Sequence[Source], places: Sequence[Placement]) -> Iterator[Counter]:
    """Yield the counters of each source, in order, on the clock of the capture's owner."""
    for process, (source, place) in enumerate(zip(sources, places, strict=True)):
        if source.counters is not None:
            yield from _series_of(source.counters, process, place)


def _series_of(file: CounterFile, process: int, place: Placement) -> Iterator[Counter]:
    times: dict[int, list[int]] = {}
    values: dict[int, list[float]] = {}
    for sample in file.samples:
        at_ns = place(sample.at_ns)
        for number, value in sample.values.items():
            times.setdefault(number, []).append(at_ns)
            values.setdefault(number, []).append(value)
    for number, series in file.series.items():
        if number in times:
            yield Counter(
                process=process,
                name=series.name,
                of=series.of,
                unit=series.unit,
                kind=series.how,
                scope=series.scope,
                times_ns=tuple(times[number]),
                values=tuple(values[number]),
            )


def _apart(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    """Separate the calls of `consume` and `step_tokens`, and collectives without an end, from other spans. No
    spans are below such calls.
    """
    marks = [span for span in spans if _is_mark(span)]
    if not marks:
        return spans, []
    left = [span for span in spans if not _is_mark(span)]
    places = {id(span): place for place, span in enumerate(left)}
    for span in spans:
        if span.parent is not None:
            span.parent = places.get(id(spans[span.parent]))
    return left, marks


def _taken(
    consumed: Iterable[Span], spans: Iterable[Span], processes: Sequence[Process], step: int
) -> frozenset[str] | None:
    """Return the names of the trajectories that the step consumes, or None if they are not all known.

    If no span of the step has one of these names, they are probably ids of another kind, and the result is
    None. But if all these trajectories began in earlier steps, their spans are in the files of those steps,
    and the names are returned.
    """
    marks = [mark for mark in consumed if mark.step == step]
    names = frozenset(mark.trajectory for mark in marks if mark.trajectory is not None)
    if not names or any(processes[mark.process].dropped for mark in marks):
        return None
    began_before = all(mark.begun_step is not None and mark.begun_step < step for mark in marks)
    return names if began_before or any(span.trajectory in names for span in spans) else None


def _is_mark(span: Span) -> bool:
    is_issued = span.attrs is not None and BEGIN_ONLY in span.attrs
    return span.dur_ns == 0 and (is_issued or span.stage in (CONSUME, STEP_TOKENS))


def _span(record: Open, process: int, parent: int | None, place: Placement, step: int) -> Span:
    span = Span(
        process=process,
        parent=parent,
        role=record.role,
        stage=record.stage,
        start_ns=place(record.start_ns),
        end_ns=None,
        dur_ns=None,
        step=step if record.step is None else record.step,
        begun_step=_begun(record, step),
        policy_version=record.policy_version,
        trajectory=record.trajectory,
        turn=record.turn,
        thread=record.thread,
        attrs=record.attrs,
        number=record.span,
        traceparent=record.traceparent,
        waits=only_waits(record.stage, record.attrs),
    )
    if isinstance(record, SpanLine):
        span.end_ns = place(record.start_ns + record.dur_ns)
        span.dur_ns = record.dur_ns
        span.error, span.cancelled = record.error, record.cancelled
    return span


def _begun(record: Open, step: int) -> int | None:
    begun = (record.attrs or {}).get("begun") if record.stage == CONSUME else None
    if isinstance(begun, int) and not isinstance(begun, bool):
        return begun
    return None if record.link is None or record.link.step == step else record.link.step


def window_of(processes: Sequence[Process]) -> Window:
    """Return the time of the step. The first process is the owner, if the owner left files."""
    owner = processes[0]
    aligned = [process for process in processes if process.aligned]
    last_ns = max((process.last_ns for process in aligned), default=owner.last_ns)
    if not owner.owner:
        start_ns = min((process.opened_ns for process in aligned), default=owner.opened_ns)
        return Window(start_ns=start_ns, end_ns=last_ns, opened=False, closed=False)
    closed = owner.closed_ns is not None
    end_ns = owner.closed_ns if owner.closed_ns is not None else last_ns
    return Window(start_ns=owner.opened_ns, end_ns=max(end_ns, owner.opened_ns), opened=True, closed=closed)


def profiled_keys(parts: Sequence[ProcessPart]) -> frozenset[str]:
    """Return `ProcessInfo.key` of each process in which a profiler ran, an engine's own included.

    A part of the manifest states this for its own process. An engine's files show it for the process that
    wrote them. If this process is a worker that left no part, they show it for the replica's process.
    """
    artifacts = [
        artifact
        for part in parts
        for item in part.expected
        for artifact in item.artifacts
        if artifact.kind != passes.KIND  # notes of passes do not slow a process
    ]
    wrote = {(artifact.host, artifact.pid) for artifact in artifacts if artifact.pid is not None}
    replicas = {number for artifact in artifacts if (number := _replica(artifact, parts)) is not None}
    return frozenset(
        part.process.key
        for part in parts
        if part.profiled
        or (part.process.host, part.process.pid) in wrote
        or _number(part.process) in replicas
    )


def _replica(artifact: Artifact, parts: Iterable[ProcessPart]) -> int | None:
    """Return the replica of an artifact, or None if the process that wrote it left a part of the manifest."""
    known = any((artifact.host, artifact.pid) == (part.process.host, part.process.pid) for part in parts)
    return None if known else artifact.replica


def _number(process: ProcessInfo) -> int | None:
    """Return the replica number that a process recorded, else its position among the given workers, or None
    if neither is known.
    """
    if process.replica is not None or process.role != "rollout" or process.rank_source != "position":
        return process.replica
    return process.rank


def _stalls_of(parts: Iterable[ProcessPart], processes: Sequence[Process]) -> tuple[EngineStall, ...]:
    """Return the stalls of each replica, disjoint and in order.

    A replica stalls while all of its data-parallel engines do, because each engine serves its own requests.
    Files of hosts whose clock was not measured are ignored.
    """
    engines: dict[int, dict[int, list[tuple[int, int]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for part in parts:
        for item in part.expected:
            for artifact in item.artifacts:
                if artifact.replica is not None:
                    dp = (artifact.topology or {}).get("dp", 0)
                    engines[artifact.replica][dp] += _placed(artifact, processes)
    return tuple(
        EngineStall(replica=replica, start_ns=start_ns, end_ns=end_ns)
        for replica, intervals in sorted(engines.items())
        for start_ns, end_ns in _common(intervals)
    )


def _replicas_of(parts: Iterable[ProcessPart]) -> int:
    """Return the number of replicas that the capture was given, recorded or not."""
    return len({item.name for part in parts for item in part.expected if item.kind == "engine"})


def _placed(artifact: Artifact, processes: Sequence[Process]) -> list[tuple[int, int]]:
    process = clock_of(artifact.host, processes)
    if process is None:
        return []
    placed = (
        (stall.start_ns - offset_at(process, stall.start_ns), stall.end_ns - offset_at(process, stall.end_ns))
        for stall in artifact.stalls
    )
    return [(start_ns, end_ns) for start_ns, end_ns in placed if start_ns < end_ns]


def _common(engines: Mapping[int, Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the stretches in which every engine has at least one interval."""
    events = sorted(
        event
        for engine, intervals in engines.items()
        for start_ns, end_ns in intervals
        for event in ((start_ns, 1, engine), (end_ns, -1, engine))
    )
    depth, began_ns = dict.fromkeys(engines, 0), None
    common = []
    for at_ns, change, engine in events:
        depth[engine] += change
        stalled = all(depth.values())
        if stalled and began_ns is None:
            began_ns = at_ns
        elif not stalled and began_ns is not None:
            if began_ns < at_ns:
                common.append((began_ns, at_ns))
            began_ns = None
    return common
