"""Readers of files as events, and the contract for further ones (`stepscope.readers`).

`chrome` splits the JSON of Chrome traces; `timeline.activity.content_reader` turns the events into numbers.
"""

from stepscope_report.timeline.readers.chrome import chrome_events
from stepscope_report.timeline.readers.contract import (
    Claim,
    Clock,
    Counter,
    Event,
    Flow,
    FoundFile,
    Instant,
    Notes,
    Origin,
    Reader,
    Recording,
    Slice,
    Track,
    clock_of,
)

__all__ = [
    "Claim",
    "Clock",
    "Counter",
    "Event",
    "Flow",
    "FoundFile",
    "Instant",
    "Notes",
    "Origin",
    "Reader",
    "Recording",
    "Slice",
    "Track",
    "chrome_events",
    "clock_of",
]
