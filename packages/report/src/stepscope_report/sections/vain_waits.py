"""Waits in vain: time in which a process waited while no process did work that could end the wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from stepscope.files.spans import SEQUENCE
from stepscope_report.accounting import Label, bits_of, walk
from stepscope_report.division import WAITING, work_of
from stepscope_report.sections import Section
from stepscope_report.spans import ROLLOUT, label_of
from stepscope_report.table import Table
from stepscope_report.timeline import Timeline


class VainWait(msgspec.Struct, frozen=True, kw_only=True):
    """The waits in vain of one stage, over the step."""

    role: str
    stage: str
    processes: tuple[str, ...]
    """Names of the processes that waited in this stage."""
    wall_ns: int
    """Time in which at least one of these processes waited, in ns."""
    vain_ns: int
    """Part of `wall_ns` in which no process did work that could end the wait. Only work of rollout roles can
    end a wait of a rollout role; any work can end other waits."""


def waits_in_vain(timeline: Timeline) -> Table[VainWait]:
    """Return the waits that were partly in vain, the longest vain time first.

    Waits for roles that recorded no work in this step are left out, and so are collectives, which wait for
    their last rank. Empty if the clock of a process is
    unaligned, because that process may have worked.
    """
    waiters: dict[Label, dict[str, None]] = defaultdict(dict)
    for span in timeline.spans:
        if span.waits and SEQUENCE not in (span.attrs or {}):
            waiters[label_of(span)][timeline.processes[span.process].name] = None
    if not waiters or not all(process.aligned for process in timeline.processes):
        return Table()
    working = {span.role for span in timeline.spans if not span.waits}
    wall_ns, vain_ns = _sum(timeline)
    return Table(
        VainWait(
            role=label[0],
            stage=label[1],
            processes=tuple(waiters[label]),
            wall_ns=wall_ns[label],
            vain_ns=vain_ns[label],
        )
        for label, _ in vain_ns.most_common()
        if label in waiters and _could_end(label, working)
    )


def _sum(timeline: Timeline) -> tuple[Counter[Label], Counter[Label]]:
    """Return the time of each waiting stage, and the part of that time in vain."""
    work, window = work_of(timeline, range(len(timeline.spans))), timeline.window
    wall_ns, vain_ns = Counter[Label](), Counter[Label]()
    for start_ns, end_ns, mask in walk(work.intervals, window.start_ns, window.end_ns):
        bits = bits_of(mask)
        busy = {work.labels[bit][0] for bit in bits if work.tiers[bit] != WAITING}
        for label in {work.labels[bit] for bit in bits if work.tiers[bit] == WAITING}:
            wall_ns[label] += end_ns - start_ns
            if not _could_end(label, busy):
                vain_ns[label] += end_ns - start_ns
    return wall_ns, vain_ns


def _could_end(wait: Label, roles: Iterable[str]) -> bool:
    """Return True if work of one of the roles could end the wait."""
    return any(role in ROLLOUT or wait[0] not in ROLLOUT for role in roles)


VAIN_WAITS = Section(name="vain_waits", compute=lambda sources: waits_in_vain(sources.timeline))
