"""`oom/`: what a process left when CUDA ran out of memory, at whichever step that was."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One out-of-memory error: `oom/<process>_<n>.json`, with the snapshot beside it as `.pickle`."""

    format: int = 1
    run_id: str
    process: ProcessInfo
    at_ns: int
    """Unix ns."""
    step: int | None
    """The step whose capture was open, or else the last one that began here; None: none that it knows."""
    device: int
    asked_bytes: int
    limit_bytes: int
    """What the device has, or what `set_per_process_memory_fraction` allows."""
    free_bytes: int
    history: bool
    """Whether the snapshot holds the allocator's history, with stacks, or what was allocated alone."""
    snapshot: str | None
    """Its file name. Open it at https://pytorch.org/memory_viz."""
    why_none: str | None = None


def write_out_of_memory(run: RunLayout, number: int, record: OutOfMemory) -> None:
    write_atomic(run.oom_record(record.process, record.run_id, number), msgspec.json.encode(record))


def read_out_of_memory(run: RunLayout) -> list[OutOfMemory]:
    """All that are there, by time; what cannot be read is left out."""
    found = []
    for path in run.oom.glob("[!.]*.json"):
        with suppress(OSError, RecordError):
            found.append(read_record(path, OutOfMemory))
    return sorted(found, key=lambda record: record.at_ns)
