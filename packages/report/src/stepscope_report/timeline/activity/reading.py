"""Reading of several traces and recordings, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path

import msgspec

from stepscope.files.sidecar import Sidecar
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import nothing_read, read_trace
from stepscope_report.timeline.activity.recordings import ProcessContent, read_recording
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.processes import Lost, results, size_of
from stepscope_report.timeline.readers.installed import Readers
from stepscope_report.timeline.step.traces import TraceFile


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file, for another process."""

    path: Path
    name: str
    sidecar: Sidecar | None
    torch: bool
    """False: an installed reader reads it."""


def read_part(part: TracePart) -> list[ProcessContent]:
    trace = TraceFile(part.path, part.name, part.sidecar)
    reader = None if part.torch else Readers().claim(trace.found_file)[0]
    return _read_here(trace._replace(reader=reader), None)


def read_all(
    traces: Sequence[TraceFile],
    on_read: Callable[[int], None] | None = None,
    executor: Executor | None = None,
    digests: Digests | None = None,
) -> list[list[ProcessContent]]:
    """Return what each file holds of each of its processes, in the order of `traces`.

    Args:
        digests: Has the content of traces that were read before, and takes that of the others.
    """
    contents = {} if digests is None else _kept(traces, digests, on_read)
    missing = [trace for trace in traces if trace.path not in contents]
    stamps = {} if digests is None else {trace.path: digests.stamps([trace.path]) for trace in missing}
    with closing(_read(missing, on_read, executor)) as parts:
        for trace, content in zip(missing, parts, strict=True):
            if isinstance(content, Lost):
                contents[trace.path] = _alone(nothing_read(f"not read: {content.why}"))
                continue
            contents[trace.path] = content
            if digests is not None:
                digests.keep([trace.path], content, stamps[trace.path])
    return [contents[trace.path] for trace in traces]


def _kept(
    traces: Sequence[TraceFile], digests: Digests, on_read: Callable[[int], None] | None
) -> dict[Path, list[ProcessContent]]:
    contents = {}
    for trace in traces:
        content = digests.kept([trace.path], list[ProcessContent])
        if content is not None:
            contents[trace.path] = content
            if on_read is not None:
                on_read(size_of(trace.path))
    return contents


def _read(
    traces: Sequence[TraceFile], on_read: Callable[[int], None] | None, executor: Executor | None
) -> Generator[list[ProcessContent] | Lost, None, None]:
    if executor is None:
        for trace in traces:
            yield _read_here(trace, on_read)
        return
    parts = [
        TracePart(path=path, name=name, sidecar=sidecar, torch=reader is None)
        for path, name, sidecar, reader in traces
    ]
    with closing(results(executor, read_part, parts, [[trace.path] for trace in traces])) as contents:
        for content, trace in zip(contents, traces, strict=True):
            yield content
            if on_read is not None:
                on_read(size_of(trace.path, executor))


def _read_here(trace: TraceFile, on_read: Callable[[int], None] | None) -> list[ProcessContent]:
    if trace.reader is None:
        return _alone(read_trace(trace.path, on_read))
    contents = read_recording(trace.reader, trace.found_file)
    if on_read is not None:
        on_read(size_of(trace.path))
    return contents


def _alone(content: TraceContent) -> list[ProcessContent]:
    return [ProcessContent(pid=None, content=content)]
