"""One captured step read back from disk: `load_step` gives its `Timeline`. Imports neither torch nor Ray."""

from stepscope.timeline.load import load_step, span_bytes
from stepscope.timeline.model import (
    Alignment,
    FileProblem,
    Process,
    ProcessClock,
    Span,
    Timeline,
    Window,
)

__all__ = [
    "Alignment",
    "FileProblem",
    "Process",
    "ProcessClock",
    "Span",
    "Timeline",
    "Window",
    "load_step",
    "span_bytes",
]
