"""Advice, idle time, engines and traces as tables for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from stepscope.report.formatting import count, duration, percents, plain, size
from stepscope.report.tables.advice import Advice
from stepscope.report.tables.breakdown import Breakdown, Line
from stepscope.report.tables.devices import DeviceRow, MemoryRow, NoDevice, OperatorRow, TraceTables
from stepscope.report.tables.gaps import GAPS, LEAST, name_gap
from stepscope.report.tables.idle import Idle
from stepscope.report.tables.long_tail import LongTail, SlowTrajectory
from stepscope.report.tables.staleness import Staleness, StaleTrajectory
from stepscope.report.terminal.layout import LISTED, listing, table

SHOWN = 10
"""Operators of a role that are printed."""
NAME = 60
"""Characters of a kernel's name; in full they fill screens."""


PROFILED = "*: a profiler recorded this process and slowed it."


def starred(name: str, profiled: bool) -> str:
    """The name of a process, with a `*` if a profiler recorded it."""
    return f"{name}*" if profiled else name


def say_profiled(*profiled: bool) -> str:
    """The note on `*`; empty if none has it."""
    return PROFILED if any(profiled) else ""


def advise(advice: Sequence[Advice], total_ns: int) -> RenderableType:
    """Show what could be done, the most urgent first."""
    parts: list[RenderableType] = [Text(""), Text("What to do", style="bold")]
    for each in advice:
        said = Text(f"{'! ' if each.kind == 'alarm' else '- '}{plain(each.what)}{_saves(each, total_ns)}")
        parts.append(Padding(said, (0, 0, 0, 2)))
        told = Text(f"{plain('; '.join(each.because))}\nTry: {plain(each.do)}", style="dim")
        parts.append(Padding(told, (0, 0, 0, 4)))
    return Group(*parts)


def _saves(advice: Advice, total_ns: int) -> str:
    if not advice.saves_ns:
        return ""
    (share,) = percents([min(advice.saves_ns, total_ns)], total_ns)
    return f" (at most {duration(advice.saves_ns)}, {share} % of the step)"


def say_outside(breakdown: Breakdown) -> str:
    """Return the time of the capture before and after the step, which other steps do not pay."""
    return (
        f"The capture took {duration(breakdown.opening_ns)} to open before the step and "
        f"{duration(breakdown.closing_ns)} to close after it; other steps do not pay that."
    )


def idle(rows: Sequence[Idle], window_ns: int) -> Iterator[RenderableType]:
    """Each process, or of many each role's mean and the most idle one."""
    shown = list(rows)
    if len(rows) > LISTED:
        by_role: dict[str, list[Idle]] = defaultdict(list)
        for row in rows:
            by_role[row.role].append(row)
        shown = [max(mine, key=lambda row: row.idle_ns) for mine in by_role.values()]
    if not rows or not window_ns:
        return
    note = "Likely causes: what others did while the process did nothing. In collectives: by its trace."
    if len(shown) < len(rows):
        note = f"Of each role the most idle of {count(len(rows), 'process')}. {note}"
    note = f"{note} {say_profiled(*(row.profiled for row in shown))}".rstrip()
    cells = [
        (
            starred(row.process, row.profiled), duration(row.busy_ns), duration(row.idle_ns),
            percents([row.idle_ns], window_ns)[0], say_causes(row), say_collectives(row),
        )
        for row in shown
    ]  # fmt: skip
    yield table(
        "Idle", ("process", ">busy", ">idle", ">%", "it probably waited for", "in collectives"), cells, note
    )


def say_causes(row: Idle, most: int = 3) -> str:
    """`rollout 2.06 s, slowest rank 196 ms (compute_log_prob)`: by kind, the longest first."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for cause in row.causes:
        by_kind[cause.kind][cause.stage or ""] += cause.wall_ns
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind].total())
    said = []
    for kind in kinds[:most]:
        stages = [stage for stage, _ in by_kind[kind].most_common(1) if stage]
        named = f" ({', '.join(stages)})" if stages and kind in ("slowest rank", "other work") else ""
        said.append(f"{kind} {duration(by_kind[kind].total())}{named}")
    return ", ".join(said)


def say_collectives(row: Idle) -> str:
    """`163 ms (128 ms before all were there: actor 3)`; empty where no trace says it."""
    if row.collective_ns is None:
        return ""
    if not row.skew_ns:
        return duration(row.collective_ns)
    last = "" if row.awaited is None else f": {row.awaited}"
    return f"{duration(row.collective_ns)} ({duration(row.skew_ns)} before all were there{last})"


GAP_COLUMNS = (">wall", ">%", ">gaps", "where no span ran")


def gap_rows(breakdown: Breakdown) -> list[tuple[str, ...]]:
    """Return the largest gaps and the sum of the others. Empty if unaccounted time is next to nothing."""
    unaccounted_ns = sum(gap.wall_ns for gap in breakdown.gaps)
    if unaccounted_ns * LEAST < max(breakdown.window_ns, 1):
        return []
    largest, rest = breakdown.gaps[:GAPS], breakdown.gaps[GAPS:]
    parts = [(name_gap(gap), gap.wall_ns, gap.count) for gap in largest]
    if rest:
        parts.append(("elsewhere", sum(gap.wall_ns for gap in rest), sum(gap.count for gap in rest)))
    shares = percents([ns for _, ns, _ in parts], breakdown.window_ns)
    return [
        (duration(ns), share, f"{number:,}", name)
        for (name, ns, number), share in zip(parts, shares, strict=True)
    ]


def waiting(line: Line) -> str:
    """The mark behind the name of a stage that waits."""
    return " (waiting)" if line.waits else ""


def say_left_out(breakdown: Breakdown) -> str:
    """Name the processes that are in no line, the first few of them."""
    names = breakdown.left_out
    more = "" if len(names) <= LISTED else f" and {len(names) - LISTED:,} more"
    return f"Not in here, because their clocks are unaligned: {', '.join(names[:LISTED])}{more}"


def say_held(tail: LongTail) -> str:
    """Return how long the others waited for the last ones."""
    if tail.held_ns is None or tail.rollout_ns is None:
        return ""
    (share,) = percents([tail.held_ns], tail.rollout_ns)
    more = (f", {duration(hold.held_ns)} for the last {hold.trajectories:,}" for hold in tail.holds[1:])
    return (
        f"The others waited {duration(tail.held_ns)} for the last {tail.last:,} of {tail.trajectories:,} "
        f"trajectories: {share} % of the {duration(tail.rollout_ns)} from the first start to the last end"
        f"{''.join(more)}.{_say_stalled(tail)}"
    )


def _say_stalled(tail: LongTail) -> str:
    if not tail.stalled_ns:
        return ""
    return f" For {duration(tail.stalled_ns)} of that an engine served nothing, because its profiler wrote."


def name_slow(slow: SlowTrajectory) -> str:
    """`t7`, or `t7*, for step 9`: with a `*` if a profiler slowed those that served it, and not all."""
    name = starred(slow.trajectory, bool(slow.profiled))
    return name + ("" if slow.consumed_by is None else f", for step {slow.consumed_by}")


def say_slowed(tail: LongTail) -> str:
    """Name the processes whose trajectories a profiler slowed; empty if none, or all alike."""
    names = ", ".join(tail.profiled[:LISTED]) + (" ..." if len(tail.profiled) > LISTED else "")
    served = f"*: served by {names}. A profiler recorded these processes and slowed them, and not the others."
    return served if tail.profiled else ""


def say_bubble(tail: LongTail) -> str:
    """Return what the replicas did meanwhile."""
    bubble = tail.bubble
    if bubble is None or not bubble.replicas:
        return ""
    (share,) = percents([bubble.idle_ns], bubble.tail_ns * bubble.replicas)
    replicas = count(bubble.replicas, "replica")
    idle = f"{replicas} did nothing for {duration(bubble.idle_ns)} in sum ({share} %)"
    return (
        f"Meanwhile {trajectories(bubble.in_flight)} ran at once, {bubble.in_flight_before:g} before, and "
        f"{idle if bubble.idle_ns else f'{replicas} had work all the time'}."
    )


def say_others(tail: LongTail) -> str:
    """Trajectories that are in the times of stages, and not among those that the others waited for."""
    late = tail.late
    until = (
        "" if late is None else f", the last for this step, {late.last}, for {duration(late.until_ns)} more"
    )
    others = (
        (tail.under_way, f"under way when the capture opened: how long they took is not known{until}"),
        (tail.of_other_steps, "for other steps to consume: nobody waited for them"),
        (tail.open, "never seen to end"),
    )
    said = [f"{number:,} {what}" for number, what in others if number]
    return f"Further trajectories: {'; '.join(said)}." if said else ""


def staleness(found: Staleness) -> Iterator[RenderableType]:
    rows = [
        (name, f"{lag.known:,}", f"{lag.p50:,}", f"{lag.p90:,}", f"{lag.max:,}")
        for name, lag in (("steps", found.steps), ("policy versions", found.versions))
        if lag is not None
    ]
    columns = ("behind by", ">trajectories", ">p50", ">p90", ">max")
    yield table("Staleness", columns, rows, say_staleness(found))
    if found.worst:
        names = ("trajectory", "begun under", "policy versions", ">steps behind", ">versions behind")
        yield table("Stalest trajectories", names, map(stale_cells, found.worst))


def say_staleness(found: Staleness) -> str:
    """Return what the step consumed."""
    said = f"{count(found.trajectories, 'trajectory')} consumed by this step"
    if found.policy_version is not None:
        said += f", under policy version {found.policy_version}"
    if found.mixed:
        said += f"; {found.mixed:,} written by several versions"
    return f"{said}."


def stale_cells(row: StaleTrajectory) -> tuple[str, ...]:
    """The cells of one of the stalest."""
    begun = "-" if row.begun_step is None else f"step {row.begun_step}"
    versions = ", ".join(map(str, row.policy_versions)) or "-"
    return (
        row.trajectory,
        begun,
        versions,
        *("-" if n is None else f"{n:,}" for n in (row.steps, row.versions)),
    )


def trajectories(number: float) -> str:
    """`1 trajectory`, `2.5 trajectories`."""
    return f"{number:g} {'trajectory' if number == 1 else 'trajectories'}"


def traces(found: TraceTables) -> Iterator[RenderableType]:
    """Show the tables of the profilers' traces."""
    roles: dict[str, list[OperatorRow]] = defaultdict(list)
    for row in found.operators:
        roles[row.role].append(row)
    for role, rows in roles.items():
        yield _operators(role, rows)
    if found.devices:
        yield _devices(found.devices)
    if found.without_device:
        yield listing("No device activity in a trace", [say_no_device(row) for row in found.without_device])
    if found.memory:
        yield _memory(found.memory)
    if found.problems:
        lines = [f"{problem.file}: {problem.what}" for problem in found.problems]
        yield listing("Trouble with traces", lines)
    if found.unread:
        yield listing("Not looked into", found.unread)


def _operators(role: str, rows: Sequence[OperatorRow]) -> RenderableType:
    on_cpu = [row for row in rows if row.kind in ("cpu", "mark")][:SHOWN]
    on_device = [row for row in rows if row.kind not in ("cpu", "mark")][:SHOWN]
    cells = [
        (
            short(row.name), row.kind, f"{row.count:,}", duration(row.self_ns), duration(row.total_ns),
            duration(row.mean_ns), duration(row.max_ns),
        )
        for row in (*on_device, *on_cpu)
    ]  # fmt: skip
    columns = ("name", "kind", ">count", ">own time", ">total", ">mean", ">max")
    title = f"Operators and kernels: {plain(role)}"
    note = "Sums over calls and processes. mark: named by a decorator; its own time is Python, or waiting."
    return table(title, columns, cells, note if any(row.kind == "mark" for row in rows) else "")


def _devices(rows: Sequence[DeviceRow]) -> RenderableType:
    cells = [
        (
            row.process, row.device, duration(row.recorded_ns), *(
                f"{duration(ns)} {percents([ns], row.recorded_ns)[0]} %"
                for ns in (row.busy_ns, row.compute_ns, row.exposed_ns, row.memory_ns)
            ),
        )
        for row in rows[:2 * LISTED]
    ]  # fmt: skip
    columns = ("process", "device", ">recorded", ">busy", ">compute", ">exposed communication", ">copies")
    note = "All streams together. Exposed: communication that no computation hides. %: of recorded."
    if len(rows) > len(cells):
        note = f"{count(len(rows) - len(cells), 'device')} more in --json. {note}"
    return table("Devices", columns, cells, note)


def say_no_device(row: NoDevice) -> str:
    """`actor 0 and 3 more: the configuration records the CPU alone. Fix: ...`."""
    more = "" if len(row.processes) == 1 else f" and {len(row.processes) - 1:,} more"
    return f"{row.processes[0]}{more}: {row.cause}" + (f". Fix: {row.fix}" if row.fix else "")


def _memory(rows: Sequence[MemoryRow]) -> RenderableType:
    cells = [
        (
            row.process, row.device, size(row.allocated_bytes), size(row.reserved_bytes),
            "-" if row.capacity_bytes is None else size(row.capacity_bytes), duration(row.at_ns),
        )
        for row in rows[:2 * LISTED]
    ]  # fmt: skip
    columns = ("process", "device", ">allocated", ">reserved", ">of", ">at")
    return table("Most memory", columns, cells, "As torch's allocators counted. at: of the most allocated.")


def short(name: str, most: int = NAME) -> str:
    """A kernel's name without what stands in the middle of a long one."""
    return name if len(name) <= most else f"{name[: most - 20]}...{name[-17:]}"
