"""Global ranks of an engine's workers.

Replica r owns [r * size, (r + 1) * size). In it tp is the fastest, then prefill context parallel, pp, and
dp the slowest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from stepscope_vllm._traces import Trace


class Layout(NamedTuple):
    """How one engine is spread over GPUs."""

    tp: int
    pp: int
    dp: int
    external: bool
    """Its workers are processes of a larger torch.distributed job, each with an engine object of its own."""
    pcp: int = 1
    """Prefill context parallel, between tp and pp."""

    @property
    def engine(self) -> int:
        """Workers of one of its data-parallel engines."""
        return self.tp * self.pcp * self.pp

    @property
    def size(self) -> int:
        return self.engine * self.dp


def global_rank(trace: Trace, layout: Layout | None, replica: int) -> int | None:
    """None for a frontend, and where nothing says."""
    if trace.frontend or trace.rank is None or layout is None:
        return None
    if layout.external:
        return trace.rank  # of the whole job, as torch.distributed numbers it
    if _one_world(trace, layout):
        return replica * layout.size + trace.rank
    if layout.dp > 1 and trace.dp is None:
        return None
    return replica * layout.size + (trace.dp or 0) * layout.engine + trace.rank % layout.engine


def topology(trace: Trace, layout: Layout | None) -> dict[str, int] | None:
    """`{"tp": 1, "pp": 0, "dp": 0}`; `pcp` where there is any; no `dp` where nothing says which it was."""
    if trace.frontend or trace.rank is None or layout is None:
        return None
    inside = trace.rank % layout.engine
    found = {"tp": inside % layout.tp, "pp": inside // (layout.tp * layout.pcp)}
    if layout.pcp > 1:
        found["pcp"] = inside // layout.tp % layout.pcp
    dp = trace.rank // layout.engine if _one_world(trace, layout) else trace.dp if layout.dp > 1 else 0
    return found if dp is None else {**found, "dp": dp}


def local_ranks(wanted: Collection[int] | None, layout: Layout | None, replica: int) -> list[int] | None:
    """The wanted ranks in a worker's own numbering; None for all, and where data-parallel engines share
    one: then each writes, and the files of the others are left aside.
    """
    if wanted is None or layout is None or layout.dp > 1:
        return None
    if layout.external:
        return list(wanted)
    first = replica * layout.size
    return [rank - first for rank in wanted if first <= rank < first + layout.size]


def unwanted(wanted: Collection[int], layout: Layout, replica: int) -> set[int]:
    """Global ranks of this engine that nobody asked for."""
    first = replica * layout.size
    return set(range(first, first + layout.size)) - set(wanted)


def _one_world(trace: Trace, layout: Layout) -> bool:
    """Whether all of dp is one torch.distributed world (mixtures of experts), and not one for each engine."""
    return layout.dp > 1 and trace.world_size == layout.size
