"""Contents of the traces that SGLang writes."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from pathlib import Path

import msgspec

from stepscope.engines.artifacts import recorded_window
from stepscope_sglang._files.names import Stage

_CHUNK = 1 << 20
_HEAD = 1 << 16
"""Bytes before the events, with the list of process groups in it."""
_TAIL = 1 << 12
"""Bytes behind the events, in which torch writes when it began and ended to record."""
_LONGEST = 64
"""Bytes of the longest text looked for: kept from one chunk for the next."""
_DISTRIBUTED = re.compile(rb'"distributedInfo":.*?"rank": (\d+), "world_size": (\d+)', re.DOTALL)
_PID = re.compile(rb'"process_name",[^{}]*?"pid": (\d+)')
_STEP = b'"name": "step['
_PREFILL, _DECODE = (b"EXTEND", b"MIXED", b"SPLIT_PREFILL"), b"DECODE"
"""Words after `_STEP`."""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a trace."""

    complete: bool
    rank: int | None = None
    """In the process group of its schedulers: data-parallel ones have a group each."""
    pid: int | None = None
    prefills: int = 0
    """Forward passes, where the engine names them (0.5.11 and later)."""
    decodes: int = 0
    window: tuple[int, int] | None = None
    """Start and end of torch's recording: unix ns of the scheduler's host."""

    @property
    def passes(self) -> int:
        return self.prefills + self.decodes


def read(path: Path) -> Content:
    """Read a trace from end to end (0.3 s for 150 MB of JSON). Its content never raises an error."""
    from isal import igzip

    head, tail, end, complete = b"", b"", b"", False
    steps: Counter[Stage] = Counter()
    try:
        with igzip.open(path, "rb") as file:  # type: ignore[no-untyped-call]  # isal has no types here
            while chunk := file.read(_CHUNK):
                if len(head) < _HEAD:
                    head += chunk[:_HEAD]
                end = (end + chunk)[-_TAIL:]
                text = tail + chunk
                # An event's name that ends in the part kept for the next chunk is counted there.
                limit = max(0, len(text) - _LONGEST)
                steps += _steps(text, limit)
                tail = text[limit:]
            steps += _steps(tail, len(tail))
            complete = tail.rstrip().endswith(b"}")
    except (EOFError, OSError, zlib.error, igzip.BadGzipFile):  # cut off, or being written now
        complete = False
    distributed, pid = _DISTRIBUTED.search(head), _PID.search(head)
    return Content(
        complete=complete,
        rank=int(distributed[1]) if distributed else None,
        pid=int(pid[1]) if pid else None,
        prefills=steps["prefill"],
        decodes=steps["decode"],
        window=recorded_window(head, end) if complete else None,
    )


def _steps(text: bytes, limit: int) -> Counter[Stage]:
    """Count the forward passes whose names begin before `limit`.

    It uses `find`, because a pattern costs as much as unpacking the file.
    """
    counts: Counter[Stage] = Counter()
    at = text.find(_STEP)
    while 0 <= at < limit:
        word = at + len(_STEP)
        if text.startswith(_DECODE, word):
            counts["decode"] += 1
        elif text.startswith(_PREFILL, word):
            counts["prefill"] += 1
        at = text.find(_STEP, word)
    return counts
