"""How long steps took that were not captured, as it stands in `uncaptured/*.jsonl`: one JSON object a line.

Written by the process that opens captures. Only the steps near a captured one are kept, so the file grows
with the captures and not with the run.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import Int
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.reading import read_file


class UncapturedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step, from where its capture would have opened to where it would have closed."""

    step: Int
    start_ns: Int
    """Unix ns, on the clock of the process that recorded it."""
    dur_ns: Int
    """By its monotonic clock."""
    first: bool = False
    """The first one after a capture: traces may still have been written meanwhile."""
    warm_up: bool = False
    """The first of its loop: it pays for compiling, allocating and connecting, and compares with no other."""


COMPARED = 40
"""How many a captured step is compared with, at most."""


def uncaptured_near(
    step: StepLayout, process: ProcessInfo, run_id: str, opened_ns: int
) -> tuple[UncapturedStep, ...]:
    """Of the loop whose `process` opened a capture at `opened_ns`: those nearest to it, in order of start.

    They lie in the run's folder: a step's folder that was moved out of it has none.
    """
    found = read_uncaptured(RunLayout(step.root.absolute().parent).uncaptured(process, run_id))
    near = sorted(found, key=lambda each: abs(each.start_ns - opened_ns))[:COMPARED]
    return tuple(sorted(near, key=lambda each: each.start_ns))


def read_uncaptured(path: Path) -> list[UncapturedStep]:
    """What of the file can be read, in the order of writing; empty where there is none."""
    try:
        lines = read_file(path).split(b"\n")
    except (OSError, RecordError):
        return []
    decoder = msgspec.json.Decoder(UncapturedStep)
    found = []
    for line in lines:
        try:
            found.append(decoder.decode(line))
        except (ValueError, msgspec.DecodeError, RecursionError):
            continue  # the end, or cut off when its writer was killed
    return [each for each in found if each.dur_ns >= 0]
