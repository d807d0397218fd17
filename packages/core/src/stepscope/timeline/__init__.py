"""One captured step read back from disk: `load_step` gives its `Timeline`, `merge_step` writes one file.

Imports neither torch nor Ray.
"""

from stepscope.timeline.activity.step import TraceActivity, Traces, load_traces
from stepscope.timeline.load import load_step, span_bytes
from stepscope.timeline.merge import Format, Merged, MergedFile, MergedRow, merge_bytes, merge_step
from stepscope.timeline.model import (
    Alignment,
    FileProblem,
    Process,
    ProcessClock,
    Span,
    Timeline,
    Window,
)
from stepscope.timeline.selection import Selection

__all__ = [
    "Alignment",
    "FileProblem",
    "Format",
    "Merged",
    "MergedFile",
    "MergedRow",
    "Process",
    "ProcessClock",
    "Selection",
    "Span",
    "Timeline",
    "TraceActivity",
    "Traces",
    "Window",
    "load_step",
    "load_traces",
    "merge_bytes",
    "merge_step",
    "span_bytes",
]
