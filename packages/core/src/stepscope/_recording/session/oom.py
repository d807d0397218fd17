"""Records of CUDA out-of-memory errors outside of `cuda_memory` windows (`cuda_memory.oom_any_step`).

A record is written at once, on the thread that requested memory, because the error may end the process.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope._recording.session import budget
from stepscope._recording.session.session import Session
from stepscope._recording.spans import slot
from stepscope.backends import cuda_memory, cuda_oom
from stepscope.backends.cuda_oom import Shortage
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files.cuda_memory import OutOfMemory, write_out_of_memory
from stepscope.files.layout import RunLayout, safe
from stepscope.files.manifest import Expectation
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import private, temporary

MOST_RECORDS = 100
"""Largest number of records of one process, because a search for the largest batch size runs out of memory
many times."""
ITEM = "CUDA out of memory"
"""Name of the manifest item for a record, if a capture is open."""

_numbers = itertools.count(1)
"""Counter for the file names of this process' records."""
_watch: _Watch | None = None
"""The object that writes records in this process, or None. One writer: `watch`."""


def watch(config: ProfileConfig, process: ProcessInfo, run_id: str, step: int | None) -> None:
    """From now on, write a record of each out-of-memory error, if `config` asks for records. May be called
    repeatedly.

    Args:
        step: The step that begins now, or None if unknown.
    """
    global _watch
    if config.cuda_memory.oom_any_step == "off":
        return
    try:
        if _watch is None or _watch.process.pid != os.getpid() or _watch.config != config:
            _watch = _Watch(config, process, run_id)
            _watch.begin()
        _watch.step = step
    except ours() as error:
        failures.note("watching for CUDA out-of-memory errors", error)


class _Watch:
    def __init__(self, config: ProfileConfig, process: ProcessInfo, run_id: str) -> None:
        self.config = config
        self.process = process
        self.step: int | None = None
        self._run_id = run_id

    def begin(self) -> None:
        history = self.config.cuda_memory.oom_any_step == "history"
        options = cuda_memory.history_options(self.config.cuda_memory) if history else None
        cuda_oom.watch(self.keep, options, _refused)

    def keep(self, shortage: Shortage, snapshot: Callable[[], object], history: bool) -> None:
        """
        Args:
            snapshot: Takes a snapshot, which is slow. Called only if the snapshot is written.
            history: True if the snapshot has the allocator's history.
        """
        try:
            self._keep(shortage, snapshot, history)
        except ours() as error:
            failures.note("keeping an out-of-memory snapshot", error)

    def _keep(self, shortage: Shortage, snapshot: Callable[[], object], history: bool) -> None:
        number = next(_numbers)
        if number > MOST_RECORDS:
            return
        run, session = RunLayout(self.config.save_path), slot.active
        why = self._why_none(run)
        file = run.oom_snapshot(self.process, self._run_id, number)
        if why is None:
            try:
                _write(file, snapshot())
            except ours(OSError, MemoryError) as error:
                why = describe(error)
        record = OutOfMemory(
            run_id=self._run_id,
            process=self.process,
            at_ns=time.time_ns(),
            step=self.step if session is None else session.step,
            device=shortage.device,
            asked_bytes=shortage.asked_bytes,
            limit_bytes=shortage.limit_bytes,
            free_bytes=shortage.free_bytes,
            history=history,
            snapshot=None if why else file.name,
            why_none=why,
        )
        write_out_of_memory(run, number, record)
        what = f"{shortage.asked_bytes} bytes asked, {shortage.free_bytes} free on device {shortage.device}"
        kept = f"no snapshot: {why}" if why else f"oom/{file.name}"
        failures.warn("stepscope: CUDA out of memory: %s; %s", what, kept)
        if isinstance(session, Session):
            item = Expectation(name=ITEM, kind="memory", state="ok", reason=f"{what}; {kept}")
            session.manifest_part.expect(item)
            session.manifest_part.write()

    def _why_none(self, run: RunLayout) -> str | None:
        most = self.config.cuda_memory.oom_snapshots
        if len(list(run.oom.glob(f"[!.]*_{safe(self._run_id)}_*.pickle"))) >= most:
            return f"snapshot limit reached (cuda_memory.oom_snapshots = {most})"
        return budget.over_budget(self.config)


def _refused(reason: str) -> None:
    failures.warn("stepscope: cuda_memory.oom_any_step has no effect: %s", reason)


def _write(file: Path, snapshot: object) -> None:
    import pickle  # imported here: 5 ms

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    passing = temporary(file)
    try:
        with open(passing, "xb", opener=private) as sink:
            pickle.dump(snapshot, sink)
        os.replace(passing, file)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise
