"""Times in which a process was held up by something other than its own work, from the counters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import msgspec

from stepscope.files.counters import (
    CORE_WAIT,
    DISK_SLEEP,
    GC,
    GPU_THROTTLED,
    MEMORY_PRESSURE,
    PREEMPTIONS,
    THREAD_CORE_WAIT,
)
from stepscope.files.spans import SEQUENCE
from stepscope_report.accounting import Pair, clipped, common_ns, joined, union_ns
from stepscope_report.formatting import count, duration
from stepscope_report.spans import ToolNames, whole
from stepscope_report.suspects import CauseKind, StepPath, Suspect
from stepscope_report.table import grouped
from stepscope_report.timeline import Timeline, model
from stepscope_report.timeline.model import GENERATES, HeldValue, held_values

_start_ns, _end_ns = attrgetter("start_ns"), attrgetter("end_ns")


class BusyHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose cores were all busy, and the number of cores that the recorded processes used."""

    host: str
    busy: float
    """Mean load of all cores, in percent."""
    cores: float
    """Mean number of cores that the recorded processes of the host used together."""
    processes: int


def say_busy_host(host: BusyHost) -> str:
    """Return the load of a host whose cores were all busy, and the number of cores that the step used, as a
    clause.
    """
    processes = count(host.processes, "process")
    return (
        f"all cores of {host.host} were busy ({host.busy:.0f} %), and {processes} of the step used "
        f"{host.cores:.2g} of them"
    )


class _Hold(NamedTuple):
    kind: CauseKind
    says: str
    """Words about a process, to be followed by the time for which it was held up."""


_HOLDS: Mapping[str, _Hold] = {
    GC: _Hold("gc", "Python's garbage collector stopped it for"),
    DISK_SLEEP: _Hold("slow-storage", "it waited for a disk or a shared folder for"),
    MEMORY_PRESSURE: _Hold("slow-host", "all of its host stood still for want of memory for"),
    CORE_WAIT: _Hold("slow-host", "it had work and no free core for"),
}
"""{counter: how it is reported}. Each counter is the percentage of time in which a process was held up by
something other than its own work."""
_WORKS = frozenset({"late-rank", "slow-rank", "slow-replica", "slow-stage", "slow-tool", "weight-sync"})
"""Kinds of suspects whose calls may have been held up. All other kinds already say why a call was long."""


def preempted_requests(timeline: Timeline) -> Counter[int]:
    """Return {process: number of requests that its engine preempted}, from spans or else from counters."""
    stated, counted = Counter[int](), Counter[int]()
    for span in timeline.spans:
        number = whole(span, "preemptions")
        if number and timeline.consumes(span):
            stated[span.process] += 1
    for counter in timeline.counters:
        if counter.name == PREEMPTIONS and (pieces := held_values(counter, timeline)):
            counted[counter.process] += round(pieces[-1].value - pieces[0].value)
    return +stated or +counted


def held_ns(pieces: Iterable[HeldValue]) -> int:
    """Return for how many ns a process was held up, according to a counter in percent."""
    return round(sum(piece.value / 100 * (piece.end_ns - piece.start_ns) for piece in pieces))


def _described(counter: model.Counter, timeline: Timeline) -> Iterable[int]:
    """Return the processes that a counter describes: the process that sampled the counter,
    or all processes of its host.
    """
    if counter.scope != "host":
        return (counter.process,)
    host = timeline.processes[counter.process].info.host
    return [index for index, process in enumerate(timeline.processes) if process.info.host == host]


class Holds:
    """Reasons why processes of a step were held up, from its counters and the requests of its engines.

    Args:
        usual: Usual number of preempted requests in a step. Preemptions hold up a step only if they are more
            than twice as many.
        busy_hosts: Hosts whose cores were all busy.
    """

    def __init__(self, timeline: Timeline, busy_hosts: Iterable[BusyHost] = (), usual: int = 0) -> None:
        self._timeline = timeline
        preempted = preempted_requests(timeline)
        self._preempted = preempted if sum(preempted.values()) > 2 * usual else Counter[int]()
        self._busy_hosts = {host.host: host for host in busy_hosts}
        self._pieces: dict[tuple[int, str], list[HeldValue]] = {
            (process, counter.name): held_values(counter, timeline)
            for counter in timeline.counters
            if counter.name in _HOLDS and timeline.processes[counter.process].aligned
            for process in _described(counter, timeline)
        }
        self._core_waits = dict(_core_waits(timeline))
        """{(process, thread): its waits for a core}."""
        self._throttled = _throttled(timeline)

    def ns(self, process: int, name: str, pairs: Iterable[Pair]) -> int:
        """Return for how many ns of the stretches `pairs` a process was held up, according to the counter
        `name`.

        A disk sleep is known only for the moment of its sample, so it counts only for a stretch that contains
        this moment.
        """
        pieces = self._pieces.get((process, name), ())
        held = 0.0
        for start_ns, end_ns in joined(pairs):
            first, last = (
                bisect_left(pieces, start_ns, key=_end_ns),
                bisect_right(pieces, end_ns, key=_start_ns),
            )
            for piece in pieces[first:last]:
                overlap_ns = min(end_ns, piece.end_ns) - max(start_ns, piece.start_ns)
                if name != DISK_SLEEP or start_ns <= piece.end_ns <= end_ns:
                    held += piece.value * max(0, overlap_ns)
        return round(held / 100)

    def core_ns(self, process: int, pairs: Iterable[Pair], thread: int | None = None) -> int:
        """Return for how many ns of the stretches `pairs` a thread (by default the main thread) lacked a
        core, by its samples; 0 without samples.
        """
        pieces = self._core_waits.get((process, thread or self._pid(process)), ())
        return round(sum(piece.value / 100 * _inside_ns(pairs, piece) for piece in pieces))

    def at_most_ns(
        self, process: int, pairs: Iterable[Pair], thread: int | None = None, *, sampled: bool = True
    ) -> int:
        """Return the largest number of ns of the stretches `pairs` in which a thread (by default the main
        thread) may have lacked a core.

        A sample states for how long a thread lacked a core since the previous sample, but not when. Time
        without samples counts in full if all cores of the host were busy.
        """
        pairs = joined(pairs)
        pieces = self._core_waits.get((process, thread or self._pid(process)), ()) if sampled else ()
        held = 0.0
        for piece in pieces:
            held += min(_inside_ns(pairs, piece), piece.value / 100 * (piece.end_ns - piece.start_ns))
        if self._timeline.processes[process].info.host in self._busy_hosts:
            covered = [(piece.start_ns, piece.end_ns) for piece in pieces]
            held += union_ns([*pairs, *covered]) - union_ns(covered)
        return round(held)

    def _at_least_ns(self, nodes: Iterable[int]) -> int:
        """Return the shortest time in ns for which the threads of these calls must have lacked a core during
        the calls.
        """
        spans, of_thread = self._timeline.spans, defaultdict[tuple[int, int], list[Pair]](list)
        for node in nodes:
            extent = spans[node].start_ns, self._timeline.until_ns(spans[node])
            of_thread[spans[node].process, spans[node].thread].append(extent)
        least = 0.0
        for thread, pairs in of_thread.items():
            for piece in self._core_waits.get(thread, ()):
                whole_ns = piece.end_ns - piece.start_ns
                outside_ns = whole_ns - _inside_ns(pairs, piece)
                least += max(0.0, piece.value / 100 * whole_ns - outside_ns)
        return round(least)

    def _works_longer(self, suspect: Suspect, most_ns: int) -> bool:
        """Return whether a suspect would still be slow if it had lacked a core for the same share of time as
        its peers.

        A suspect is slow if it takes a quarter longer than usual, and longer by at least half of the measured
        excess.

        Args:
            most_ns: The longest time for which the suspect may have lacked a core. For its peers, the
                shortest time that their samples allow is used.
        """
        took_ns, usual_ns = suspect.took_ns, suspect.usual_ns
        if not suspect.peers or took_ns is None or not usual_ns:
            return False
        spans = self._timeline.spans
        lacked = median(
            self._at_least_ns(nodes) / max(1, sum(spans[node].dur_ns or 0 for node in nodes))
            for nodes in suspect.peers
        )
        longer_ns = (took_ns - most_ns) / max(0.01, 1 - lacked) - usual_ns
        return longer_ns * 4 >= usual_ns and longer_ns * 2 >= took_ns - usual_ns

    def _pid(self, process: int) -> int:
        return self._timeline.processes[process].info.pid

    def unless_held(self, suspect: Suspect) -> Suspect | None:
        """Return the suspect, with the reason for its excess if counters show one.

        If engines preempted unusually many requests, a suspect that generates becomes one of the kind
        `preemption`. If counters explain half of the excess, the suspect names what held up its process for
        longest.

        Return None to drop the suspect if its calls may have lacked a core for half of its excess.
        """
        if self._preempted and suspect.label is not None and suspect.label[0] in GENERATES:
            ((engine, number),) = self._preempted.most_common(1)
            because = f"{count(number, 'request')} lost their place in the cache"
            return suspect._replace(kind="preemption", process=engine, because=because)
        if suspect.kind not in _WORKS:
            return suspect
        spans = self._timeline.spans
        alike = self._alike(suspect) if suspect.process is None else suspect.nodes
        held_ns = Counter[int]()
        for each, nodes in grouped(alike, lambda node: spans[node].process).items():
            held_ns[each] = sum(self._held(each, self._threads(each, nodes, suspect.spells)).values())
        process = suspect.process
        if process is None and suspect.nodes:
            process = max((spans[node].process for node in suspect.nodes), key=held_ns.__getitem__)
        if process is None:
            return suspect
        own = [node for node in suspect.nodes if spans[node].process == process]
        pid, every = self._pid(process), self._extents(own)
        of_thread = self._threads(process, own, suspect.spells)
        held = self._held(process, of_thread)
        # If a call is a collective, other threads send its data.
        meets = any(SEQUENCE in (spans[node].attrs or {}) for node in own)
        most_ns = sum(
            self.at_most_ns(process, pairs, thread, sampled=not meets)
            for thread, pairs in of_thread.items()
            if thread == pid or (process, thread) in self._core_waits
        )
        # True if the suspect would be slow with as many cores as its peers too.
        if self._works_longer(suspect, most_ns):
            most_ns = 0
        else:
            held[CORE_WAIT] = sum(self.core_ns(process, pairs, at) for at, pairs in of_thread.items())
        if sum(held.values()) * 2 < suspect.longer_ns:
            is_new = suspect.usual_ns == 0 and not suspect.peers  # a lack of cores does not add calls
            may_lack = most_ns * 2 >= suspect.longer_ns and not is_new
            return None if may_lack else self._slowed(suspect, process, every)
        collects = held[GC] * 2 >= suspect.longer_ns  # the collector may have lacked a core itself
        name = GC if collects else max(held, key=lambda name: held[name])
        said = f"{_HOLDS[name].says} {duration(min(held[name], suspect.longer_ns))}"
        kind = _HOLDS[name].kind
        is_alone = all(2 * ns < held_ns[process] for one, ns in held_ns.items() if one != process)
        named = process if kind == "slow-host" or is_alone else suspect.process
        if name == CORE_WAIT:
            said += self._say_host(process)
        return suspect._replace(kind=kind, process=named, because=said)

    def _alike(self, suspect: Suspect) -> tuple[int, ...]:
        """Return the calls of the suspect's stage in all processes; without a stage, the suspect's calls."""
        if suspect.label is None:
            return suspect.nodes
        names = ToolNames(self._timeline)
        return tuple(
            node for node, span in enumerate(self._timeline.spans) if names.label_of(span) == suspect.label
        )

    def _extents(self, nodes: Iterable[int]) -> list[Pair]:
        spans = self._timeline.spans
        return [(spans[node].start_ns, self._timeline.until_ns(spans[node])) for node in nodes]

    def _threads(
        self, process: int, nodes: Iterable[int], spells: Sequence[Pair]
    ) -> Mapping[int, list[Pair]]:
        """Return {thread of a process: stretches of its calls `nodes`}. `spells` are of the main thread."""
        of_thread: dict[int, list[Pair]] = defaultdict(list, {self._pid(process): list(spells)})
        for node in nodes:
            of_thread[self._timeline.spans[node].thread] += self._extents([node])
        return of_thread

    def _held(self, process: int, of_thread: Mapping[int, list[Pair]]) -> dict[str, int]:
        """Return {counter: ns of the stretches `of_thread` in which the process was held up}, without waits
        for a core.
        """
        every = [pair for pairs in of_thread.values() for pair in pairs]
        held = {name: self.ns(process, name, every) for name in _HOLDS}
        return {**held, CORE_WAIT: 0, DISK_SLEEP: self.ns(process, DISK_SLEEP, of_thread[self._pid(process)])}

    def is_unsampled(self, suspect: Suspect) -> bool:
        """Return whether a call of the suspect ran on a host whose cores were all busy, in a thread without
        samples of its waits for a core.
        """
        if suspect.kind not in _WORKS:
            return False
        calls = [self._timeline.spans[node] for node in suspect.nodes]
        infos = {call.process: self._timeline.processes[call.process].info for call in calls}
        return any(
            infos[call.process].host in self._busy_hosts
            and (call.process, call.thread) not in self._core_waits
            for call in calls
        )

    def _slowed(self, suspect: Suspect, process: int, calls: Sequence[Pair]) -> Suspect:
        """Return the suspect. If the process' GPU was slowed for half of the excess, `because` names the
        reason.
        """
        gpu, slow = self._throttled.get(process, ("", []))
        ns = common_ns(joined(calls), slow)
        if ns * 2 < suspect.longer_ns or not ns:
            return suspect
        return suspect._replace(because=f"heat or power slowed {gpu} for {duration(ns)} of that")

    def _say_host(self, process: int) -> str:
        host = self._busy_hosts.get(self._timeline.processes[process].info.host)
        return "" if host is None else f" ({say_busy_host(host)})"

    def busy_host(self, path: StepPath) -> Suspect | None:
        """Return the lack of cores on the critical path, or None if no process lacked one."""
        held = Counter[int]()
        for (process, thread), pairs in self._by_thread(path).items():
            held[process] += self.core_ns(process, pairs, thread)
        most = max(held, key=lambda process: held[process], default=None)
        if most is None or not held[most]:
            return None
        ns = sum(held.values())
        return Suspect("slow-host", ns, ns, process=most, because=self._say_host(most))

    def may_lack_ns(self, path: StepPath, within: Sequence[Pair] | None = None) -> int:
        """Return the longest time for which processes on the critical path may have lacked a core.

        Args:
            within: The stretches of the step that count, or None for all of it.
        """
        return sum(
            self.at_most_ns(
                process,
                pairs if within is None else [part for pair in within for part in clipped(pairs, *pair)],
                thread,
            )
            for (process, thread), pairs in self._by_thread(path).items()
        )

    def _by_thread(self, path: StepPath) -> dict[tuple[int, int], list[Pair]]:
        """Return the stretches of the critical path by process and thread. Stretches outside of calls, and
        stretches of threads without samples, are added to the main thread.
        """
        found: dict[tuple[int, int], list[Pair]] = defaultdict(list)
        for piece in path.pieces:
            process, span = path.graph.process_of(piece.node), path.graph.span_of(piece.node)
            key = (process, self._pid(process) if span is None else span.thread)
            key = key if key in self._core_waits else (process, self._pid(process))
            found[key].append((piece.start_ns, piece.end_ns))
        return found


def _inside_ns(pairs: Iterable[Pair], piece: HeldValue) -> int:
    return union_ns(clipped(pairs, piece.start_ns, piece.end_ns))


def _core_waits(timeline: Timeline) -> Iterator[tuple[tuple[int, int], list[HeldValue]]]:
    """Yield ((process, thread), its waits for a core). A thread that was first sampled after the step is
    left out.
    """
    for counter in timeline.counters:
        process = timeline.processes[counter.process]
        if not process.aligned:
            continue
        if counter.name == CORE_WAIT:
            yield (counter.process, process.info.pid), held_values(counter, timeline)
        thread = counter.of.removeprefix("thread ")
        is_known = counter.name == THREAD_CORE_WAIT and thread.isdecimal()
        if is_known and counter.times_ns[0] <= timeline.window.end_ns:
            yield (counter.process, int(thread)), held_values(counter, timeline)


def _throttled(timeline: Timeline) -> dict[int, tuple[str, list[Pair]]]:
    """Return {process: (name of its GPU, stretches in which heat or power limits slowed that GPU)}."""
    parts = () if timeline.manifest is None else timeline.manifest.processes
    gpus = {part.process.key: f"GPU {part.hardware.gpu}" for part in parts if part.hardware.gpu is not None}
    slowed = {
        (timeline.processes[counter.process].info.host, counter.of): [
            (piece.start_ns, piece.end_ns) for piece in held_values(counter, timeline) if piece.value
        ]
        for counter in timeline.counters
        if counter.name == GPU_THROTTLED and timeline.processes[counter.process].aligned
    }
    return {
        index: (gpu, joined(slowed.get((process.info.host, gpu), ())))
        for index, process in enumerate(timeline.processes)
        if (gpu := gpus.get(process.info.key))
    }
