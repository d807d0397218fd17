"""This process' part of the manifest, kept up to date on disk during a capture and after it.

Every expected item is in the part as `pending` from the beginning, so that the part is correct even if the
process dies.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files.clock import ClockOffset
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import (
    AWAITED,
    Absent,
    Expectation,
    Fate,
    Kind,
    Manifest,
    Peer,
    Pending,
    ProcessPart,
    State,
    awaited,
)
from stepscope.files.manifest_parts import fold, of_the_last, part_files, with_late_files, write_manifest
from stepscope.files.requests import Listening, has_died, peers_of, read_listening
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.storage import read_records, write_atomic


def find_peers(layout: RunLayout, process: ProcessInfo, run_id: str, *, all_hosts: bool) -> list[Peer]:
    """Return the other ranks of the job of `process` that have died, and those that should leave a part.

    The ranks are found by their files in `control/`. A rank whose configuration selects other steps need not
    leave a part.

    Args:
        all_hosts: False to return only dead ranks, and only if a rank of this host has died. Few files are
            then read if no rank has died.
    """
    own = next(iter(read_records([layout.listener(process.host, process.pid)], Listening)), None)
    if own is None or own.run_id != run_id or own.rank is None:
        return []
    if not all_hosts and not any(map(has_died, peers_of(own, read_listening(layout, process.host)))):
        return []
    peers = list[Peer]()
    for peer in peers_of(own, read_listening(layout)):
        if has_died(peer):
            peers.append(Peer(process=peer.process, fate="died"))
        elif all_hosts and peer.ended_ns is None and peer.selects == own.selects:
            peers.append(Peer(process=peer.process, fate="expected"))
    return peers


class ManifestPart:
    """This process' part of the manifest, in memory. Thread-safe. `write` writes it to disk: after the
    opening, the closing, and each export.
    """

    def __init__(self, path: Path, part: ProcessPart) -> None:
        self._path = path
        self._part = part
        self._items: dict[str, Expectation] = {}
        self.told = False
        """True once the capture's problems were logged. Later problems are then logged one by one."""
        self._pending: Counter[str] = Counter()
        self._on_disk: ProcessPart | None = None
        """The part as written last, or None."""
        self._cut: dict[str, str] = {}
        """{name of an item: the budget that prevented some of its windows}."""
        self._lock = threading.RLock()  # reentrant, because a signal handler may call write() during write()
        self._folding = threading.RLock()  # reentrant too; the newest manifest must be written last

    @property
    def record(self) -> ProcessPart:
        with self._lock:
            return msgspec.structs.replace(self._part, expected=tuple(self._items.values()))

    def update(self, **fields: object) -> None:
        """Set fields of the part (`closed`, `spans`, `dropped`, `clocks`, `error`...)."""
        with self._lock:
            self._part = msgspec.structs.replace(self._part, **fields)

    def add_absent(self, absent: tuple[Absent, ...]) -> None:
        with self._lock:
            self.update(absent=self._part.absent + absent)

    def add_clocks(self, clocks: tuple[ClockOffset, ...]) -> None:
        """Add measured clock offsets. Several offsets of one process show its drift."""
        with self._lock:
            self.update(clocks=self._part.clocks + clocks)

    def add_peers(self, peers: Sequence[Peer], *, in_step: bool = True) -> None:
        """Add ranks that have died, and ranks that should leave a part of the step, as `find_peers` returns
        them.

        Args:
            in_step: False if the ranks may have died in a later step.
        """
        fates: dict[Fate, Fate] = {} if in_step else {"died": "gone"}
        known = (msgspec.structs.replace(peer, fate=fates.get(peer.fate, peer.fate)) for peer in peers)
        self.update(peers=tuple(known))

    def state(self, name: str) -> State | None:
        with self._lock:
            return self._items[name].state if name in self._items else None

    def spend(self, **ns: int) -> None:
        """Add to the cost of profiling in this process. `ns` are fields of `OwnCost`."""
        with self._lock:
            cost = self._part.cost
            total = {name: getattr(cost, name) + more for name, more in ns.items()}
            self.update(cost=msgspec.structs.replace(cost, **total))

    def expect(self, item: Expectation) -> None:
        """Add an expected item, or replace the item of the same name."""
        with self._lock:
            self._items[item.name] = item

    def skip(self, name: str, reason: str, *, kind: Kind) -> None:
        """Add an item as skipped. An item that already has this name is kept, because another call of the
        stage may have a recording.
        """
        with self._lock:
            if name not in self._items:
                self.expect(Expectation(name=name, kind=kind, state="skipped", reason=reason))

    def lack(self, name: str, reason: str, *, kind: Kind) -> None:
        """Add an item as missing, because nothing can provide it."""
        with self._lock:
            self.expect(Expectation(name=name, kind=kind, state="missing", reason=reason))

    def cut(self, name: str, reason: str, *, kind: Kind) -> None:
        """Record that a budget prevented a window of an item. The item is `partial` if it has artifacts, else
        `missing`.
        """
        with self._lock:
            self._cut.setdefault(name, reason)
            old = self._items.get(name)
            if old is None or old.state == "skipped":
                old = Expectation(name=name, kind=kind, state="missing", reason=reason)
            elif old.state == "ok":
                old = msgspec.structs.replace(old, state="partial", reason=reason)
            self.expect(msgspec.structs.replace(old, truncated=old.truncated or reason))

    def fail(self, name: str, reason: str, *, kind: Kind, died: bool = False) -> None:
        """Record a failure of an item. The item is `partial` if it has artifacts, else `failed`.

        Args:
            died: True if the item failed because the actor of an engine died.
        """
        with self._lock:
            old = self._items.get(name, Expectation(name=name, kind=kind, state="failed"))
            state: State = "partial" if old.artifacts else "failed"
            pending: Pending | None = "exporting" if self._pending[name] else None
            self.expect(msgspec.structs.replace(old, state=state, reason=reason, pending=pending, died=died))

    def export_begins(self, name: str, truncated: str | None, ignored: dict[str, str]) -> None:
        """Record that an artifact of the item `name` is being exported."""
        with self._lock:
            self._pending[name] += 1
            old = self._items.get(name, awaited(name, "trace", "exporting"))
            if old.state not in ("failed", "partial"):
                old = msgspec.structs.replace(old, state="pending", reason=AWAITED["exporting"])
            self.expect(
                msgspec.structs.replace(
                    old,
                    pending="exporting",
                    truncated=truncated or old.truncated,
                    ignored={**old.ignored, **ignored},
                )
            )

    def export_ends(self, name: str, artifact: Artifact | None, error: str | None, cost_ns: int) -> None:
        """Record the outcome of an export, which is an artifact or an error."""
        with self._lock:
            self._pending[name] -= 1
            old = self._items[name]
            if artifact is not None:
                notes = old.notes if artifact.note is None else (*old.notes, artifact.note)
                old = msgspec.structs.replace(old, artifacts=(*old.artifacts, artifact), notes=notes)
                self._items[name] = old
            if error is not None:
                self.fail(name, error, kind="trace")
            elif self._pending[name] == 0:
                self._end_exports(old)
            self.spend(export_ns=cost_ns)
            self.write()

    def _end_exports(self, item: Expectation) -> None:
        """Set the final state of an item after its last file. If an earlier file failed, the item is
        `partial`.
        """
        cut = self._cut.get(item.name) or item.truncated
        if item.state == "pending":
            item = msgspec.structs.replace(item, state="partial" if cut else "ok", reason=cut)
        elif item.state == "failed":
            item = msgspec.structs.replace(item, state="partial")
        self.expect(msgspec.structs.replace(item, pending=None))

    def manifest(self, step: StepLayout) -> Manifest:
        """Return the current manifest, combined from the parts of all processes of the step."""
        return self._fold(step, self._others(step))

    def _fold(self, step: StepLayout, others: Sequence[ProcessPart]) -> Manifest:
        return fold([*with_late_files(step, [self.record]), *others])

    def _others(self, step: StepLayout) -> list[ProcessPart]:
        """Return the parts of the other processes from disk, without the part of this process."""
        own, parts = self.record, part_files(step, but=self._path)[0].values()
        last = of_the_last([own, *(part for part in parts if part.run_id == own.run_id)])
        return [part for part in last if part is not own]

    def write_last(
        self, step: StepLayout, enter: Callable[[Sequence[ProcessPart]], None], *, alone: bool
    ) -> Manifest:
        """Write this process' part at the end of a capture, and return the manifest, which `fold` writes
        later.

        Args:
            enter: Called with the parts of all processes, this process' part first. It may add items to this
                part that depend on all parts.
            alone: True if no other process takes part in the capture. Otherwise this part is also written
                before the other parts are read. If two ranks close at the same time, at least one rank then
                reads the part of the other.
        """
        if not alone:
            self.write()
        others = self._others(step)
        enter([self.record, *others])
        self.write()
        return self._fold(step, others)

    def fold(self, step: StepLayout) -> Manifest:
        """Write `manifest.json`, and return the manifest.

        May be called from several threads: after exports, hooks and commands, during a wait, and after a late
        stop. A disk error is recorded and not raised.
        """
        with self._folding:
            manifest = self.manifest(step)
            try:
                write_manifest(step, manifest)
            except ours(OSError) as error:
                failures.note("writing the manifest", error)
            return manifest

    def write(self) -> None:
        """Write the part to disk, unless it has not changed. A disk error is recorded and not raised."""
        with self._lock:
            record = self.record
            if record == self._on_disk and self._path.exists():
                return
            try:
                write_atomic(self._path, msgspec.json.encode(record))
                self._on_disk = record
            except ours(OSError) as error:
                failures.note("writing the manifest", error)
