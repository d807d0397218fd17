"""Reading of several traces, in this process or in others."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path

from stepscope.timeline.activity.content import TraceContent
from stepscope.timeline.activity.content_reader import nothing_read, read_trace
from stepscope.timeline.digests import Digests
from stepscope.timeline.execution.near import size_of
from stepscope.timeline.execution.parts import Lost, results


def read_part(path: bytes) -> TraceContent:
    """Read the trace in `path`, which are the system's bytes."""
    return read_trace(Path(os.fsdecode(path)))


def read_all(
    paths: Sequence[Path],
    on_read: Callable[[int], None] | None = None,
    executor: Executor | None = None,
    digests: Digests | None = None,
) -> list[TraceContent]:
    """Return the content of each trace, in the order of `paths`.

    Args:
        digests: Has the content of traces that were read before, and takes that of the others.
    """
    contents = {} if digests is None else _kept(paths, digests, on_read)
    missing = [path for path in paths if path not in contents]
    stamps = {} if digests is None else {path: digests.stamps([path]) for path in missing}
    with closing(_read(missing, on_read, executor)) as parts:
        for path, content in zip(missing, parts, strict=True):
            if isinstance(content, Lost):
                contents[path] = nothing_read(f"not read: twice, {content.why}")
                continue
            contents[path] = content
            if digests is not None:
                digests.keep([path], content, stamps[path])
    return [contents[path] for path in paths]


def _kept(
    paths: Sequence[Path], digests: Digests, on_read: Callable[[int], None] | None
) -> dict[Path, TraceContent]:
    contents = {}
    for path in paths:
        content = digests.kept([path], TraceContent)
        if content is not None:
            contents[path] = content
            if on_read is not None:
                on_read(size_of(path))
    return contents


def _read(
    paths: Sequence[Path], on_read: Callable[[int], None] | None, executor: Executor | None
) -> Generator[TraceContent | Lost, None, None]:
    if executor is None:
        for path in paths:
            yield read_trace(path, on_read)
        return
    encoded = [os.fsencode(path) for path in paths]
    with closing(results(executor, read_part, encoded, [[path] for path in paths])) as parts:
        for content, path in zip(parts, paths, strict=True):
            yield content
            if on_read is not None:
                on_read(size_of(path, executor))
