"""Global ranks of an engine's workers.

Replica r owns [r * size, (r + 1) * size). Within it tp varies fastest, then prefill context parallel, then
pp, and dp slowest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from stepscope_vllm._files.traces import Trace


class Layout(NamedTuple):
    """The distribution of one engine over GPUs."""

    tp: int
    pp: int
    dp: int
    external: bool
    """True if the workers are processes of a larger torch.distributed job, each with its own engine
    object."""
    pcp: int = 1
    """Size of prefill context parallelism, an axis between tp and pp."""

    @property
    def engine(self) -> int:
        """Return the number of workers of one data-parallel engine."""
        return self.tp * self.pcp * self.pp

    @property
    def size(self) -> int:
        return self.engine * self.dp


def global_rank(trace: Trace, layout: Layout | None, replica: int) -> int | None:
    """Return the global rank of a trace; None for a front end, or if the rank is unknown or contradicts the
    layout.
    """
    if trace.frontend or trace.rank is None or layout is None:
        return None
    if layout.external:
        return trace.rank  # of the whole job, as torch.distributed numbers it
    place = _place(trace, trace.rank, layout)
    if place is None or place[1] is None:
        return None
    return replica * layout.size + place[1] * layout.engine + place[0]


def topology(trace: Trace, layout: Layout | None) -> dict[str, int] | None:
    """Return the place of a worker: `{"tp": 1, "pp": 0, "dp": 0}`.

    `pcp` is there if the engine has that axis. `dp` is absent if nothing says which engine it was.
    """
    if trace.frontend or trace.rank is None or layout is None:
        return None
    place = _place(trace, trace.rank, layout)
    if layout.external:
        place = trace.rank % layout.engine, 0
    if place is None:
        return None
    inside, dp = place
    axes = {"tp": inside % layout.tp, "pp": inside // (layout.tp * layout.pcp)}
    if layout.pcp > 1:
        axes["pcp"] = inside // layout.tp % layout.pcp
    return axes if dp is None else {**axes, "dp": dp}


def contradiction(trace: Trace, layout: Layout | None) -> str | None:
    """Return the reason why a trace cannot be of an engine with this layout, or None if it can."""
    if trace.frontend or trace.rank is None or layout is None or layout.external:
        return None
    if _place(trace, trace.rank, layout) is not None:
        return None
    of = "" if trace.world_size is None else f" of {trace.world_size}"
    return (
        f"{trace.path.name} is of worker {trace.rank}{of}, and the engine was declared to have {layout.size} "
        f"(tensor parallel {layout.tp}, pipeline parallel {layout.pp}, data parallel {layout.dp}): its "
        "global rank is not known. Fix: VllmServer(url, tensor_parallel_size=...), as it was served"
    )


def _place(trace: Trace, rank: int, layout: Layout) -> tuple[int, int | None] | None:
    """Return the rank in its data-parallel engine, and the number of that engine (None if unknown).

    Return None if the layout contradicts the file.
    """
    dp = trace.dp if layout.dp > 1 else 0
    if trace.world_size == layout.size and layout.dp > 1:
        # All of dp is one torch.distributed world (mixtures of experts), and not one for each engine.
        dp, rank = divmod(rank, layout.engine)
    elif trace.world_size is None and layout.dp > 1 and dp == rank // layout.engine:
        rank %= layout.engine  # a name that counts through all of dp
    elif trace.world_size not in (None, layout.engine):
        return None
    return (rank, dp) if rank < layout.engine and (dp or 0) < layout.dp else None


def local_ranks(wanted: Collection[int] | None, layout: Layout | None, replica: int) -> list[int] | None:
    """Return the wanted ranks in a worker's own numbering; None for all.

    Return None also if data-parallel engines share a numbering. Then all of them write, and the files of
    unwanted ranks are removed.
    """
    if wanted is None or layout is None or layout.dp > 1:
        return None
    if layout.external:
        return list(wanted)
    first = replica * layout.size
    return [rank - first for rank in wanted if first <= rank < first + layout.size]
