"""This process' part of the manifest, kept true on disk while a capture runs and after it.

Everything that was promised stands in it from the moment it is promised, as `missing` with the reason, so
that a process that dies leaves the truth behind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stepscope.files.atomic import write_atomic
from stepscope.files.clock import ClockOffset
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import (
    NOT_EXPORTED,
    Absent,
    Expectation,
    Manifest,
    OwnCost,
    ProcessPart,
    State,
)
from stepscope.files.parts import fold, part_files, write_manifest
from stepscope.files.sidecar import Artifact
from stepscope.recording import guard


class Ledger:
    """Thread-safe. `write` puts it on disk: at the end of opening, of closing and of each export."""

    def __init__(self, path: Path, part: ProcessPart) -> None:
        self._path = path
        self._part = part
        self._items: dict[str, Expectation] = {}
        self._pending: Counter[str] = Counter()
        self._cut: dict[str, str] = {}
        """Name -> the budget that kept some of its windows from opening."""
        self._lock = threading.RLock()  # a signal handler may write in the middle of a write
        self._folding = threading.RLock()  # the same, and the fold that looked later is to be written later

    @property
    def part(self) -> ProcessPart:
        with self._lock:
            return msgspec.structs.replace(self._part, expected=tuple(self._items.values()))

    def problems(self) -> list[str]:
        """One line for each thing that is promised and not there, exports under way left out."""
        return [
            f"{item.name}: {item.state}: {item.reason}"
            for item in self.part.expected
            if item.state in ("missing", "partial", "failed") and item.reason != NOT_EXPORTED
        ]

    def update(self, **fields: object) -> None:
        """Replaces fields of the part (`closed`, `spans`, `dropped`, `clocks`, `error`...)."""
        with self._lock:
            self._part = msgspec.structs.replace(self._part, **fields)

    def add_absent(self, absent: tuple[Absent, ...]) -> None:
        with self._lock:
            self.update(absent=self._part.absent + absent)

    def add_clocks(self, clocks: tuple[ClockOffset, ...]) -> None:
        """Offsets measured anew are added: several of one process give its drift."""
        with self._lock:
            self.update(clocks=self._part.clocks + clocks)

    def state(self, name: str) -> State | None:
        with self._lock:
            return self._items[name].state if name in self._items else None

    def spend(
        self,
        *,
        start_ns: int = 0,
        stop_ns: int = 0,
        inside_ns: int = 0,
        export_ns: int = 0,
        spans_ns: int = 0,
    ) -> None:
        """Adds to what profiling itself cost this process."""
        with self._lock:
            cost = self._part.cost
            total = OwnCost(
                start_ns=cost.start_ns + start_ns,
                stop_ns=cost.stop_ns + stop_ns,
                inside_ns=cost.inside_ns + inside_ns,
                export_ns=cost.export_ns + export_ns,
                spans_ns=cost.spans_ns + spans_ns,
            )
            self.update(cost=total)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """All the time in the block is a cost of opening, waiting for others included."""
        began, before = time.monotonic_ns(), self._part.cost.start_ns
        try:
            yield
        finally:
            known = self._part.cost.start_ns - before
            self.spend(start_ns=max(0, time.monotonic_ns() - began - known))

    @contextmanager
    def closing(self) -> Iterator[None]:
        """All the time in the block is a cost of closing, waiting for others included."""
        began, before = time.monotonic_ns(), self._part.cost.stop_ns
        try:
            yield
        finally:
            known = self._part.cost.stop_ns - before
            self.spend(stop_ns=max(0, time.monotonic_ns() - began - known))

    def expect(self, item: Expectation) -> None:
        """Promises something, or replaces what was said of it."""
        with self._lock:
            self._items[item.name] = item

    def skip(self, name: str, reason: str) -> None:
        """Says why something is not recorded, unless it is or was (a stage skipped once and recorded another
        time).
        """
        with self._lock:
            if name not in self._items:
                self.expect(Expectation(name=name, state="skipped", reason=reason))

    def cut(self, name: str, reason: str) -> None:
        """Says that a budget kept a window of it from opening: `missing`, or `partial` with artifacts."""
        with self._lock:
            self._cut.setdefault(name, reason)
            old = self._items.get(name, Expectation(name=name, state="skipped", reason=reason))
            if old.state == "skipped":
                old = msgspec.structs.replace(old, state="missing", reason=reason)
            elif old.state == "ok":
                old = msgspec.structs.replace(old, state="partial", reason=reason)
            self.expect(msgspec.structs.replace(old, truncated=old.truncated or reason))

    def fail(self, name: str, reason: str) -> None:
        """Says that something went wrong: `partial` where artifacts of it are there, else `failed`."""
        with self._lock:
            old = self._items.get(name, Expectation(name=name, state="failed", reason=reason))
            state = "partial" if old.artifacts else "failed"
            self.expect(msgspec.structs.replace(old, state=state, reason=reason))

    def export_begins(self, name: str, truncated: str | None, ignored: dict[str, str]) -> None:
        """An artifact of `name` was recorded and is on its way to the disk."""
        with self._lock:
            self._pending[name] += 1
            old = self._items.get(name, Expectation(name=name, state="missing", reason=NOT_EXPORTED))
            failed = old.state in ("failed", "partial")
            self.expect(
                msgspec.structs.replace(
                    old,
                    state=old.state if failed else "missing",
                    reason=old.reason if failed else NOT_EXPORTED,
                    truncated=truncated or old.truncated,
                    ignored={**old.ignored, **ignored},
                )
            )

    def export_ends(self, name: str, artifact: Artifact | None, error: str | None, cost_ns: int) -> None:
        """It is there, or it is not and this is why."""
        with self._lock:
            self._pending[name] -= 1
            old = self._items[name]
            if artifact is not None:
                old = msgspec.structs.replace(old, artifacts=(*old.artifacts, artifact))
                self._items[name] = old
            if error is not None:
                self.fail(name, error)
            elif self._pending[name] == 0 and old.reason == NOT_EXPORTED:
                cut = self._cut.get(name)
                self.expect(msgspec.structs.replace(old, state="partial" if cut else "ok", reason=cut))
            self.spend(export_ns=cost_ns)
            self.write()

    def manifest(self, step: StepLayout) -> Manifest:
        """What is there at this moment, folded from the parts of all processes of the step."""
        mine = self.part  # from memory: a disk that refuses to be written cannot hide it
        others = part_files(step, but=self._path)[0].values()
        return fold([mine, *(part for part in others if part.run_id == mine.run_id)])

    def fold(self, step: StepLayout) -> None:
        """Writes `manifest.json` anew. Several threads do: at a wait, after a command, when late files come.

        Raises:
            OSError: the disk or the folder does not let us.
        """
        with self._folding:
            write_manifest(step, self.manifest(step))

    def write(self) -> None:
        """Puts the part on disk, whole. A disk that refuses is noted by the guard."""
        with self._lock:
            try:
                write_atomic(self._path, msgspec.json.encode(self.part))
            except OSError as error:
                guard.note("writing the manifest", error)
