"""The files of each process in a step's folder: its part of the manifest, its spans, its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import StepLayout
from stepscope.files.manifest.parts import expire_pending, part_files
from stepscope.files.manifest.records import Expectation, ProcessPart
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import Header
from stepscope_report.timeline.model import FileProblem
from stepscope_report.timeline.record_files import (
    CounterFile,
    RecordFile,
    SpanFile,
    leave_out_far,
    read_counters,
    read_spans,
    skim_spans,
)


class Source(NamedTuple):
    """One process of one run."""

    run_id: str
    step: int
    info: ProcessInfo
    opened: ClockAnchor
    closed: ClockAnchor | None
    part: ProcessPart | None
    file: SpanFile | None
    counters: CounterFile | None = None
    capture: int = 1
    """Number of this capture among those of the step in this process."""

    @property
    def process(self) -> ProcessInfo:
        return self.info

    @property
    def owner(self) -> bool:
        return self.part is not None and self.part.owner

    @property
    def clocks(self) -> tuple[ClockOffset, ...]:
        return () if self.part is None else self.part.clocks


def read_sources(
    layout: StepLayout, on_read: Callable[[int], None] | None = None, *, spans: bool = True
) -> tuple[list[Source], list[FileProblem]]:
    """Return all processes of every run that left files, and the problems of their files.

    Args:
        spans: Whether the spans of files with an end are read.
    """
    read = read_spans if spans else skim_spans
    parts, unreadable = part_files(layout, as_written=True)
    # The part and the span file of one capture share a name, which identifies a file that lost its header.
    left = {path.stem: part for path, part in parts.items()}
    files = {path.stem: read(path, on_read) for path in sorted(layout.spans.glob("[!.]*.jsonl"))}
    counted = {
        path.stem: read_counters(path, on_read) for path in sorted(layout.counters.glob("[!.]*.jsonl"))
    }
    problems = [
        FileProblem(file=f"{layout.processes.name}/{path.name}", what=why) for path, why in unreadable.items()
    ]
    sources = []
    for name in sorted({*left, *files}):
        source = _source(left.get(name), files.get(name), counted.get(name))
        if source is not None:
            number = layout.capture_of(Path(f"{name}.json"), source.info, source.run_id)
            sources.append(source._replace(capture=number))
        if name in files:
            unowned = None if source is not None else len(files[name].spans) or None
            problems += _problems(layout.spans, files[name], unowned)
    for name, counters in counted.items():
        used = name in left or name in files
        problems += _problems(layout.counters, counters, None if used else len(counters.samples))
    return sources, problems


def _source(part: ProcessPart | None, file: SpanFile | None, counters: CounterFile | None) -> Source | None:
    """Return the process that wrote the files, or None if neither its part nor its spans identify it."""
    header, end = (file.header, file.end) if file is not None else (None, None)
    record = header or part
    if record is None:
        return None
    opened = record.anchor if isinstance(record, Header) else record.opened
    closed = end.anchor if end is not None else part.closed if part is not None else None
    if file is not None:
        leave_out_far(file, opened, closed)
    if end is not None and part is not None:
        whole = {"spans"} if counters is None or counters.end is None else {"spans", "counters"}
        part = _closed(part, whole)
    part = None if part is None else expire_pending(part)
    return Source(record.run_id, record.step, record.process, opened, closed, part, file, counters)


def _closed(part: ProcessPart, whole: Set[str]) -> ProcessPart:
    """Return a process' part without things that wait for its closing: its span file shows that it closed its
    capture.

    A full disk may have prevented the last update of the part.

    Args:
        whole: Kinds of things whose files have their ends.
    """
    expected = (
        item if item.pending != "closing" else _whole(item) if item.kind in whole else _unknown(item)
        for item in part.expected
    )
    return msgspec.structs.replace(part, expected=tuple(expected))


def _whole(item: Expectation) -> Expectation:
    return msgspec.structs.replace(item, state="ok", pending=None, reason=None)


def _unknown(item: Expectation) -> Expectation:
    reason = "its process closed the capture, and could not write what became of this"
    return msgspec.structs.replace(item, state="missing", pending=None, reason=reason)


def _problems(folder: Path, file: RecordFile, unowned: int | None) -> Iterator[FileProblem]:
    """Yield the problems of a file.

    Args:
        unowned: Number of its lines, if nothing tells which process wrote them.
    """
    name = f"{folder.name}/{file.path.name}"
    for what, lines in file.problems.items():
        yield FileProblem(file=name, what=what, lines=lines)
    if unowned is not None:
        yield FileProblem(file=name, what="left out: nothing says whose it is", lines=unowned)
