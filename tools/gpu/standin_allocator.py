"""Stand-in for torch's CUDA caching allocator, for `--pretend`.

The stand-in allocates no memory. Its functions, its snapshot and the order of its events are the documented
ones of `torch.cuda.memory._snapshot`. A run over it shows that the part works, and nothing about CUDA.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TOTAL = 8 << 30


class Block:
    """Allocated memory. The block is freed when this object is deleted."""

    def __init__(self, allocator: Allocator, address: int, size: int) -> None:
        self._allocator, self.address, self.size = allocator, address, size

    def __del__(self) -> None:
        self._allocator.free(self)


class Allocator:
    def __init__(self) -> None:
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.history: list[dict[str, Any]] | None = None
        self.limit = TOTAL
        self.live: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        """{address: bytes} of freed blocks."""
        self.most = 0
        self._next = 1 << 21

    @property
    def allocated(self) -> int:
        return sum(self.live.values())

    @property
    def reserved(self) -> int:
        return self.allocated + sum(self.cached.values())

    def allocate(self, size: int) -> Block:
        address = next((address for address, cached in self.cached.items() if cached == size), None)
        if address is None:
            address = self._grow(size)
        else:
            del self.cached[address]
        self.live[address] = size
        self.most = max(self.most, self.allocated)
        self._note("alloc", address, size)
        return Block(self, address, size)

    def _grow(self, size: int) -> int:
        free = self.limit - self.reserved
        if size > free:
            self._note("oom", free, size)
            for observer in self.observers:
                observer(0, size, self.limit, free)
            raise torch.OutOfMemoryError("CUDA out of memory (pretended).")
        address, self._next = self._next, self._next + size
        self._note("segment_alloc", address, size)
        return address

    def free(self, block: Block) -> None:
        self.cached[block.address] = self.live.pop(block.address)
        for action in ("free_requested", "free_completed"):
            self._note(action, block.address, block.size)

    def _note(self, action: str, address: int, size: int) -> None:
        if self.history is None:
            return
        frame = sys._getframe(2)
        frames = [
            {"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name}
        ]
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.history.append({**entry, "time_us": time.time_ns() // 1000})

    def record(self, enabled: str | None = "all", **options: object) -> None:
        self.history = None if enabled is None else []

    def snapshot(self) -> dict[str, Any]:
        states = [*((item, "active_allocated") for item in self.live.items())]
        states += [(item, "inactive") for item in self.cached.items()]
        segments = [
            {
                "device": 0,
                "address": address,
                "total_size": size,
                "blocks": [{"address": address, "size": size, "state": state}],
            }
            for (address, size), state in states
        ]
        return {"segments": segments, "device_traces": [list(self.history or [])]}

    def stats(self, device: int = 0) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "reserved_bytes.all.current": self.reserved,
        }

    def set_share(self, share: float) -> None:
        self.limit = round(share * TOTAL)

    def reset_most(self) -> None:
        self.most = self.allocated


@contextmanager
def standing_in() -> Iterator[Allocator]:
    """Replace torch's allocator by a stand-in during the block."""
    allocator = Allocator()
    cuda: Any = torch.cuda
    functions: Sequence[tuple[Any, str, Any]] = (
        (torch._C, "_cuda_attach_out_of_memory_observer", allocator.observers.append),
        (torch._C, "_cuda_isHistoryEnabled", lambda: allocator.history is not None),
        (cuda.memory, "_record_memory_history", allocator.record),
        (cuda.memory, "_snapshot", allocator.snapshot),
        (cuda, "is_available", lambda: True),
        (cuda, "is_initialized", lambda: True),
        (cuda, "device_count", lambda: 1),
        (cuda, "memory_allocated", lambda: allocator.allocated),
        (cuda, "memory_reserved", lambda: allocator.reserved),
        (cuda, "max_memory_allocated", lambda: allocator.most),
        (cuda, "memory_stats", allocator.stats),
        (cuda, "reset_peak_memory_stats", allocator.reset_most),
        (cuda, "mem_get_info", lambda: (TOTAL - allocator.reserved, TOTAL)),
        (cuda, "set_per_process_memory_fraction", allocator.set_share),
        (cuda, "empty_cache", allocator.cached.clear),
    )
    absent = object()
    before = [(owner, name, getattr(owner, name, absent)) for owner, name, _ in functions]
    for owner, name, function in functions:
        setattr(owner, name, function)
    try:
        yield allocator
    finally:
        for owner, name, function in before:
            if function is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, function)
