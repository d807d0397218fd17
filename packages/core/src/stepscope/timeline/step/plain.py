"""Timeline of traces that stepscope did not write: files and folders of torch.profiler and of engines.

Each process is known by its traces alone. Its rank is that of `distributedInfo`; else that in the file's
name (`rank0`, `rank_0`, `rank-0`, or SGLang's `TP-0` without other dimensions); else unknown.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import SIDECAR_SUFFIX
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.timeline.activity.content import TraceContent
from stepscope.timeline.activity.reading import read_all
from stepscope.timeline.clocks.align import Aligned, Reference, align
from stepscope.timeline.clocks.refine import refine_by
from stepscope.timeline.model import FileProblem, Process, Timeline, Window
from stepscope.timeline.names import names_of
from stepscope.timeline.readers.chrome import ChromeTrace
from stepscope.timeline.readers.contract import FoundFile
from stepscope.timeline.sources import Source
from stepscope.timeline.step.traces import StepFiles, TraceFile

_SUFFIXES = (".json", ".json.gz")
_FOREIGN = (".nsys-rep", ".sqlite", ".ncu-rep", ".pickle")
_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?(\d+)", re.IGNORECASE)
_DIMENSION = re.compile(r"(?:^|[^A-Za-z])(tp|pp|dp|ep)[-_]?(\d+)(?=[^0-9]|$)", re.IGNORECASE)
_REPLICA = re.compile(r"replica[-_]?(\d+)", re.IGNORECASE)
_HANDLER = re.compile(r"(.+)_(\d+)\.\d+\.pt\.trace\.json")
"""`host_pid.time.pt.trace.json`, of torch's `tensorboard_trace_handler`."""
_FIELD = re.compile(rb'"(?:traceEvents|schemaVersion|ph)"\s*:')
_HEAD = 1 << 18
_MERGED = "merged-"
"""Prefix of the file in which SGLang repeats the traces of its ranks."""
_NO_HOST = "host unknown"
_ASSUMED = "its traces name no host: its wall clock is taken to be that of the others"


class PlainStep(NamedTuple):
    """Traces as one step, with a process for each rank."""

    timeline: Timeline
    files: StepFiles
    contents: list[TraceContent]
    """By trace, as in `files`."""


class _Trace(NamedTuple):
    path: Path
    name: str
    info: ProcessInfo
    topology: dict[str, int] | None
    content: TraceContent


def has_traces(path: Path) -> bool:
    """Return whether a path is, or has below it, a trace."""
    return any(map(_is_trace, _below(path)))


def plain_bytes(paths: Sequence[Path]) -> int:
    """Return the number of bytes that `read_plain` will read."""
    return sum(path.stat().st_size for path in _files(paths))


def read_plain(
    paths: Sequence[Path], on_read: Callable[[int], None] | None = None, executor: Executor | None = None
) -> PlainStep:
    """Return the traces in files and folders as one step. Writes nothing.

    Raises:
        RecordError: none of them holds an event of a trace.
    """
    files = list(_files(paths))
    root = _root(paths)
    unread = [f"{path.relative_to(root)}: SGLang merged it" for path in files if _is_merged(path)]
    unread += [
        f"{file.relative_to(root)}: only read in the folder of a step"
        for path in paths
        for file in path.absolute().rglob("*")
        if file.suffix in _FOREIGN
    ]
    unread += [f"{path.relative_to(root)}: no trace" for path in files if not _is_trace(path)]
    files = [path for path in files if _is_trace(path) and not _is_merged(path)]
    problems: list[FileProblem] = []
    traces: list[_Trace] = []
    for path, content in zip(files, read_all(files, on_read, executor), strict=True):
        name = path.relative_to(root).as_posix()
        if content.events:
            traces.append(_trace(path, name, content))
        elif not content.problems:
            unread.append(f"{name}: it holds no event")
        else:
            problems += [FileProblem(file=name, what=what, events=n) for what, n in content.problems.items()]
    if not traces:
        reasons = "; ".join([*unread, *(f"{problem.file}: {problem.what}" for problem in problems)][:3])
        raise RecordError(f"no trace in {', '.join(map(str, paths))} ({reasons or 'no such files'})")
    step_files = StepFiles([_file(trace) for trace in traces], unread, problems, [])
    return PlainStep(_timeline(root, traces), step_files, [trace.content for trace in traces])


def _is_trace(path: Path) -> bool:
    """Return whether a file is a trace, damaged or not, rather than other JSON. Reads its beginning alone."""
    head = FoundFile(path=path, name=path.name).head(_HEAD)
    return ".trace.json" in path.name or _FIELD.search(head) is not None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    return iter(sorted({file.absolute() for path in paths for file in _below(path)}))


def _below(path: Path) -> Iterator[Path]:
    candidates = [path] if path.is_file() else path.rglob("*")
    for file in candidates:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        named = file.name.endswith(_SUFFIXES) and not file.name.endswith(SIDECAR_SUFFIX)
        if named and not hidden and file.is_file():
            yield file


def _is_merged(path: Path) -> bool:
    return path.name.startswith(_MERGED)


def _root(paths: Sequence[Path]) -> Path:
    folders = [path.absolute() if path.is_dir() else path.absolute().parent for path in paths]
    return Path(os.path.commonpath(folders))


def _trace(path: Path, name: str, content: TraceContent) -> _Trace:
    fields = ChromeTrace(path).fields()
    distributed, pid = content.distributed, fields.pid or 0
    topology = {key.lower(): int(number) for key, number in _DIMENSION.findall(path.name)}
    named = _HANDLER.match(path.name)
    host = content.host or (named[1] if named is not None and int(named[2]) == pid else _NO_HOST)
    rank = None if distributed is None else distributed.rank
    rank = _named_rank(path.name, topology) if rank is None else rank
    replica = _REPLICA.search(name)
    role = "rollout" if content.iterations else "trace" if rank is None else "rank"
    info = ProcessInfo(
        role=role,
        rank=rank,
        world_size=None if distributed is None else distributed.world_size,
        host=host,
        pid=pid,
        replica=None if replica is None else int(replica[1]),
    )
    return _Trace(path, name, info, topology or None, content)


def _named_rank(name: str, topology: dict[str, int]) -> int | None:
    match = _RANK.search(name)
    if match is not None:
        return int(match[1])
    return topology["tp"] if set(topology) == {"tp"} else None


def _file(trace: _Trace) -> TraceFile:
    info = trace.info
    artifact = Artifact(
        path=trace.name,
        kind="torch_trace",
        tool="torch",
        role=info.role,
        rank=info.rank,
        world_size=info.world_size,
        replica=info.replica,
        topology=trace.topology,
        host=info.host,
        pid=info.pid,
        size_bytes=trace.path.stat().st_size,
    )
    sidecar = Sidecar(step=0, run_id="", artifact=artifact, process=info.key, opened=None, closed=None)
    return TraceFile(trace.path, trace.name, sidecar)


def _timeline(root: Path, traces: Sequence[_Trace]) -> Timeline:
    """Return a timeline without spans. Traces without a wall clock have no process in it."""
    by_key: dict[str, list[_Trace]] = {}
    for trace in traces:
        if trace.content.base_ns is not None:
            by_key.setdefault(trace.info.key, []).append(trace)
    groups = sorted(by_key.values(), key=lambda group: (group[0].info.role, _rank(group[0]), group[0].name))
    sources = [_source(group) for group in groups]
    aligned = _align(sources, groups)
    names = names_of([source.info for source in sources])
    processes = tuple(map(_process, sources, names, aligned))
    return Timeline(
        step=0,
        run_id=root.name,
        runs=(root.name,),
        window=_window(processes, traces),
        processes=processes,
        spans=[],
        manifest=None,
    )


def _rank(trace: _Trace) -> int:
    return -1 if trace.info.rank is None else trace.info.rank


def _source(group: Sequence[_Trace]) -> Source:
    times = [_extent(trace.content) for trace in group]
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
    """Align by wall clocks, and hosts with each other by the collectives that both took part in."""
    if not sources:
        return []
    ((host, _),) = Counter(source.info.host for source in sources).most_common(1)
    reference = Reference(host, place=None, uncertainty_ns=0, offsets=())
    aligned = [align(s.info.key, s.info.host, s.opened, s.closed, reference) for s in sources]
    paths = {index: [trace.path for trace in group] for index, group in enumerate(groups)}
    return refine_by(sources, aligned, reference, lambda: paths)


def _process(source: Source, name: str, aligned: Aligned) -> Process:
    opened_ns, closed_ns = (
        aligned.place(source.opened.mono_ns),
        aligned.place((source.closed or source.opened).mono_ns),
    )
    clock = aligned.clock
    if source.info.host == _NO_HOST:
        clock = msgspec.structs.replace(clock, alignment="assumed", uncertainty_ns=None, note=_ASSUMED)
    return Process(
        name=name,
        info=source.info,
        owner=False,
        opened_ns=opened_ns,
        closed_ns=closed_ns,
        last_ns=closed_ns,
        clock=clock,
        spans=0,
        dropped=0,
        cost=None,
        profiled=True,
    )


def _window(processes: Sequence[Process], traces: Sequence[_Trace]) -> Window:
    times = [(p.opened_ns, p.last_ns) for p in processes if p.aligned]
    times = times or [_extent(trace.content) for trace in traces]
    start_ns, end_ns = min(first for first, _ in times), max(last for _, last in times)
    return Window(start_ns=start_ns, end_ns=end_ns, opened=False, closed=False)
