"""Reading of several traces, in this process or in others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path

from stepscope.timeline.activity.content import TraceContent
from stepscope.timeline.activity.content_reader import nothing_read, read_trace
from stepscope.timeline.execution.parts import Lost, results


def read_part(path: bytes) -> TraceContent:
    """Read the trace in `path`, which are the system's bytes."""
    return read_trace(Path(os.fsdecode(path)))


def read_all(
    paths: Sequence[Path], on_read: Callable[[int], None] | None = None, executor: Executor | None = None
) -> list[TraceContent]:
    """Return the content of each trace, in the order of `paths`."""
    if executor is None:
        return [read_trace(path, on_read) for path in paths]
    contents = []
    sizes = [_size(path) for path in paths]
    with closing(results(executor, read_part, [os.fsencode(path) for path in paths], sizes)) as parts:
        for content, size in zip(parts, sizes, strict=True):
            contents.append(
                nothing_read(f"not read: twice, {content.why}") if isinstance(content, Lost) else content
            )
            if on_read is not None:
                on_read(size)
    return contents


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
