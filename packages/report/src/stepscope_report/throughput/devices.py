"""Devices that stages and the rollout ran on: how many, and their names. Nothing is guessed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope_report.sections.engines import Engine
from stepscope_report.spans import generates
from stepscope_report.timeline import Span, Timeline, TraceActivity

_Worker: TypeAlias = tuple[str, int, tuple[tuple[str, int], ...]]
"""(host, pid, place in the parallel layout)."""


class Devices(NamedTuple):
    """Things that tokens are shared among."""

    number: int
    unit: str
    """`GPU`, `NPU`; else what is known: `rank`, `process` or `replica`."""
    name: str | None = None
    """The devices' name; None if it is unknown, or if there are several kinds."""


class Hardware:
    """The devices of a step's processes, by what their parts of the manifest and their traces say."""

    def __init__(self, timeline: Timeline, activities: Sequence[TraceActivity]) -> None:
        self._timeline = timeline
        self.of_process: dict[int, Devices] = {}
        """{index of a process: its devices}, without processes that have none."""
        self.of_replica: dict[int, Devices] = {}
        """{number of a replica: the devices in its recording}."""
        self.flops_per_token: float | None = None
        self.peak_tflops: float | None = None
        """The peak as configured."""
        self._read_manifest()
        self._read_traces(activities)
        self._read_replicas(activities)

    def of_spans(self, counts: Callable[[Span], bool]) -> Devices | None:
        """Return the devices of the processes that ran certain spans, or anything below them.

        If no device is known: the ranks among these processes, else the processes. None without such a span.
        """
        below = _below(self._timeline, counts)
        indices = {span.process for span, inside in zip(self._timeline.spans, below, strict=True) if inside}
        if not indices:
            return None
        devices = [self.of_process[index] for index in indices if index in self.of_process]
        if devices:
            return together(devices)
        processes = [self._timeline.processes[index] for index in indices]
        ranks = [process for process in processes if process.info.rank is not None]
        return Devices(len(ranks), "rank") if ranks else Devices(len(processes), "process")

    def of_rollout(self, engines: Sequence[Engine]) -> Devices | None:
        """Return the devices of the engines, or of processes that generate themselves."""
        timeline = self._timeline
        numbers = {engine.number for engine in engines if engine.number is not None}
        numbers |= {
            process.info.replica for process in timeline.processes if process.info.replica is not None
        }
        replicas = max(len(numbers), timeline.replicas)
        if replicas:
            known = [self.of_replica[number] for number in numbers if number in self.of_replica]
            same = {devices.unit for devices in known}
            return (
                together(known) if len(known) == replicas and len(same) == 1 else Devices(replicas, "replica")
            )
        own = {span.process for span in timeline.spans if generates(span) and span.role == "rollout"}
        devices = [self.of_process[index] for index in own if index in self.of_process]
        return together(devices) if devices else None

    def _read_manifest(self) -> None:
        places = {process.info.key: at for at, process in enumerate(self._timeline.processes)}
        manifest = self._timeline.manifest
        for part in manifest.processes if manifest is not None else ():
            hardware, at = part.hardware, places.get(part.process.key)
            if at is not None and hardware.device is not None:
                self.of_process[at] = _named(1, {hardware.device})
            self.flops_per_token = self.flops_per_token or hardware.flops_per_token
            self.peak_tflops = self.peak_tflops or hardware.peak_tflops

    def _read_traces(self, activities: Sequence[TraceActivity]) -> None:
        for activity in activities:
            content = activity.content
            if activity.process is not None and activity.replica is None and content.devices:
                known = self.of_process.get(activity.process)
                names = {known.name} if known is not None and known.name else set(content.device_names)
                number = max(len(content.devices), 0 if known is None else known.number)
                self.of_process[activity.process] = _named(number, names)

    def _read_replicas(self, activities: Sequence[TraceActivity]) -> None:
        """Count the ranks of each recorded replica: those that wrote a file, or the size that one states."""
        names: dict[int, set[str]] = defaultdict(set)
        workers: dict[int, set[_Worker]] = defaultdict(set)
        sizes: dict[int, int] = defaultdict(int)
        for activity in activities:
            if activity.replica is not None:
                info = activity.info
                workers[activity.replica].add(_worker(info.host, info.pid, activity.topology))
                if activity.content.devices:
                    names[activity.replica].update(activity.content.device_names)
        manifest = self._timeline.manifest
        for part in manifest.processes if manifest is not None else ():
            for made in (made for item in part.expected for made in item.artifacts):
                if made.replica is not None:
                    workers[made.replica].add(_worker(made.host, made.pid, made.topology))
                    sizes[made.replica] = max(sizes[made.replica], made.world_size or 0)
        for replica, own in workers.items():
            number = max(len(own), sizes[replica])
            named = names.get(replica)
            self.of_replica[replica] = _named(number, named) if named else Devices(number, "rank")


def _worker(host: str, pid: int | None, topology: Mapping[str, int] | None) -> _Worker:
    return host, pid or 0, tuple(sorted((topology or {}).items()))


def _named(number: int, names: set[str]) -> Devices:
    (name, *others) = sorted(names) or [""]
    unit = "NPU" if name.startswith("Ascend") else "GPU"
    return Devices(number, unit, name if name and not others else None)


def together(devices: Sequence[Devices]) -> Devices:
    """Return the sum. Devices of several names have none."""
    names, units = {own.name for own in devices}, [own.unit for own in devices]
    (name, *others) = names
    return Devices(sum(own.number for own in devices), units[0], None if others else name)


def _below(timeline: Timeline, counts: Callable[[Span], bool]) -> list[bool]:
    """Return for each span whether it counts, or runs below one that does."""
    known: list[bool | None] = [True if counts(span) else None for span in timeline.spans]
    for index in range(len(known)):
        path, at = [], index
        while known[at] is None:
            path.append(at)
            parent = timeline.spans[at].parent
            if parent is None:
                known[at] = False
                break
            at = parent
        for place in path:
            known[place] = known[at]
    return [inside is True for inside in known]
