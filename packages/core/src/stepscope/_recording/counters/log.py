"""Counter file of one process for one capture. The sampling thread writes the file at least once a second."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from stepscope._recording.counters.sampler import Sampler, Tick
from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope.errors import ours
from stepscope.files import counters as records
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import append_whole, private

if TYPE_CHECKING:
    from io import FileIO

WRITE_NS = 900_000_000
"""Smallest interval between two writes, in ns. A sample waits for it and for one tick, at most 1 s in all."""
MOST_SAMPLES = 100_000
"""Largest number of samples in one file: almost three hours at 10 Hz. Further samples are dropped and
counted."""
_encode = msgspec.json.Encoder().encode_lines


class CounterLog:
    """The counter file of one capture. Call its methods in the order `prepare`, `open`, `start`, `close`."""

    def __init__(
        self, path: Path, sampler: Sampler, *, process: ProcessInfo, step: int, run_id: str, hz: float
    ) -> None:
        self.path = path
        self.began = False
        """True once `start` was called."""
        self.samples = 0
        """Number of samples written so far."""
        self.dropped = 0
        self.failed: str | None = None
        """Reason why the file is incomplete, or None."""
        self.sampler = sampler
        self._head = records.Header(
            step=step, run_id=run_id, process=process, anchor=ClockAnchor(wall_ns=0, mono_ns=0), hz=hz
        )
        self._file: FileIO | None = None
        self._size = 0
        self._series = 0
        """Number of series that are already in the file."""
        self._until_ns = 0
        """Time of the last tick in the file, CLOCK_MONOTONIC in ns."""
        self._written_ns = 0
        self._closing = False

    def prepare(self) -> None:
        """Open the counters on the sampling thread, because some import libraries. Never raise."""
        try:
            self.sampler.open()
        except ours(RuntimeError) as error:  # no more threads
            self.failed = describe(error)

    def open(self) -> None:
        """Create the file. An error is stored in `failed` and not raised."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = open(self.path, "xb", buffering=0, opener=private)  # noqa: SIM115  # until close()
        except ours(OSError) as error:
            self.failed = describe(error)

    def start(self, anchor: ClockAnchor) -> None:
        """Begin sampling at `anchor`. The sampling thread writes, so the call does not wait for the disk."""
        if self._closing or self.failed is not None:
            return
        self.began = True
        self._head = msgspec.structs.replace(self._head, anchor=anchor)
        self._until_ns = anchor.mono_ns - 1
        self.sampler.ticked = self._ticked
        try:
            self.sampler.start(self._head.hz)
        except ours(RuntimeError) as error:  # the thread ended, and no other can start
            self.failed = describe(error)

    def close(self, anchor: ClockAnchor) -> None:
        """End sampling, and write the remaining samples and the end line."""
        self._closing = True
        if not self.sampler.stop():
            self.failed = self.failed or "a counter did not answer while the capture was closed"
            self._close_with_the_sampler()
            return
        file = self._file
        if file is None:
            return
        try:
            self._end(file, anchor)
        except ours(OSError) as error:
            self.failed = self.failed or describe(error)
        finally:
            file.close()
            self._file = None

    def _close_with_the_sampler(self) -> None:
        """Let the sampling thread close the file when it ends, because it may write until then."""
        file = self._file
        if file is not None:
            self.sampler.ended = file.close
            if self.sampler.is_over:  # the sampler ended meanwhile, perhaps before `ended` was set
                file.close()

    def _end(self, file: FileIO, anchor: ClockAnchor) -> None:
        if not self.began:
            self.path.unlink()
            return
        self._write(file)
        absent = self.sampler.absent
        self._append(
            file, [records.End(anchor=anchor, samples=self.samples, dropped=self.dropped, absent=absent)]
        )

    def _ticked(self) -> None:
        file, now_ns = self._file, monotonic_ns()
        if file is None or self.failed is not None or self._closing or now_ns - self._written_ns < WRITE_NS:
            return
        self._written_ns = now_ns
        try:
            self._write(file)
        except ours(OSError) as error:
            self.failed = describe(error)
            failures.note("writing counters", error)

    def _write(self, file: FileIO) -> None:
        """Write what the file does not have yet: the header, series and samples."""
        if not self._size:
            self._append(file, [self._head])
        ticks = self.sampler.between(self._until_ns, monotonic_ns())
        taken = ticks[: max(0, MOST_SAMPLES - self.samples)]
        series = self.sampler.series[self._series :]
        self._append(file, [*series, *map(_sample, taken)])
        self._series += len(series)
        self.samples += len(taken)
        self.dropped += len(ticks) - len(taken)
        if ticks:
            self._until_ns = ticks[-1].at_ns

    def _append(self, file: FileIO, lines: list[records.Line]) -> None:
        self._size = append_whole(file.fileno(), self._size, _encode(lines))


def _sample(tick: Tick) -> records.Sample:
    return records.Sample(at_ns=tick.at_ns, values=tick.values)
