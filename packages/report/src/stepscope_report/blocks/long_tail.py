"""The long tail as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope_report.blocks.block import Block, TextTable
from stepscope_report.formatting import LISTED, count, duration, few, percent_of, starred, turn
from stepscope_report.model import StepReport
from stepscope_report.tables.long_tail import LongTail, SlowTrajectory, Spread


def long_tail_blocks(tail: LongTail | None, report: StepReport) -> Iterator[Block]:
    """Yield the spread of each stage inside trajectories, and the slowest ones."""
    if tail is None:
        return
    columns = ("role", "stage", ">calls", ">p50", ">p90", ">p99", ">max", "p99 is", "max is")
    yield TextTable("Long tail", columns, tuple(map(_spread, tail.spreads)), "\n".join(tail_sentences(tail)))
    if tail.worst:
        rows = tuple((*slow_cells(slow), waits(slow)) for slow in tail.worst)
        yield TextTable("Slowest trajectories", ("trajectory", ">took", ">began at", "of that"), rows)


def _spread(spread: Spread) -> tuple[str, ...]:
    times = (spread.p50_ns, spread.p90_ns, spread.p99.ns, spread.max.ns)
    named = (turn(extreme.trajectory, extreme.turn) for extreme in (spread.p99, spread.max))
    return spread.role, spread.title, f"{spread.calls:,}", *map(duration, times), *named


def slow_cells(slow: SlowTrajectory) -> tuple[str, str, str]:
    """Return the name, the duration and the beginning of a slow trajectory."""
    took = duration(slow.wall_ns) + (" (open)" if slow.open else " (cancelled)" if slow.cancelled else "")
    return name_slow(slow), took, duration(slow.start_ns)


def waits(slow: SlowTrajectory) -> str:
    """Return the stages that took most of it."""
    return ", ".join(f"{wait.title} {duration(wait.wall_ns)}" for wait in slow.waits[:4])


def name_slow(slow: SlowTrajectory) -> str:
    """Return `t7`, or `t7*, for step 9`: `*` if a profiler slowed those that served it, and not all."""
    name = starred(slow.trajectory, bool(slow.profiled))
    if slow.consumed:
        return name
    return f"{name}, not consumed" if slow.consumed_by is None else f"{name}, for step {slow.consumed_by}"


def tail_sentences(tail: LongTail) -> list[str]:
    """Return what the table of spreads does not say."""
    sentences = (_say_held(tail), _say_bubble(tail), _say_others(tail), _say_outside(tail), _say_slowed(tail))
    return [sentence for sentence in sentences if sentence]


def _say_held(tail: LongTail) -> str:
    """Return how long the others waited for the last ones."""
    if tail.held_ns is None or tail.rollout_ns is None:
        return ""
    share = percent_of(tail.held_ns, tail.rollout_ns)
    fewer = [f"{duration(hold.held_ns)} for the last {hold.trajectories:,}" for hold in tail.holds[1:]]
    return (
        f"The others waited {duration(tail.held_ns)} for the last {tail.last:,} of {tail.trajectories:,} "
        f"trajectories: {share} % of the {duration(tail.rollout_ns)} from the first start to the last end."
        f"{' Of that, ' + ', '.join(fewer) + '.' if fewer else ''}{_say_stalled(tail)}"
    )


def _say_stalled(tail: LongTail) -> str:
    if not tail.stalled_ns:
        return ""
    return f" For {duration(tail.stalled_ns)} of that an engine served nothing, because its profiler wrote."


def _say_bubble(tail: LongTail) -> str:
    """Return what the replicas did meanwhile."""
    bubble = tail.bubble
    if bubble is None or not bubble.replicas:
        return ""
    share = percent_of(bubble.idle_ns, bubble.tail_ns * bubble.replicas)
    replicas = count(bubble.replicas, "replica")
    idle = f"{replicas} did nothing for {duration(bubble.idle_ns)} in sum ({share} %)"
    return (
        f"Meanwhile {trajectories(bubble.in_flight)} ran at once, {bubble.in_flight_before:g} before, and "
        f"{idle if bubble.idle_ns else f'{replicas} had work all the time'}."
    )


def _say_others(tail: LongTail) -> str:
    """Count the trajectories that the sentences before leave out."""
    late = tail.late
    until = (
        "" if late is None else f", the last for this step, {late.last}, for {duration(late.until_ns)} more"
    )
    others = (
        (tail.under_way, f"under way when the capture opened: how long they took is not known{until}"),
        (tail.of_other_steps, "that this step does not consume"),
        (tail.cancelled, f"cancelled{_after(tail)}"),
        (tail.open, "never seen to end"),
    )
    parts = [f"{number:,} {what}" for number, what in others if number]
    return f"Further trajectories: {'; '.join(parts)}." if parts else ""


def _after(tail: LongTail) -> str:
    late_ns = tail.cancelled_after_ns
    return f", the last {duration(late_ns)} after all others had ended" if late_ns else ""


def _say_outside(tail: LongTail) -> str:
    """Name the tools that are in no trajectory."""
    calls = [
        f"{count(own.calls, 'call')} of {own.role} {own.stage}, while {count(own.running, 'trajectory')} ran"
        for own in tail.outside
    ]
    fix = "`attach(carrier())` in their thread or process puts them there."
    return f"In no trajectory: {few(calls, LISTED)}. {fix}" if calls else ""


def _say_slowed(tail: LongTail) -> str:
    """Name the processes whose trajectories a profiler slowed. Empty if none, or all alike."""
    if not tail.profiled:
        return ""
    names = few(tail.profiled, LISTED)
    return f"*: served by {names}. A profiler recorded these processes and slowed them, and not the others."


def trajectories(number: float) -> str:
    """Return `1 trajectory`, `2.5 trajectories`."""
    return f"{number:g} {'trajectory' if number == 1 else 'trajectories'}"
