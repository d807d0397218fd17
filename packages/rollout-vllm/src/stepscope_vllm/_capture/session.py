"""The captures of one engine, one at a time.

The states of a session are begun, ending and ended. A session that is given up ends without files. All work
runs on the work loop, so it is completed even if the caller gives up: the recording is stopped, and the files
of a slow stop are still moved to the capture's folder, with their sidecars.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from stepscope.engines import EngineCapture, EngineProfilerBase, refuse_second_start
from stepscope.engines.artifacts import read_anchor
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture import collection
from stepscope_vllm._capture.collection import Recording
from stepscope_vllm._driving.target import Target
from stepscope_vllm._files import engine_folder

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
"""The work loop, or None before its first use. Writers: `_running`, and a forked child."""
_lock = threading.Lock()
"""Lock that is held while the loop is made. A forked child replaces it."""


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start `work` on the work loop. The work of one caller starts in the order of the calls."""
    future = asyncio.run_coroutine_threadsafe(work, _running())
    future.add_done_callback(_seen)
    return future


async def result_of(future: Future[T]) -> T:
    """Return the result of `future`. If the waiting task is cancelled, the work goes on."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="stepscope-vllm", daemon=True).start()
        return _loop


def _seen(future: Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # a waiting caller raises the exception, so asyncio need not log the exception


def _after_fork() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()  # the parent may have held the lock


os.register_at_fork(after_in_child=_after_fork)


class Desk:
    """The captures of one engine. A desk outlives profilers, because each capture makes a new profiler."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turn = asyncio.Lock()
        """Lock that the work loop holds while it calls the engine."""
        self.current: Session | None = None
        """The running capture, or None. Callers on any thread change the value, under `lock`."""
        self.owed: Recording | None = None
        """The latest recording that got no files, or None. Files that are written late belong to this
        recording."""

    def take(self, session: Session) -> None:
        """Reserve the engine for a session. Raises EngineError while another session has the engine."""
        with self.lock:
            refuse_second_start(None if self.current is None else self.current.recording.capture)
            self.current = session

    def give_back(self) -> Session | None:
        """Free the engine. Return the session that had the engine, or None."""
        with self.lock:
            session, self.current = self.current, None
            return session


class Session:
    """One capture of one engine."""

    def __init__(self, desk: Desk, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        self.recording = Recording(target=target, capture=capture, ignored=ignored)
        self._desk = desk
        self._target = target
        self._given_up = False
        self._ending: Future[list[Artifact]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.over = threading.Event()
        """Set once the end of the session has begun."""

    async def begin(self) -> None:
        async with self._desk.turn:
            if self._given_up:
                return
            recording = self.recording
            recording.files_before = await asyncio.to_thread(self._files_before)
            recording.facts_at_start = await asyncio.to_thread(self._target.facts)
            capture = recording.capture
            started = await self._target.start(capture, recording.prefix, recording.local_ranks)
            recording.started, recording.opened = started, read_anchor()
            recording.files_at_start = await asyncio.to_thread(engine_folder.listed, started.folder)
            if capture.seconds is not None:
                self._timer = asyncio.get_running_loop().call_later(capture.seconds, self._expire)

    def give_up(self) -> None:
        """Stop the recording, if it has begun, and remove its files, because the caller has given up."""
        self._given_up = True
        submit(self._undo())

    def end(self) -> Future[list[Artifact]]:
        """Stop the recording, once. Return a future of its artifacts, which is the same for every caller."""
        with self._desk.lock:
            if self._ending is None:
                self._ending = submit(self._end())
                self.over.set()
            return self._ending

    def _expire(self) -> None:
        self.recording.expired = f"open for more than {self.recording.capture.seconds:g} s"
        self.end()

    async def _undo(self) -> None:
        async with self._desk.turn:
            if self.recording.started is None:
                return
            with contextlib.suppress(EngineError):  # no caller waits; the next start would report it
                await self._stop_target()
            await asyncio.to_thread(collection.remove, self.recording)

    async def _end(self) -> list[Artifact]:
        async with self._desk.turn:
            if self._timer is not None:
                self._timer.cancel()
            recording, before = self.recording, self._desk.owed
            self._desk.owed = recording
            recording.is_early = await asyncio.to_thread(collection.has_ended, recording)
            recording.stop_ns = time.time_ns()
            recording.ignored |= await self._stop_target()
            recording.closed = read_anchor()
            recording.facts_at_stop = await asyncio.to_thread(self._target.facts)
            passes = await asyncio.to_thread(collection.publish_passes_of, recording)
            artifacts = await asyncio.to_thread(collection.collect, recording, before)
            self._desk.owed = None
            return [*artifacts, *passes]

    async def _stop_target(self) -> dict[str, str]:
        failures = await self._target.stop()
        started, folder = self.recording.started, self._target.folder
        if started is not None and not started.aimed and folder is not None:
            # Servers may share a parent folder. Files show the server's own folder only after the stop.
            self.recording.started = started._replace(folder=folder)
        return failures

    def _files_before(self) -> set[str]:
        """Return the names of the files that exist before the start, in the engine's folder and in the
        capture's folder.
        """
        folder = self._target.folder
        return engine_folder.listed(folder) | engine_folder.listed(Path(self.recording.capture.out_dir))


class ReplicaProfiler(EngineProfilerBase):
    """Base class of VllmProfiler and VllmServer. All profilers of one engine share a `Desk`."""

    def __init__(self, replica: int | None, desk: Desk) -> None:
        super().__init__(replica)
        self._desk = desk

    async def stop(self) -> list[Artifact]:
        """Stop the running capture, and return its artifacts; empty if no capture runs. If the caller is
        cancelled, the files are still published.
        """
        session = self._desk.give_back()
        if session is None:
            return []
        artifacts = await result_of(session.end())
        self._ignored = session.recording.ignored
        return artifacts

    async def _begin(self, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        """Start a recording, and return when every worker has begun. If the start fails or is cancelled, the
        recording is stopped.
        """
        self._ignored = ignored
        session = Session(self._desk, target, capture, ignored)
        self._desk.take(session)
        try:
            await result_of(submit(session.begin()))
        except BaseException as error:
            self._desk.give_back()
            session.give_up()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(
                    f"the profiler of vLLM did not start: {type(error).__name__}: {error}"
                ) from error
            raise
