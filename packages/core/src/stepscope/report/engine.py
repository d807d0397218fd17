"""How an inference engine spent the step: reading prompts, writing tokens, with how many requests at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from stepscope.report.rows import Table
from stepscope.timeline import Timeline, TraceActivity

BINS = 120
"""Stretches of time that the load is averaged over."""
_STAGES = {"queue": (1, 0, 0), "wait": (1, 0, 0), "prefill": (0, 1, 0), "decode": (0, 0, 1)}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests were, on average over a stretch of time, waiting, being read, and being written."""

    start_ns: int
    """After the capture opened."""
    waiting: float
    prefilling: float
    decoding: float


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. The three times do not overlap; what is missing of `window_ns` it ran nothing."""

    replica: str
    source: Literal["iterations", "spans"]
    """`iterations`: the engine's own annotations in its trace. `spans`: of requests, stages `prefill` and
    `decode` in the replica's process."""
    iterations: int | None
    window_ns: int
    """From the first start to the last end of any replica of this source."""
    prefill_ns: int
    """While it read prompts and wrote no token."""
    decode_ns: int
    """While it wrote tokens and read no prompt."""
    both_ns: int
    decoding: float
    """Requests in decode at once, on average over the time in which there were any."""
    most_decoding: int
    prefill_tokens: int | None
    load: tuple[Load, ...]


class Phaseless(msgspec.Struct, frozen=True, kw_only=True):
    """A process that did work of role `rollout`, and of which nothing says when it read and when it wrote."""

    process: str
    stages: tuple[str, ...]
    """What its work is called."""


class _Piece(NamedTuple):
    start_ns: int
    end_ns: int
    waiting: int
    prefilling: int
    decoding: int


class _Replica(NamedTuple):
    name: str
    iterations: int | None
    prefill_tokens: int | None
    pieces: list[_Piece]


def view_engines(timeline: Timeline, activities: Sequence[TraceActivity] = ()) -> Table[Engine]:
    """Each replica by its trace's annotations, where they are there, and by the spans of its requests."""
    by_trace, by_spans = list(_by_iterations(activities)), list(_by_spans(timeline))
    opened_ns = timeline.window.start_ns
    return Table(
        [
            *(_engine(replica, "iterations", by_trace, opened_ns) for replica in by_trace),
            *(_engine(replica, "spans", by_spans, opened_ns) for replica in by_spans),
        ]
    )


def find_phaseless(timeline: Timeline, engines: Sequence[Engine]) -> Table[Phaseless]:
    """Processes that `view_engines` has no row of, though they seem to be engines.

    None where an engine's trace names its iterations: that engine may run in any of the processes. The
    owner's spans of role `rollout` are taken for the wait for a replica, unless it is the only process.
    """
    if any(engine.source == "iterations" for engine in engines):
        return Table()
    seen = {engine.replica for engine in engines}
    stages: dict[int, set[str]] = defaultdict(set)
    for span in timeline.spans:
        if span.role == "rollout" and span.stage not in _STAGES:
            stages[span.process].add(span.stage)
    alone = len(timeline.processes) == 1
    return Table(
        Phaseless(process=process.name, stages=tuple(sorted(stages[index])))
        for index, process in enumerate(timeline.processes)
        if index in stages and process.aligned and process.name not in seen and (alone or not process.owner)
    )


def _by_iterations(activities: Iterable[TraceActivity]) -> Iterable[_Replica]:
    """One trace for each replica: the workers of one run the same iterations."""
    seen = set()
    for activity in activities:
        replica = activity.name if activity.info.replica is None else activity.info.replica
        found = activity.content.iterations
        if not found or activity.unaligned is not None or replica in seen:
            continue
        seen.add(replica)
        tokens = [each.prefill_tokens for each in found]
        name = activity.name if activity.info.replica is None else f"replica {activity.info.replica}"
        pieces = [
            _Piece(
                activity.unix_ns(x.start_us),
                activity.unix_ns(x.start_us + x.dur_us),
                0,
                x.prefills,
                x.decodes,
            )
            for x in found
        ]
        yield _Replica(name, len(found), None if None in tokens else sum(t or 0 for t in tokens), pieces)


def _by_spans(timeline: Timeline) -> Iterable[_Replica]:
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    for span in timeline.spans:
        process = timeline.processes[span.process]
        if span.role == "rollout" and span.stage in _STAGES and process.aligned:
            until_ns = timeline.until_ns(span)
            pieces[span.process].append(_Piece(span.start_ns, until_ns, *_STAGES[span.stage]))
    for index, mine in sorted(pieces.items()):
        if any(piece.decoding or piece.prefilling for piece in mine):
            yield _Replica(timeline.processes[index].name, None, None, mine)


def _engine(
    replica: _Replica, source: Literal["iterations", "spans"], others: Sequence[_Replica], opened_ns: int
) -> Engine:
    start_ns = min(piece.start_ns for other in others for piece in other.pieces)
    end_ns = max(piece.end_ns for other in others for piece in other.pieces)
    phases = {(True, False): 0, (False, True): 0, (True, True): 0, (False, False): 0}
    requests_ns = most = 0
    for from_ns, until_ns, _, prefilling, decoding in _levels(replica.pieces):
        phases[prefilling > 0, decoding > 0] += until_ns - from_ns
        requests_ns += decoding * (until_ns - from_ns)
        most = max(most, decoding)
    decode_ns, both_ns = phases[False, True], phases[True, True]
    return Engine(
        replica=replica.name,
        source=source,
        iterations=replica.iterations,
        window_ns=end_ns - start_ns,
        prefill_ns=phases[True, False],
        decode_ns=decode_ns,
        both_ns=both_ns,
        decoding=round(requests_ns / (decode_ns + both_ns), 2) if decode_ns + both_ns else 0.0,
        most_decoding=most,
        prefill_tokens=replica.prefill_tokens,
        load=_load(replica.pieces, start_ns, end_ns, opened_ns),
    )


def _levels(pieces: Sequence[_Piece]) -> Iterable[tuple[int, int, int, int, int]]:
    """(start, end, waiting, prefilling, decoding) wherever one of these changes."""
    changes: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for piece in pieces:
        for place, number in enumerate(piece[2:]):
            changes[piece.start_ns][place] += number
            changes[piece.end_ns][place] -= number
    levels, at_ns = [0, 0, 0], 0
    for time_ns in sorted(changes):
        if any(levels):
            yield at_ns, time_ns, levels[0], levels[1], levels[2]
        levels = [level + change for level, change in zip(levels, changes[time_ns], strict=True)]
        at_ns = time_ns


def _load(pieces: Sequence[_Piece], start_ns: int, end_ns: int, opened_ns: int) -> tuple[Load, ...]:
    width = max(1, -(-(end_ns - start_ns) // BINS))
    sums = [[0, 0, 0] for _ in range(-(-(end_ns - start_ns) // width))]
    for from_ns, until_ns, *levels in _levels(pieces):
        for at in range((from_ns - start_ns) // width, (until_ns - start_ns - 1) // width + 1):
            left, right = start_ns + at * width, start_ns + (at + 1) * width
            shared = min(until_ns, right) - max(from_ns, left)
            for place, level in enumerate(levels):
                sums[at][place] += level * shared
    return tuple(
        Load(
            start_ns=start_ns + at * width - opened_ns,
            waiting=round(waiting / width, 2),
            prefilling=round(prefilling / width, 2),
            decoding=round(decoding / width, 2),
        )
        for at, (waiting, prefilling, decoding) in enumerate(sums)
    )
