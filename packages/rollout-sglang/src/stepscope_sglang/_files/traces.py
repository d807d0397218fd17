"""The files SGLang writes: whose each is, and whether it is complete. Names are read from their end.

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
from stepscope.errors import EngineError
from stepscope_sglang._driving.facts import EngineFacts

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


class TraceName(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a file's name."""

    kind: Kind
    topology: dict[str, int]
    stage: Stage | None


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


def parse_name(name: str) -> TraceName | None:
    """None: no file of SGLang's profiler."""
    if name.startswith("merged-") and name.endswith(".trace.json.gz"):
        return TraceName(kind="merged_trace", topology={}, stage=None)
    found = _NAME.search(name)
    if found is None:
        return None
    topology = {axis: int(found[axis]) for axis in ("tp", "dp", "pp", "ep") if found[axis] is not None}
    stage = _STAGES[found["stage"]] if found["stage"] else None
    kind: Kind = "cuda_memory_snapshot" if name.endswith(".pickle") else "torch_trace"
    return TraceName(kind=kind, topology=topology, stage=stage)


def read(path: Path) -> Content:
    """Decompress the file from end to end (0.3 s for 150 MB of JSON). Never raises for what is in it."""
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
    """Return the forward passes whose names begin before `limit`. `find`: a pattern costs as much as
    unpacking.
    """
    found: Counter[Stage] = Counter()
    at = text.find(_STEP)
    while 0 <= at < limit:
        word = at + len(_STEP)
        if text.startswith(_DECODE, word):
            found["decode"] += 1
        elif text.startswith(_PREFILL, word):
            found["prefill"] += 1
        at = text.find(_STEP, word)
    return found


def rank_of(name: TraceName, content: Content, facts: EngineFacts, replica: int) -> int | None:
    """Global GPU rank. None where the name leaves out an axis that the engine has, or says something else
    than the file.

    SGLang numbers its processes pp-major, `pp * tp_size + tp`, in each data-parallel copy of the model; with
    attention data-parallel the dp ranks are among the tp ranks.
    """
    at = name.topology
    tp, pp, dp = at.get("tp"), at.get("pp", 0), at.get("dp", 0)
    if tp is None or tp >= facts.tp or pp >= facts.pp or dp >= facts.dp:
        return None
    if (facts.pp > 1 and "pp" not in at) or (facts.dp > 1 and not facts.dp_attention and "dp" not in at):
        return None
    inside = pp * facts.tp + tp
    if content.rank is not None and content.rank != inside:
        return None
    copy = 0 if facts.dp_attention else dp
    return replica * facts.world_size + copy * facts.tp * facts.pp + inside


def make_folder(path: Path, *, open_to_all: bool) -> None:
    """Make `path` and write in it once: where SGLang cannot, its scheduler dies at the stop.

    Raises:
        EngineError: that cannot be done.
    """
    probe = path / "probe"
    try:
        path.mkdir(parents=True)
        if open_to_all:
            path.chmod(0o777)  # a server may run as somebody else
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise EngineError(
            f"SGLang could not write into {path.parent}, which would kill its scheduler at the end of the "
            f"capture: {error}. Fix: a save_path that can be written"
        ) from error
