"""`oom/`: records and snapshots of CUDA's out-of-memory errors, at any step."""

from __future__ import annotations

import msgspec

from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_records


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One out-of-memory error: `oom/<process>_<n>.json`, with the snapshot beside it as `.pickle`."""

    format: int = 1
    run_id: str
    process: ProcessInfo
    at_ns: int
    """Time of the error in unix ns."""
    step: int | None
    """The step of the open capture, else of the last step that began here; None if unknown."""
    device: int
    asked_bytes: int
    limit_bytes: int
    """The memory of the device, or the share that `set_per_process_memory_fraction` allows."""
    free_bytes: int
    history: bool
    """True if the snapshot holds the allocator's history with stacks; False if it holds only live blocks."""
    snapshot: str | None
    """The file name of the snapshot. Open it at https://pytorch.org/memory_viz."""
    why_none: str | None = None


def write_out_of_memory(run: RunLayout, number: int, record: OutOfMemory) -> None:
    write_atomic(run.oom_record(record.process, record.run_id, number), msgspec.json.encode(record))


def read_out_of_memory(run: RunLayout) -> list[OutOfMemory]:
    """Return all readable records, by time."""
    return sorted(read_records(run.oom.glob("[!.]*.json"), OutOfMemory), key=lambda record: record.at_ns)
