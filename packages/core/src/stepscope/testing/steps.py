"""Folders of captured steps with known content, for tests of readers and reports.

Times are in ns after the opening of the capture, in true time. Each process converts them to its own clocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stepscope.files import counters as counter_files
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.counters import CounterKind, CounterScope
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import (
    Absent,
    EndedBy,
    Expectation,
    FrameworkSettings,
    Hardware,
    OpenedBy,
    OwnCost,
    ProcessPart,
    awaited,
)
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import End, Header, Open, Span, SpanLink
from stepscope.files.values import AttrValue

OPENED_NS = 1_750_000_000_000_000_000
"""Time at which the capture opened, in unix ns, in true time."""


class StepFolder:
    """One step of one run. Add processes, record spans and counters in them, then call `write`."""

    def __init__(
        self,
        save_path: str | os.PathLike[str],
        *,
        step: int = 2,
        run_id: str = "run1",
        opened_ns: int = OPENED_NS,
        capture: int = 1,
    ) -> None:
        """
        Args:
            capture: Number of the capture. A step that is retried has several captures.
        """
        self.layout: StepLayout = RunLayout(save_path).step(step)
        self.step = step
        self.run_id = run_id
        self.opened_ns = opened_ns
        self.capture = capture
        self.processes: list[FakeProcess] = []

    def process(
        self, role: str, rank: int | None = None, *, host: str = "host-a", pid: int | None = None,
        owner: bool = False, skew_ns: int = 0, drift_ppm: int = 0, mono_ppm: int = 0,
        cost: OwnCost | None = None, replica: int | None = None,
    ) -> FakeProcess:  # fmt: skip
        """Add a process.

        The wall clock of the process is `skew_ns` ahead of true time at the opening and gains `drift_ppm`.
        Its monotonic clock gains `mono_ppm`.
        """
        pid = 1000 + len(self.processes) if pid is None else pid
        info = ProcessInfo(role=role, rank=rank, world_size=None, host=host, pid=pid, replica=replica)
        process = FakeProcess(
            folder=self, info=info, owner=owner, skew_ns=skew_ns, drift_ppm=drift_ppm, mono_ppm=mono_ppm,
            cost=cost or OwnCost(),
        )  # fmt: skip
        self.processes.append(process)
        return process

    def write(self) -> Path:
        """Write all files and return the step's folder."""
        for process in self.processes:
            process.write()
        return self.layout.root


@dataclass(kw_only=True, eq=False)
class FakeProcess:
    """One process of a `StepFolder`. A process without `close` counts as killed."""

    info: ProcessInfo
    folder: StepFolder
    owner: bool
    skew_ns: int
    drift_ppm: int
    mono_ppm: int
    cost: OwnCost
    expected: list[Expectation] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    began: dict[str, str] = field(default_factory=dict)
    """{`ProcessInfo.key`: name} of the workers. Set by the owner only."""
    clocks: list[ClockOffset] = field(default_factory=list)
    dropped: int = 0
    error: str | None = None
    ended_by: EndedBy | None = None
    """Cause of an early end of the capture, or None."""
    opened_by: OpenedBy = "program"
    prepared: bool = False
    profiled: bool = False
    """True if a profiler ran in the process."""
    hardware: Hardware = field(default_factory=Hardware)
    settings: tuple[FrameworkSettings, ...] = ()
    closed_ns: int | None = None
    imported_at_ns: int | None = None
    """Time at which the process had imported stepscope, or None for a manifest without this time."""
    _records: list[Open] = field(default_factory=list)
    _series: list[counter_files.Series] = field(default_factory=list)
    _samples: list[counter_files.Sample] = field(default_factory=list)

    def anchor(self, at_ns: int) -> ClockAnchor:
        """Return the readings of the process' clocks at `at_ns` in true time."""
        return ClockAnchor(wall_ns=self.wall_ns(at_ns), mono_ns=self.mono_ns(at_ns))

    def mono_ns(self, at_ns: int) -> int:
        return 1_000_000_000 * self.info.pid + at_ns + at_ns * self.mono_ppm // 1_000_000

    def wall_ns(self, at_ns: int) -> int:
        return self.folder.opened_ns + at_ns + self.skew_ns + at_ns * self.drift_ppm // 1_000_000

    def span(
        self, stage: str, start_ns: int, end_ns: int | None, *, role: str | None = None,
        parent: int | None = None, link: SpanLink | None = None, step: int | None = None,
        policy_version: int | None = None, trajectory: str | None = None, turn: int | None = None,
        error: str | None = None, attrs: dict[str, AttrValue] | None = None, traceparent: str | None = None,
        cancelled: bool = False, thread: int | None = None,
    ) -> int:  # fmt: skip
        """Record a span and return its number. With `end_ns=None`, the span has not ended.

        Args:
            thread: Native id of the thread; None for the first thread.
        """
        opened = Open(
            span=len(self._records) + 1, parent=parent, link=link, role=role or self.info.role, stage=stage,
            start_ns=self.mono_ns(start_ns), step=step, policy_version=policy_version, trajectory=trajectory,
            turn=turn, thread=self.info.pid if thread is None else thread, attrs=attrs,
            traceparent=traceparent,
        )  # fmt: skip
        if end_ns is None:
            self._records.append(opened)
        else:
            self._records.append(
                Span(
                    **msgspec.structs.asdict(opened),
                    dur_ns=self.mono_ns(end_ns) - opened.start_ns,
                    error=error,
                    cancelled=cancelled,
                )
            )
        return opened.span

    def counter(
        self, name: str, values: Mapping[int, float], *, of: str = "", unit: str = "",
        kind: CounterKind = "level", scope: CounterScope = "process",
    ) -> None:  # fmt: skip
        """Record the samples of a counter: {time in ns after the opening of the capture: value}."""
        number = len(self._series)
        self._series.append(
            counter_files.Series(series=number, name=name, of=of, unit=unit, how=kind, scope=scope)
        )
        self._samples += [
            counter_files.Sample(at_ns=self.mono_ns(at_ns), values={number: value})
            for at_ns, value in values.items()
        ]

    def link(self, span: int) -> SpanLink:
        """Return the link to a span of this process, as in a carrier."""
        return SpanLink(process=self.info.key, span=span, step=self.folder.step)

    def measures(self, other: FakeProcess, at_ns: int, uncertainty_ns: int = 0, error_ns: int = 0) -> None:
        """Record a measurement of the clock of `other` that is wrong by `error_ns`."""
        offset_ns = other.wall_ns(at_ns) - self.wall_ns(at_ns) + error_ns
        offset = ClockOffset(
            process=other.info.key,
            offset_ns=offset_ns,
            uncertainty_ns=uncertainty_ns,
            at_mono_ns=self.mono_ns(at_ns),
        )
        self.clocks.append(offset)

    def close(self, at_ns: int) -> None:
        self.closed_ns = at_ns

    @property
    def part_path(self) -> Path:
        return self.folder.layout.part_of(self.info, self.folder.run_id, self.folder.capture)

    @property
    def span_path(self) -> Path:
        return self.folder.layout.spans_of(self.info, self.folder.run_id, self.folder.capture)

    @property
    def counter_path(self) -> Path:
        return self.folder.layout.counters_of(self.info, self.folder.run_id, self.folder.capture)

    def write(self) -> None:
        if self._series:
            self.counter_path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._counter_lines()
            self.counter_path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        for path in (self.part_path, self.span_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.part_path.write_bytes(msgspec.json.encode(self._part()))
        self.span_path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines()))

    def _counter_lines(self) -> Iterator[counter_files.Line]:
        anchor, folder = self.anchor(0), self.folder
        yield counter_files.Header(
            step=folder.step, run_id=folder.run_id, process=self.info, anchor=anchor, hz=10
        )
        yield from self._series
        yield from self._samples
        if self.closed_ns is not None:
            yield counter_files.End(anchor=self.anchor(self.closed_ns), samples=len(self._samples))

    def _part(self) -> ProcessPart:
        spans = Expectation(name="spans", kind="spans", state="ok")
        if self.closed_ns is None:
            spans = awaited("spans", "spans", "closing")
        return ProcessPart(
            run_id=self.folder.run_id, step=self.folder.step, process=self.info, owner=self.owner,
            opened=self.anchor(0), closed=None if self.closed_ns is None else self.anchor(self.closed_ns),
            imported_ns=None if self.imported_at_ns is None else self.wall_ns(self.imported_at_ns),
            recorded=True, why="every rank", expected=(spans, *self.expected), spans=self._finished,
            dropped=self.dropped, cost=self.cost, clocks=tuple(self.clocks), absent=tuple(self.absent),
            ended_by=self.ended_by or ("exception" if self.error else None), error=self.error,
            opened_by=self.opened_by, prepared=self.prepared,
            profiled=self.profiled, began=self.began, hardware=self.hardware, settings=self.settings,
        )  # fmt: skip

    @property
    def _finished(self) -> int:
        return sum(isinstance(record, Span) for record in self._records)

    def _lines(self) -> list[Header | Open | End]:
        header = Header(
            step=self.folder.step, run_id=self.folder.run_id, process=self.info, anchor=self.anchor(0)
        )
        lines: list[Header | Open | End] = [header, *self._records]
        if self.closed_ns is not None:
            lines.append(End(anchor=self.anchor(self.closed_ns), spans=self._finished, dropped=self.dropped))
        return lines
