"""The captures of one engine, one at a time."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from stepscope.engines import refuse_second_start

if TYPE_CHECKING:
    from stepscope_vllm._capture.session import Session


class Desk:
    """The captures of one engine. Outlives the profilers that are made for it, one for each capture."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: Session | None = None
        """The running capture. Callers of any thread set it and take it back, under `lock`."""
        self.owed: Session | None = None
        """The latest capture that got no files. Files that come late are its own."""
        self._turn: asyncio.Lock | None = None

    @property
    def turn(self) -> asyncio.Lock:
        """Return the lock that is held on the work loop during calls to the engine."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    def take(self, session: Session) -> None:
        """Reserve the engine for a session. Raises EngineError while another one has it."""
        with self.lock:
            refuse_second_start(None if self.current is None else self.current.capture)
            self.current = session

    def give_back(self) -> Session | None:
        """Free the engine. Return the session that had it, if any."""
        with self.lock:
            session, self.current = self.current, None
            return session
