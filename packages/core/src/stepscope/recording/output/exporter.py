"""Recordings become files here, off the critical path: on one daemon thread, in the order they were
submitted.

torch holds the GIL while it writes a trace (3 us an event), so a job may be *deferred* to a moment when the
process waits anyway (a forked child would write it without our GIL, but a process that holds CUDA or threads
is not safe to fork); compression (igzip, which releases the GIL) is then most of the rest.

On disk: a job works in a hidden folder beside its target. The finished file is renamed into place first, its
sidecar second, so that whoever finds a sidecar finds its file. Neither is ever half there, and a name that is
taken is not used again. Files are not fsynced: a machine that loses power may lose its last trace, and in
exchange no export waits for a network disk.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.backends.protocol import PendingArtifact
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.files.storage.temporary import temporary
from stepscope.recording.process import failures

BLOCK = 8 << 20
"""Bytes of one compression call (6 ms). Each takes the GIL back from the training thread for a moment."""


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Either the artifact, whole and in place, or why it is not there."""

    artifact: Artifact | None
    error: str | None
    sidecar: Sidecar | None = None
    """What was written beside it."""
    cost_ns: int
    """What the job took in its thread."""
    stall_ns: int = 0
    """The part of it that `PendingArtifact.write` took, which may have held the GIL."""


class _Job(msgspec.Struct, kw_only=True, eq=False):
    pending: PendingArtifact
    target: Path
    describe: Callable[[int, Path], Sidecar]
    on_done: Callable[[ExportResult], None]
    deferred: bool


class _Then(msgspec.Struct, kw_only=True, eq=False):
    """Something to do when all that was submitted before it is done."""

    work: Callable[[], None]
    deferred: bool


class Exporter:
    """Of one process. Submitting never raises for a disk's trouble: that comes back in the result."""

    def __init__(self) -> None:
        self._jobs: deque[_Job | _Then] = deque()
        self._running: _Job | _Then | None = None
        self._thread: threading.Thread | None = None
        self._written: Counter[int] = Counter()
        # Of an RLock: a SIGTERM handler may drain in the middle of submit().
        self._changed = threading.Condition()

    def submit(
        self,
        pending: PendingArtifact,
        *,
        target: Path,
        describe: Callable[[int, Path], Sidecar],
        on_done: Callable[[ExportResult], None],
        deferred: bool,
    ) -> None:
        """Queues one recording.

        Args:
            target: Its path, without `.gz`. Folders are created; a name that is taken gets a number.
            describe: (size in bytes, final path) -> what to write beside it.
            on_done: Called once, on the exporter's thread.
            deferred: Wait for `flush` or `drain`.
        """
        self._put(_Job(pending=pending, target=target, describe=describe, on_done=on_done, deferred=deferred))

    def then(self, work: Callable[[], None], *, deferred: bool) -> None:
        """Calls `work` on the exporter's thread when all that was submitted before is done, as deferred."""
        self._put(_Then(work=work, deferred=deferred))

    def _put(self, job: _Job | _Then) -> None:
        with self._changed:
            self._jobs.append(job)
            self._start_thread()  # now, also for a deferred job: at exit Python 3.12 starts no more
            self._changed.notify_all()

    def flush(self) -> None:
        """Deferred jobs begin now. Returns at once."""
        with self._changed:
            for job in self._jobs:
                job.deferred = False
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> list[str]:
        """Waits until all is written, deferred jobs too.

        Returns:
            File names of what is unfinished after `timeout_s`; it goes on in the background.
        """
        self.flush()
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._unfinished() and time.monotonic() < until:
                if self._thread is not None:
                    self._changed.wait(until - time.monotonic())
                elif not self._do_next():  # no thread could be started: the process is exiting
                    break
            return [job.target.name for job in self._unfinished() if isinstance(job, _Job)]

    def unwritten(self) -> list[Path]:
        """Targets of what is under way or still to come."""
        with self._changed:
            return [job.target for job in self._unfinished() if isinstance(job, _Job)]

    def bytes_written(self, step: int) -> int:
        """Size of the files that are in place, of one step."""
        return self._written[step]

    def _unfinished(self) -> list[_Job | _Then]:
        return [*([] if self._running is None else [self._running]), *self._jobs]

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="stepscope-export", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the interpreter is exiting: drain() does the work
        self._thread = thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                self._do_next()
        finally:
            self._thread = None

    def _has_work(self) -> bool:
        return any(not job.deferred for job in self._jobs)

    def _do_next(self) -> bool:
        """Whether there was a job to do."""
        with self._changed:
            job = next((job for job in self._jobs if not job.deferred), None)
            if job is None:
                return False
            self._jobs.remove(job)
            self._running = job
        try:
            if isinstance(job, _Then):
                job.work()
            else:
                self._do(job)
        except Exception as error:
            failures.note("reporting an export", error)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
        return True

    def _do(self, job: _Job) -> None:
        result, step = _export(job)
        if result.artifact is not None:
            self._written[step] += result.artifact.size_bytes
        job.on_done(result)


def _export(job: _Job) -> tuple[ExportResult, int]:
    """The result, and the step that its sidecar names."""
    import shutil

    began = time.monotonic_ns()
    stall_ns = 0
    folder: Path | None = None
    try:
        job.target.parent.mkdir(parents=True, exist_ok=True)
        folder = temporary(job.target)
        folder.mkdir(mode=0o700)
        file = folder / job.target.name
        writing = time.monotonic_ns()
        try:
            job.pending.write(file)
        finally:
            stall_ns = time.monotonic_ns() - writing
        if job.pending.compress:
            file = _compress(file)
        sidecar = _put(job, file)
    except Exception as error:
        job.pending.discard()
        took = time.monotonic_ns() - began
        reason = f"{type(error).__name__}: {error}"
        return ExportResult(artifact=None, error=reason, cost_ns=took, stall_ns=stall_ns), 0
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic_ns() - began
    artifact = sidecar.artifact
    result = ExportResult(artifact=artifact, error=None, sidecar=sidecar, cost_ns=took, stall_ns=stall_ns)
    return result, sidecar.step


def _put(job: _Job, file: Path) -> Sidecar:
    """Renames the finished file into place, then its sidecar. What a disk may refuse comes before that."""
    final = _free(job.target.parent, job.target.name.removesuffix(job.pending.suffix), file.name)
    sidecar = job.describe(_size(file), final)
    beside = file.with_name("sidecar")
    beside.write_bytes(msgspec.json.encode(sidecar))
    for each in (file, beside):
        each.chmod(0o700 if each.is_dir() else 0o600)  # what a trace holds is the user's own
    file.rename(final)
    beside.rename(sidecar_of(final))
    return sidecar


def _size(file: Path) -> int:
    """In bytes; of a folder, all that is in it."""
    return sum(path.stat().st_size for path in (file, *file.rglob("*")) if path.is_file())


def _compress(file: Path) -> Path:
    import shutil

    from isal import igzip  # 9 ms, paid in this thread

    compressed = file.with_name(file.name + ".gz")
    sink = igzip.open(compressed, "wb", compresslevel=1)  # type: ignore[no-untyped-call]  # isal
    with file.open("rb") as source, sink:
        shutil.copyfileobj(source, sink, BLOCK)
    file.unlink()
    return compressed


def _free(folder: Path, stem: str, name: str) -> Path:
    """`name` in `folder`, or with a number after its `stem` where that is taken."""
    suffix = name.removeprefix(stem)
    tried = (folder / (f"{stem}-{number}{suffix}" if number > 1 else name) for number in itertools.count(1))
    return next(path for path in tried if not path.exists() and not sidecar_of(path).exists())


_exporter = Exporter()
"""One writer: this module."""


def exporter() -> Exporter:
    """The exporter of this process."""
    return _exporter


def _in_child() -> None:
    # The parent's jobs are the parent's to write, and its thread is not here.
    global _exporter
    _exporter = Exporter()


os.register_at_fork(after_in_child=_in_child)
