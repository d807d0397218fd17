"""Summary of a snapshot of CUDA's allocator: the peak of each device, and the blocks alive at that time.

The docstring of `torch.cuda.memory._snapshot` defines the format: `segments` with their `blocks`, and
`device_traces`, a list of events for each device, oldest first. Memory counts as allocated from `alloc` to
`free_requested`, as in `torch.cuda.memory_allocated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.files.cuda_memory import Block, DeviceMemory, MemorySummary

LISTED = 2000
"""The number of blocks per device that the summary lists one by one."""
_CHANGES = {"alloc": 1, "free_requested": -1}
_HELD = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _Peak(NamedTuple):
    bytes: int
    events: int
    """The number of events up to the peak."""


def summarise(snapshot: Mapping[str, Any], max_entries: int) -> MemorySummary:
    """Summarise a snapshot, for each device that has segments or events. Needs no torch.

    Args:
        snapshot: As `torch.cuda.memory._snapshot()` returns it.
        max_entries: The number of events that the history could hold.

    Raises:
        KeyError, TypeError: it is no such snapshot.
    """
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    segments: Sequence[Mapping[str, Any]] = snapshot["segments"]
    with_segments = {segment.get("device", 0) for segment in segments}
    devices = sorted({*with_segments, *(device for device, trace in enumerate(traces) if trace)})
    return MemorySummary(
        devices=tuple(
            _device(
                device,
                [segment for segment in segments if segment.get("device", 0) == device],
                traces[device] if device < len(traces) else [],
                max_entries,
            )
            for device in devices
        )
    )


def _device(
    device: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], max_entries: int
) -> DeviceMemory:
    end_bytes = sum(block["size"] for block in _blocks(segments) if block["state"] == "active_allocated")
    end_reserved = sum(segment["total_size"] for segment in segments)
    peak = _highest(trace, end_bytes, _CHANGES)
    alive = _alive(trace[: peak.events])
    listed = sorted(alive, key=lambda event: -event["size"])[:LISTED]
    frames: dict[str, int] = {}
    blocks = tuple(
        Block(event["size"], event.get("time_us"), _place(event.get("frames"), frames)) for event in listed
    )
    known = sum(event["size"] for event in alive)
    ooms = [event for event in trace if event["action"] == "oom"]
    return DeviceMemory(
        device=device,
        events=len(trace),
        since_us=trace[0].get("time_us") if trace else None,
        cut=len(trace) >= max_entries,
        peak_bytes=peak.bytes,
        peak_us=trace[peak.events - 1].get("time_us") if peak.events else None,
        peak_reserved_bytes=_highest(trace, end_reserved, _HELD).bytes,
        end_bytes=end_bytes,
        end_reserved_bytes=end_reserved,
        before_bytes=max(0, peak.bytes - known),
        blocks=blocks,
        other_blocks=len(alive) - len(listed),
        other_bytes=known - sum(block.bytes for block in blocks),
        frames=tuple(frames),
        ooms=len(ooms),
        oom_bytes=ooms[0]["size"] if ooms else None,
    )


def _blocks(segments: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for segment in segments:
        yield from segment["blocks"]


def _highest(trace: Sequence[Mapping[str, Any]], end: int, changes: Mapping[str, int]) -> _Peak:
    """Return the first moment of the peak.

    The value before the first event follows from the value at the end.
    """
    now = end - sum(changes.get(event["action"], 0) * event["size"] for event in trace)
    peak = _Peak(now, 0)
    for count, event in enumerate(trace, 1):
        now += changes.get(event["action"], 0) * event["size"]
        if now > peak.bytes:
            peak = _Peak(now, count)
    return peak


def _alive(trace: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the allocations that none of these events ended."""
    alive: dict[int, Mapping[str, Any]] = {}
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return list(alive.values())


def _place(frames: Sequence[Mapping[str, Any]] | None, known: dict[str, int]) -> int:
    if not frames:
        return -1
    own = (frame for frame in frames if "/torch/" not in frame["filename"] and frame["filename"] != "??")
    frame = next(own, frames[0])
    name = f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}"
    return known.setdefault(name, len(known))
