"""Summaries of snapshots of CUDA's allocator in a step."""

from __future__ import annotations

import gzip
import zlib

import msgspec

from stepscope.files.cuda_memory import OOM_SUMMARY, MemorySummary
from stepscope.timeline.model import FileProblem, Timeline
from stepscope.timeline.step.rows import offset_at
from stepscope.timeline.step.traces import TraceFile

_LARGEST = 64 << 20
"""Largest number of bytes that are read of a summary. A few hundred kB are usual."""


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one snapshot, with its process."""

    file: str
    """Relative to the step's folder."""
    process: int
    """Index in `Timeline.processes`."""
    stage: str | None
    """None: the snapshot is of the whole capture."""
    oom: bool
    """True if it was taken because CUDA was out of memory."""
    summary: MemorySummary
    ahead_ns: int
    """Lead of the process' wall clock, which the summary uses, over the owner's."""


def read_memory(file: TraceFile, timeline: Timeline) -> MemoryRecord | FileProblem:
    """Return the record of a summary, or the problem of its file."""
    sidecar = file.sidecar
    keys = [process.info.key for process in timeline.processes]
    if sidecar is None or sidecar.process not in keys:
        return FileProblem(file=file.name, what="it is of no process of this step")
    try:
        with gzip.open(file.path) as packed:
            summary = msgspec.json.decode(packed.read(_LARGEST), type=MemorySummary)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, msgspec.DecodeError) as error:
        return FileProblem(file=file.name, what=f"no summary of CUDA memory: {type(error).__name__}: {error}")
    index = keys.index(sidecar.process)
    process = timeline.processes[index]
    return MemoryRecord(
        file=file.name,
        process=index,
        stage=sidecar.artifact.stage,
        oom=sidecar.artifact.kind == OOM_SUMMARY,
        summary=summary,
        ahead_ns=offset_at(process, process.opened_ns) if process.aligned else 0,
    )
