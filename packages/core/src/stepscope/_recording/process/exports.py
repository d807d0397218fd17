"""Exports of recordings into files, on a thread of this process."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope._recording.process import failures, fork
from stepscope._recording.process.work_queue import WorkQueue
from stepscope.backends.protocol import PendingArtifact
from stepscope.errors import ours
from stepscope.files.layout import free_path, sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.files.storage import compress, temporary


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an export: a complete file, or an error."""

    sidecar: Sidecar | None = None
    """The sidecar of the file, or None after an error."""
    error: str | None = None
    cost_ns: int
    """Duration of the export on the exporter's thread, in ns."""

    @property
    def artifact(self) -> Artifact | None:
        return None if self.sidecar is None else self.sidecar.artifact


class _Job(msgspec.Struct, kw_only=True, eq=False):
    pending: PendingArtifact
    target: Path
    describe: Callable[[int, Path], Sidecar]
    on_done: Callable[[ExportResult], None]


class _Then(msgspec.Struct, eq=False):
    """Work to do after everything that was submitted before."""

    work: Callable[[], object]


class Exporter:
    """The exporter of one process. Errors are passed to `on_done` in the result."""

    def __init__(self) -> None:
        self._queue: WorkQueue[_Job | _Then] = WorkQueue("stepscope-export", self._do, inline=True)
        self._written: Counter[int] = Counter()

    def submit(
        self,
        pending: PendingArtifact,
        *,
        target: Path,
        describe: Callable[[int, Path], Sidecar],
        on_done: Callable[[ExportResult], None],
        deferred: bool,
    ) -> None:
        """Queue the export of one recording.

        Args:
            target: Path of the file, without `.gz`. Folders are created. If the name exists, a number is
                added.
            describe: Returns the sidecar. Called with the size in bytes and the final path.
            on_done: Called once, on the exporter's thread.
            deferred: True to begin only when `drain` is called.
        """
        job = _Job(pending=pending, target=target, describe=describe, on_done=on_done)
        self._queue.put(job, deferred=deferred)

    def then(self, work: Callable[[], object], *, deferred: bool) -> None:
        """Call `work` on the exporter's thread after everything that was submitted before. `deferred`: see
        `submit`.
        """
        self._queue.put(_Then(work), deferred=deferred)

    def drain(self, timeout_s: float) -> list[str]:
        """Begin deferred jobs, and wait until everything is written.

        Returns:
            Names of the files that are not written after `timeout_s`. Their export continues in the
                background.
        """
        return [job.target.name for job in self._queue.drain(timeout_s) if isinstance(job, _Job)]

    def unwritten(self) -> list[Path]:
        """Return the paths of all files that are not written yet."""
        return [job.target for job in self._queue.unfinished() if isinstance(job, _Job)]

    def bytes_written(self, step: int) -> int:
        """Return the total size of one step's exported files, in bytes."""
        return self._written[step]

    def _do(self, job: _Job | _Then) -> None:
        try:
            if isinstance(job, _Then):
                job.work()
            else:
                self._export(job)
        except ours() as error:
            failures.note("reporting an export", error)

    def _export(self, job: _Job) -> None:
        result = _export(job)
        if result.sidecar is not None:
            self._written[result.sidecar.step] += result.sidecar.artifact.size_bytes
        job.on_done(result)


def _export(job: _Job) -> ExportResult:
    began = time.monotonic_ns()
    folder: Path | None = None
    try:
        job.target.parent.mkdir(parents=True, exist_ok=True)
        folder = temporary(job.target)
        folder.mkdir(mode=0o700)
        file = folder / job.target.name
        job.pending.write(file)
        if job.pending.compress:
            file = compress(file)
        sidecar = _put(job, file)
    except ours() as error:
        job.pending.discard()
        return ExportResult(error=f"{type(error).__name__}: {error}", cost_ns=time.monotonic_ns() - began)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return ExportResult(sidecar=sidecar, cost_ns=time.monotonic_ns() - began)


def _put(job: _Job, file: Path) -> Sidecar:
    """Write the sidecar, then move both files to their final names. A lack of disk space shows before the
    moves.
    """
    stem = job.target.name.removesuffix(job.pending.suffix)
    final = free_path(job.target.parent, stem, file.name.removeprefix(stem))
    sidecar = job.describe(_size(file), final)
    beside = file.with_name("sidecar")
    beside.write_bytes(msgspec.json.encode(sidecar))
    for path in (file, beside):
        path.chmod(0o700 if path.is_dir() else 0o600)  # traces are private to the user
    file.rename(final)
    beside.rename(sidecar_of(final))
    return sidecar


def _size(file: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes."""
    return sum(path.stat().st_size for path in (file, *file.rglob("*")) if path.is_file())


_exporter = Exporter()
"""The exporter of this process. One writer: this module."""


def exporter() -> Exporter:
    """Return the exporter of this process."""
    return _exporter


def _forget() -> None:
    # The parent writes its own jobs, and a forked child does not have the thread.
    global _exporter
    _exporter = Exporter()


fork.forgets("exporter", _forget)
