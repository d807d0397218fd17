"""Names of the files that SGLang writes, read from their end.

[<prefix>-]<id>-TP-0[-DP-0][-PP-0][-EP-0][-EXTEND|-DECODE].trace.json.gz
[<prefix>-]<time>-TP-0-memory[-EXTEND|-DECODE].pickle      no -DP-, -PP-, -EP-
rpd-<time>-TP-0.trace.json.gz                              likewise
merged-<id>.trace.json.gz                                  of all ranks, beside their own files
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

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


class TraceName(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a file's name."""

    kind: Kind
    topology: dict[str, int]
    stage: Stage | None


def parse_name(name: str) -> TraceName | None:
    """Read the facts in a file's name; None if SGLang's profiler did not write it."""
    if name.startswith("merged-") and name.endswith(".trace.json.gz"):
        return TraceName(kind="merged_trace", topology={}, stage=None)
    match = _NAME.search(name)
    if match is None:
        return None
    topology = {axis: int(match[axis]) for axis in ("tp", "dp", "pp", "ep") if match[axis] is not None}
    stage = _STAGES[match["stage"]] if match["stage"] else None
    kind: Kind = "cuda_memory_snapshot" if name.endswith(".pickle") else "torch_trace"
    return TraceName(kind=kind, topology=topology, stage=stage)
