"""One capture of one engine, from its start to its files.

Life of a session: begun -> ending -> ended, or given up, which is ending without files. Everything happens on
the work loop, so nothing depends on the caller. If it gives up, what it began is stopped. Files of a stop
that took too long still reach their folder, with their sidecars.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import read_anchor
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture import collection, late_files
from stepscope_vllm._capture.desk import Desk
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._driving import work_loop
from stepscope_vllm._driving.target import Target
from stepscope_vllm._files import engine_folder


class Session:
    """One capture of one engine."""

    def __init__(self, desk: Desk, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        self._desk = desk
        self._target = target
        self._recording = Recording(target=target, capture=capture, ignored=ignored)
        self._given_up = False
        self._ending: Future[list[Artifact]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.over = threading.Event()
        """Set once somebody has begun to end it."""

    @property
    def capture(self) -> EngineCapture:
        return self._recording.capture

    @property
    def ignored(self) -> dict[str, str]:
        """Return {option or part that is absent: reason}."""
        return self._recording.ignored

    @property
    def folder(self) -> Path | None:
        """Return the folder that its engine writes to by default."""
        return self._target.folder

    async def begin(self) -> None:
        async with self._desk.turn:
            if self._given_up:
                return
            recording = self._recording
            recording.files_before = await asyncio.to_thread(self._files_before)
            recording.facts_at_start = await asyncio.to_thread(self._target.facts)
            started = await self._target.start(self.capture, recording.prefix, recording.local_ranks)
            recording.started, recording.opened = started, read_anchor()
            recording.files_at_start = await asyncio.to_thread(engine_folder.listed, started.folder)
            if self.capture.seconds is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.capture.seconds, self._expire)

    def give_up(self) -> None:
        """Stop what has begun, and remove its files: the caller that asked for it is gone."""
        self._given_up = True
        work_loop.submit(self._undo())

    def end(self) -> Future[list[Artifact]]:
        """Return its artifacts, once they are complete. They are the same for every caller."""
        with self._desk.lock:
            if self._ending is None:
                self._ending = work_loop.submit(self._end())
                self.over.set()
            return self._ending

    def _expire(self) -> None:
        self._recording.expired = f"open for more than {self.capture.seconds:g} s"
        self.end()

    async def _undo(self) -> None:
        async with self._desk.turn:
            if self._recording.started is None:
                return
            with contextlib.suppress(EngineError):  # its caller is gone, and the next start says why it fails
                await self._stop_target()
            await asyncio.to_thread(collection.remove, self._recording)

    async def _end(self) -> list[Artifact]:
        async with self._desk.turn:
            if self._timer is not None:
                self._timer.cancel()
            recording, before = self._recording, self._desk.owed
            self._desk.owed = self
            recording.is_early = await asyncio.to_thread(collection.has_ended, recording)
            recording.stop_ns = time.time_ns()
            recording.ignored |= await self._stop_target()
            recording.closed = read_anchor()
            recording.facts_at_stop = await asyncio.to_thread(self._target.facts)
            late = None if before is None else before._recording
            artifacts = await asyncio.to_thread(collection.collect, recording, late)
            self._desk.owed = None
            return artifacts

    async def _stop_target(self) -> dict[str, str]:
        failures = await self._target.stop()
        started, folder = self._recording.started, self._target.folder
        if started is not None and not started.aimed and folder is not None:
            # Of several folders, only the files show which is the engine's.
            self._recording.started = started._replace(folder=folder)
        return failures

    def _files_before(self) -> set[str]:
        """Return the names of files before the start, also those of this step's earlier captures."""
        folder = self._target.folder
        if folder is not None:
            late_files.bring_home(self._target, self.capture, folder)
        return engine_folder.listed(folder) | engine_folder.listed(Path(self.capture.out_dir))
