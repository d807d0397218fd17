"""Timeline of traces without a captured step. The traces come from torch.profiler, engines or installed
readers, or from a timeline that `stepscope merge` wrote.

Only traces describe the processes. The rank comes from `distributedInfo` or from the recording, or else from
the names of files and folders (`named`), or else it is unknown.

This file has more than 500 lines, because the process, the steps and the clock of a trace are found together.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import SIDECAR_SUFFIX, RunLayout, StepLayout
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage import files_below
from stepscope_report.timeline.activity.content import ProfilerStep, TraceContent
from stepscope_report.timeline.activity.content_reader import Reading
from stepscope_report.timeline.activity.intervals import Pair
from stepscope_report.timeline.activity.trace_events import Complete, Event, Metadata
from stepscope_report.timeline.activity.traces import ProcessContent, read_all
from stepscope_report.timeline.clocks import Aligned, Placement
from stepscope_report.timeline.clocks.refine import refine
from stepscope_report.timeline.load import align_without_owner, process_of, window_of
from stepscope_report.timeline.merge import MergedRow
from stepscope_report.timeline.model import FileProblem, ProcessClock, Timeline, Window
from stepscope_report.timeline.readers.chrome import SUFFIXES, ChromeTrace, TraceFields
from stepscope_report.timeline.readers.contract import FoundFile, Notes, Origin, Readers
from stepscope_report.timeline.readers.nccl_inspector import InspectorReader
from stepscope_report.timeline.rows import names_of
from stepscope_report.timeline.sources import Source
from stepscope_report.timeline.trace_files import NO_HOST, StepFiles, TraceFile, dimensions, named

_OTHERS = (".sqlite", ".ncu-rep", ".pickle")
"""Suffixes of profilers' files that are listed as unread unless a reader claims them."""
_ASCEND = "_ascend_pt"
OF_OTHERS = "its events have no category of a profiler that is read here: only `stepscope merge` shows them"
"""Problem of files of other programs, such as JAX."""
_HANDLER = re.compile(r"(.+)_(\d+)\.\d+\.pt\.trace\.json")
"""`host_pid.time.pt.trace.json`, of torch's `tensorboard_trace_handler`."""
_FIELD = re.compile(rb'"(?:traceEvents|schemaVersion|ph)"\s*:')
_HEAD = 1 << 18
_MARK = b'"displayTimeUnit":"ms","baseTimeNanoseconds":'
"""Beginning of a timeline that `stepscope merge` wrote."""
_MERGED = "merged-"
"""Prefix of the file in which SGLang repeats the traces of its ranks."""
_APART_NS = 60_000_000_000
"""A longer time than this (in ns) between two traces separates two runs. The clocks of a run's hosts differ
by less."""
_UNALIGNED = Aligned(Placement([(0, 0)]), ProcessClock(alignment="unaligned"))
_ALONE = Aligned(Placement([(0, 0)]), ProcessClock(alignment="owner", uncertainty_ns=0))
_TIMELESS = Aligned(Placement([(0, 0)]), ProcessClock(alignment="assumed"))
_ASSUMED = "its traces name no host: its wall clock is taken to be that of the others"


class PlainStep(NamedTuple):
    """Traces as one step, with a process for each rank."""

    timeline: Timeline
    files: StepFiles
    contents: list[list[ProcessContent]]
    """The contents of each trace in `files`."""


class _Trace(NamedTuple):
    """The content of one process in a trace file."""

    file: TraceFile
    info: ProcessInfo
    content: TraceContent


def has_traces(path: Path) -> bool:
    """Return whether a path is, or contains, a trace, or a recording that could be read."""
    readers = Readers()
    files = (FoundFile(path=file, name=file.name) for file in _below(path))
    return any(_is_trace(file) or _is_of_npu(file.path) or _is_claimed(file, readers) for file in files)


def no_trace(path: Path) -> str:
    """Return the reason why a file is no trace that can be read, as half a sentence for an error."""
    head = FoundFile(path=path, name=path.name).head()
    if re.search(rb"chakra|execution_(trace|graph)", head.lower()):
        return "an execution trace (Chakra), without times of devices: name the profiler's trace beside it"
    return "no trace that is read here: JSON of torch or an engine, SQLite of nsys, recordings of NPUs, OTLP"


def is_ours(path: Path) -> bool:
    """Return whether a folder is a step's or a run's, contains runs, or lies inside a step."""
    layout = RunLayout(path)
    if path.is_file():
        return False
    if StepLayout(path).is_step or layout.steps() or any(record.is_file() for record in layout.runs()):
        return True
    inside = any(StepLayout(parent).processes.is_dir() for parent in path.absolute().parents)
    return inside or any(RunLayout(child).steps() for child in path.glob("*/"))


def plain_bytes(paths: Sequence[Path]) -> int:
    """Return the number of bytes that `read_plain` will read."""
    return sum(file.path.stat().st_size for file in _found(paths, _root(paths)).traces)


def read_plain(
    paths: Sequence[Path],
    on_read: Callable[[int], None] | None = None,
    executor: Executor | None = None,
    step_mark: str | None = None,
    steps: Callable[[int], bool] | None = None,
) -> PlainStep:
    """Return the traces in files and folders as one step. Writes nothing.

    Args:
        step_mark: Name of the ranges that are the program's steps: the `mark` of `ProfilerSteps`.
        steps: Returns whether the program's step with this number is wanted. A trace is read from its first
            to its last wanted step. A trace without a wanted step is left out. None to read all traces in
            full.

    Raises:
        RecordError: no file contains an event of a trace, or no trace has a wanted step.
    """
    root = _root(paths)
    below = _found(paths, root)
    read = read_all(below.traces, on_read, executor, step_mark=step_mark)
    if steps is not None:
        below, read = _only(below, read, steps, partial(read_all, executor=executor, step_mark=step_mark))
    files, traces, contents = StepFiles([], below.unread, below.problems, [], []), list[_Trace](), []
    for trace, held in zip(below.traces, read, strict=True):
        problems = [(what, events) for one in held for what, events in one.content.problems.items()]
        rows = None if trace.reader is not None else _rows_of(trace.path, trace.found_file.head())
        if rows is not None:
            for info, content in _read_timeline(trace.path, rows):
                described = _described(trace, info, "torch", None)
                files.traces.append(described)
                traces.append(_Trace(described, info, content))
                contents.append([ProcessContent(pid=None, content=content)])
        elif any(one.content.events for one in held):
            if trace.reader is None and not problems:
                for one in filter(_is_of_others, held):
                    one.content.problems[OF_OTHERS] = None
            described, processes = _processes(trace, held)
            files.traces.append(described)
            traces += processes
            contents.append(held)
        elif problems:
            files.problems.extend(FileProblem(file=trace.name, what=what, events=n) for what, n in problems)
        else:
            files.unread.append(f"{trace.name}: it holds no event")
    traces = list(_with_inspected(traces))
    if not traces:
        reasons = "; ".join([*files.unread, *(f"{one.file}: {one.what}" for one in files.problems)][:3])
        raise RecordError(f"no trace in {', '.join(map(str, paths))} ({reasons or 'no such files'})")
    return PlainStep(_timeline(root, traces), files, contents)


def _is_of_others(process: ProcessContent) -> bool:
    """Return whether a process has events, and none that a report can use."""
    content = process.content
    return bool(content.events) and content.first_us is None and not (content.iterations or content.memory)


def _only(
    below: StepFiles,
    read: Sequence[list[ProcessContent]],
    wanted: Callable[[int], bool],
    read_again: Callable[..., list[list[ProcessContent]]],
) -> tuple[StepFiles, list[list[ProcessContent]]]:
    """Return the traces with a step that is wanted, and what was recorded in these steps."""
    kept, within, known = dict[Path, TraceFile](), dict[Path, Pair](), set[int]()
    steps: dict[tuple[Path, int | None], list[ProfilerStep]] = {}
    for trace, held in zip(below.traces, read, strict=True):
        told, said = [step for one in held for step in one.content.steps], named(trace.name).steps
        known |= {step.number for step in told} or {*said}
        own = [step for step in told if wanted(step.number)]
        if own:
            begun, ended = min(one.start_us for one in own), max(one.start_us + one.dur_us for one in own)
            within[trace.path] = begun, ended
        if own or (not told and any(map(wanted, said))):
            kept[trace.path] = trace
            steps |= {(trace.path, one.pid): one.content.steps for one in held}
    if not kept:
        present = ", ".join(map(str, sorted(known)))
        raise RecordError(f"no trace has such a step; they have {present or 'none that is told'}")
    left_out = [f"{trace.name}: of no such step" for trace in below.traces if trace.path not in kept]
    again = read_again([*kept.values()], within=within)
    for path, held in zip(kept, again, strict=True):
        for one in held:  # numbers count from the trace's beginning
            one.content.steps = [step for step in steps[path, one.pid] if wanted(step.number)]
    return below._replace(traces=[*kept.values()], unread=[*below.unread, *left_out]), again


def _found(paths: Sequence[Path], root: Path) -> StepFiles:
    """Return the traces below the paths, each with its reader, and the files that are not read."""
    files = StepFiles([], [], [], [], [])
    readers = Readers()
    for path in sorted({file.absolute() for given in paths for file in _below(given)}):
        file = FoundFile(path=path, name=path.relative_to(root).as_posix())
        reader, claim = readers.claim(file)
        if claim is not None and not claim.read:
            why = claim.why
        elif reader is not None:
            files.traces.append(TraceFile(path, file.name, None, reader))
            continue
        elif path.name.startswith(_MERGED):
            why = "SGLang merged it"
        elif any(folder.name.endswith(_ASCEND) for folder in path.parents):
            why = "of an NPU: pip install 'stepscope[npu]'" if _is_of_npu(path) else None
        elif _is_trace(file):
            files.traces.append(TraceFile(path, file.name, None))
            continue
        elif path.name.endswith(SUFFIXES):
            why = "no trace"
        else:
            why = f"nothing here reads {path.suffix}" if path.suffix in _OTHERS else None
        if why is not None:
            files.unread.append(f"{file.name}: {why}")
    files.problems.extend(readers.problems)
    return files


def _is_trace(file: FoundFile) -> bool:
    """Return whether a file is a trace, damaged or not, rather than other JSON. Reads only its beginning."""
    if not file.path.name.endswith(SUFFIXES):
        return False
    return ".trace.json" in file.path.name or _FIELD.search(file.head(_HEAD)) is not None


def _is_of_npu(path: Path) -> bool:
    """Return whether a file is a result of torch_npu that can be read: a JSON trace or a database."""
    return path.parent.parent.name.endswith(_ASCEND) and (
        path.name == "trace_view.json" or path.match("ascend_pytorch_profiler*.db")
    )


def _is_claimed(file: FoundFile, readers: Readers) -> bool:
    _, claim = readers.claim(file)
    return claim is not None and (claim.read or claim.why is not None)


def _below(path: Path) -> Iterator[Path]:
    candidates = [path] if path.is_file() else files_below(path)
    for file in candidates:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not hidden and not file.name.endswith(SIDECAR_SUFFIX) and file.is_file():
            yield file


def _root(paths: Sequence[Path]) -> Path:
    folders = [path.absolute() if path.is_dir() else path.absolute().parent for path in paths]
    return Path(os.path.commonpath(folders))


def _processes(trace: TraceFile, held: Sequence[ProcessContent]) -> tuple[TraceFile, list[_Trace]]:
    """Return a trace with a sidecar that identifies its process, and the contents by process."""
    if trace.reader is None:
        content = held[0].content
        info, topology = _info(trace, content)
        described = _described(trace, info, "torch", topology or None)
        return described, [_Trace(described, info, content)]
    with closing(trace.reader.open(trace.found_file, Notes())) as recording:
        origin = recording.origin
    main = _info_of(trace, origin)
    described = _described(trace, main, trace.reader.name, None)
    processes = []
    for one in held:
        if one.pid not in (None, main.pid):
            info = ProcessInfo(role="trace", rank=None, world_size=None, host=main.host, pid=one.pid or 0)
        else:
            info = main
        # Times on other clocks cannot be placed, because no process has recorded anchors of these clocks.
        base_ns = one.content.base_ns if origin.clock == "realtime" else None
        processes.append(_Trace(described, info, msgspec.structs.replace(one.content, base_ns=base_ns)))
    return described, processes


def _info(trace: TraceFile, content: TraceContent) -> tuple[ProcessInfo, dict[str, int]]:
    """Return the process of a torch trace, from its content and its name, and the process' place in the
    parallel layout.
    """
    fields, name = ChromeTrace(trace.path).fields(), trace.path.name
    distributed, pid = content.distributed, fields.pid or 0
    topology, said = dimensions(name), named(trace.name)
    handler = _HANDLER.match(name)
    host = content.host or (handler[1] if handler is not None and int(handler[2]) == pid else NO_HOST)
    rank = None if distributed is None else distributed.rank
    if rank is None:
        rank = said.rank
    if rank is None and set(topology) == {"tp"}:
        rank = topology["tp"]
    role = "rollout" if content.iterations else said.role
    info = ProcessInfo(
        role=role or _role(rank),
        rank=rank,
        world_size=said.world_size if distributed is None else distributed.world_size,
        host=host,
        pid=pid or said.pid or 0,
        replica=said.replica,
    )
    return info, topology


def _info_of(trace: TraceFile, origin: Origin) -> ProcessInfo:
    """Return the process of a recording, from its content and its name."""
    said = named(trace.name)
    rank = said.rank if origin.rank is None else origin.rank
    return ProcessInfo(
        role=said.role or _role(rank),
        rank=rank,
        world_size=origin.world_size,
        host=origin.host or NO_HOST,
        pid=origin.pid or said.pid or 0,
        replica=said.replica,
    )


def _role(rank: int | None) -> str:
    return "trace" if rank is None else "rank"


def _described(trace: TraceFile, info: ProcessInfo, tool: str, topology: dict[str, int] | None) -> TraceFile:
    said = named(trace.name)
    artifact = Artifact(
        path=trace.name,
        kind=f"{tool}_trace",
        tool=tool,
        role=info.role,
        rank=info.rank,
        world_size=info.world_size,
        stage=said.stage,
        replica=info.replica,
        topology=topology,
        host=info.host,
        pid=info.pid,
        size_bytes=trace.path.stat().st_size,
    )
    sidecar = Sidecar(
        step=-1 if said.step is None else said.step,
        run_id="",
        artifact=artifact,
        process=info.key,
        opened=None,
        closed=None,
    )
    return trace._replace(sidecar=sidecar)


def _timeline(root: Path, traces: Sequence[_Trace]) -> Timeline:
    """Return a timeline without spans. Processes without a wall clock are unaligned and come last. Before
    them come processes that only NCCL's Inspector recorded, which have no times and do not extend the window.
    """
    by_key: dict[tuple[bool, str], list[_Trace]] = {}
    for trace in traces:
        by_key.setdefault((trace.content.base_ns is None, trace.info.key), []).append(trace)
    groups, files = sorted(by_key.values(), key=_order), {trace.file.path for trace in traces}
    sources = [_source(group) for group in groups]
    known = sum(1 for group in groups if _order(group)[:2] == (False, False))
    timeless = sum(1 for group in groups if _order(group)[:2] == (False, True))
    aligned = [
        *_align(sources[:known], groups[:known]),
        *[_TIMELESS] * timeless,
        *[_UNALIGNED if len(files) > 1 else _ALONE] * (len(sources) - known - timeless),
    ]
    names = names_of([source.info for source in sources])
    processes = tuple(
        msgspec.structs.replace(process_of(source, name, placed, (), profiled=True), dropped=0)
        for source, name, placed in zip(sources, names, aligned, strict=True)
    )
    return Timeline(
        step=0,
        run_id=root.name,
        runs=(root.name,),
        window=window_of(processes[:known]) if known else _window(traces),
        processes=processes,
        spans=[],
        manifest=None,
    )


def _with_inspected(traces: Sequence[_Trace]) -> Iterator[_Trace]:
    """Yield the traces. Traces of NCCL's Inspector get the process that another trace names, if one does."""
    named = {(one.info.host, one.info.pid): one.info for one in traces if not _is_inspected(one)}
    for one in traces:
        known = named.get((one.info.host, one.info.pid)) if _is_inspected(one) else None
        yield one if known is None else one._replace(info=known)


def _is_inspected(trace: _Trace) -> bool:
    return isinstance(trace.file.reader, InspectorReader)


def _order(group: Sequence[_Trace]) -> tuple[bool, bool, str, int, str]:
    first = group[0]
    rank = -1 if first.info.rank is None else first.info.rank
    inspected = all(map(_is_inspected, group))
    return first.content.base_ns is None, inspected, first.info.role, rank, first.file.name


def _source(group: Sequence[_Trace]) -> Source:
    timed = [trace for trace in group if not _is_inspected(trace)]
    times = [_extent(trace.content) for trace in timed or group]
    opened, closed = min(first for first, _ in times), max(last for _, last in times)
    return Source(
        "",
        0,
        group[0].info,
        ClockAnchor(wall_ns=opened, mono_ns=opened),
        ClockAnchor(wall_ns=closed, mono_ns=closed),
        part=None,
        file=None,
    )


def _extent(content: TraceContent) -> tuple[int, int]:
    base_ns = content.base_ns or 0
    first_us, last_us = content.first_us or 0.0, content.last_us or 0.0
    return base_ns + round(first_us * 1000), base_ns + round(last_us * 1000)


def _align(sources: Sequence[Source], groups: Sequence[Sequence[_Trace]]) -> list[Aligned]:
    """Return the sources aligned by their wall clocks. Hosts of one run are also aligned by their common
    collectives.
    """
    if not sources:
        return []
    placed: dict[int, Aligned] = {}
    aligned, reference = align_without_owner(sources)
    for run in _runs(sources):
        of_run, so_far = [sources[index] for index in run], [aligned[index] for index in run]
        paths = {
            at: [trace.file.path for trace in groups[index] if trace.file.reader is None]
            for at, index in enumerate(run)
        }
        placed |= zip(run, refine(of_run, so_far, reference, paths.copy), strict=True)
    return [
        _assumed(placed[index]) if source.info.host == NO_HOST and len(sources) > 1 else placed[index]
        for index, source in enumerate(sources)
    ]


def _runs(sources: Sequence[Source]) -> Iterator[list[int]]:
    """Yield the indices of the sources of each run. Sources of one run recorded at the same time,
    but their clocks may differ.
    """
    run: list[int] = []
    until_ns = 0
    for index in sorted(range(len(sources)), key=lambda index: sources[index].opened.wall_ns):
        source = sources[index]
        if run and source.opened.wall_ns > until_ns + _APART_NS:
            yield run
            run = []
        run.append(index)
        closed_ns = source.opened.wall_ns if source.closed is None else source.closed.wall_ns
        until_ns = closed_ns if len(run) == 1 else max(until_ns, closed_ns)
    if run:
        yield run


def _assumed(placed: Aligned) -> Aligned:
    clock = msgspec.structs.replace(placed.clock, alignment="assumed", uncertainty_ns=None, note=_ASSUMED)
    return placed._replace(clock=clock)


def _window(traces: Sequence[_Trace]) -> Window:
    times = [_extent(trace.content) for trace in traces]
    start_ns, end_ns = min(first for first, _ in times), max(last for _, last in times)
    return Window(start_ns=start_ns, end_ns=end_ns, opened=False, closed=False)


class _Merged(msgspec.Struct, frozen=True):
    rows: tuple[MergedRow, ...]


def _rows_of(path: Path, head: bytes) -> tuple[MergedRow, ...] | None:
    """Return the rows of a timeline of stepscope, or None for any other file.

    Args:
        head: The first bytes of the file.
    """
    if _MARK not in head:
        return None
    field = ChromeTrace(path).field("stepscope")
    try:
        return None if field is None else msgspec.json.decode(field, type=_Merged).rows
    except msgspec.DecodeError:
        return None


def _read_timeline(path: Path, rows: Sequence[MergedRow]) -> list[tuple[ProcessInfo, TraceContent]]:
    """Return the content of the timeline for each process, without process groups."""
    notes, readings, fields = _read_rows(path)
    held = []
    for row in rows:
        if row.pid in readings:
            base_ns = None if row.alignment == "unaligned" else fields.base_ns
            of_row = msgspec.structs.replace(fields, base_ns=base_ns, distributed=None, host=row.host)
            held.append((_process_of_row(row), readings[row.pid].finish(of_row)))
    if held:
        held[0][1].problems.update(notes.counts)
    return held


def _read_rows(path: Path) -> tuple[Notes, dict[int, Reading], TraceFields]:
    notes, readings, described = Notes(), dict[int, Reading](), list[Metadata]()

    def take(events: list[Event]) -> None:
        of_row: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            if isinstance(event, Complete) and isinstance(event.pid, int):
                of_row[event.pid].append(event)
            elif isinstance(event, Metadata):
                described.append(event)
        for pid, own in of_row.items():
            if pid not in readings:
                readings[pid] = Reading(Notes())
            readings[pid].take(own)

    trace = ChromeTrace(path, notes)
    fields = trace.read(Reading(notes).parse, take)
    rows_of = {msgspec.json.encode(pid): reading for pid, reading in readings.items()}
    for event in described:
        if (row := rows_of.get(bytes(event.pid))) is not None:
            row.describe(event)
    return notes, readings, fields


def _process_of_row(row: MergedRow) -> ProcessInfo:
    return ProcessInfo(
        role=row.role,
        rank=row.rank,
        world_size=None,
        host=row.host,
        pid=row.native_pid or row.pid,
        replica=row.replica,
    )
