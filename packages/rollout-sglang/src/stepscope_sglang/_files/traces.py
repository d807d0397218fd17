"""Names and contents of the files that SGLang writes. Names are read from their end.

[<prefix>-]<id>-TP-0[-DP-0][-PP-0][-EP-0][-EXTEND|-DECODE].trace.json.gz
[<prefix>-]<time>-TP-0-memory[-EXTEND|-DECODE].pickle      no -DP-, -PP-, -EP-
rpd-<time>-TP-0.trace.json.gz                              likewise
merged-<id>.trace.json.gz                                  of all ranks, beside their own files
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from stepscope.engines.artifacts import recorded_window

Stage: TypeAlias = Literal["prefill", "decode"]
Kind: TypeAlias = Literal["torch_trace", "merged_trace", "cuda_memory_snapshot"]
_NAME = re.compile(
    r"-?TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?"
    r"(?P<memory>-memory)?(?:-(?P<stage>EXTEND|DECODE|prefill|decode))?\.(?:trace\.json\.gz|pickle)\Z"
)
_STAGES: dict[str, Stage] = {
    "EXTEND": "prefill",
    "prefill": "prefill",
    "DECODE": "decode",
    "decode": "decode",
}
_CHUNK = 1 << 20
_HEAD = 1 << 16
"""Number of bytes before the events, in which the list of process groups is."""
_TAIL = 1 << 12
"""Number of bytes after the events, in which torch writes the times at which it began and ended to record."""
_LONGEST = 64
"""Number of bytes of the longest text that is searched for at a name and before it."""
_DISTRIBUTED = re.compile(rb'"distributedInfo":.*?"rank": (\d+), "world_size": (\d+)', re.DOTALL)
_PID = re.compile(rb'"process_name",[^{}]*?"pid": (\d+)')
_STEP = b'"name": "step['
_COPY = b'"cat": "gpu_user_annotation", '
"""Bytes before `_STEP` in an entry that is a copy of another one, with the times of the GPU."""
_PREFILL = b"EXTEND", b"MIXED", b"SPLIT_PREFILL", b"DLLM_EXTEND"
_DECODE = b"DECODE", b"TARGET_VERIFY", b"VERIFY"
"""Words after `_STEP` that mean a decode pass."""


class TraceName(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a file's name."""

    kind: Kind
    topology: dict[str, int]
    stage: Stage | None


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a trace's content."""

    complete: bool
    rank: int | None = None
    """The rank in the process group of the schedulers; each data-parallel scheduler has its own group."""
    pid: int | None = None
    prefills: int = 0
    """Number of prefill passes, if the engine names passes (0.5.11 and later)."""
    decodes: int = 0
    window: tuple[int, int] | None = None
    """Start and end of torch's recording in unix ns of the scheduler's host, or None if unknown."""

    @property
    def passes(self) -> int:
        return self.prefills + self.decodes


def parse_name(name: str) -> TraceName | None:
    """Return the facts in a file's name, or None if SGLang's profiler did not write the file."""
    if name.startswith("merged-") and name.endswith(".trace.json.gz"):
        return TraceName(kind="merged_trace", topology={}, stage=None)
    match = _NAME.search(name)
    if match is None:
        return None
    topology = {axis: int(match[axis]) for axis in ("tp", "dp", "pp", "ep") if match[axis] is not None}
    stage = _STAGES[match["stage"]] if match["stage"] else None
    kind: Kind = "cuda_memory_snapshot" if name.endswith(".pickle") else "torch_trace"
    return TraceName(kind=kind, topology=topology, stage=stage)


def read(path: Path) -> Content:
    """Read a trace from end to end (0.3 s for 150 MB of JSON). No content raises an error."""
    from isal import igzip

    head, tail, end, first, complete = b"", b"", b"", 0, False
    steps: Counter[Stage] = Counter()
    try:
        with igzip.open(path, "rb") as file:  # type: ignore[no-untyped-call]  # isal has no types here
            while chunk := file.read(_CHUNK):
                if len(head) < _HEAD:
                    head += chunk[:_HEAD]
                end = (end + chunk)[-_TAIL:]
                text = tail + chunk
                # An event's name that ends in the part kept for the next chunk is counted there.
                limit = max(first, len(text) - _LONGEST)
                steps += _steps(text, first, limit)
                begin = max(0, limit - _LONGEST)
                tail, first = text[begin:], limit - begin
            steps += _steps(tail, first, len(tail))
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


def _steps(text: bytes, first: int, limit: int) -> Counter[Stage]:
    """Count the forward passes whose names begin from `first` on, and before `limit`.

    The search uses `find`, because a regular expression costs as much as unpacking the file.
    """
    counts: Counter[Stage] = Counter()
    at = text.find(_STEP, first)
    while 0 <= at < limit:
        word = at + len(_STEP)
        if text.startswith(_COPY, max(0, at - len(_COPY))):
            pass
        elif text.startswith(_DECODE, word):
            counts["decode"] += 1
        elif text.startswith(_PREFILL, word):
            counts["prefill"] += 1
        at = text.find(_STEP, word)
    return counts
