"""*Batches*: forward passes of each inference engine by batch size, and the end of the rollout, in which
batches are small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import TYPE_CHECKING

import msgspec

from stepscope_report.accounting import union_ns
from stepscope_report.formatting import count, duration, percent_of
from stepscope_report.sections import ROLLOUT, Section
from stepscope_report.sections.requests import FEW
from stepscope_report.table import Block, TextTable
from stepscope_report.timeline import Timeline
from stepscope_report.timeline.model import EnginePasses
from stepscope_report.timeline.passes import linked_requests
from stepscope_report.whatif import slots_of_passes
from stepscope_report.whatif.curve import edges

if TYPE_CHECKING:
    from stepscope_report.model import StepReport


class BatchSize(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes with at least `least` and at most `most` requests."""

    least: int
    most: int
    passes: int
    ns: int
    """Sum of the durations of the passes of this size, in ns."""
    tokens: int
    """Output tokens of the passes of this size."""
    per_s: float
    """Output tokens of the whole batch per second of the passes of this size."""
    per_s_each: float
    """Output tokens of one request per second of the passes of this size."""


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of one engine of a replica, summed up over the step."""

    replica: int
    dp: int | None
    """Number of the data-parallel engine, or None if the replica has one engine."""
    passes: int
    dropped: int
    """Number of passes that the recorder did not keep, because more passes ran than the setting
    `engine.passes` allows."""
    requests: int
    linked: int
    """Number of requests that are named by a recorded span of a trajectory."""
    preemptions: int
    busy_ns: int
    """Time in which a pass ran, in ns."""
    prefill_ns: int
    """Time in passes that only prefilled. `sizes` does not contain these passes."""
    held_ns: int
    """Part of `prefill_ns` in which other requests, already decoding, had to wait."""
    waiting_ns: int
    """Sum of the durations of passes during which requests waited in the engine's queue."""
    limit: int | None
    """The engine's limit of running requests: the number that ran in each pass during which other requests
    waited. None if the number varied, or if no request ever waited."""
    demand: int
    """Largest number of requests that were running or waiting at the same time."""
    kv_use: float | None
    """Largest used share of the KV cache, from 0 to 1. None if unknown."""
    computed: int
    """Tokens that all passes computed: prompt tokens and output tokens."""
    tokens: int
    """Output tokens of all passes."""
    sizes: tuple[BatchSize, ...]
    rollout_ns: int
    """Time from the start of the first pass to the end of the last pass in this step, over all engines."""
    thin_ns: int
    """Time from the end of this engine's last pass with at least `FEW` requests to the end of the rollout.
    `rollout_ns` if there is no such pass."""


def step_batches(timeline: Timeline) -> tuple[Batches, ...]:
    """Return the passes of each engine by batch size. Empty if no engine recorded its passes."""
    known = [engine for engine in timeline.passes if engine.begins_ns]
    if not known:
        return ()
    links = linked_requests(timeline)
    linked = Counter(
        key.engine for key, index in links.items() if timeline.spans[index].trajectory is not None
    )
    first_ns = min(engine.begins_ns[0] for engine in known)
    last_ns = max(max(engine.ends_ns) for engine in known)
    engines = Counter(engine.replica for engine in timeline.passes)
    return tuple(
        _batches(engine, linked[at], engines[engine.replica] > 1, first_ns, last_ns)
        for at, engine in enumerate(timeline.passes)
        if engine.begins_ns
    )


def _batches(engine: EnginePasses, linked: int, several: bool, first_ns: int, last_ns: int) -> Batches:
    noted, rows = engine.noted, engine.rows
    durations = [end - begin for begin, end in zip(engine.begins_ns, engine.ends_ns, strict=True)]
    written = [sum(noted.served.output[rows[at] : rows[at + 1]]) for at in range(len(durations))]
    facts = noted.passes
    kinds, batches = facts.kind, facts.requests
    full = (end for end, requests in zip(engine.ends_ns, batches, strict=True) if requests >= FEW)
    writes = [at for at, kind in enumerate(kinds) if kind not in ("prefill", "idle")]
    return Batches(
        replica=engine.replica,
        dp=noted.dp if several else None,
        passes=len(durations),
        dropped=noted.dropped,
        requests=len(noted.requests.id),
        linked=linked,
        preemptions=len(noted.preempted.number),
        busy_ns=union_ns(zip(engine.begins_ns, engine.ends_ns, strict=True)),
        prefill_ns=sum(ns for ns, kind in zip(durations, kinds, strict=True) if kind == "prefill"),
        held_ns=sum(
            ns
            for ns, kind, requests, running in zip(durations, kinds, batches, facts.running, strict=True)
            if kind == "prefill" and running > requests
        ),
        waiting_ns=sum(ns for ns, waiting in zip(durations, facts.waiting, strict=True) if waiting),
        limit=slots_of_passes([engine]),
        demand=max(map(add, facts.running, facts.waiting)),
        kv_use=max((use for use in facts.kv_use if use is not None), default=None),
        computed=sum(noted.served.tokens),
        tokens=sum(written),
        sizes=tuple(_sizes([(batches[at], durations[at], written[at]) for at in writes])),
        rollout_ns=last_ns - first_ns,
        thin_ns=last_ns - max(full, default=first_ns),
    )


def _sizes(passes: Sequence[tuple[int, int, int]]) -> Iterator[BatchSize]:
    """Group passes by batch size. Each pass is (requests, duration in ns, output tokens)."""
    bounds = edges(max((requests for requests, _, _ in passes), default=1))
    bins: dict[int, list[tuple[int, int, int]]] = {}
    for own in passes:
        bins.setdefault(bisect_left(bounds, own[0]), []).append(own)
    for place, members in sorted(bins.items()):
        ns, tokens = (sum(own[at] for own in members) for at in (1, 2))
        served_ns = sum(requests * took_ns for requests, took_ns, _ in members)
        yield BatchSize(
            least=bounds[place - 1] + 1 if place else 1,
            most=bounds[place],
            passes=len(members),
            ns=ns,
            tokens=tokens,
            per_s=round(tokens * 1e9 / ns, 1) if ns else 0.0,
            per_s_each=round(tokens * 1e9 / served_ns, 2) if served_ns else 0.0,
        )


_COLUMNS = (
    "replica", ">requests in a pass", ">passes", ">time", ">of its passes, %", ">tokens", ">tokens/s",
    ">each",
)  # fmt: skip


def batches_blocks(batches: Sequence[Batches], report: StepReport) -> Iterator[Block]:
    """Yield a table of the passes of each engine by batch size."""
    if batches:
        rows = tuple(row for engine in batches for row in _rows(engine))
        yield TextTable("Batches", _COLUMNS, rows, " ".join(_sentences(batches)), "line")


def _name(engine: Batches) -> str:
    return str(engine.replica) if engine.dp is None else f"{engine.replica} dp {engine.dp}"


def _rows(engine: Batches) -> Iterator[tuple[str, ...]]:
    name, total_ns = _name(engine), sum(size.ns for size in engine.sizes) + engine.prefill_ns
    if engine.prefill_ns:
        share = percent_of(engine.prefill_ns, total_ns)
        yield name, "prefill", "", duration(engine.prefill_ns), share, "", "", ""
    for size in engine.sizes:
        yield (
            name,
            str(size.most) if size.least == size.most else f"{size.least}-{size.most}",
            f"{size.passes:,}",
            duration(size.ns),
            percent_of(size.ns, total_ns),
            f"{size.tokens:,}",
            f"{size.per_s:,.0f}",
            f"{size.per_s_each:,.0f}",
        )


def thin_end(batches: Sequence[Batches]) -> tuple[int, str] | None:
    """Return (duration in ns, sentence) of the end of the rollout in which every engine ran fewer than `FEW`
    requests per pass. None if there is no such end, or if no pass had at least `FEW` requests.
    """
    thin_ns = min((engine.thin_ns for engine in batches), default=0)
    if not 0 < thin_ns < batches[0].rollout_ns:
        return None
    share = percent_of(thin_ns, batches[0].rollout_ns)
    return thin_ns, (
        f"the last {share} % of the rollout's passes, {duration(thin_ns)}, ran with fewer than {FEW} "
        "requests per replica"
    )


def _sentences(batches: Sequence[Batches]) -> Iterable[str]:
    thin = thin_end(batches)
    if thin is not None:
        yield f"{thin[1][0].upper()}{thin[1][1:]}."
    requests, linked = (sum(getattr(engine, name) for engine in batches) for name in ("requests", "linked"))
    if linked < requests:
        yield f"Without a recorded turn: {count(requests - linked, 'request')} of {requests:,}."
    preempted, dropped = (
        sum(getattr(engine, name) for engine in batches) for name in ("preemptions", "dropped")
    )
    if preempted:
        yield f"Preempted: {count(preempted, 'time')}."
    if dropped:
        yield f"Not recorded, beyond the limit engine.passes: {count(dropped, 'pass')}."


BATCHES = Section(
    name="batches",
    title="Batches",
    compute=lambda sources: step_batches(sources.whole),
    terminal=batches_blocks,
    page=ROLLOUT,
)
