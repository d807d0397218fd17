"""A backend without a profiler, which records the markers of its window and can be made to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from stepscope.backends import PendingArtifact, SpanInfo, Window
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError


class FakeBackend:
    """A backend that passes `BackendConformance`.

    Its traces are JSON files: {"step": 2, "stage": null, "events": [...]}.
    """

    name = "fake"

    def __init__(self, config: ProfileConfig | None = None) -> None:
        self.fails_to_start = False
        """True to make `start` fail after it has locked the process."""
        self.lacks: str | None = None
        """Value of `PendingArtifact.lacking` in the backend's recordings, or None."""
        self._window: Window | None = None
        self._events: list[str] = []

    def check(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        self._window, self._events = window, []  # set first, so that stop() cleans up
        try:
            PROCESS_LOCK.acquire(f"the fake trace of step {window.step}", by=self)
            if self.fails_to_start:
                raise BackendError("the fake profiler cannot start")
        except Exception:
            self._end()
            raise

    def advance(self) -> None:
        if self._window is not None:
            self._events.append("mini-batch")

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        return nullcontext() if self._window is None or span.is_async else self._mark(span, self._events)

    @contextmanager
    def _mark(self, span: SpanInfo, events: list[str]) -> Iterator[None]:
        events.append(f"{span.role}.{span.stage}")
        yield

    def stop(self) -> list[PendingArtifact]:
        window = self._window
        if window is None:
            return []
        in_child = PROCESS_LOCK.holder is None  # the fork freed the lock
        self._end()
        if in_child:
            return []
        trace = {"step": window.step, "stage": window.stage, "events": self._events}

        def write(path: Path) -> None:
            path.write_text(json.dumps(trace))

        artifact = PendingArtifact(
            kind="fake_trace", suffix=".json", write=write, compress=True, lacking=self.lacks
        )
        return [artifact]

    def _end(self) -> None:
        PROCESS_LOCK.release(by=self)
        self._window = None  # cleared last, so that stop() after an interrupt repeats everything
