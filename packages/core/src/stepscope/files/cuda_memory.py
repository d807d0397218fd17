"""What of a snapshot of CUDA's allocator is kept for the report: a small JSON file beside the pickle.

A pickle runs what it holds when it is read, so nothing of ours ever reads one. This is written in the
recorded process, where the snapshot is at hand.
"""

from __future__ import annotations

import msgspec

SUMMARY = "cuda_memory_summary"
OOM_SUMMARY = "cuda_memory_oom_summary"
"""The artifact's kind; the second one of a snapshot that was taken at an out-of-memory error."""


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An allocation that was alive when the most was allocated."""

    bytes: int
    at_us: int | None
    """When it was made, unix us. None: torch did not say."""
    where: int
    """Index in `DeviceMemory.frames`; -1: no stack was kept."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    device: int
    events: int
    """Of the allocator's history."""
    since_us: int | None
    """The first of them, unix us. How full it was before is not known."""
    cut: bool
    """The history was full, and its oldest events are gone (`cuda_memory.max_entries`)."""
    peak_bytes: int
    """The most that was allocated at once, as far as the history reaches."""
    peak_us: int | None
    peak_reserved_bytes: int
    """The most that the allocator held of the device."""
    end_bytes: int
    end_reserved_bytes: int
    """At the snapshot."""
    before_bytes: int
    """Of `peak_bytes`: allocated before the first event."""
    blocks: tuple[Block, ...]
    """Of `peak_bytes`: the largest, in descending order."""
    other_blocks: int
    other_bytes: int
    """Smaller ones that are not listed."""
    frames: tuple[str, ...]
    """`model.py:41 forward`: the innermost frame of each stack that is not torch's own."""
    ooms: int
    oom_bytes: int | None
    """What the first failed allocation asked for."""


class MemorySummary(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    devices: tuple[DeviceMemory, ...]
