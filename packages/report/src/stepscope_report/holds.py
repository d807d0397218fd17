"""Times in which something else than its own work held a process, by its counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stepscope.files.counters import CORE_WAIT, DISK_SLEEP, GC, MEMORY_PRESSURE, PREEMPTIONS
from stepscope_report.accounting import Pair, joined
from stepscope_report.formatting import count, duration
from stepscope_report.sections.counters import Piece, pieces_of
from stepscope_report.spans import whole
from stepscope_report.suspects import CauseKind, StepPath, Suspect
from stepscope_report.timeline import Timeline, model
from stepscope_report.timeline.model import GENERATES


class _Hold(NamedTuple):
    kind: CauseKind
    says: str
    """Words about a process, before the time that it was held for."""


_HOLDS: Mapping[str, _Hold] = {
    GC: _Hold("gc", "Python's garbage collector stopped it for"),
    DISK_SLEEP: _Hold("slow-storage", "it waited for a disk or a shared folder for"),
    MEMORY_PRESSURE: _Hold("slow-host", "all of its host stood still for want of memory for"),
    CORE_WAIT: _Hold("slow-host", "it had work and no free core for"),
}
"""Counters in percent of the time in which something else than its work held a process."""
_OF_MAIN_THREAD = frozenset({DISK_SLEEP, CORE_WAIT})
_WORKS = frozenset({"late-rank", "slow-rank", "slow-replica", "slow-stage", "slow-tool", "weight-sync"})
"""Kinds whose calls may have been held. Others say already why a call was long."""


def preempted_requests(timeline: Timeline) -> Counter[int]:
    """Return {process: requests of its engine that were preempted, by their spans or else by its counter}."""
    stated, counted = Counter[int](), Counter[int]()
    for span in timeline.spans:
        number = whole(span, "preemptions")
        if number and timeline.consumes(span):
            stated[span.process] += 1
    for counter in timeline.counters:
        if counter.name == PREEMPTIONS and (pieces := pieces_of(counter, timeline)):
            counted[counter.process] += round(pieces[-1].value - pieces[0].value)
    return +stated or +counted


def _described(counter: model.Counter, timeline: Timeline) -> Iterable[int]:
    """Return the processes that a counter describes: its own, or all of its host."""
    if counter.scope != "host":
        return (counter.process,)
    host = timeline.processes[counter.process].info.host
    return [index for index, process in enumerate(timeline.processes) if process.info.host == host]


class Holds:
    """The counters of a step, and the requests of its engines, that tell what held its processes.

    Args:
        usual: Preempted requests in a neighbouring step.
    """

    def __init__(self, timeline: Timeline, usual: int = 0) -> None:
        self._timeline = timeline
        preempted = preempted_requests(timeline)
        self._preempted = preempted if sum(preempted.values()) > 2 * usual else Counter[int]()
        self._pieces: dict[tuple[int, str], list[Piece]] = {
            (process, counter.name): pieces_of(counter, timeline)
            for counter in timeline.counters
            if counter.name in _HOLDS and timeline.processes[counter.process].aligned
            for process in _described(counter, timeline)
        }

    def ns(self, process: int, name: str, pairs: Iterable[Pair]) -> int:
        """Return how long a counter held a process in these stretches."""
        pieces = self._pieces.get((process, name), ())
        held = 0.0
        for start_ns, end_ns in joined(pairs):
            for piece in pieces:
                overlap_ns = min(end_ns, piece.end_ns) - max(start_ns, piece.start_ns)
                held += piece.value * max(0, overlap_ns)
        return round(held / 100)

    def reason(self, suspect: Suspect) -> Suspect:
        """Return the suspect with what held its process for longest, if all that held it explains half of its
        excess.
        """
        if self._preempted and suspect.label is not None and suspect.label[0] in GENERATES:
            ((engine, number),) = self._preempted.most_common(1)
            because = f"{count(number, 'request')} lost their place in the cache"
            return suspect._replace(kind="preemption", process=engine, because=because)
        if suspect.kind not in _WORKS:
            return suspect
        spans = self._timeline.spans
        process = suspect.process
        if process is None and suspect.nodes:
            process = spans[suspect.nodes[0]].process
        if process is None:
            return suspect
        own = [node for node in suspect.nodes if spans[node].process == process]
        pid = self._timeline.processes[process].info.pid
        held: dict[str, int] = {}
        for name in _HOLDS:
            main = name in _OF_MAIN_THREAD
            pairs = [
                (spans[node].start_ns, self._timeline.until_ns(spans[node]))
                for node in own
                if not main or spans[node].thread == pid
            ]
            held[name] = self.ns(process, name, [*pairs, *suspect.spells])
        if sum(held.values()) * 2 < suspect.longer_ns:
            return suspect
        collects = held[GC] * 2 >= suspect.longer_ns  # while it collects, it may also lack a core
        name = GC if collects else max(held, key=lambda name: held[name])
        said = f"{_HOLDS[name].says} {duration(min(held[name], suspect.longer_ns))}"
        kind = _HOLDS[name].kind
        named = process if kind == "slow-host" else suspect.process
        return suspect._replace(kind=kind, process=named, because=said)

    def busy_host(self, path: StepPath) -> Suspect | None:
        """Return the lack of cores on the critical path, or None if no process lacked one."""
        pairs: dict[int, list[Pair]] = defaultdict(list)
        for piece in path.pieces:
            pairs[path.graph.process_of(piece.node)].append((piece.start_ns, piece.end_ns))
        held = {process: self.ns(process, CORE_WAIT, own) for process, own in pairs.items()}
        process = max(held, key=lambda process: held[process], default=None)
        if process is None or not held[process]:
            return None
        ns = sum(held.values())
        return Suspect("slow-host", ns, ns, process=process)
