"""Event loops that calls waited for, because other code ran on their thread and did not await."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stepscope.files.counters import BLOCKED_NS, EVENT_LOOP, IN
from stepscope_report.accounting import Pair, clipped, union_ns
from stepscope_report.timeline import Counter, Span, Timeline

_CLOSE_NS = 10_000_000
"""Two times at most this far apart count as one. A sample's clock is read before its sources are."""


class LateLoop(msgspec.Struct, frozen=True, kw_only=True):
    """An event loop that did not run while calls waited for it."""

    process: str
    role: str
    thread: str
    """Name of the thread that it runs on."""
    late_ns: int
    """Longest time for which it did not run."""
    blocker: tuple[str, str] | None = None
    """Role and stage of the call that the loop's task was in meanwhile, else of the call that ended when the
    loop ran again. None if no recorded call did."""
    line: str = ""
    """The blocker's line: `tools.py:33`; empty if the sampler did not see it."""


def late_loops(timeline: Timeline) -> Iterator[LateLoop]:
    """Yield each loop that was late by more than `BLOCKED_NS` in the step, with its longest block.

    A block is harmless if recorded calls fill it, the loop ran again when one of these calls ended, and no
    other call was open at the same time: then no recorded call waited.
    """
    for counter in timeline.counters:
        if counter.name != EVENT_LOOP or IN in counter.of:
            continue
        process = timeline.processes[counter.process]
        calls = [index for index, span in enumerate(timeline.spans) if span.process == counter.process]
        for start_ns, end_ns in sorted(_blocks(counter, timeline), key=lambda block: block[0] - block[1]):
            seen = _seen(counter, calls, start_ns, end_ns, timeline)
            blocker = seen[0] if seen else _blocker(calls, start_ns, end_ns, counter.times_ns[-1], timeline)
            if blocker is not None and not _is_beside_others(blocker, calls, start_ns, end_ns, timeline):
                continue
            call = None if blocker is None else timeline.spans[blocker]
            if (
                call is not None and call.start_ns < start_ns
            ):  # since the sample before, at which the loop ran
                ran_ns = max((time for time in counter.times_ns if time < start_ns), default=start_ns)
                start_ns = call.start_ns if call.start_ns >= ran_ns else start_ns
            yield LateLoop(
                process=process.name,
                role=process.info.role,
                thread=counter.of,
                late_ns=end_ns - start_ns,
                blocker=None if call is None else (call.role, call.stage),
                line=seen[1] if seen else "",
            )
            break


def _blocks(counter: Counter, timeline: Timeline) -> list[Pair]:
    """Return the stretches of the step in which the loop did not run.

    The sampler gives the loop a callback when it samples, and each sample says how late that callback was so
    far. So a block begins at the latest sample that allows for its length. A callback that is later than the
    time since the sample before is that sample's.
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
    loop: Counter, calls: Sequence[int], start_ns: int, end_ns: int, timeline: Timeline
) -> tuple[int, str] | None:
    """Return the call that the sampler saw in the block, as an index of a span, and its line. None if it saw
    none, or the call is not among `calls`.
    """
    seen = [
        (value, counter.of.removeprefix(loop.of + IN))
        for counter in timeline.counters
        if (counter.name, counter.process) == (EVENT_LOOP, loop.process)
        and counter.of.startswith(loop.of + IN)
        for at_ns, value in zip(counter.times_ns, counter.values, strict=True)
        if start_ns <= at_ns <= end_ns + _CLOSE_NS
    ]
    if not seen:
        return None
    label, _, line = max(seen)[1].rpartition(", ")
    held = [
        (min(end_ns, timeline.until_ns(span)) - max(start_ns, span.start_ns), index)
        for index in calls
        for span in [timeline.spans[index]]
        if f"{span.role} {span.stage}" == label
    ]
    longest_ns, call = max(held, default=(0, 0))
    return (call, line) if longest_ns > 0 else None


def _blocker(
    calls: Sequence[int], start_ns: int, end_ns: int, last_ns: int, timeline: Timeline
) -> int | None:
    """Return the innermost of the calls that ended when the loop ran again, as an index of a span.

    None if no call ended then, or the calls fill less than nine tenths of the block. `last_ns` is the time of
    the last sample: a call that ended later may still have blocked the loop then.
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
    return min(ended)[2] if ended else None


def _is_beside_others(
    blocker: int, calls: Sequence[int], start_ns: int, end_ns: int, timeline: Timeline
) -> bool:
    """Return whether another one of the calls was open on the blocker's thread at the same time, within the
    block.
    """
    spans = timeline.spans
    start_ns = max(start_ns, spans[blocker].start_ns)
    end_ns = min(end_ns, timeline.until_ns(spans[blocker]))
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
    """Return the indices of the span and of all spans that it runs below."""
    above = set[int]()
    while index is not None:
        above.add(index)
        index = spans[index].parent
    return above
