"""The common base class of SglangProfiler and SglangServer."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from stepscope.engines import (
    EngineCapture,
    EngineProfilerBase,
    refuse_second_start,
)
from stepscope.engines.own_thread import WorkThread
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope_sglang._capture.opening import check_facts, check_options, prepared
from stepscope_sglang._capture.session import Session, hand_in_late
from stepscope_sglang._driving.target import EngineFacts, Target

T = TypeVar("T")

log = logging.getLogger("stepscope")


class ReplicaProfiler(EngineProfilerBase, ABC):
    """Profiler of one replica, which consists of one or more engines."""

    def __init__(self, replica: int | None) -> None:
        super().__init__(replica)
        self._sessions: list[Session] = []
        self._capture: EngineCapture | None = None
        self._thread = WorkThread("stepscope-sglang")
        self._watchdog: threading.Timer | None = None

    def check(self) -> None:
        for facts in self._facts():
            check_facts(facts)

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        ignored: dict[str, str] = {}
        for facts in self._facts():
            ignored.update(check_options(capture, facts))
        return ignored

    async def start(self, capture: EngineCapture) -> None:
        refuse_second_start(self._capture)
        self._capture = capture
        try:
            self._prepare()
            with self._waited_for(capture):
                sessions = await self._do(lambda: self._open(capture))
        except asyncio.CancelledError:
            self._capture = None
            self._thread.submit(self._drop)
            raise
        except BaseException:
            self._capture = None
            raise
        self._sessions = sessions

    async def stop(self) -> list[Artifact]:
        capture, self._capture = self._capture, None
        if capture is None:
            return []
        # If the caller gives up, the thread still finishes the files.
        with self._waited_for(capture):
            return await self._do(self._close)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(work)))

    # Subclasses override the methods below.

    @abstractmethod
    def _targets(self) -> Sequence[tuple[Target, str | None]]:
        """Return (engine, label) for each engine of the replica. The label is None if there is one engine."""

    def _facts(self) -> Iterator[EngineFacts]:
        """Yield the facts of the replica's engines. May block."""
        return (target.facts() for target, _ in self._targets())

    def _waited_for(self, capture: EngineCapture) -> AbstractContextManager[None]:
        """Return a context manager in which the caller waits for work on the profiler's thread."""
        return nullcontext()

    def _prepare(self) -> None:  # not abstract, because only some subclasses need it
        """Prepare the engine before a start, on the caller's event loop. Does nothing by default."""

    def _later(self, work: Callable[[], None]) -> None:
        """Submit `work` to the profiler's thread as soon as the engine can be reached, by default at once."""
        self._thread.submit(work)

    # The methods below run on the profiler's thread.

    def _open(self, capture: EngineCapture) -> list[Session]:
        self._sessions = []
        hand_in_late()
        try:
            for target, label in self._targets():
                session = Session(target, prepared(target, capture, label))
                session.open()
                self._sessions.append(session)
        except BaseException:
            self._drop()
            raise
        self._ignored = _joined(self._sessions)
        self._watch(capture)
        return self._sessions

    def _close(self) -> list[Artifact]:
        self._unwatch()
        sessions, self._sessions = self._sessions, []
        artifacts: list[Artifact] = []
        troubles: list[Exception] = []
        for session in sessions:
            try:
                artifacts += session.close()
            except Exception as error:
                troubles.append(error)
        self._ignored = _joined(sessions)
        if troubles and not artifacts:
            raise troubles[0] if isinstance(troubles[0], EngineError) else EngineError(str(troubles[0]))
        if troubles:
            self._ignored["files"] = "; ".join(map(str, troubles))
        return artifacts

    def _drop(self) -> None:
        self._unwatch()
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            try:
                session.drop()
            except Exception as error:
                log.warning("stepscope: could not end a cancelled capture of SGLang: %s", error)

    def _watch(self, capture: EngineCapture) -> None:
        if capture.seconds is None:
            return
        sessions, reason = self._sessions, f"open for more than {capture.seconds:g} s"
        self._watchdog = threading.Timer(capture.seconds, lambda: self._expire(sessions, reason))
        self._watchdog.daemon = True
        self._watchdog.start()

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _expire(self, sessions: list[Session], reason: str) -> None:
        def work() -> None:
            for session in sessions if sessions is self._sessions else ():
                session.expire(reason)

        self._later(work)


def _joined(sessions: Sequence[Session]) -> dict[str, str]:
    return {option: why for session in sessions for option, why in session.recording.ignored.items()}
