"""Summaries of allocator snapshots, and records of CUDA's out-of-memory errors.

The summary of a snapshot is a small JSON file beside the snapshot, which is a pickle.

Loading a pickle can run code, so the report does not load pickles. The recorded process, which has the
snapshot in memory, writes the summary for the report.
"""

from __future__ import annotations

import msgspec

from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import read_records, write_atomic

SUMMARY = "cuda_memory_summary"
"""`Artifact.kind` of the summary of a snapshot."""
OOM_SUMMARY = "cuda_memory_oom_summary"
"""`Artifact.kind` of the summary of a snapshot that was taken at an out-of-memory error."""


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An allocation that was alive at the peak."""

    bytes: int
    at_us: int | None
    """Time of the allocation in unix us, or None if torch does not report it."""
    where: int
    """Index in `DeviceMemory.frames`, or -1 if no stack was kept."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    device: int
    events: int
    """The number of events in the allocator's history."""
    since_us: int | None
    """Time of the first event in unix us, or None if torch does not report it. Earlier allocations are
    unknown."""
    cut: bool
    """True if the history was full, so that its oldest events were dropped (`cuda_memory.max_entries`)."""
    peak_bytes: int
    """Largest number of bytes that were allocated at one time within the history."""
    peak_us: int | None
    """Time of the peak in unix us, or None if torch does not report it."""
    peak_reserved_bytes: int
    """Largest number of bytes that the allocator reserved on the device."""
    end_bytes: int
    """Bytes that were allocated when the snapshot was taken."""
    end_reserved_bytes: int
    """Bytes that the allocator had reserved when the snapshot was taken."""
    before_bytes: int
    """Bytes of `peak_bytes` that were allocated before the first event."""
    blocks: tuple[Block, ...]
    """The largest blocks at the peak, in descending order."""
    other_blocks: int
    """Number of smaller blocks at the peak, which are not listed."""
    other_bytes: int
    """Bytes of the smaller blocks, which are not listed."""
    frames: tuple[str, ...]
    """For each stack, its innermost frame outside of torch: `model.py:41 forward`."""
    ooms: int
    oom_bytes: int | None
    """Size of the first allocation that failed, or None if none failed."""


class MemorySummary(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    devices: tuple[DeviceMemory, ...]


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One out-of-memory error: `oom/<process>_<run>_<n>.json`. The snapshot is beside it, as `.pickle`."""

    format: int = 1
    run_id: str
    process: ProcessInfo
    at_ns: int
    """Time of the error in unix ns."""
    step: int | None
    """The step of the open capture, else the last step that began in this process; None if unknown."""
    device: int
    asked_bytes: int
    limit_bytes: int
    """The memory of the device, or the share that `set_per_process_memory_fraction` allows."""
    free_bytes: int
    history: bool
    """True if the snapshot contains the allocator's history with stacks; False if it contains only live
    blocks."""
    snapshot: str | None
    """The file name of the snapshot, which https://pytorch.org/memory_viz shows, or None if there is no
    snapshot."""
    why_none: str | None = None
    """Reason why there is no snapshot, or None if there is one."""


def write_out_of_memory(run: RunLayout, number: int, record: OutOfMemory) -> None:
    write_atomic(run.oom_record(record.process, record.run_id, number), msgspec.json.encode(record))


def read_out_of_memory(run: RunLayout) -> list[OutOfMemory]:
    """Return all readable records, ordered by time."""
    return sorted(read_records(run.oom.glob("[!.]*.json"), OutOfMemory), key=lambda record: record.at_ns)
