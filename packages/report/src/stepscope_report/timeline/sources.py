"""The files of each process in a step's folder: its part of the manifest, its spans, its counters.

Files of spans and counters have one JSON object per line. Killed processes and full disks leave damaged
files. All lines that can be read are used.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from stepscope.files import counters as counter_lines
from stepscope.files import spans as span_lines
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import StepLayout, safe
from stepscope.files.manifest import Expectation, ProcessPart
from stepscope.files.manifest_parts import expire_pending, part_files
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import RECENT_NS, CounterNow
from stepscope.files.storage import LONGEST_LINE, lines_of, open_file
from stepscope_report.timeline.clocks import FARTHEST_NS, MARGIN_NS, NOT_NEAR, is_near
from stepscope_report.timeline.model import FileProblem

_R = TypeVar("_R")
_span_line = msgspec.json.Decoder(span_lines.Line).decode
_counter_line = msgspec.json.Decoder(counter_lines.Line).decode
_LAST_BYTES = 4096
"""Number of bytes within which the last record of a span file lies."""


class RecordFile(msgspec.Struct):
    """Usable content of one file."""

    path: Path
    problems: dict[str, int | None] = {}
    """{problem: number of lines, or None for the whole file}."""

    def note(self, problem: str, lines: int | None = 1) -> None:
        """Count lines that have a problem."""
        before = self.problems.get(problem)
        self.problems[problem] = lines if before is None or lines is None else before + lines

    def records(self, decode: Callable[[bytes], _R], on_read: Callable[[int], None] | None) -> Iterator[_R]:
        """Yield the records, and note the lines without a valid one. A damaged or missing file raises no
        exception.

        Args:
            on_read: Called with the number of bytes of each read.
        """
        try:
            with open_file(self.path) as stream:
                for line, whole in lines_of(stream):
                    if on_read is not None:
                        on_read(len(line))
                    try:
                        record = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        cut = "last line cut off: its writer was killed, or the disk full"
                        self.note("lines that are no record" if whole else cut)
                    else:
                        yield record
        except OSError as error:
            self.note(f"cannot be read: {error.strerror or error}", lines=None)


class SpanFile(RecordFile):
    """Usable content of one file of spans."""

    header: span_lines.Header | None = None
    end: span_lines.End | None = None
    spans: dict[int, span_lines.Open] = msgspec.field(default_factory=dict)
    """Records by id: a `Span`, or an `Open` without an end."""
    latest_ns: int | None = None
    """The latest monotonic time in the file; None if the file contains no time."""


class CounterFile(RecordFile):
    """Usable content of one file of counters."""

    header: counter_lines.Header | None = None
    end: counter_lines.End | None = None
    series: dict[int, counter_lines.Series] = msgspec.field(default_factory=dict)
    """{number: series}."""
    samples: list[counter_lines.Sample] = msgspec.field(default_factory=list)
    """The samples in the order of their times."""


def read_spans(path: Path, on_read: Callable[[int], None] | None = None) -> SpanFile:
    """Return the records of a file of spans. A damaged or missing file raises no exception."""
    file = SpanFile(path)
    for record in file.records(_span_line, on_read):
        _take(file, record)
    if file.header is None:
        something = file.spans or file.end or file.problems
        file.note("no header" if something else "empty", lines=None)
    finished = sum(isinstance(span, span_lines.Span) for span in file.spans.values())
    if file.end is not None and finished < file.end.spans:
        file.note(f"spans lost: its end counts {file.end.spans}", lines=file.end.spans - finished)
    return file


def _skim_spans(path: Path, on_read: Callable[[int], None] | None = None) -> SpanFile:
    """Return a span file with only its header and its last record, or the whole file if one of the two is
    missing.
    """
    file = SpanFile(path)
    with suppress(OSError, ValueError, RecursionError), open_file(path) as stream:
        _take(file, _span_line(stream.readline(LONGEST_LINE)))
        stream.seek(-min(_LAST_BYTES, os.fstat(stream.fileno()).st_size), os.SEEK_END)
        _take(file, _span_line(stream.readlines()[-1]))
    return read_spans(path, on_read) if file.header is None or file.end is None else file


def _leave_out_far(file: SpanFile, opened: ClockAnchor, closed: ClockAnchor | None) -> None:
    """Leave out finished spans that end more than an hour from the capture, or begin more than an hour before
    their parent, and count them. A program may pass any times to `span.add`.
    """
    end_ns = _written_ns(file, opened) if closed is None else closed.mono_ns
    window = opened.mono_ns, end_ns
    far = [number for number, span in file.spans.items() if _is_far(span, file, window)]
    if not far:
        return
    file.note(NOT_NEAR.replace("events", "spans"), len(far))
    for number in far:
        del file.spans[number]
    file.latest_ns = None if file.end is None else file.end.anchor.mono_ns
    for span in file.spans.values():
        _seen(file, span.start_ns + (span.dur_ns if isinstance(span, span_lines.Span) else 0))


def _is_far(span: span_lines.Open, file: SpanFile, window: tuple[int, int]) -> bool:
    if not isinstance(span, span_lines.Span):
        return False
    above = None if span.parent is None else file.spans.get(span.parent)
    first_ns = 0 if above is None else above.start_ns - MARGIN_NS
    end_ns = span.start_ns + span.dur_ns
    return span.start_ns < first_ns or not is_near(end_ns, end_ns, window)


def _written_ns(file: SpanFile, opened: ClockAnchor) -> int:
    """Return the monotonic time of the last write to a file, for a process that was killed."""
    try:
        return opened.mono_ns + max(0, file.path.stat().st_mtime_ns - opened.wall_ns)
    except OSError:
        return FARTHEST_NS


def _take(file: SpanFile, record: span_lines.Line) -> None:
    if isinstance(record, span_lines.Open):
        _take_span(file, record)
    elif not (_possible(record.anchor.mono_ns) and _possible(record.anchor.wall_ns)):
        file.note("clock readings that are impossible")
    elif isinstance(record, span_lines.End):
        file.end = record
        _seen(file, record.anchor.mono_ns)
    elif file.header is None:
        file.header = record
    else:
        file.note("further headers")


def _take_span(file: SpanFile, record: span_lines.Open) -> None:
    dur_ns = record.dur_ns if isinstance(record, span_lines.Span) else 0
    if not (_possible(dur_ns) and _possible(record.start_ns)):
        file.note("spans with impossible times")
        return
    if isinstance(file.spans.get(record.span), span_lines.Span):
        if isinstance(record, span_lines.Span):
            file.note("spans whose number another one has")
        return
    file.spans[record.span] = record
    _seen(file, record.start_ns + dur_ns)


def _possible(time_ns: int) -> bool:
    return 0 <= time_ns < FARTHEST_NS


def _seen(file: SpanFile, mono_ns: int) -> None:
    file.latest_ns = mono_ns if file.latest_ns is None else max(file.latest_ns, mono_ns)


def read_counters(path: Path, on_read: Callable[[int], None] | None = None) -> CounterFile:
    """Return the records of a file of counters. A damaged or missing file raises no exception."""
    file = CounterFile(path)
    for record in file.records(_counter_line, on_read):
        match record:
            case counter_lines.Sample():
                if _possible(record.at_ns) and all(map(isfinite, record.values.values())):
                    file.samples.append(record)
                else:
                    file.note("samples that are impossible")
            case counter_lines.Series():
                file.series.setdefault(record.series, record)
            case counter_lines.End():
                file.end = record
            case counter_lines.Header() if file.header is None:
                file.header = record
            case _:
                file.note("further headers")
    file.samples.sort(key=lambda sample: sample.at_ns)
    if file.header is None:
        file.note("no header" if file.samples or file.problems else "empty", lines=None)
    if file.end is not None and len(file.samples) < file.end.samples:
        lost = file.end.samples - len(file.samples)
        file.note(f"samples lost: its end counts {file.end.samples}", lines=lost)
    return file


def latest_counters(step: StepLayout, run: str) -> list[tuple[ProcessInfo, tuple[CounterNow, ...]]]:
    """Return the means over the last seconds of the counter files, in the form of a live process' state.

    Args:
        run: Id of the run, as written in file names. Files of other runs are left out.
    """
    files = (read_counters(path) for path in sorted(step.counters.glob("[!.]*.jsonl")))
    return [
        (file.header.process, tuple(_means(file)))
        for file in files
        if file.header is not None and safe(file.header.run_id) == run
    ]


def _means(file: CounterFile) -> Iterator[CounterNow]:
    values: dict[int, list[float]] = defaultdict(list)
    since_ns = file.samples[-1].at_ns - RECENT_NS if file.samples else 0
    for sample in file.samples:
        if sample.at_ns > since_ns:
            for number, value in sample.values.items():
                values[number].append(value)
    for number, own in values.items():
        series = file.series.get(number)
        if series is not None and series.how != "total":
            yield CounterNow(name=series.name, of=series.of, value=round(sum(own) / len(own), 3))


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
    """Number of this capture among the captures of the step in this process."""

    @property
    def process(self) -> ProcessInfo:
        return self.info

    @property
    def owner(self) -> bool:
        return self.part is not None and self.part.owner

    @property
    def imported_ns(self) -> int | None:
        return None if self.part is None else self.part.imported_ns

    @property
    def clocks(self) -> tuple[ClockOffset, ...]:
        return () if self.part is None else self.part.clocks


def read_sources(
    layout: StepLayout, on_read: Callable[[int], None] | None = None, *, spans: bool = True
) -> tuple[list[Source], list[FileProblem]]:
    """Return all processes of every run that left files, and the problems of their files.

    Args:
        spans: False to read only the header and the end of complete span files.
    """
    read = read_spans if spans else _skim_spans
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
    """Return the process that wrote the files, or None if neither its part of the manifest nor its spans
    identify it.
    """
    header, end = (file.header, file.end) if file is not None else (None, None)
    record = header or part
    if record is None:
        return None
    opened = record.anchor if isinstance(record, span_lines.Header) else record.opened
    closed = end.anchor if end is not None else part.closed if part is not None else None
    if file is not None:
        _leave_out_far(file, opened, closed)
    if end is not None and part is not None:
        whole = {"spans"} if counters is None or counters.end is None else {"spans", "counters"}
        part = _closed(part, whole)
    part = None if part is None else expire_pending(part)
    return Source(record.run_id, record.step, record.process, opened, closed, part, file, counters)


def _closed(part: ProcessPart, whole: Set[str]) -> ProcessPart:
    """Return a part of the manifest in which no item waits for the closing of the capture any more. The span
    file shows that the capture was closed.

    A full disk may have prevented the last update of the part.

    Args:
        whole: Kinds of items whose files are complete.
    """
    expected = (
        item if item.pending != "closing" else _whole(item) if item.kind in whole else _unknown(item)
        for item in part.expected
    )
    return msgspec.structs.replace(part, expected=tuple(expected))


def _whole(item: Expectation) -> Expectation:
    return msgspec.structs.replace(item, state="ok", pending=None, reason=None)


def _unknown(item: Expectation) -> Expectation:
    reason = "its process closed the capture, and could not write the manifest (a full disk?)"
    return msgspec.structs.replace(item, state="missing", pending=None, reason=reason)


def _problems(folder: Path, file: RecordFile, unowned: int | None) -> Iterator[FileProblem]:
    """Yield the problems of a file.

    Args:
        unowned: Number of the file's lines if the process that wrote them is unknown, else None.
    """
    name = f"{folder.name}/{file.path.name}"
    for what, lines in file.problems.items():
        yield FileProblem(file=name, what=what, lines=lines)
    if unowned is not None:
        yield FileProblem(file=name, what="left out: nothing says whose it is", lines=unowned)
