"""One captured step read back from disk: `load_step` returns its `Timeline`, `merge_step` writes one file.

This package imports neither torch nor Ray. Its modules are imported at their first use, because a process
that reads one trace needs few of the modules.

`load` reads spans, counters and the manifest into the `Timeline`; `activity` reads the content of traces, and
places it in the step. `merge` writes spans, counters and traces into one file. `readers` turn files into
events, and `clocks` put processes on the clock of the capture's owner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope_report.timeline.activity.content import Requests
    from stepscope_report.timeline.activity.traces import TraceActivity, Traces, load_traces
    from stepscope_report.timeline.load import load_step, span_bytes
    from stepscope_report.timeline.merge import Merged, MergedFile, MergedRow, Selection
    from stepscope_report.timeline.merge.merge import bytes_to_read, merge_step
    from stepscope_report.timeline.model import (
        Alignment,
        Counter,
        EngineStall,
        FileProblem,
        Process,
        ProcessClock,
        Span,
        Timeline,
        Window,
    )

__all__ = [
    "Alignment",
    "Counter",
    "EngineStall",
    "FileProblem",
    "Merged",
    "MergedFile",
    "MergedRow",
    "Process",
    "ProcessClock",
    "Requests",
    "Selection",
    "Span",
    "Timeline",
    "TraceActivity",
    "Traces",
    "Window",
    "bytes_to_read",
    "load_step",
    "load_traces",
    "merge_step",
    "span_bytes",
]

_WHERE = {
    "activity.content": ("Requests",),
    "activity.traces": ("TraceActivity", "Traces", "load_traces"),
    "load": ("load_step", "span_bytes"),
    "merge.merge": ("bytes_to_read", "merge_step"),
    "merge": ("Merged", "MergedFile", "MergedRow", "Selection"),
    "model": (
        "Alignment",
        "Counter",
        "EngineStall",
        "FileProblem",
        "Process",
        "ProcessClock",
        "Span",
        "Timeline",
        "Window",
    ),
}
_LATER = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value  # a module attribute, so later accesses skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
