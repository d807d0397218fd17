"""Event loops that could not run while calls waited for them, and the code that blocked them.

An event loop is late if other code kept its thread busy while calls waited for the loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from stepscope.files.counters import BLOCKED_NS, CORE_WAIT, EVENT_LOOP, IN
from stepscope_report.accounting import Label, Pair, clipped, union_ns
from stepscope_report.formatting import duration
from stepscope_report.spans import ToolNames, label_of
from stepscope_report.table import grouped
from stepscope_report.timeline import Counter, Span, Timeline
from stepscope_report.timeline.model import HeldValue, held_values

_CLOSE_NS = 10_000_000
"""Largest difference, in ns, of two times that count as the same time. A sample's time is read shortly before
the sample's values."""


class LateLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the code that blocked an event loop, so that waiting calls could not go on."""

    process: str
    role: str
    thread: str
    """Name of the loop's thread."""
    late_ns: int
    """Sum of `blocks`, in ns."""
    blocks: tuple[Pair, ...]
    """(start, end) of each block at this place, in order. Unix time in ns."""
    blocker: Label | None = None
    """(role, stage) of the call that blocked the loop: the call that the sampler found running, else the
    innermost call that ended when the loop ran again. A tool's stage includes its name. None if neither call
    is known."""
    line: str = ""
    """Source line that blocked the loop: `tools.py:33`. Empty if the sampler found no line."""


def say_blocks(loop: LateLoop) -> str:
    """Return how long callbacks waited for the blocks of a place, as a clause."""
    whose = f"on its thread {loop.thread} waited"
    if len(loop.blocks) == 1:
        return f"a callback {whose} for {duration(loop.late_ns)}"
    longest = max(end_ns - start_ns for start_ns, end_ns in loop.blocks)
    return f"callbacks {whose} {len(loop.blocks):,} times, for at most {duration(longest)}"


class _Seen(NamedTuple):
    """A sample that found a call running while the event loop was blocked."""

    at_ns: int
    call: int
    line: str


class _Block(NamedTuple):
    start_ns: int
    end_ns: int
    call: int | None
    """Index of the span that blocked the loop, or None if unknown."""
    line: str


def late_loops(timeline: Timeline) -> Iterator[LateLoop]:
    """Yield each place that blocked an event loop for more than `BLOCKED_NS` at once in the step.

    A block by a recorded call counts only if another recorded call was open on the loop's thread meanwhile.
    Otherwise no recorded call waited for the loop.
    """
    names = ToolNames(timeline)
    counters = grouped(timeline.counters, lambda counter: counter.process)
    calls_of = grouped(range(len(timeline.spans)), lambda index: timeline.spans[index].process)
    for counter in timeline.counters:
        if counter.name != EVENT_LOOP or IN in counter.of:
            continue
        process, beside = timeline.processes[counter.process], counters[counter.process]
        places = [
            other for other in beside if other.name == EVENT_LOOP and other.of.startswith(counter.of + IN)
        ]
        waits = [
            piece
            for other in beside
            if other.name == CORE_WAIT and counter.of == "MainThread"
            for piece in held_values(other, timeline)
        ]
        found = defaultdict[tuple[Label | None, str], list[Pair]](list)
        for start_ns, end_ns, calls in _with_calls(counter, calls_of.get(counter.process, ()), timeline):
            for part in _parts(counter, places, calls, start_ns, end_ns, timeline):
                label = None if part.call is None else names.label_of(timeline.spans[part.call])
                if 2 * _without_core_ns(part, waits) >= part.end_ns - part.start_ns:
                    continue
                if _is_beside_others(part, calls, timeline):
                    found[label, part.line].append((part.start_ns, part.end_ns))
        for place in [place for place in found if not place[1]]:  # of a short block, no line was sampled
            lines = [other for other in found if other[0] == place[0] and other[1]]
            if lines:
                found[max(lines, key=lambda other: union_ns(found[other]))] += found.pop(place)
        for (label, line), blocks in found.items():
            yield LateLoop(
                process=process.name,
                role=process.info.role,
                thread=counter.of,
                late_ns=sum(end_ns - start_ns for start_ns, end_ns in blocks),
                blocks=tuple(sorted(blocks)),
                blocker=label,
                line=line,
            )


def _with_calls(
    loop: Counter, calls: Sequence[int], timeline: Timeline
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield (start, end, calls) of each block of a loop. The calls are those that were open after the loop's
    last sample before the block, and the last call that began before the block.

    A step may have 100,000 calls and 1,000 blocks, so the calls of each block are found in one pass.
    """
    spans = timeline.spans
    coming = deque(sorted(calls, key=lambda index: spans[index].start_ns))
    near = list[int]()
    for start_ns, end_ns in sorted(_blocks(loop, timeline)):
        while coming and spans[coming[0]].start_ns <= end_ns:
            near.append(coming.popleft())
        near.sort()
        ran_ns = _ran_ns(loop, start_ns)
        begun = (index for index in near if spans[index].start_ns <= start_ns)
        last = max(begun, key=lambda index: spans[index].start_ns, default=None)
        near = [index for index in near if index == last or timeline.until_ns(spans[index]) > ran_ns]
        yield start_ns, end_ns, near


def _ran_ns(loop: Counter, start_ns: int) -> int:
    """Return the last time before a block at which a sample shows that the loop ran."""
    return max((time for time in loop.times_ns if time < start_ns), default=start_ns)


def _without_core_ns(block: _Block, waits: Sequence[HeldValue]) -> int:
    """Return the ns of a block in which the loop's thread had work but no free core.

    Args:
        waits: The thread's waits for a core, in percent. Empty if they are unknown.
    """
    return round(
        sum(
            piece.value / 100 * max(0, min(block.end_ns, piece.end_ns) - max(block.start_ns, piece.start_ns))
            for piece in waits
        )
    )


def _parts(
    loop: Counter,
    places: Sequence[Counter],
    calls: Sequence[int],
    start_ns: int,
    end_ns: int,
    timeline: Timeline,
) -> Iterator[_Block]:
    """Yield the block of a loop, divided where the sampler found another call or line running.

    Args:
        places: Counters of the places in the code that blocked the loop.
    """
    seen = sorted(_seen(loop, places, calls, start_ns, end_ns, timeline))
    if not seen:
        call = _blocker(calls, start_ns, end_ns, loop.times_ns[-1], timeline)
        yield _Block(_begin_ns(loop, call, calls, start_ns, timeline), end_ns, call, "")
        return
    runs = [list(own) for _, own in groupby(seen, key=lambda one: (one.call, one.line))]
    since_ns = _begin_ns(loop, seen[0].call, calls, start_ns, timeline)
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        call, until_ns = run[0].call, end_ns
        if following is not None:
            # A blocked thread enters and leaves no span, so the block had ended at the next edge of a span.
            edges = _edges_ns(call, calls, run[-1].at_ns, following[0].at_ns, timeline)
            until_ns = min(edges, default=following[0].at_ns)
        yield _Block(since_ns, until_ns, call, run[0].line)
        since_ns = until_ns


def _begin_ns(
    loop: Counter, call: int | None, calls: Sequence[int], start_ns: int, timeline: Timeline
) -> int:
    """Return the time at which a block of a loop began.

    The loop ran at the last sample before `start_ns`, and whenever a span of its thread began or ended.
    """
    if call is None:
        return start_ns
    edges = _edges_ns(call, calls, _ran_ns(loop, start_ns), start_ns, timeline)
    return max(edges, default=start_ns)


def _edges_ns(
    call: int, calls: Sequence[int], from_ns: int, until_ns: int, timeline: Timeline
) -> Iterator[int]:
    """Yield the times after `from_ns` and before `until_ns` at which spans of the call's thread began or
    ended. Spans below the call are left out.
    """
    spans = timeline.spans
    for index in calls:
        span = spans[index]
        edges = [ns for ns in (span.start_ns, timeline.until_ns(span)) if from_ns < ns < until_ns]
        if edges and span.thread == spans[call].thread and call not in _above(index, spans) - {index}:
            yield from edges


def _blocks(counter: Counter, timeline: Timeline) -> list[Pair]:
    """Return the stretches of the step in which the loop could not run.

    With each sample the sampler schedules a callback on the loop, and the sample's value is the delay of that
    callback so far. A delay of d at time t means that the loop has not run since t - d. Samples of one block
    are joined; the block begins at the last sample at or before t - d.
    """
    longest: dict[int, int] = {}
    start_ns, before_ns = None, counter.times_ns[0]
    aligned, window = timeline.processes[counter.process].aligned, timeline.window
    for at_ns, value in zip(counter.times_ns, counter.values, strict=True):
        late_ns = round(value * 1e6)
        sent_ns = at_ns - late_ns
        if sent_ns + _CLOSE_NS >= before_ns:
            start_ns = None
        before_ns = at_ns
        if late_ns <= BLOCKED_NS or (aligned and not (window.start_ns <= at_ns and sent_ns <= window.end_ns)):
            continue
        if start_ns is None:
            before = (time for time in counter.times_ns if time <= sent_ns + _CLOSE_NS)
            start_ns = max(before, default=sent_ns)
        longest[start_ns] = max(late_ns, longest.get(start_ns, 0))
    return [(start_ns, start_ns + late_ns) for start_ns, late_ns in longest.items()]


def _seen(
    loop: Counter,
    places: Sequence[Counter],
    calls: Sequence[int],
    start_ns: int,
    end_ns: int,
    timeline: Timeline,
) -> Iterator[_Seen]:
    """Yield each sample that found a call of `calls` running during the block. Of several calls with the
    sampled name, the longest in the block counts.
    """
    longest = dict[str, tuple[int, int]]()
    for index in calls:
        span = timeline.spans[index]
        ns = min(end_ns, timeline.until_ns(span)) - max(start_ns, span.start_ns)
        label = f"{span.role} {span.stage}"
        for name in (label, f"{label} {(span.attrs or {}).get('name')}"):
            if ns > longest.get(name, (0, 0))[0]:
                longest[name] = ns, index
    for place in places:
        name, _, line = place.of.removeprefix(loop.of + IN).rpartition(", ")
        if name in longest:
            for at_ns in place.times_ns:
                if start_ns <= at_ns <= end_ns + _CLOSE_NS:
                    yield _Seen(at_ns, longest[name][1], line)


def _blocker(
    calls: Sequence[int], start_ns: int, end_ns: int, last_ns: int, timeline: Timeline
) -> int | None:
    """Return the index of the innermost span in `calls` that ended when the loop ran again. If calls of
    several stages ended then, return the last call that began before the block.

    Return None if no such call ended then, or if the calls fill less than nine tenths of the block.

    Args:
        last_ns: Time of the loop's last sample. If the block lasts until about then, a call that ended later
            may be the blocker too.
    """
    ends_ns = {index: timeline.until_ns(timeline.spans[index]) for index in calls}
    filled = [(timeline.spans[index].start_ns, until_ns) for index, until_ns in ends_ns.items()]
    if union_ns(clipped(filled, start_ns, end_ns)) * 10 < 9 * (end_ns - start_ns):
        return None
    near_ns = max(_CLOSE_NS, (end_ns - start_ns) // 10)
    latest_ns = None if end_ns + near_ns >= last_ns else end_ns + near_ns
    ended = [
        (until_ns, -timeline.spans[index].start_ns, index)
        for index, until_ns in ends_ns.items()
        if timeline.spans[index].start_ns < end_ns
        and until_ns >= end_ns - near_ns
        and (latest_ns is None or until_ns <= latest_ns)
    ]
    if len({label_of(timeline.spans[index]) for *_, index in ended}) <= 1:
        return min(ended)[2] if ended else None
    # Calls whose timers ran out during the block end with it too.
    begun = (index for index in calls if timeline.spans[index].start_ns <= start_ns)
    latest = max(begun, key=lambda index: timeline.spans[index].start_ns, default=None)
    return latest if any(index == latest for *_, index in ended) else None


def _is_beside_others(block: _Block, calls: Sequence[int], timeline: Timeline) -> bool:
    """Return True if another call of `calls`, neither around nor inside the blocker, was open on the
    blocker's thread during the block.
    """
    if block.call is None:
        return True
    spans, blocker = timeline.spans, block.call
    start_ns = max(block.start_ns, spans[blocker].start_ns)
    end_ns = min(block.end_ns, timeline.until_ns(spans[blocker]))
    above = _above(blocker, spans)
    return any(
        index not in above
        and spans[index].thread == spans[blocker].thread
        and spans[index].start_ns < end_ns
        and timeline.until_ns(spans[index]) > start_ns
        and blocker not in _above(index, spans)
        for index in calls
    )


def _above(index: int | None, spans: Sequence[Span]) -> set[int]:
    """Return the indices of a span and of all spans around it."""
    above = set[int]()
    while index is not None:
        above.add(index)
        index = spans[index].parent
    return above
